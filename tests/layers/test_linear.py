"""RoutedLinear and Routing: each row gets its own adapter's delta, and nothing else happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lorafold.errors import RouteError
from lorafold.layers import linear
from lorafold.layers.linear import RoutedLinear, SharedInput
from lorafold.layers.routing import Routing
from lorafold.ops import apply_lora_delta
from lorafold.route import LoraPair, LoraRoute
from tests.tiny_models import bits

K_IN, N_OUT, MAX_RANK = 40, 24, 8
CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def pair(seed: int, scale: float) -> LoraPair:
    a, b = random(MAX_RANK, K_IN, seed=seed), random(N_OUT, MAX_RANK, seed=seed + 1)
    return LoraPair(a, b, scale)


PAIRS = [pair(10, 4 / 3), None, pair(20, 0.5)]


def make_layer(*, is_head: bool = False) -> tuple[RoutedLinear, Routing]:
    torch.manual_seed(0)
    base = nn.Linear(K_IN, N_OUT, dtype=torch.bfloat16).requires_grad_(False)
    routing = Routing(CPU, max_loras=3, has_head=is_head)
    route = LoraRoute.from_pairs(PAIRS)
    return RoutedLinear(base, route, routing, name="layer", is_head=is_head), routing


def expected(layer: RoutedLinear, x: Tensor, slots: list[int]) -> Tensor:
    """The base output of the very same call, plus the delta of each row on its own."""
    out = layer.base(x).reshape(-1, N_OUT).clone()
    x = x.reshape(-1, K_IN)
    for row, slot in enumerate(slots):
        adapter = PAIRS[slot] if slot >= 0 else None
        if adapter is not None:
            apply_lora_delta(adapter, x[row : row + 1], out[row : row + 1])
    return out


@settings(max_examples=40, deadline=None)
@given(slots=st.lists(st.integers(-1, 2), min_size=1, max_size=5), num_tokens=st.integers(1, 4))
def test_every_row_gets_its_own_delta(slots: list[int], num_tokens: int) -> None:
    layer, routing = make_layer()
    x = random(len(slots), num_tokens, K_IN, seed=3)
    routing.begin(slots)
    routing.step(len(slots), num_tokens, num_tokens)
    out = layer(x)
    rows = [slot for slot in slots for _ in range(num_tokens)]
    want = expected(layer, x, rows)
    assert torch.equal(bits(out.view(-1, N_OUT)), bits(want))
    base = layer.base(x)
    for i, slot in enumerate(slots):
        assert torch.equal(out[i], base[i]) == (slot in (-1, 1))  # slot 1 does not adapt this layer


@pytest.mark.parametrize("shape", [(2, 3, K_IN), (6, K_IN), (1, 6, K_IN), (2, 1, 3, K_IN)])
def test_rows_may_be_flattened_in_any_way(shape: tuple[int, ...]) -> None:
    layer, routing = make_layer()
    x = random(*shape, seed=4)
    routing.begin([0, 2])
    routing.step(2, 3, 3)
    out = layer(x)
    assert out.shape == (*shape[:-1], N_OUT)
    want = expected(layer, x, [0, 0, 0, 2, 2, 2])
    assert torch.equal(bits(out.view(-1, N_OUT)), bits(want))


def test_input_and_output_of_the_base_need_not_be_contiguous() -> None:
    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

    layer, routing = make_layer()
    odd = Transposed(K_IN, N_OUT, dtype=torch.bfloat16).requires_grad_(False)
    odd.load_state_dict(layer.base.state_dict())
    layer.base = odd
    x = random(3, 2, K_IN, seed=5).transpose(0, 1)
    assert not odd(x).is_contiguous()
    routing.begin([0, 2])
    routing.step(2, 3, 3)
    out = layer(x)
    want = expected(layer, x, [0, 0, 0, 2, 2, 2])
    assert torch.equal(bits(out.reshape(-1, N_OUT)), bits(want))


def test_without_routing_and_for_base_rows_the_layer_is_its_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a batch of base rows must not call the operator")

    monkeypatch.setattr("lorafold.layers.linear.apply_lora_beside", forbidden)
    layer, routing = make_layer()
    x = random(2, K_IN, seed=6)
    assert torch.equal(layer(x), layer.base(x))
    routing.begin([-1, -1])
    assert routing.seq_slot is None
    assert torch.equal(layer(x), layer.base(x))
    routing.end()
    routing.begin([-1, 0])
    with pytest.raises(AssertionError, match="must not call"):
        layer(x)


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_another_number_of_rows_is_an_error_that_names_the_layer(rows: int) -> None:
    layer, routing = make_layer()
    routing.begin([0, 2])
    routing.step(2, 3, 3)
    with pytest.raises(RouteError, match=r"`layer` got .* this forward has 6 rows"):
        layer(random(rows, K_IN, seed=7))


def test_another_dtype_is_an_error() -> None:
    layer, routing = make_layer()
    layer.base.float()
    routing.begin([0])
    with pytest.raises(RouteError, match="bfloat16"):
        layer(random(1, K_IN, seed=8).float())


def test_the_head_sees_the_kept_tokens_only() -> None:
    head, routing = make_layer(is_head=True)
    x = random(2, 1, K_IN, seed=9)
    routing.begin([2, 0])
    routing.step(2, 5, 1)
    assert torch.equal(bits(head(x).view(2, -1)), bits(expected(head, x, [2, 0])))
    with pytest.raises(RouteError, match="this forward has 2 rows"):
        head(random(2, 5, K_IN, seed=9))


def test_sequences_repeat_for_beams_only_where_that_was_asked() -> None:
    _, routing = make_layer()
    routing.begin([0, -1], may_repeat=True)
    routing.step(6, 2, 1)
    assert routing.seq_slot is not None
    assert routing.seq_slot.tolist() == [0] * 6 + [-1] * 6
    with pytest.raises(RouteError, match="5 sequences, but adapters were named for 2"):
        routing.step(5, 2, 1)
    routing.end()
    routing.begin([0, -1])
    for num_sequences in (1, 4):
        with pytest.raises(RouteError, match="one adapter"):
            routing.step(num_sequences, 2, 1)


def test_slots_stay_at_one_address() -> None:
    _, routing = make_layer()
    addresses = set()
    for slots, num_tokens in (([0], 1), ([2, -1, 0], 7), ([1], 4000), ([0, 0], 1)):
        routing.begin(slots)
        routing.step(len(slots), num_tokens, num_tokens)
        assert routing.seq_slot is not None
        addresses.add(routing.seq_slot.data_ptr())
        routing.end()
        assert routing.seq_slot is None
    assert len(addresses) == 1
    routing.begin([0])
    routing.step(1, 5000, 1)  # more than there is room for
    assert routing.seq_slot is not None
    assert routing.seq_slot.data_ptr() not in addresses


def test_inference_mode_may_come_and_go() -> None:
    with torch.inference_mode():
        layer, routing = make_layer()
        routing.begin([0])
        routing.step(1, 5000, 5000)
        routing.end()
    routing.begin([0, 2])
    routing.step(2, 1, 1)
    x = random(2, K_IN, seed=16)
    assert torch.equal(bits(layer(x)), bits(expected(layer, x, [0, 2])))


def test_a_step_of_the_same_shape_writes_nothing() -> None:
    _, routing = make_layer()
    routing.begin([0, 2])
    routing.step(2, 3, 1)
    rows = routing.rows
    routing.step(2, 3, 1)
    assert routing.rows is rows
    routing.step(2, 1, 1)
    assert routing.rows is not rows


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU seem to capture a graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def pretend_capture(routing: Routing, num_sequences: int) -> None:
    routing.device = torch.device("cuda")
    try:
        routing.step(num_sequences, 1, 1)
    finally:
        routing.device = CPU


@pytest.mark.usefixtures("capturing")
def test_what_a_graph_reads_stays_where_it_is() -> None:
    _, routing = make_layer()
    routing.begin([-1, -1])
    with pytest.raises(RouteError, match="base rows only"):
        pretend_capture(routing, 2)
    routing.end()
    routing.begin([0, 2])
    with pytest.raises(RouteError, match="another shape than the last"):
        pretend_capture(routing, 4)
    pretend_capture(routing, 2)
    captured = routing.rows
    assert captured is not None
    routing.end()
    assert captured.seq_slot.tolist() == [-1, -1]
    for slots in ([2, -1], [-1, -1]):  # base rows must be written too
        routing.begin([0] * 5)
        routing.end()
        routing.begin(slots)
        assert captured.seq_slot.tolist() == slots
        assert routing.rows is not None
        assert routing.rows.plan is captured.plan
        with pytest.raises(RouteError, match="room for 4096 rows; given: 10000"):
            routing.step(2, 5000, 5000)
        routing.end()


@pytest.mark.gpu
def test_a_captured_graph_replays_new_slots() -> None:
    device = torch.device("cuda")
    pairs = [p and LoraPair(p.a.cuda(), p.b.cuda(), p.scale) for p in PAIRS]
    routing = Routing(device, max_loras=3)
    layers = []
    for route in (LoraRoute.from_pairs(pairs), LoraRoute.from_pairs(pairs[::-1])):
        base = nn.Linear(K_IN, N_OUT, dtype=torch.bfloat16, device=device).requires_grad_(False)
        layers.append(RoutedLinear(base, route, routing))
    layers[0].shared = layers[1].shared = SharedInput(layers)
    x = random(6, K_IN, seed=15).cuda()

    def step() -> None:
        routing.step(3, 2, 2)
        outs[:] = [layer(x) for layer in layers]

    outs: list[Tensor] = []
    routing.begin([0, -1, 2])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = list(outs)
    routing.end()
    for slots in ([2, 2, 0], [-1, -1, -1], [1, -1, 0]):
        routing.begin(slots)
        step()
        graph.replay()
        for replayed, eager in zip(captured, outs, strict=True):
            assert torch.equal(bits(replayed.cpu()), bits(eager.cpu()))
        routing.end()
    graph.replay()
    for replayed, layer in zip(captured, layers, strict=True):
        assert torch.equal(bits(replayed.cpu()), bits(layer.base(x).cpu()))


@pytest.mark.parametrize("slots", [[], [3], [0, -2]])
def test_slots_that_do_not_exist_are_refused(slots: list[int]) -> None:
    _, routing = make_layer()
    with pytest.raises(RouteError, match=r"-1 \(base\) .. 2"):
        routing.begin(slots)
    assert not routing.is_active


def test_routings_do_not_nest() -> None:
    _, routing = make_layer()
    with pytest.raises(RouteError, match="no routing is active"):
        routing.step(1, 1, 1)
    routing.begin([0])
    with pytest.raises(RouteError, match="active already"):
        routing.begin([0])


def make_siblings() -> tuple[RoutedLinear, RoutedLinear, Routing]:
    layer, routing = make_layer()
    torch.manual_seed(1)
    base = nn.Linear(K_IN, N_OUT, dtype=torch.bfloat16).requires_grad_(False)
    other = RoutedLinear(base, LoraRoute.from_pairs(PAIRS[::-1]), routing, name="other")
    layer.shared = other.shared = SharedInput([layer, other])
    routing.begin([0, 2])
    return layer, other, routing


def alone(layer: RoutedLinear, x: Tensor) -> Tensor:
    shared, layer.shared = layer.shared, None
    out = layer(x)
    layer.shared = shared
    return out


@pytest.fixture
def operator_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of routes of every operator call."""
    calls: list[int] = []
    operator = linear.apply_lora_beside

    def counted(routes: list[LoraRoute], *args: Any, **kwargs: Any) -> Any:
        calls.append(len(routes))
        return operator(routes, *args, **kwargs)

    monkeypatch.setattr(linear, "apply_lora_beside", counted)
    return calls


