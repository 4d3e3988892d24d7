"""Kernels compiled ahead: every block size that some number of rows needs, and nothing after."""

from __future__ import annotations

import pytest
import torch

from lorafold.ops import (
    CallShape,
    LoraRoute,
    apply_lora_beside,
    apply_lora_bgmv,
    make_plan,
    tiles,
    warm_up,
)
from lorafold.ops.ahead import distinct_rows

SHAPES = [
    CallShape(k_in=4096, n_outs=(4096, 1024, 1024), max_rank=16, num_keys=8),
    CallShape(k_in=768, n_outs=(2048,), max_rank=64, num_keys=256, rows_per_token=8),
    CallShape(k_in=64, n_outs=(32,), max_rank=8, num_keys=2),
]


@pytest.mark.parametrize("numerics", ["gemv", "mma"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_of_rows_has_its_blocks_among_those_compiled(shape, numerics):
    def blocks(num_rows: int) -> tuple[object, object]:
        height = tiles.plan_rows(num_rows, shape.num_keys)
        num_tiles = tiles.max_tiles(num_rows, shape.num_keys, height)
        fixed = num_tiles, height, shape.k_in, shape.n_outs, shape.max_rank
        usual, beside = (
            tiles.call_tiles(numerics, num_rows, *fixed, is_beside=is_beside)
            for is_beside in (False, True)
        )
        return usual, beside

    most = 300 * shape.rows_per_token
    compiled = {blocks(n) for n in distinct_rows(shape, 300, numerics)}
    assert compiled == {blocks(n) for n in range(shape.rows_per_token, most + 1)}
    if numerics == "mma" and shape is SHAPES[0]:
        assert len(compiled) > 3


def test_nothing_is_compiled_on_a_cpu():
    assert warm_up(SHAPES, 100, device=torch.device("cpu")) == 0


def num_compiled() -> int:
    """Kernels that Triton holds for the first device."""
    from lorafold.ops import expand, fold, gemv_expand, gemv_shrink, group, shrink

    kernels = [
        expand.expand_kernel, fold.fold_kernel, group.count_kernel, group.fence_kernel,
        group.group_few_kernel, group.place_kernel, group.scan_kernel, shrink.shrink_kernel,
        gemv_expand.gemv_expand_kernel, gemv_shrink.gemv_shrink_kernel,
    ]  # fmt: skip
    return sum(len(kernel.device_caches[0][0]) for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["gemv", "mma"])
def test_nothing_is_compiled_after_it(numerics):
    k_in, n_outs, rank, num_keys = 2112, (192, 80), 24, 5  # shapes that no other test has
    shape = CallShape(k_in, n_outs, rank, num_keys)
    before = num_compiled()
    assert warm_up([shape, shape], 300, device=torch.device("cuda", 0), numerics=numerics) > 0
    compiled = num_compiled()
    assert compiled > before

    def table(value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_keys,), value, dtype=dtype, device="cuda")

    a = torch.zeros(rank, k_in, dtype=torch.bfloat16, device="cuda")
    routes = []
    for n_out in n_outs:
        b = torch.zeros(n_out, rank, dtype=torch.bfloat16, device="cuda")
        routes.append(
            LoraRoute(
                a_table=table(a.data_ptr(), torch.int64), b_table=table(b.data_ptr(), torch.int64),
                scale_table=table(1, torch.float32), rank_table=table(rank, torch.int32),
                k_in=k_in, n_out=n_out, max_rank=rank, storage=(a, b),
            )
        )  # fmt: skip
    for num_rows in (1, 2, 5, 16, 17, 64, 65, 128, 200, 256, 257, 300):
        x = torch.zeros(num_rows, k_in, dtype=torch.bfloat16, device="cuda")
        outs = [x.new_zeros(num_rows, n) for n in n_outs]
        slots = (torch.arange(num_rows, device="cuda") % num_keys).int()
        plan = make_plan(slots, num_keys)
        apply_lora_bgmv(routes, x, outs, slots, plan=plan, numerics=numerics)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            base = [out.clone() for out in outs]
            apply_lora_beside(routes, x, lambda base=base: base, slots, plan=plan,
                              numerics=numerics)  # fmt: skip
    assert num_compiled() == compiled
