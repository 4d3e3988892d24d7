"""Writes into slots come after all that reads them, and beside all that does not.

Streams and events are modelled: every piece of work knows what must be finished before it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from lorafold.errors import BackendError, RouteError
from lorafold.ops import LoraPair, apply_lora_bgmv, apply_lora_delta
from lorafold.pool import Pool
from lorafold.transfer import Transfer
from tests.pool_contents import SHAPES, assert_holds, make_adapter

CUDA = torch.device("cuda", 0)


class Work:
    """A kernel, a copy or a wait: it starts when everything in `after` is finished."""

    def __init__(self, after: set[Work]) -> None:
        self.after = after

    def follows(self, other: Work) -> bool:
        return other in self.after or any(each.follows(other) for each in self.after)


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.last: set[Work] = set()
        self.cuda_stream = id(self)

    def run(self) -> Work:
        """Enqueue something."""
        work = Work(set(self.last))
        self.last = {work}
        return work

    def wait_event(self, event: Event) -> None:
        self.last = self.last | event.recorded

    def wait_stream(self, other: Stream) -> None:
        self.last = self.last | other.last


class Event:
    finished: ClassVar[set[Work]] = set()
    """What the host has waited for."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking, self.recorded = blocking, set[Work]()

    def record(self, stream: Stream) -> None:
        self.recorded = set(stream.last)

    def synchronize(self) -> None:
        assert self.blocking
        Event.finished |= self.recorded


class Device:
    """Stands in for torch.cuda: one thread, a current stream, and a graph that may be captured."""

    def __init__(self) -> None:
        self.current = Stream()
        self.is_capturing = False

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    Event.finished = set()
    stand_ins: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": device.stream,
        "current_stream": lambda _: device.current,
        "is_current_stream_capturing": lambda: device.is_capturing,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device


def write(transfer: Transfer, cuda: Device, slot: int) -> Work:
    with transfer.writing(slot):
        return cuda.current.run()


def test_a_write_comes_after_every_use_of_its_slot_and_no_other(cuda: Device) -> None:
    transfer, uses = Transfer(CUDA, 2), []
    loader, served = cuda.current, [Stream(), Stream()]
    for stream in served:
        for slot in (0, 1, 1, 0):
            with cuda.stream(stream):
                uses.append((slot, stream.run()))
                transfer.note_use(slot)
    after = [stream.run() for stream in served]
    own = loader.run()
    work = write(transfer, cuda, 0)
    assert cuda.current is loader
    assert work.follows(own)
    # The last use of slot 0 in each stream, and so all before it; nothing that came later.
    assert all(work.follows(use) for _, use in uses)
    assert not any(work.follows(later) for later in after)
    # Nothing that serves waits for the write.
    assert not any(stream.run().follows(work) for stream in served)


def test_a_slot_that_others_use_now_is_not_waited_for(cuda: Device) -> None:
    transfer, serving = Transfer(CUDA, 2), Stream()
    with cuda.stream(serving):
        busy = serving.run()
        transfer.note_use(1)
    assert not write(transfer, cuda, 0).follows(busy)
    assert write(transfer, cuda, 1).follows(busy)


def test_no_write_comes_before_the_slots_are_there(cuda: Device) -> None:
    with cuda.stream(Stream()):
        made = cuda.current.run()
        transfer = Transfer(CUDA, 2)
    assert write(transfer, cuda, 1).follows(made)


def test_the_host_waits_for_the_write_alone(cuda: Device) -> None:
    transfer, serving = Transfer(CUDA, 2), Stream()
    busy = serving.run()
    work = write(transfer, cuda, 0)
    assert work not in Event.finished
    transfer.finish()
    assert work in Event.finished
    assert busy not in Event.finished


def test_emptying_is_in_the_stream_of_the_last_user_and_before_the_next_write(
    cuda: Device,
) -> None:
    transfer, other, last = Transfer(CUDA, 2), Stream(), Stream()
    with cuda.stream(other):
        used = other.run()
        transfer.note_use(0)
    with cuda.stream(last):
        transfer.note_use(0)
        with transfer.emptying(0):
            emptied = cuda.current.run()
    assert emptied in last.last
    assert emptied.follows(used)
    later = last.run()
    work = write(transfer, cuda, 0)
    assert work.follows(emptied)
    assert not work.follows(later)
    assert not write(transfer, cuda, 1).follows(later)


