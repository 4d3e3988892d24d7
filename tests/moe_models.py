"""Tiny mixtures of experts, adapters for them, and adapters merged into a model by our own sums."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny_models import LINEAR_ATTENTION

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 48, 32

_COMMON = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": TOP_K,
}
_QWEN = {
    "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_LOCAL = {"num_local_experts": NUM_EXPERTS}
_MLA = {
    "moe_intermediate_size": INNER,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,  # the first layer is dense, as in the real model
    "n_group": 2,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", _QWEN),
    "mixtral": ("Mixtral", _LOCAL),
    "gpt_oss": ("GptOss", _LOCAL | {"sliding_window": 64}),
    "qwen3_next": ("Qwen3Next", LINEAR_ATTENTION | _QWEN),
    "qwen3_5_moe": ("Qwen3_5Moe", LINEAR_ATTENTION | _QWEN),
    "deepseek_v3": ("DeepseekV3", _MLA),
}


def make_moe(family: str, *, seed: int = 0) -> nn.Module:
    """A model of the family in bf16, whose routers have clear favourites: where they have not, the
    rounding of bf16 alone sends tokens to other experts than in fp64."""
    name, extra = MOE_FAMILIES[family]
    text = "Text" if family == "qwen3_5_moe" else ""
    config = getattr(transformers, f"{name}{text}Config")(
        **(_COMMON | extra), attn_implementation="eager"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_router = path.endswith(("mlp.gate.weight", "mlp.router.weight"))
                parameter.normal_(std=0.6 if is_router else 0.15)
            elif path.endswith("bias"):
                parameter.normal_(std=0.1)
            parameter.data = parameter.to(torch.bfloat16)
        for path, parameter in model.named_parameters():
            if path.endswith("_bias") and parameter.dim() == 2:
                parameter.normal_(std=0.1)
    return model.eval().requires_grad_(False)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The experts modules of a plain model."""
    return {p: m for p, m in model.named_modules() if p.endswith("mlp.experts")}


def router_name(family: str) -> str:
    return "router" if family == "gpt_oss" else "gate"


Factors = tuple[Tensor, Tensor, float]
"""A [rank, in], B [out, rank] and the scale of one product."""


def write_apart(
    model: nn.Module, folder: Path, *, ranks: tuple[int, int, int] = (3, 5, 4), seed: int = 5
) -> Path:
    """An adapter with names of single experts: gate and up have an A each, here even a rank each.

    alpha is rank * 4 / 3 for every tensor, so that the scale is no power of two.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, module in experts_of(model).items():
        sizes = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER)}
        sizes["down_proj"] = (INNER, HIDDEN)
        for expert in range(module.num_experts):
            for (name, (k_in, n_out)), rank in zip(sizes.items(), ranks, strict=True):
                key = f"base_model.model.{path}.{expert}.{name}"
                a = torch.randn(rank, k_in, generator=generator) * 0.2
                b = torch.randn(n_out, rank, generator=generator) * 0.2
                tensors[f"{key}.lora_A.weight"] = a.bfloat16()
                tensors[f"{key}.lora_B.weight"] = b.bfloat16()
    patterns = dict(zip(("gate_proj", "up_proj", "down_proj"), ranks, strict=True))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ranks[0],
        "lora_alpha": ranks[0] * 4 / 3,
        "rank_pattern": patterns,
        "alpha_pattern": {name: rank * 4 / 3 for name, rank in patterns.items()},
        "target_modules": list(patterns),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class AdapterFile:
    """The factors of an adapter's file by their definition, read without the library.

    Attributes:
        linears: per module (routers too), its factors.
        experts: per (experts module, expert), the factors of "gate", "up" and "down".
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        self.linears: dict[str, Factors] = {}
        self.experts: dict[tuple[str, int], dict[str, Factors]] = {}
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in tensors:
            if ".lora_A." not in name:
                continue
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a = tensors[name].bfloat16()
            b = tensors[name.replace("lora_A", "lora_B")].bfloat16()
            head, is_experts, tail = path.partition(".mlp.experts")
            module = f"{head}.mlp.experts"
            if not is_experts:
                self.linears[path] = (a, b, config["lora_alpha"] / config["r"])
            elif tail in ("", ".base_layer"):
                self._folded(module, model.get_submodule(module), a, b, config)
            else:
                _, expert, leaf = tail.split(".")
                scale = config["alpha_pattern"][leaf] / config["rank_pattern"][leaf]
                products = self.experts.setdefault((module, int(expert)), {})
                products[leaf.removesuffix("_proj")] = (a, b, scale)

    def _folded(self, path: str, module: Any, a: Tensor, b: Tensor, config: Any) -> None:
        """PEFT's folded factors: A by expert, B by rank."""
        num_experts = module.num_experts
        rank = a.shape[0] // num_experts
        is_down = b.shape[0] == HIDDEN
        # Old names of single experts make PEFT double the rank, and write so in the patterns.
        part = "down_proj" if is_down else "gate_up_proj"
        alphas = [v for k, v in config["alpha_pattern"].items() if k.endswith(part)]
        scale = (alphas[0] if alphas else config["lora_alpha"]) / rank
        for expert in range(num_experts):
            products = self.experts.setdefault((path, expert), {})
            a_e, b_e = a[expert * rank : (expert + 1) * rank], b[:, expert::num_experts]
            if is_down:
                products["down"] = (a_e, b_e, scale)
                continue
            gate, up = (
                (b_e[:INNER], b_e[INNER:]) if module.is_concatenated else (b_e[::2], b_e[1::2])
            )
            products |= {"gate": (a_e, gate, scale), "up": (a_e, up, scale)}


def merged(model: nn.Module, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in dtype, with scale * B A of every product added in fp64."""
    file, result = AdapterFile(folder, model), copy.deepcopy(model)
    with torch.no_grad():
        for path, factors in file.linears.items():
            weight: Any = result.get_submodule(path).weight
            weight.data = weight.double() + _product(factors)
        for (path, expert), products in file.experts.items():
            module: Any = result.get_submodule(path)
            for parameter in (module.gate_up_proj, module.down_proj):
                parameter.data = parameter.double()
            _merge_expert(module, expert, products)
    # The model's own implementation of experts in fp64 is the plain loop.
    result.set_experts_implementation("eager")
    return result.to(dtype)


def _merge_expert(module: Any, expert: int, products: Mapping[str, Factors]) -> None:
    gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
    if module.is_transposed:
        gate_up, down = gate_up.T, down.T
    halves = (gate_up[:INNER], gate_up[INNER:])
    if not module.is_concatenated:
        halves = (gate_up[::2], gate_up[1::2])
    weights = {"gate": halves[0], "up": halves[1], "down": down}
    for name, factors in products.items():
        weights[name] += _product(factors)


def _product(factors: Factors) -> Tensor:
    a, b, scale = factors
    return scale * b.double() @ a.double()


def chosen_experts(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits, and per mixture the experts that each token was sent to, in ascending order."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Sequence[Tensor], out: Tensor) -> None:
        seen.append(args[1].sort(dim=-1).values.view(*ids.shape, -1))

    handles = [m.register_forward_hook(hook) for m in experts_of(model).values()]
    try:
        return model(ids).logits, seen
    finally:
        for handle in handles:
            handle.remove()
