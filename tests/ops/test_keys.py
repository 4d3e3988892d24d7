"""The keys of expert rows: the kernels against the CPU, and what only a device can see.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorafold.ops.group import group_gathered_triton
from lorafold.ops.keys import gather_keys, grouped_keys
from lorafold.ops.keys_triton import gather_keys_triton, grouped_keys_triton
from lorafold.ops.plan import Plan

NUM_EXPERTS, MAX_LORAS = 5, 3


def ints(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def gathered(indices: Tensor, slots: Tensor | None, top_k: int) -> Tensor:
    return gather_keys_triton(indices, slots, top_k, NUM_EXPERTS, MAX_LORAS, None).cpu()


def grouped(
    offsets: list[int],
    tokens: list[int],
    slots: list[int] | None,
    device: str,
    *,
    num_tokens: int | None = None,
    window: tuple[int, int] | None = None,
) -> list[int]:
    row_offset, row_end = window or (0, len(tokens))
    keys = grouped_keys_triton(
        ints(offsets, device),
        ints(tokens, device),
        None if slots is None else ints(slots, device),
        len(slots or []) if num_tokens is None else num_tokens,
        row_offset,
        row_end,
        NUM_EXPERTS,
        MAX_LORAS,
        None,
    )
    return keys.tolist()


def by_hand(slot: int, expert: int) -> int:
    fits = 0 <= slot < MAX_LORAS and 0 <= expert < NUM_EXPERTS
    return slot * NUM_EXPERTS + expert if fits else -1


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_gathered_keys_are_slot_and_expert(device: str, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, 4))
    # Most blocks of the kernel are full only from 128 rows on.
    num_tokens = data.draw(st.sampled_from([1, 2, 5, 33, 70]))
    rows = num_tokens * top_k
    # Both ids below 0 and beyond the table are seen by a device only.
    experts = data.draw(st.lists(st.integers(-2, 7), min_size=rows, max_size=rows))
    slots = data.draw(st.lists(st.integers(-2, 4), min_size=num_tokens, max_size=num_tokens))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    keys = gathered(ints(experts, device, dtype), ints(slots, device), top_k)
    want = [by_hand(slots[r // top_k], expert) for r, expert in enumerate(experts)]
    assert keys.tolist() == want
    on_cpu = gather_keys(ints(experts, "cpu"), ints(slots, "cpu"), top_k, NUM_EXPERTS, MAX_LORAS)
    assert on_cpu.tolist() == want
    assert on_cpu.dtype == torch.int32


@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_a_gathered_plan_is_that_of_its_keys(device: str, num_tokens: int) -> None:
    """Few rows have their keys computed by the kernel that groups them; 300 * 4 rows do not."""
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.randint(-1, NUM_EXPERTS + 1, (num_tokens * 4,), generator=generator)
    slots = torch.randint(-1, MAX_LORAS, (num_tokens,), generator=generator, dtype=torch.int32)
    plan = Plan.empty(num_tokens * 4, NUM_EXPERTS * MAX_LORAS, device)
    for _ in range(2):  # the second time, buffers are full of the first
        group_gathered_triton(experts.to(device), slots.to(device), 4, NUM_EXPERTS, MAX_LORAS, plan)
        keys = gather_keys(experts, slots, 4, NUM_EXPERTS, MAX_LORAS)
        assert torch.equal(plan.keys.cpu(), keys)
        found = plan.tile_rows.cpu().view(-1, plan.block_rows)
        of_tile = plan.tile_key.cpu()
        for key in range(plan.num_keys):
            rows = found[of_tile == key].flatten()
            wanted = (keys == key).nonzero().flatten().tolist()
            assert sorted(rows[rows >= 0].tolist()) == wanted
        assert int((found >= 0).sum()) == int((keys >= 0).sum())


def test_an_expert_id_that_wraps_in_32_bits_is_beyond_the_table(device: str) -> None:
    indices = ints([2**32, 2**32 + 1, -(2**40)], device, torch.int64)
    assert gathered(indices, ints([0, 1, 2], device), 1).tolist() == [-1, -1, -1]


def test_without_a_row_map_every_token_is_on_slot_0(device: str) -> None:
    assert gathered(ints([4, 0, 5, 1], device), None, 2).tolist() == [4, 0, -1, 1]
    on_cpu = gather_keys(ints([4, 0, 5, 1], "cpu"), None, 2, NUM_EXPERTS, MAX_LORAS)
    assert on_cpu.tolist() == [4, 0, -1, 1]
    assert grouped([0, 1, 1, 2], [7, 3], None, device, num_tokens=8) == [0, 2]


def test_keys_go_where_they_are_asked_to_on_the_cpu() -> None:
    out = torch.full((3,), 77, dtype=torch.int32)
    indices, offsets, tokens = (ints(v, "cpu") for v in ([0, 1, 2], [0, 2, 3], [0, 0, 0]))
    assert gather_keys(indices, None, 1, NUM_EXPERTS, MAX_LORAS, out) is out
    assert out.tolist() == [0, 1, 2]
    assert grouped_keys(offsets, tokens, None, 1, 0, 3, NUM_EXPERTS, MAX_LORAS, out) is out
    assert out.tolist() == [0, 0, 1]


def test_keys_go_where_they_are_asked_to(device: str) -> None:
    buffer = torch.full((6,), 77, dtype=torch.int32, device=device)
    out = buffer[1:4]
    keys = gather_keys_triton(ints([0, 1, 2], device), None, 1, NUM_EXPERTS, MAX_LORAS, out)
    assert keys.data_ptr() == out.data_ptr()
    assert buffer.tolist() == [77, 0, 1, 2, 77, 77]
    offsets, tokens = ints([0, 2, 3], device), ints([0, 0, 0], device)
    grouped_keys_triton(offsets, tokens, None, 1, 1, 3, NUM_EXPERTS, MAX_LORAS, buffer[4:])
    assert buffer.tolist() == [77, 0, 1, 2, 0, 1]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_grouped_keys_are_slot_and_expert_in_every_window(device: str, data: st.DataObject) -> None:
    # Seven experts in the layer, of which the table knows five; some are empty.
    counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 60, 200]), min_size=7, max_size=7))
    total, num_tokens = sum(counts), data.draw(st.integers(1, 9))
    tokens = [(3 * r) % num_tokens for r in range(total)]
    slots = data.draw(st.lists(st.integers(-2, 4), min_size=num_tokens, max_size=num_tokens))
    offsets = [sum(counts[:e]) for e in range(8)]
    experts = [e for e, n in enumerate(counts) for _ in range(n)]
    want = [by_hand(slots[t], e) for t, e in zip(tokens, experts, strict=True)]
    cut = data.draw(st.integers(0, total))
    parts = [(0, cut), (cut, total)]
    got = [k for w in parts for k in grouped(offsets, tokens, slots, device, window=w)]
    assert got == want
    on_cpu = [
        k
        for begin, end in parts
        for k in grouped_keys(
            ints(offsets, "cpu"), ints(tokens, "cpu"), ints(slots, "cpu"), num_tokens,
            begin, end, NUM_EXPERTS, MAX_LORAS,
        ).tolist()
    ]  # fmt: skip
    assert on_cpu == want


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 3, 2, 4],  # descends
        [1, 2, 3, 4],  # does not begin at 0
        [0, 1, 2, 3],  # ends before the last row
        [0, 1, 2, 5],  # ends after it
        [0, -1, 2, 4],
        [0, 2**31 - 1, 2, 4],
    ],
    ids=str,
)
def test_offsets_that_are_no_partition_give_no_key(device: str, offsets: list[int]) -> None:
    tokens, slots = [0, 1, 0, 1], [0, 2]
    assert grouped([0, 1, 2, 4], tokens, slots, device) == [0, 11, 2, 12]  # control
    assert grouped(offsets, tokens, slots, device) == [-1] * 4
    assert grouped(offsets, tokens, slots, device, window=(2, 3)) == [-1]


def test_tokens_that_do_not_exist_give_no_key(device: str) -> None:
    tokens = [0, -1, 2, 2**31 - 1, 1]
    assert grouped([0, 5], tokens, [1, 2], device) == [5, -1, -1, -1, 10]
    # Slots that do not exist likewise.
    assert grouped([0, 5], [0, 1, 2, 3, 4], [3, -1, 2**31 - 1, -(2**31), 0], device) == [
        -1, -1, -1, -1, 0,
    ]  # fmt: skip


def test_no_rows(device: str) -> None:
    assert gathered(ints([], device), ints([], device), 3).tolist() == []
    assert grouped([0, 0, 0], [], [0], device) == []
    assert grouped([0, 1, 2], [0, 0], [0], device, window=(1, 1)) == []
