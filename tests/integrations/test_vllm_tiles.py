"""The rows of a step grouped into tiles, and the plugin's kernel, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lorafold.integrations.vllm import rows as rows_module
from lorafold.integrations.vllm.rows import StepRows, tiles_for
from lorafold.integrations.vllm.weighted import fold_delta
from lorafold.ops.group import group_triton
from lorafold.ops.tiles import HEIGHTS, plan_rows
from tests.ops.cases import assert_same_bits


def grouped(rows: StepRows, num_rows: int) -> dict[int, int]:
    """row -> slot, as kernels of a call of num_rows rows read it from the tiles."""
    tile_key, tile_rows = tiles_for(rows.tiles, num_rows, rows.max_loras)
    size = plan_rows(num_rows, rows.max_loras)
    found: dict[int, int] = {}
    for key, members in zip(tile_key.tolist(), tile_rows.view(-1, size).tolist(), strict=True):
        for row in members if key >= 0 else []:
            if row >= 0:
                assert row not in found
                found[row] = key
    return found


@pytest.fixture
def stepped(device, monkeypatch):
    """Rows with tiles; on the CPU the kernels that fill them run in the interpreter."""
    made = StepRows(300, 2, device)
    if device == "cpu":
        monkeypatch.setattr(
            rows_module, "make_plan", lambda keys, n, plan: group_triton(keys, plan)
        )
        made._make_buffers()
    return made


def test_tiles_follow_the_slots(stepped):
    """Steps get longer and shorter, all base and back; calls may have more rows than the step."""
    generator = torch.Generator().manual_seed(0)
    addresses = [t.data_ptr() for t in stepped.tiles]
    assert len(addresses) == 2 * len(HEIGHTS)
    for num_rows in (5, 290, 40, 1, 3, 130, 0, 70):
        slots = torch.randint(-1, 2, (num_rows,), generator=generator, dtype=torch.int32)
        if num_rows == 3:
            slots[:] = -1
        stepped.update(slots)
        expected = {i: s for i, s in enumerate(slots.tolist()) if s >= 0}
        for padded in {num_rows, num_rows + 1, num_rows + 9, 64, 100, 300} - {0}:
            if num_rows <= padded <= 300:
                assert grouped(stepped, padded) == expected, (num_rows, padded)
    assert [t.data_ptr() for t in stepped.tiles] == addresses


def test_base_steps_group_nothing(stepped, monkeypatch):
    stepped.update(torch.tensor([0, -1], dtype=torch.int32))
    base = torch.full((7,), -1, dtype=torch.int32)
    stepped.update(base)
    assert grouped(stepped, 300) == {}
    monkeypatch.setattr(rows_module, "make_plan", None)
    stepped.update(base)
    assert not stepped.any_adapter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernel_that_adds_deltas(device, dtype, weighted):
    from lorafold.integrations.vllm.weighted_triton import fold_delta_triton

    generator = torch.Generator().manual_seed(0)
    num_rows, columns = 7, 1030
    buffer = torch.randn(num_rows, columns + 5, generator=generator).to(dtype)
    buffer[:, 0] = -0.0
    delta = torch.randn(num_rows, columns, generator=generator).bfloat16()
    weights = torch.rand(num_rows, generator=generator) if weighted else None
    keys = torch.tensor([0, -1, 2, 1, 0, -5, 2], dtype=torch.int32)
    a_table = torch.tensor([16, 0, 32])  # key 1 is not adapted
    expected = buffer.clone()
    fold_delta(expected[:, :columns], delta, weights, keys, a_table)
    placed = buffer.clone().to(device)
    operands = [t if t is None else t.to(device) for t in (delta, weights, keys, a_table)]
    fold_delta_triton(placed[:, :columns], *operands)
    untouched = [1, 3, 5]
    if dtype == torch.bfloat16:
        assert_same_bits(placed, expected)
        assert_same_bits(placed[untouched], buffer[untouched])
    else:
        assert torch.equal(placed.cpu().view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(placed[0].cpu(), buffer[0])
