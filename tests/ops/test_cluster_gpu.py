"""The cluster kernel on a GPU: the bits of the CPU reference, in every cut, eager and captured.

It is forced, or put in the table: what the table that is shipped says does not matter here.
"""

from __future__ import annotations

import threading

import pytest
import torch

from lorafold.ops import Plan, apply_lora_bgmv, cluster_choice, make_plan
from lorafold.ops.cluster import ClusterLaunch, has_clusters
from lorafold.ops.cluster_choice import Choice, Shape
from lorafold.ops.group import group_triton
from lorafold.ops.launch import prepare, prepare_call
from lorafold.route import tables_of
from tests.ops.cases import Case, Layers, assert_same_bits, make_case, poisoned
from tests.ops.test_kernels import plan_of_height

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_clusters(torch.device("cuda", 0)),
        reason="needs compute capability 9.0 and cuda.bindings",
    ),
]

SITES = {
    "o": (4096, [4096], 16),
    "qkv": (4096, [1024, 256, 256], 16),
    "wide-rank": (4096, [512, 320], 64),
    "odd": (2432, [520, 192, 64], 24),
    "down": (13952, [512], 16),
    "one-chunk": (128, [8], 8),
}
CUTS = [
    *(("o", Choice(*c)) for c in ((8,), (4,), (16,), (8, 1, 2), (8, 1, 1, True, 4))),
    *(("o", Choice(8, wgmma=False, x_parts=n)) for n in (1, 2, 4)),
    *(("qkv", Choice(*c)) for c in ((4,), (8,), (16,), (8, 2, 1), (8, 1, 1, False, 4))),
    *(("wide-rank", Choice(*c)) for c in ((8, 1, 1), (16, 1, 1), (8, 1, 2, True, 2))),
    *(("odd", Choice(*c)) for c in ((8, 1, 2), (8, 2, 1, True, 2), (8, 1, 1, False, 4))),
    *(("down", Choice(*c)) for c in ((8, 1, 2), (16,), (16, 1, 1, False, 2))),
    *(("one-chunk", Choice(*c)) for c in ((1,), (2, 1, 1, False))),
]
RANKS = [64, 16, None, 8, 33, 1, 64, 24]


def build(site: str, num_rows: int, seed: int = 0, **kwargs) -> Case:
    k_in, n_outs, max_rank = SITES[site]
    ranks = [rank and min(rank, max_rank) for rank in RANKS]
    return make_case(
        num_rows, ranks, k_in, n_outs, max_rank, device="cuda", seed=seed, x_pad=8, out_pad=8,
        **kwargs,
    )  # fmt: skip


def run(
    case: Case,
    plan: Plan,
    choice: Choice,
    x: torch.Tensor | None = None,
    top_k: int = 1,
    source: torch.Tensor | None = None,
) -> None:
    """The call by the cluster kernel, or a failure."""
    route, x = case.routes[0], case.x if x is None else x
    call = prepare_call(
        x, tuple(case.outs), route.max_rank, "mma", plan.tile_key, plan.tile_rows,
        top_k, source is not None, cluster=choice,
    )  # fmt: skip
    (launch,) = call.launches
    assert isinstance(launch, ClusterLaunch)
    assert call.xa_bytes == 0
    tables = tuple(zip(*map(tables_of, case.routes), strict=True))
    (operands,) = call.operands(
        x, None, tuple(case.outs), tables, plan.tile_key, plan.tile_rows, source
    )
    launch(*operands)


def assert_equal(case: Case, expected: list[torch.Tensor], what: str = "") -> None:
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth, what)


@pytest.mark.parametrize("tile_rows", [8, 16])
@pytest.mark.parametrize(("site", "choice"), CUTS, ids=str)
def test_every_cut_equals_the_reference(site, choice, tile_rows):
    case = build(site, 40)
    k_in, n_outs, max_rank = SITES[site]
    if not Shape(tile_rows, k_in, tuple(n_outs), max_rank, choice).fits:
        pytest.skip("there is no such kernel")
    expected = case.truth("mma", by_slot=True)
    run(case, plan_of_height(case, tile_rows), choice)
    assert_equal(case, expected)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 64, 300])
@pytest.mark.parametrize("site", ["qkv", "odd"])
def test_numbers_of_rows(site, num_rows):
    """With rows of the base, unused tiles, keys without an adapter in any slice."""
    for tile_rows in (8, 16):
        case = build(site, num_rows, seed=num_rows)
        expected = case.truth("mma", by_slot=True)
        run(case, plan_of_height(case, tile_rows), Choice(8))
        assert_equal(case, expected, f"tiles of {tile_rows}")