def test_siblings_with_one_x_share_one_operator_call(operator_calls: list[int]) -> None:
    first, second, routing = make_siblings()
    x = random(2, K_IN, seed=11)
    want = [alone(layer, x) for layer in (first, second)]
    operator_calls.clear()
    for _ in range(2):  # a second forward on the same tensor computes everything again
        assert torch.equal(bits(second(x)), bits(want[1]))
        assert torch.equal(bits(first(x)), bits(want[0]))
    assert operator_calls == [2, 2]
    routing.end()
    assert torch.equal(first(x), first.base(x))


@pytest.mark.parametrize("change", ["other tensor", "equal tensor", "in place", "slots", "again"])
def test_siblings_share_nothing_stale(change: str, operator_calls: list[int]) -> None:
    first, second, routing = make_siblings()
    x = random(2, K_IN, seed=12)
    first(x)
    if change == "other tensor":
        x = random(2, K_IN, seed=13)
    elif change == "equal tensor":
        x = x.clone()
    elif change == "in place":
        x.mul_(2)
    elif change == "slots":
        routing.end()
        routing.begin([2, -1])
    elif change == "again":
        assert torch.equal(bits(first(x)), bits(alone(first, x)))
    assert torch.equal(bits(second(x)), bits(alone(second, x)))
    assert operator_calls.count(2) == 2


def test_siblings_without_versions_work_one_by_one(operator_calls: list[int]) -> None:
    first, second, _ = make_siblings()
    with torch.inference_mode():
        x = random(2, K_IN, seed=14)
        want = [alone(layer, x) for layer in (first, second)]
        assert torch.equal(bits(first(x)), bits(want[0]))
        assert torch.equal(bits(second(x)), bits(want[1]))
    assert operator_calls == [1, 1, 1, 1]


def test_it_shows_what_it_wraps() -> None:
    layer, _ = make_layer()
    shown = repr(layer)
    assert "RoutedLinear" in shown
    assert "max_loras=3" in shown
    assert "Linear(in_features=40, out_features=24" in shown
    assert (layer.in_features, layer.out_features) == (K_IN, N_OUT)
    assert layer.weight is layer.base.weight
    assert layer.bias is layer.base.bias
