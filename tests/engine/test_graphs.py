"""Decode steps as graphs: the answers and the bits of steps that are launched kernel by kernel."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorafold.engine import Answer, Engine, Request
from lorafold.engine.graphs import DecodeGraphs
from lorafold.engine.kv import KvCache
from lorafold.engine.packed import PackedBatches, PackedForward
from lorafold.engine.step import Piece
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request, wait_until
from tests.tiny_models import COMMON, bits, make_model, random_ids, write_adapter

Make = Callable[..., Engine]
MAX_RUNNING = 6
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen3 with a window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
}
MIXED = [
    request(5, "a0", num_logprobs=2),
    request(7, None, prompt=1, num_logprobs=2),
    request(9, "a1", prompt=2, num_logprobs=2, temperature=1.2, seed=5),
    request(3, "a2", prompt=3, num_logprobs=2),
]


@pytest.fixture
def make_engine(plain: nn.Module, folders: list[Path]) -> Iterator[Make]:
    """Engines with adapters a0, a1, ...: "graphs", "padded" (uncaptured), or "usual"."""
    engines: list[Engine] = []

    def make(how: str, *, device: str = "cuda", max_loras: int = 3, adapters: int = 3) -> Engine:
        model = copy.deepcopy(plain).to(device)
        lora = attach(model, max_loras=max_loras, max_rank=8)
        settings: dict[str, Any] = {"max_running": MAX_RUNNING, "cache_tokens": 1024, "chunk": 64}
        engine = Engine(lora, TOKENIZER, graphs=how == "graphs", **settings)
        if how == "padded":
            batches = batches_of(engine)
            forward = batches._forward
            batches._decode = DecodeGraphs(lora, forward.attention, MAX_RUNNING)
        for at in range(adapters):
            engine.load(f"a{at}", folders[at])
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(timeout_s=0)


def batches_of(engine: Engine) -> PackedBatches:
    batches = engine._loop._batches
    assert isinstance(batches, PackedBatches)
    return batches


def answers(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """All of them let in at once, after their adapters have been placed: the same steps each time.

    On a GPU the base's bits may depend on the number of rows.
    """
    for name in dict.fromkeys(each.adapter for each in requests):
        engine.answer([request(2, name, max_tokens=1)])
    listeners = [Listener() for _ in requests]
    wait_until(lambda: not engine._loop._running)
    with engine.lora.turn():  # the engine waits for its turn
        for asked, listener in zip(requests, listeners, strict=True):
            listener.hold.set()
            engine.submit(asked, listener)
    return [listener.answer() for listener in listeners]


class Replays(dict[tuple[int, bool], Any]):
    """The graphs of an engine, and which of them were asked for."""

    def __init__(self, engine: Engine) -> None:
        decode = batches_of(engine)._decode
        assert decode is not None
        super().__init__(decode._graphs)
        self.asked: list[tuple[int, bool]] = []
        decode._graphs = self

    def get(self, key: tuple[int, bool], default: Any = None) -> Any:
        self.asked.append(key)
        return super().get(key, default)


@pytest.mark.usefixtures("exact_base")
def test_answers_of_padded_steps_are_the_usual_ones(make_engine: Make) -> None:
    """All but the capture itself, which is how the same forward is launched."""
    padded, usual = make_engine("padded", device="cpu"), make_engine("usual", device="cpu")
    replays = Replays(padded)
    staggered = [
        request(n, name, prompt=n, max_tokens=3 * n, num_logprobs=1)
        for n, name in ((2, "a0"), (4, None), (1, "a2"), (7, "a1"), (3, "a0"))
    ]
    base = [request(n, None, prompt=n, num_logprobs=1) for n in (4, 6)]
    for requests in (MIXED, staggered, base):
        assert answers(padded, requests) == answers(usual, requests)
    assert {size for size, _ in replays.asked} == {1, 2, 4, 6}
    assert {with_adapters for _, with_adapters in replays.asked} == {True, False}


def test_an_engine_on_the_cpu_has_no_graphs(make_engine: Make) -> None:
    assert batches_of(make_engine("graphs", device="cpu"))._decode is None


def test_what_cannot_be_captured_is_said_and_runs_as_usual(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batches = batches_of(make_engine("padded", device="cpu"))

    def fail(self: DecodeGraphs) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = batches._decode
    assert graphs is not None
    monkeypatch.setattr(DecodeGraphs, "capture", lambda self: None)
    assert batches._captured(graphs) is graphs
    monkeypatch.setattr(DecodeGraphs, "capture", fail)
    assert batches._captured(graphs) is None
    assert "without CUDA graphs: operation not permitted" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3 with a window", "adapted head"])
def test_replayed_logits_have_the_bits_of_launched_ones(family: str, tmp_path: Path) -> None:
    """And so have keys and values; a replay knows nothing of the step before."""
    model = make_model("qwen3" if "qwen3" in family else "llama", **WINDOWS.get(family, {}))
    targets = ["lm_head", "q_proj"] if "head" in family else ["q_proj", "down_proj"]
    folders = [write_adapter(model, tmp_path / str(n), targets, seed=n) for n in range(3)]
    device = torch.device("cuda")
    lora = attach(model.to(device), max_loras=3, max_rank=8, targets=targets)
    for slot, folder in enumerate(folders):
        lora.load(str(slot), folder)
    caches, forwards, graphs = [], [], []
    for _ in range(2):
        caches.append(KvCache(512, device, num_spare=9))
        forwards.append(PackedForward(lora, caches[-1]))
        graphs.append(DecodeGraphs(lora, forwards[-1].attention, 9))
    pieces = begin(forwards, [(3, 0), (17, -1), (1, 2), (5, 1), (30, 1), (8, -1), (2, 0)])
    with forwards[0].session():
        graphs[0].capture()
    assert len(graphs[0]._graphs) == 2 * 5
    seen = set()
    for at in ([0, 1, 2], [1], [1, 5], [0, 1, 2, 3, 4, 5, 6], [4, 6], [1, 2, 3, 4], [0, 1, 2]):
        chosen, logits = [pieces[i] for i in at], []
        for forward, graph in zip(forwards, graphs, strict=True):
            with forward.session():
                logits.append(graph(chosen).clone())
        assert torch.equal(bits(logits[0]), bits(logits[1]))
        assert logits[0].isfinite().all()
        seen.add(tuple(bits(logits[0]).flatten().tolist()))
        for one, other in zip(*(stored(cache) for cache in caches), strict=True):
            assert torch.equal(bits(one[:512]), bits(other[:512]))
        pieces = [further(piece) if i in at else piece for i, piece in enumerate(pieces)]
    assert len(seen) == 7


def begin(forwards: list[PackedForward], sequences: list[tuple[int, int]]) -> list[Piece]:
    """The same sequences in every cache; their next tokens."""
    pieces = []
    for forward in forwards:
        pieces, prompts, cache = [], [], forward.attention.cache
        for seed, (there, slot) in enumerate(sequences):
            stretch = cache.reserve(there + 16)
            assert stretch is not None
            ids = random_ids(there + 1, seed=seed).tolist()
            prompts.append(Piece(ids[:-1], 0, stretch, slot, wants_logits=False))
            pieces.append(Piece(ids[-1:], there, stretch, slot, wants_logits=True))
        with forward.session():
            forward(prompts)
    return pieces


def further(piece: Piece) -> Piece:
    """The same sequence, a token later."""
    token = (piece.tokens[0] + 1) % COMMON["vocab_size"]
    return Piece([token], piece.end, piece.stretch, piece.slot, wants_logits=True)


def stored(cache: KvCache) -> list[Tensor]:
    return [t for layer in cache._layers.values() for t in layer]


@pytest.mark.gpu
def test_answers_with_graphs_are_those_without(make_engine: Make) -> None:
    graphs = make_engine("graphs")
    replays = Replays(graphs)
    assert replays.keys() == {(n, on) for n in (1, 2, 4, MAX_RUNNING) for on in (True, False)}
    # Four sequences fill a bucket: the shapes, and so the bits, are those of usual steps.
    with_graphs = answers(graphs, MIXED)
    assert (4, True) in replays.asked
    assert with_graphs == answers(make_engine("padded"), MIXED)
    assert with_graphs == answers(make_engine("usual"), MIXED)
    assert answers(graphs, MIXED) == with_graphs


@pytest.mark.gpu
def test_replays_are_timed(make_engine: Make) -> None:
    engine = make_engine("graphs")
    answers(engine, MIXED)
    with engine.lora.turn():  # which the engine gives back when its last step has been counted
        before = engine.stats()
    start = time.perf_counter()
    engine.answer([request(5, "a0", max_tokens=30)])
    expected = before.num_steps + 30
    wait_until(lambda: engine.stats().num_steps == expected)
    wall_s, after = time.perf_counter() - start, engine.stats()
    forward_s = after.forward_seconds - before.forward_seconds
    assert 0 < forward_s < after.step_seconds - before.step_seconds < wall_s


@pytest.mark.gpu
def test_base_rows_alone_replay_a_graph_without_adapters(make_engine: Make) -> None:
    graphs = make_engine("graphs")
    requests = [request(n, None, prompt=n, num_logprobs=1) for n in (4, 6)]
    answers(graphs, MIXED)  # what was routed before must not show
    replays = Replays(graphs)
    assert answers(graphs, requests) == answers(make_engine("usual"), requests)
    assert {with_adapters for _, with_adapters in replays.asked} == {False}


@pytest.mark.gpu
def test_sequences_join_and_leave(make_engine: Make) -> None:
    requests = [
        request(n, name, prompt=n, max_tokens=2 * n, num_logprobs=1)
        for n, name in ((2, "a0"), (4, None), (1, "a2"), (7, "a1"), (3, "a0"), (9, "a1"), (5, "a2"))
    ]  # one more than run at a time
    graphs, padded = make_engine("graphs"), make_engine("padded")
    replays = Replays(graphs)
    assert answers(graphs, requests) == answers(padded, requests)
    assert len({size for size, _ in replays.asked}) >= 3


@pytest.mark.gpu
def test_graphs_follow_what_is_loaded(make_engine: Make, folders: list[Path]) -> None:
    graphs, usual = make_engine("graphs"), make_engine("usual")
    before = answers(graphs, MIXED)
    # Another use of the model between replays, which ends its own routing.
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    graphs.lora.generate(ids, adapters=[None], max_new_tokens=2, min_new_tokens=2)
    for engine in (graphs, usual):
        engine.unload("a1")
        engine.load("a0", folders[4])
        engine.load("a1", folders[5])
    after = answers(graphs, MIXED)
    assert after == answers(usual, MIXED)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, False, True]


@pytest.mark.gpu
def test_more_adapters_than_slots_take_turns(make_engine: Make) -> None:
    graphs = make_engine("graphs", max_loras=2, adapters=6)
    usual = make_engine("usual", max_loras=6, adapters=6)
    requests = [request(6, f"a{n}", max_tokens=6, num_logprobs=1) for n in range(6)] * 2
    alone = [usual.answer([asked])[0] for asked in requests]
    for _ in range(2):
        for among, expected in zip(graphs.answer(requests), alone, strict=True):
            # Who is beside whom depends on the placing thread, and so may the base's last bits.
            for ours, theirs in zip(among.logprobs, expected.logprobs, strict=True):
                assert ours.top[0][1] == pytest.approx(theirs.top[0][1], abs=0.1)
                if ours.token != theirs.token:
                    break
    assert graphs.stats().num_evictions > 0
    assert len({round(answer.logprobs[1].top[0][1], 1) for answer in alone}) > 2


@pytest.mark.gpu
def test_a_model_that_waits_for_the_device_runs_without_graphs(
    plain: nn.Module, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = copy.deepcopy(plain).cuda()
    model.model.norm.register_forward_hook(lambda _, __, out: out * float(out.abs().amax() > 0))
    with Engine(attach(model, max_loras=1, max_rank=8), TOKENIZER, max_running=4) as engine:
        assert "decode steps run without CUDA graphs" in caplog.text
        assert batches_of(engine)._decode is None
        engine.load("a0", folders[0])
        assert engine.answer([request(5, "a0")])[0].finish_reason == "length"