@pytest.mark.parametrize("tile_rows", [8, 16])
@pytest.mark.parametrize("by_source", [False, True])
@pytest.mark.parametrize("site", ["o", "odd", "down"])
def test_several_rows_read_one_row_of_x(site, by_source, tile_rows):
    """As experts' gate and up do: rows / top_k, or through an index that another kernel writes."""
    case = build(site, 40)
    x = case.x[:10].clone()
    sources = torch.arange(40, device="cuda").int() // 4
    if by_source:
        sources = sources[torch.randperm(40, device="cuda")].contiguous()
    case.x.copy_(x[sources.long()])
    expected = case.truth("mma", by_slot=True)
    plan, choice = plan_of_height(case, tile_rows), Choice(16 if site == "down" else 8)
    if by_source:
        written = torch.full_like(sources, 7)
        torch.cuda.synchronize()
        written.copy_(sources)  # by the kernel before
        run(case, plan, choice, x, source=written)
    else:
        run(case, plan, choice, x, top_k=4)
    assert_equal(case, expected)


def test_slices_of_which_some_have_no_adapter():
    case = build("qkv", 30)
    for s, route in enumerate(case.routes):
        for slot in (s, s + 3):
            route.a_table[slot] = route.b_table[slot] = 0
            case.pairs[s][slot] = None
    expected = case.truth("mma", by_slot=True)
    run(case, plan_of_height(case, 8), Choice(8))
    assert_equal(case, expected)


def test_no_row_has_an_adapter():
    case = build("o", 9, slots=[-1] * 9)
    before = [buffer.clone() for buffer in case.out_buffers]
    run(case, plan_of_height(case, 8), Choice(8))
    assert_equal(case, before)


def test_padding_is_not_read():
    case = build("odd", 40)
    expected = case.truth("mma", by_slot=True)
    for pair in (pair for pairs in case.pairs for pair in pairs if pair is not None):
        pair.a[pair.rank :] = float("nan")
        pair.b[:, pair.rank :] = float("nan")
    run(case, plan_of_height(case, 16), Choice(8, x_parts=2))
    assert_equal(case, expected)


