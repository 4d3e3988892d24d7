"""The base's products of expert-sorted rows: right, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorafold.layers.grouped import grouped_linear, sort_by_expert
from tests.tiny_models import bits


def random(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).bfloat16()


@given(data=st.data())
def test_rows_are_sorted_by_expert_and_then_by_token(data: st.DataObject) -> None:
    num_experts, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    choices = st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k)
    index = torch.tensor(data.draw(st.lists(choices, min_size=1, max_size=9)))
    rows = sort_by_expert(index, num_experts)
    flat = index.flatten().tolist()
    want = sorted(range(len(flat)), key=lambda r: (flat[r], r))
    assert rows.order.tolist() == want
    assert rows.experts.tolist() == [flat[r] for r in want]
    assert rows.tokens.tolist() == [r // top_k for r in want]
    assert rows.offsets.tolist() == [sum(e < n for e in flat) for n in range(num_experts + 1)]
    assert (rows.tokens.dtype, rows.offsets.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_every_row_goes_through_its_expert(
    device: str, num_tokens: int, with_bias: bool, transposed: bool
) -> None:
    index = torch.randint(5, (num_tokens, 3), generator=torch.Generator().manual_seed(1))
    index[index == 3] = 2  # an expert without rows
    rows = sort_by_expert(index.to(device), 5)
    x = random(3 * num_tokens, 48, seed=2, device=device)
    weight = random(5, 24, 48, seed=3, device=device)
    bias = random(5, 24, seed=4, device=device) if with_bias else None
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    got = grouped_linear(x, stored, bias, rows, transposed=transposed)
    want = torch.einsum("nk,nok->no", x.double(), weight[rows.experts].double())
    if bias is not None:
        want += bias[rows.experts].double()
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(want, want.roll(1, 0), atol=1)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_on_the_cpu_a_row_has_one_result_whatever_else_is_there(data: st.DataObject) -> None:
    """Sizes at which this machine sums one row alone in another order than several."""
    k_in, n_out = 2048, 256
    weight = random(3, n_out, k_in, seed=5) * 0.02
    row = random(1, k_in, seed=6)
    alone = grouped_linear(
        row, weight, None, sort_by_expert(torch.tensor([[1]]), 3), transposed=False
    )
    experts = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=30))
    at = data.draw(st.integers(0, len(experts) - 1))
    experts[at] = 1
    rows = sort_by_expert(torch.tensor(experts)[:, None], 3)
    x = random(len(experts), k_in, seed=7)
    x[at] = row[0]
    got = grouped_linear(x[rows.order], weight, None, rows, transposed=False)
    place = rows.order.tolist().index(at)
    assert torch.equal(bits(got[place]), bits(alone[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 64, 512, 8192])
def test_on_a_gpu_a_row_does_not_see_where_the_others_go(device: str, num_rows: int) -> None:
    """Also none of it waits for the device: it can be captured."""
    weight = random(128, 1536, 2048, seed=8, device=device) * 0.02
    x = random(num_rows, 2048, seed=9, device=device)
    generator = torch.Generator(device).manual_seed(10)
    index = torch.randint(128, (num_rows, 1), generator=generator, device=device)
    fixed = min(4, num_rows)

    def products() -> Tensor:
        rows = sort_by_expert(index, 128)
        out = grouped_linear(x[rows.order], weight, None, rows, transposed=False)
        by_row = torch.empty_like(out)
        by_row[rows.order] = out
        return by_row

    first = products().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products()
    for others in (None, 7):  # anywhere, and all at one expert
        other = torch.randint(128, (num_rows, 1), generator=generator, device=device)
        index[fixed:] = other[fixed:] if others is None else others
        x[fixed:] = random(num_rows, 2048, seed=11, device=device)[fixed:]
        assert torch.equal(bits(products()[:fixed]), bits(first[:fixed]))
        graph.replay()
        assert torch.equal(bits(captured), bits(products()))
