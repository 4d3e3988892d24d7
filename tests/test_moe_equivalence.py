"""The product's promise for mixtures of experts, end to end: a mixed batch is every request alone.

The truth is our own merge, W + scale * B A per expert in fp64. Where bf16 sends a token to another
expert than fp64 does, nothing after it can be compared, in this library or any other: the rest of
such a row is left out, and enough must remain. The yardstick is the model with the adapter merged
and rounded to bf16: our error may be at most twice its error.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafold.errors import AdapterMismatchError
from lorafold.layers import experts as experts_module
from lorafold.layers import router as router_module
from lorafold.ops import LoraPair, apply_lora_delta
from lorafold.runtime import attach
from tests.moe_models import (
    MOE_FAMILIES,
    AdapterFile,
    chosen_experts,
    experts_of,
    make_moe,
    merged,
    router_name,
    write_apart,
)
from tests.tiny_models import bits, random_ids, write_adapter

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


class Bench:
    """One family: the plain model, adapters of all forms, and an attached copy."""

    def __init__(self, family: str, root: Path) -> None:
        self.family, self.plain = family, make_moe(family)
        router = f"mlp.{router_name(family)}.weight"
        linear = ["o_proj"]
        self.folders = {
            # As PEFT writes them today: 3-D parameters folded into two matrices.
            "fused": write_adapter(
                self.plain, root / "fused", linear, rank=3, alpha=4, seed=1,
                target_parameters=[GATE_UP, DOWN, router],
            ),
            # One name per expert: gate and up have an A each.
            "apart": write_apart(self.plain, root / "apart"),
            "router": write_adapter(
                self.plain, root / "router", [], rank=2, alpha=16, seed=2,
                target_parameters=[router],
            ),
            "down": write_adapter(
                self.plain, root / "down", linear, rank=5, alpha=5, seed=3,
                target_parameters=[DOWN],
            ),
        }  # fmt: skip
        if family == "qwen3_moe":
            # Old names, which PEFT turns into fused parameters of twice the rank.
            names = ["gate_proj", "up_proj", "down_proj"]
            with warnings.catch_warnings():  # of a pattern that PEFT has written itself
                warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)
                self.folders["names"] = write_adapter(
                    self.plain, root / "names", names, rank=2, seed=4
                )
        self.names: list[str | None] = [*self.folders, None]
        self.files = {name: AdapterFile(at, self.plain) for name, at in self.folders.items()}
        self.lora = self.attached()

    def attached(self, order: Sequence[str] | None = None, **sizes: Any) -> Any:
        settings = {"max_loras": 5, "max_rank": 8, "max_expert_rank": 5} | sizes
        lora = attach(copy.deepcopy(self.plain), **settings)
        for name in order or self.folders:
            lora.load(name, self.folders[name])
        return lora

    def logits(self, ids: Tensor, adapters: Sequence[str | None]) -> Tensor:
        with self.lora.rows(adapters):
            return self.lora.model(ids).logits


@pytest.fixture(scope="module", params=MOE_FAMILIES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp(request.param))


def rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def test_a_mixed_batch_against_each_adapter_merged_in_fp64(bench: Bench) -> None:
    names = bench.names * 3
    ids = random_ids(len(names), 8)
    with bench.lora.rows(names):
        got, places = chosen_experts(bench.lora.model, ids)
    plain = bench.plain(ids).logits
    for name, folder in bench.folders.items():
        want, of_want = chosen_experts(merged(bench.plain, folder, torch.float64), ids)
        rounded, of_rounded = chosen_experts(merged(bench.plain, folder, torch.bfloat16), ids)
        same = torch.stack(
            [
                (here == there).all(dim=-1) & (other == there).all(dim=-1)
                for here, there, other in zip(places, of_want, of_rounded, strict=True)
            ]
        )
        at = same.all(dim=0).int().cumprod(dim=1).bool()  # up to the first difference in a row
        at &= torch.tensor([row == name for row in names])[:, None]
        assert int(at.sum()) >= 8, f"{name}: too many tokens go to other experts in bf16"
        error, error_of_rounded = rms(got[at] - want[at]), rms(rounded[at] - want[at])
        assert 0 < error_of_rounded < 0.2 * rms(want[at])
        assert error <= 2 * error_of_rounded, name
        assert rms(plain[at] - want[at]) > 4 * error, f"{name} makes too little difference"


def test_base_rows_have_the_bits_of_a_batch_without_adapters(bench: Bench) -> None:
    ids = random_ids(len(bench.names), 6)
    nobody = bench.lora.model(ids).logits
    assert torch.equal(bits(bench.logits(ids, [None] * len(ids))), bits(nobody))
    mixed = bench.logits(ids, bench.names)
    assert torch.equal(bits(mixed[-1]), bits(nobody[-1]))
    for row in range(len(bench.folders)):
        assert not torch.equal(mixed[row], nobody[row])


def test_a_row_does_not_see_the_adapters_of_its_neighbours(bench: Bench) -> None:
    num_rows = len(bench.names)
    ids = random_ids(num_rows, 6)
    alone = {name: bench.logits(ids, [name] * num_rows) for name in bench.names}
    for shift in (0, 1, 3):
        adapters = [bench.names[(row + shift) % num_rows] for row in range(num_rows)]
        mixed = bench.logits(ids, adapters)
        for row, name in enumerate(adapters):
            assert torch.equal(bits(mixed[row]), bits(alone[name][row]))


def test_slots_and_sizes_do_not_enter_the_bits(bench: Bench) -> None:
    ids = random_ids(len(bench.names), 4)
    want = bench.logits(ids, bench.names)
    order = list(bench.folders)[::-1]
    other = bench.attached(order, max_loras=7, max_rank=32, max_expert_rank=16)
    with other.rows(bench.names):
        assert torch.equal(bits(other.model(ids).logits), bits(want))


def test_each_prompt_generates_with_its_own_adapter(bench: Bench) -> None:
    ids = random_ids(len(bench.names), 4)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    mixed = bench.lora.generate(ids, adapters=bench.names, **settings)
    for row, name in enumerate(bench.names):
        alone = bench.lora.generate(ids, adapters=[name] * len(ids), **settings)
        assert torch.equal(mixed[row], alone[row])
    assert len({tuple(row[4:].tolist()) for row in mixed}) > 2


def test_a_router_alone_installs_no_expert_route(bench: Bench) -> None:
    pool = bench.lora.pool
    slots = {name: pool.slot(name) for name in bench.folders}
    for path in experts_of(bench.plain):
        routes = pool.experts.routes(path)
        for route, changed in (
            (routes.gate, {"fused", "apart", "names"}),
            (routes.up, {"fused", "apart", "names"}),
            (routes.down, {"fused", "apart", "names", "down"}),
        ):
            has = route.a_table.view(pool.max_loras, -1).ne(0).all(dim=1)
            assert {name for name, slot in slots.items() if has[slot]} == changed & slots.keys()
            assert not route.rank_table.view(pool.max_loras, -1)[slots["router"]].any()
    gate = next(p for p in bench.lora.targets if p.endswith(f"mlp.{router_name(bench.family)}"))
    assert pool.route(gate).rank_table[slots["router"]] == 2


def test_every_expert_delta_has_the_bits_of_its_row_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With A, B and scale as the file has them: unpadded, and outside of any pool."""
    num_tokens, names = 3, bench.names
    path_of = {
        id(route): (path, name)
        for path in experts_of(bench.plain)
        for name in ("gate", "up", "down")
        for route in [getattr(bench.lora.pool.experts.routes(path), name)]
    }
    fold, seen = experts_module.moe_lora_grouped_down, {}

    def record(
        route: Any, x: Tensor, out: Tensor, offsets: Tensor, tokens: Tensor, slots: Tensor,
        *, x_gather: int, plan: Any,
    ) -> None:  # fmt: skip
        before = out.clone()
        fold(route, x, out, offsets, tokens, slots, x_gather=x_gather, plan=plan)
        x_rows = x[tokens.long()] if x_gather else x
        experts = torch.repeat_interleave(offsets.diff().long())
        seen[path_of[id(route)]] = (x_rows, before, out.clone(), experts, tokens)

    monkeypatch.setattr(experts_module, "moe_lora_grouped_down", record)
    bench.logits(random_ids(len(names), num_tokens), names)
    assert set(seen) == set(path_of.values())
    changed: set[str] = set()
    for (path, product), (x_rows, before, after, experts, tokens) in seen.items():
        for row, (expert, token) in enumerate(zip(experts.tolist(), tokens.tolist(), strict=True)):
            name = names[token // num_tokens]
            want = before[row : row + 1].clone()
            products = bench.files[name].experts.get((path, expert), {}) if name else {}
            if product in products:
                a, b, scale = products[product]
                pair = LoraPair(a.clone(), b.contiguous().clone(), scale)
                apply_lora_delta(pair, x_rows[row : row + 1].clone(), want)
                changed |= (
                    {str(name)} if not torch.equal(bits(want[0]), bits(before[row])) else set()
                )
            assert torch.equal(bits(after[row]), bits(want[0])), (path, product, name)
    assert changed == bench.folders.keys() - {"router"}


def test_every_router_delta_has_the_bits_of_its_row_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, names = 3, bench.names
    fold, seen = router_module.apply_lora_bgmv, []

    def record(route: Any, x: Tensor, out: Tensor, slots: Tensor, *, plan: Any) -> None:
        before = out.clone()
        fold(route, x, out, slots, plan=plan)
        seen.append((route, x, before, out.clone()))

    monkeypatch.setattr(router_module, "apply_lora_bgmv", record)
    bench.logits(random_ids(len(names), num_tokens), names)
    paths = {id(bench.lora.pool.route(p)): p for p in bench.lora.pool.targets}
    assert len(seen) == len(experts_of(bench.plain))
    for route, x, before, after in seen:
        for row in range(len(names) * num_tokens):
            name, want = names[row // num_tokens], before[row : row + 1].clone()
            factors = bench.files[name].linears.get(paths[id(route)]) if name else None
            if factors is not None:
                a, b, scale = factors
                pair = LoraPair(a.clone(), b.contiguous().clone(), scale)
                apply_lora_delta(pair, x[row : row + 1].clone(), want)
                assert not torch.equal(bits(want[0]), bits(before[row]))
            assert torch.equal(bits(after[row]), bits(want[0]))


def test_unloading_leaves_nothing_of_the_experts(bench: Bench) -> None:
    lora = bench.attached()
    ids = random_ids(2, 4)
    nobody = lora.model(ids).logits
    for name in bench.folders:
        lora.unload(name)
    assert not any(table.any() for table in lora.pool.experts._tables.values())
    lora.load("again", bench.folders["down"])
    with lora.rows(["again", None]):
        again = lora.model(ids).logits
    assert torch.equal(bits(again[1]), bits(nobody[1]))
    assert torch.equal(bits(again), bits(bench.logits(ids, ["down", None])))


def test_an_adapter_of_experts_needs_them_attached(bench: Bench) -> None:
    lora = attach(copy.deepcopy(bench.plain), max_expert_rank=0)
    lora.load("router", bench.folders["router"])
    with pytest.raises(AdapterMismatchError, match="experts"):
        lora.load("fused", bench.folders["fused"])
    assert lora.names() == ("router",)


@pytest.fixture
def no_compiler_cache() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_compiler_cache")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_block_runs_router_and_experts_outside_of_its_graph(bench: Bench) -> None:
    block = bench.lora.model.model.layers[1].mlp
    compiled = torch.compile(block, backend="aot_eager")
    x = bench.plain.get_input_embeddings()(random_ids(len(bench.names), 1))
    with bench.lora.rows(bench.names):
        want, got = block(x), compiled(x)
    assert torch.equal(bits(first_of(got)), bits(first_of(want)))
    assert not torch.equal(first_of(got), first_of(block(x)))


def first_of(out: Any) -> Tensor:
    """A block of GPT-OSS gives its weights too."""
    return out[0] if isinstance(out, tuple) else out