def spoil(case: Case) -> None:
    """Special values in x, A, B and outs, in tiles that have plain rows too."""
    tiny, huge, inf = 2.0**-133, 3e38, float("inf")
    case.x[0, :4] = torch.tensor([float("nan"), 1, 2, 3])
    case.x[1, :4] = torch.tensor([inf, -1, 0.0, -0.0])
    case.x[2], case.x[3], case.x[4], case.x[5] = tiny, huge, 0.0, -0.0
    case.outs[0][4], case.outs[0][5], case.outs[0][6] = -0.0, -0.0, inf
    case.x[7] *= 2.0**-110
    for pairs in case.pairs:
        for slot, value, other in ((3, tiny, inf), (7, -huge, float("nan"))):
            pairs[slot].a[1, 40:44], pairs[slot].a[2] = value, -tiny
            pairs[slot].b[5, 3], pairs[slot].b[6] = other, -0.0
    case.slots[:] = torch.tensor([0, 1, 3, 7]).repeat(case.slots.shape[0] // 4)


@pytest.mark.parametrize("tile_rows", [8, 16])
@pytest.mark.parametrize("choice", [Choice(8), Choice(8, wgmma=False, x_parts=2)], ids=str)
@pytest.mark.parametrize("site", ["o", "odd"])
def test_special_values(site, choice, tile_rows):
    case = build(site, 32)
    spoil(case)
    expected = case.truth("mma", by_slot=True)
    run(case, plan_of_height(case, tile_rows), choice)
    assert_equal(case, expected)


@pytest.mark.parametrize("site", ["o", "qkv", "odd", "down"])
def test_replay_with_other_slots(site):
    choice = Choice(16) if site == "down" else Choice(8)
    case = build(site, 64)
    start = [b.clone() for b in case.out_buffers]
    plan = plan_of_height(case, 16)
    run(case, plan, choice)  # compiled and loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group_triton(case.slots, plan)
        run(case, plan, choice)
    for shift in range(3):
        case.slots.copy_(case.slots.roll(shift * 7 + 1))
        for buffer, old in zip(case.out_buffers, start, strict=True):
            buffer.copy_(old)
        expected = case.truth("mma", by_slot=True)
        graph.replay()
        assert_equal(case, expected, f"replay {shift}")


@pytest.mark.parametrize(
    "choice", [Choice(8), Choice(8, x_parts=4), Choice(4), Choice(16)], ids=str
)
def test_outs_are_the_next_calls_x(table, choice):
    """Calls in a row, each of which reads what the one before wrote, with nothing between them."""
    case = build("o", 21)
    plan = plan_of_height(case, 8)
    tables = tuple(zip(*map(tables_of, case.routes), strict=True))
    start = [torch.randn(21, 4096, device="cuda").bfloat16() for _ in range(3)]

    def chain(buffers: list[torch.Tensor], cut: Choice | None) -> None:
        for i in range(9):
            x, outs = buffers[i % 3], (buffers[(i + 1) % 3],)
            call = prepare_call(x, outs, 16, "mma", plan.tile_key, plan.tile_rows, cluster=cut)
            assert (len(call.launches) == 1) == (cut is not None)
            scratch = torch.empty(max(1, call.xa_bytes), dtype=torch.uint8, device="cuda")
            each = call.operands(x, scratch, outs, tables, plan.tile_key, plan.tile_rows)
            for launch, operands in zip(call.launches, each, strict=True):
                launch(*operands)

    expected, ours = [b.clone() for b in start], [b.clone() for b in start]
    chain(expected, None)
    chain(ours, choice)
    for one, truth in zip(ours, expected, strict=True):
        assert_same_bits(one, truth, "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(ours, choice)
    for _ in range(5):
        for one, old in zip(ours, start, strict=True):
            one.copy_(old)
        graph.replay()
        for one, truth in zip(ours, expected, strict=True):
            assert_same_bits(one, truth, "replayed")


@pytest.fixture
def table(monkeypatch):
    """A function that lets every call near this one take a choice, and the operators with it."""

    def put(shape: tuple[int, ...] | None, choice: Choice | None) -> None:
        monkeypatch.setattr(cluster_choice, "_table", lambda: [(shape, choice)] if shape else [])
        cluster_choice.cluster_choice.cache_clear()
        prepare.cache_clear()

    put(None, None)  # the Triton kernels, whatever is shipped
    yield put
    monkeypatch.undo()
    cluster_choice.cluster_choice.cache_clear()
    prepare.cache_clear()


def shape_of(site: str, plan: Plan) -> tuple[int, ...]:
    k_in, n_outs, rank = SITES[site]
    segments = -(-k_in // 1024)
    return plan.block_rows, plan.tile_key.shape[0], rank, len(n_outs), sum(n_outs), segments


@pytest.mark.parametrize("site", ["o", "qkv", "odd"])
def test_operators_take_it(table, site):
    """First call, second, and repeats, which skip checks; without scratch, and in a new thread."""
    case = build(site, 48)
    start = [b.clone() for b in case.out_buffers]
    plan = make_plan(case.slots, case.routes[0].max_loras)
    table(shape_of(site, plan), Choice(8))
    expected = case.truth("mma", by_slot=True)

    def step() -> None:
        apply_lora_bgmv(case.routes, case.x, case.outs, case.slots, plan=plan, numerics="mma")

    def in_a_thread() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    for each in (step, step, step, step, in_a_thread):
        for buffer, old in zip(case.out_buffers, start, strict=True):
            buffer.copy_(old)
        torch.cuda.synchronize()
        each()
        assert_equal(case, expected)
    ready = plan.ready[tuple(case.routes)]
    assert [type(launch) for launch in ready._call.launches] == [ClusterLaunch]


@pytest.mark.parametrize("site", ["o", "qkv", "odd"])
def test_beside_the_base_layer(table, site):
    """Three layers in one graph, each of which changes what the next one reads: there the Triton
    kernels make the deltas.
    """
    layers = Layers([build(site, 64, seed) for seed in range(3)], "mma")
    slots, plan = layers.slots, layers.plan
    truths, shift = [], [5 * i + 1 for i in range(4)]
    first = slots.clone()
    for by in shift:
        slots.copy_(slots.roll(by))
        truths.append([out.clone() for out in layers.after()])
    slots.copy_(first)
    plan.ready.clear()
    table(shape_of(site, plan), Choice(8))
    layers.beside()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.beside()
    for by, expected in zip(shift, truths, strict=True):
        slots.copy_(slots.roll(by))
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        for at, (result, truth) in enumerate(zip(captured, expected, strict=True)):
            assert_same_bits(result, truth, f"output {at}")


def test_misaligned_operands_take_the_triton_kernels(table):
    case = build("o", 9)
    plan = plan_of_height(case, 8)
    memory = poisoned((9 * 4112 + 8,), "cuda")
    x = torch.as_strided(memory, case.x.shape, case.x.stride(), 1).copy_(case.x)
    tables = (x, tuple(case.outs), 16, "mma", plan.tile_key, plan.tile_rows)
    assert len(prepare_call(*tables, cluster=Choice(8)).launches) == 2
