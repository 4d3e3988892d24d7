"""The product's promise, end to end: a mixed batch is every request on its own.

Three things are held apart, because they are not equally strong:

- the delta of a row: the same *bits* whatever else is in the batch (the contract);
- the row through the whole model: the same bits in batches of one shape. In another shape the
  base's own matrix products may sum in another order, which is not ours to fix;
- against the adapter merged in fp64: close. Nothing in bf16 can be equal to that; the yardstick is
  PEFT itself running the adapter in bf16: our error may be at most twice its error.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lorafold.layers.linear import RoutedLinear
from lorafold.ops import apply_lora_delta
from lorafold.peft import load_adapter
from lorafold.route import LoraPair
from lorafold.runtime import attach
from tests.tiny_models import (
    adapted_by_peft,
    bits,
    make_model,
    merged_by_peft,
    random_ids,
    write_adapter,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GDN = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
}
# Two adapters per family, with different targets, ranks and scales (4/3 is no power of two).
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "llama": (["q_proj", "v_proj"], [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
    "qwen3": (["k_proj", "o_proj", "down_proj"], [*ATTENTION, "gate_proj", "up_proj"]),
    "qwen3_next": (["q_proj", "out_proj"], [*ATTENTION, *GDN["qwen3_next"]]),
    "qwen3_5": (["q_proj", "out_proj"], [*ATTENTION, *GDN["qwen3_5"], "up_proj"]),
    "gpt2": (["c_attn"], ["c_attn", "c_proj", "c_fc"]),
}


class Bench:
    """One family: the plain model, two adapters written by PEFT, and an attached copy."""

    def __init__(self, family: str, root: Path) -> None:
        self.plain = make_model(family)
        few, many = TARGETS[family]
        conv = {"fan_in_fan_out": True} if family == "gpt2" else {}
        self.folders = {
            "few": write_adapter(self.plain, root / "few", few, rank=3, alpha=4, seed=1, **conv),
            "many": write_adapter(self.plain, root / "many", many, rank=8, alpha=8, seed=2, **conv),
        }
        self.lora = attach(copy.deepcopy(self.plain), max_loras=3, max_rank=8)
        self.weights = {}
        for name, folder in self.folders.items():
            self.lora.load(name, folder)
            self.weights[name] = load_adapter(folder, self.lora.pool.targets).weights

    def logits(self, ids: Tensor, adapters: Sequence[str | None]) -> Tensor:
        with self.lora.rows(adapters):
            return self.lora.model(ids).logits


@pytest.fixture(scope="module", params=TARGETS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp(request.param))


def rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def test_a_mixed_batch_against_each_adapter_merged_in_fp64(bench: Bench) -> None:
    ids = random_ids(3, 7)
    got = bench.logits(ids, ["few", None, "many"])
    for row, name in ((0, "few"), (2, "many")):
        exact = merged_by_peft(bench.plain, bench.folders[name], torch.float64)(ids).logits[row]
        by_peft = adapted_by_peft(bench.plain, bench.folders[name], torch.bfloat16)(ids).logits[row]
        error, error_of_peft = rms(got[row] - exact), rms(by_peft - exact)
        assert 0 < error_of_peft < 0.2 * rms(exact)
        assert error <= 2 * error_of_peft
        # The yardstick is short enough to see a missing adapter, and the wrong one.
        assert rms(bench.plain(ids).logits[row] - exact) > 4 * error
        assert rms(bench.logits(ids, ["many", None, "few"])[row] - exact) > 4 * error


def test_generating_follows_the_merged_model(bench: Bench) -> None:
    ids = random_ids(2, 5)
    out = bench.lora.generate(
        ids,
        adapters=["few", "many"],
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    got = torch.stack(out.logits, dim=1)  # [2, 6, vocab]: one prefill and five steps with a cache
    for row, name in enumerate(("few", "many")):
        exact = merged_by_peft(bench.plain, bench.folders[name], torch.float64)
        by_peft = adapted_by_peft(bench.plain, bench.folders[name], torch.bfloat16)
        want = exact(out.sequences).logits[row, 4:-1]
        yardstick = by_peft(out.sequences).logits[row, 4:-1]
        assert rms(got[row] - want) <= 2 * rms(yardstick - want)


def test_base_rows_have_the_bits_of_the_plain_model(bench: Bench) -> None:
    ids = random_ids(3, 7)
    plain = bench.plain(ids).logits
    assert torch.equal(bits(bench.lora.model(ids).logits), bits(plain))
    assert torch.equal(bits(bench.logits(ids, [None] * 3)), bits(plain))
    mixed = bench.logits(ids, ["few", None, "many"])
    assert torch.equal(bits(mixed[1]), bits(plain[1]))
    assert not torch.equal(bits(mixed[0]), bits(plain[0]))


def test_a_row_does_not_see_the_adapters_of_its_neighbours(bench: Bench) -> None:
    ids = random_ids(4, 6)
    alone = {name: bench.logits(ids, [name] * 4) for name in ("few", "many", None)}
    for adapters in (["few", "many", None, "many"], ["many", "few", "few", None]):
        mixed = bench.logits(ids, adapters)
        for row, name in enumerate(adapters):
            assert torch.equal(bits(mixed[row]), bits(alone[name][row]))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_delta_has_the_bits_of_its_row_alone(bench: Bench, data: st.DataObject) -> None:
    names = st.sampled_from(["few", "many", None])
    adapters = data.draw(st.lists(names, min_size=1, max_size=4))
    num_tokens = data.draw(st.integers(1, 5))
    seen: dict[str, list[Tensor]] = {}

    def keep_base(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        seen[paths[module]] = [args[0].flatten(0, -2), out.flatten(0, -2).clone()]

    def keep_folded(module: RoutedLinear, args: tuple[Tensor], out: Tensor) -> None:
        seen[paths[module.base]].append(out.flatten(0, -2).clone())

    paths, handles = {}, []
    for path, module in bench.lora.model.named_modules():
        if isinstance(module, RoutedLinear):
            paths[module.base] = path
            handles.append(module.base.register_forward_hook(keep_base))
            handles.append(module.register_forward_hook(keep_folded))
    try:
        bench.logits(random_ids(len(adapters), num_tokens), adapters)
    finally:
        for handle in handles:
            handle.remove()
    assert set(seen) == set(bench.lora.targets)
    rows = [name for name in adapters for _ in range(num_tokens)]
    for path, (x, base_out, folded) in seen.items():
        for row, name in enumerate(rows):
            want = base_out[row : row + 1].clone()
            if name is not None and (weights := bench.weights[name].get(path)):
                # As the file holds them: unpadded, and outside of any pool.
                pair = LoraPair(weights.a, weights.b, weights.scale)
                apply_lora_delta(pair, x[row : row + 1].clone(), want)
            assert torch.equal(bits(folded[row : row + 1]), bits(want))


def test_slots_and_the_order_of_loading_do_not_enter_the_bits(tmp_path: Path) -> None:
    plain = make_model("llama")
    folders = [
        write_adapter(plain, tmp_path / str(i), ["q_proj", "up_proj"], rank=i + 1, seed=i)
        for i in range(3)
    ]
    ids = random_ids(3, 4)
    results = []
    for order, max_loras, max_rank in (([0, 1, 2], 3, 3), ([2, 0, 1], 5, 16)):
        lora = attach(copy.deepcopy(plain), max_loras=max_loras, max_rank=max_rank)
        for i in order:
            lora.load(f"adapter {i}", folders[i])
        with lora.rows(["adapter 0", "adapter 1", "adapter 2"]):
            results.append(lora.model(ids).logits)
    assert torch.equal(bits(results[0]), bits(results[1]))