def test_what_is_done_to_one_slot_is_done_in_order(cuda: Device) -> None:
    transfer = Transfer(CUDA, 1)
    first = write(transfer, cuda, 0)
    with transfer.emptying(0):  # also where the write has failed, and nobody has waited for it
        emptied = cuda.current.run()
    second = write(transfer, cuda, 0)
    assert emptied.follows(first)
    assert second.follows(emptied)


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    transfer = Transfer(torch.device("cpu"), 1)
    transfer.check()
    transfer.note_use(0)
    with transfer.writing(0), transfer.emptying(0):
        pass
    transfer.finish()
    assert not transfer.is_pinned


# The pool on such a device; its memory is the CPU's


def make_pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool whose copies are ordered as on CUDA, from memory that is not page-locked."""
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    pool._transfer = Transfer(CUDA, 2)
    monkeypatch.setattr(Transfer, "is_pinned", False)
    return pool


def test_a_pool_waits_for_who_has_released_a_slot_before_it_writes_there(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, serving, writes = make_pool(monkeypatch), Stream(), []
    writing = Transfer.writing

    @contextmanager
    def watched(transfer: Transfer, slot: int) -> Iterator[None]:
        with writing(transfer, slot):
            yield
            writes.append(cuda.current.run())

    monkeypatch.setattr(Transfer, "writing", watched)
    pool.place(make_adapter("a"))
    assert writes[0] in Event.finished  # before anybody can acquire it
    with cuda.stream(serving):
        slot = pool.acquire("a")
        use = serving.run()
        pool.release(slot)
    pool.place(make_adapter("b"))
    assert not writes[1].follows(use)
    pool.place(make_adapter("a", seed=1))
    assert writes[2].follows(use)
    assert set(writes) <= Event.finished
    assert_holds(pool, 0, make_adapter("a", seed=1))


def test_nothing_becomes_part_of_a_graph(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(monkeypatch)
    pool.place(make_adapter("a"))
    slot = pool.acquire("a")
    cuda.is_capturing = True
    calls: list[Any] = [
        lambda: pool.place(make_adapter("b")),
        lambda: pool.evict("a"),
        lambda: pool.release(slot),
    ]
    for call in calls:
        with pytest.raises(RouteError, match="while a CUDA graph is captured"):
            call()
    cuda.is_capturing = False
    assert pool.names() == ("a",)
    pool.release(slot)
    assert_holds(pool, 0, make_adapter("a"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is page-locked memory here")
def test_page_locked_memory_that_is_not_there_is_our_error_and_changes_nothing(
    cuda: Device,
) -> None:
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    pool.place(make_adapter("a"))
    pool._transfer = Transfer(CUDA, 2)
    with pytest.raises(BackendError, match=f"could not allocate {pool.image_bytes} bytes for `b`"):
        pool.place(make_adapter("b"))
    assert pool.names() == ("a",)
    assert pool.image_bytes == 512  # the next power of two


@pytest.mark.gpu
def test_what_a_late_kernel_reads_is_not_overwritten_by_another_thread() -> None:
    """The last user has let go on the host, long before the device has come to its kernel."""
    old, new = (make_adapter(name, {"q": 2}, seed=seed) for seed, name in enumerate("ab"))
    pool = Pool(SHAPES, max_loras=1, max_rank=4, device="cuda")
    slot = pool.place(old)
    x = torch.randn(3, 5, device="cuda").bfloat16()
    slots = torch.full((3,), slot, dtype=torch.int32, device="cuda")
    expected = {}
    for adapter in (old, new):
        weights = adapter.weights["q"]
        pair = LoraPair(weights.a.cuda(), weights.b.cuda(), weights.scale)
        expected[adapter.name] = torch.zeros(3, 7, device="cuda", dtype=torch.bfloat16)
        apply_lora_delta(pair, x, expected[adapter.name])
    assert not torch.equal(expected["a"], expected["b"])
    out, later = torch.zeros_like(expected["a"]), torch.zeros_like(expected["a"])
    apply_lora_bgmv(pool.route("q"), x, later.clone(), slots)  # compiles
    torch.cuda.synchronize()
    serving = torch.cuda.Stream()
    with torch.cuda.stream(serving), ThreadPoolExecutor(1) as threads:
        assert pool.acquire("a") == slot
        torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
        apply_lora_bgmv(pool.route("q"), x, out, slots)
        pool.release(slot)
        placed = threads.submit(pool.place, new)
        assert not serving.query()
        assert placed.result(20) == slot
        assert pool.acquire("b") == slot
        apply_lora_bgmv(pool.route("q"), x, later, slots)
        pool.release(slot)
        pool.evict("b")
    serving.synchronize()
    assert torch.equal(out, expected["a"])
    assert torch.equal(later, expected["b"])
    assert not pool._memory.any()
