"""Adapters of routed experts for tests: shapes, files written by hand, and the deltas they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorafold.adapter import Adapter, ExpertShape
from tests.peft.folders import CONFIG, PREFIX, Targets, factor

NUM_EXPERTS, HIDDEN, INNER = 4, 16, 12
PLAIN = ExpertShape(NUM_EXPERTS, HIDDEN, INNER)
GPT_OSS = ExpertShape(NUM_EXPERTS, HIDDEN, INNER, transposed=True, interleaved=True)
EXPERTS = "model.layers.0.mlp.experts"
FILE = f"{PREFIX}0.mlp.experts"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def deltas_of(adapter: Adapter, shapes: Targets) -> dict[str, Tensor]:
    """scale * B A of every target, as the base stores the parameter."""
    found = {
        f"{path}.weight": weights.scale * weights.b.float() @ weights.a.float()
        for path, weights in adapter.weights.items()
    }
    for path, lora in adapter.experts.items():
        shape = shapes[path]
        assert isinstance(shape, ExpertShape)
        for name, part in (("gate_up_proj", lora.gate_up), ("down_proj", lora.down)):
            if part is not None:
                delta = part.scale * part.b.float() @ part.a.float()
                found[f"{path}.{name}"] = delta.mT if shape.transposed else delta
    return found


def assert_same_deltas(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-4, atol=1e-4)


def expert_config(**fields: Any) -> dict[str, Any]:
    return CONFIG | {"r": 3, "lora_alpha": 3, "target_parameters": BOTH} | fields


def folded(
    rank: int = 3, *, hidden: int = HIDDEN, inner: int = INNER, swapped: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """PEFT's folded tensors of gate_up and down, and the deltas that they mean at scale 1."""
    tensors, deltas = {}, {}
    for infix, name, (k, n) in [
        (".base_layer", "gate_up_proj", (hidden, 2 * inner)),
        ("", "down_proj", (inner, hidden)),
    ]:
        a, b = factor(NUM_EXPERTS, rank, k, seed=k), factor(NUM_EXPERTS, n, rank, seed=n)
        deltas[f"{EXPERTS}.{name}"] = b @ a
        if swapped:
            a, b = b.mT, a.mT
        tensors[f"{FILE}{infix}.lora_A.weight"] = a.reshape(NUM_EXPERTS * rank, -1)
        tensors[f"{FILE}{infix}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return tensors, deltas
