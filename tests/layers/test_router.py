"""RoutedRouter: the deltas get into the logits before the experts are chosen, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorafold.errors import RouteError
from lorafold.layers.router import RoutedRouter, WeightProduct
from lorafold.layers.routing import Routing
from lorafold.ops import apply_lora_delta
from lorafold.route import LoraPair, LoraRoute

NUM_EXPERTS, HIDDEN, RANK = 6, 40, 4


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


PAIRS = [
    LoraPair(random(RANK, HIDDEN, seed=1), random(NUM_EXPERTS, RANK, seed=2), 4 / 3),
    None,
    LoraPair(random(RANK, HIDDEN, seed=3), random(NUM_EXPERTS, RANK, seed=4), 0.5),
]


class Router(nn.Module):
    """As routers of transformers are: a weight of its own, and the choice in the same forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(random(NUM_EXPERTS, HIDDEN, seed=5), requires_grad=False)
        self.bias = nn.Parameter(random(NUM_EXPERTS, seed=6), requires_grad=False)
        self.other = nn.Parameter(random(NUM_EXPERTS, HIDDEN, seed=7), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, HIDDEN)
        logits = {
            "plain": lambda: F.linear(x, self.weight),
            "bias": lambda: F.linear(x, self.weight, self.bias),
            "by name": lambda: F.linear(input=x, weight=self.weight, bias=None),
            "fp32": lambda: F.linear(x.type(torch.float32), self.weight.type(torch.float32)),
            "fp32 by method": lambda: F.linear(x.float(), self.weight.float()),
            "fp32 after": lambda: F.linear(x, self.weight).float(),
            "two products": lambda: F.linear(x, self.weight) + F.linear(x, self.other),
            "twice": lambda: F.linear(x, self.weight) + F.linear(x, self.weight),
            "matmul": lambda: x @ self.weight.T,
        }[self.kind]()
        return logits, logits.topk(2, dim=-1).indices


def make(kind: str) -> tuple[RoutedRouter, Routing]:
    routing = Routing(torch.device("cpu"), max_loras=3)
    return RoutedRouter(Router(kind), LoraRoute.from_pairs(PAIRS), routing, name="gate"), routing


FOLLOWED = ["plain", "bias", "by name", "fp32", "fp32 by method", "fp32 after", "two products"]


@pytest.mark.parametrize("kind", FOLLOWED)
def test_every_token_gets_its_own_delta_before_the_choice(kind: str) -> None:
    router, routing = make(kind)
    x = random(5, HIDDEN, seed=8)
    slots = [0, -1, 2, 1, 0]
    base = router.base(x)[0]
    assert torch.equal(router(x)[0], base)  # nothing is routed
    routing.begin(slots)
    logits, experts = router(x)
    assert logits.dtype == base.dtype
    assert torch.equal(experts, logits.topk(2, dim=-1).indices)
    for row, slot in enumerate(slots):
        pair = PAIRS[slot] if slot >= 0 else None
        if pair is None:
            assert torch.equal(logits[row], base[row])
            continue
        product = base[row : row + 1]
        if kind == "two products":
            product = F.linear(x, router.base.weight)[row : row + 1]
        # A product in float32 is added to; one in bfloat16 is folded into, whatever comes after.
        in_fp32 = kind in ("fp32", "fp32 by method")
        start = torch.full_like(product, -0.0) if in_fp32 else product
        folded = start.bfloat16().clone()
        apply_lora_delta(pair, x[row : row + 1], folded)
        want = product + folded if in_fp32 else folded.to(base.dtype)
        if kind == "two products":
            want = folded + F.linear(x, router.base.other)[row]
        assert torch.equal(logits[row], want[0])
        assert not torch.equal(logits[row], base[row])


def test_a_zero_logit_of_a_base_token_keeps_its_sign() -> None:
    router, routing = make("fp32")
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    router.base.weight.data.copy_(-router.base.weight.data.abs())
    x[0] = -0.0
    base = router.base(x)[0]
    routing.begin([-1, 0])
    assert torch.equal(torch.signbit(router(x)[0][0]), torch.signbit(base[0]))


@pytest.mark.parametrize(("kind", "times"), [("twice", 2), ("matmul", 0)])
def test_a_router_that_is_not_followed_is_an_error(kind: str, times: int) -> None:
    router, routing = make(kind)
    x = random(2, HIDDEN, seed=9)
    router(x)  # without adapters it is the router that it is
    routing.begin([-1, 0])
    with pytest.raises(RouteError, match=f"`gate` multiplied by its weight {times} times"):
        router(x)
    # Nothing of it stays: products are as they were.
    assert torch.equal(F.linear(x, router.base.weight), x @ router.base.weight.T)


def test_another_number_of_tokens_is_an_error() -> None:
    router, routing = make("plain")
    routing.begin([0, 2])
    with pytest.raises(RouteError, match=r"`gate` got \(3, 40\), but this forward has 2 tokens"):
        router(random(3, HIDDEN, seed=10))


def test_an_error_inside_a_router_leaves_nothing() -> None:
    router, routing = make("plain")
    router.base.kind = "no such kind"
    routing.begin([0])
    with pytest.raises(KeyError):
        router(random(1, HIDDEN, seed=10))
    router.base.kind = "plain"
    x = random(1, HIDDEN, seed=11)
    logits = F.linear(x, router.base.weight)
    assert torch.equal(logits, router.base(x)[0])


def test_it_looks_like_the_router() -> None:
    router, _ = make("bias")
    assert router.weight is router.base.weight
    assert router.bias is router.base.bias
    assert router.kind == "bias"
    with pytest.raises(AttributeError, match="no_such"):
        router.no_such  # noqa: B018
    assert "max_loras=3, max_rank=4" in repr(router)


def test_only_the_product_of_that_weight_is_changed() -> None:
    weight, other = random(4, 8, seed=12), random(4, 8, seed=12)
    x = random(2, 8, seed=13)
    seen: list[Any] = []

    def change(x: Tensor, product: Tensor) -> Tensor:
        seen.append(x)
        return product + 1

    with WeightProduct(weight, change) as products:
        changed = F.linear(x, weight)
        same = F.linear(x, other)
    assert torch.equal(same, F.linear(x, weight))
    assert torch.equal(changed, F.linear(x, weight) + 1)
    assert products.num_products == 1
    assert seen[0] is x
