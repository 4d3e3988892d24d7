"""Tiny random models, and adapters written for them by PEFT itself.

PEFT is imported where it is used: the tests of layers run without it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 1,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", LINEAR_ATTENTION | EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", LINEAR_ATTENTION),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}),
}


def make_model(family: str = "llama", *, seed: int = 0, **settings: Any) -> nn.Module:
    """A model of the family in bf16, with weights large enough that tokens differ.

    As after loading, the parameters are in bf16 and the buffers of the rotary embedding are not.
    """
    config_name, model_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(
        **COMMON, **extra, **settings, attn_implementation="eager"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            parameter.data = parameter.to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def write_adapter(
    model: nn.Module,
    folder: Path,
    targets: Sequence[str] | str,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 1,
    **config: Any,
) -> Path:
    """Let PEFT write an adapter for a copy of the model; returns the folder.

    A and B are random and exact in bf16, so that PEFT in fp64 and lorafold mean the same factors.
    """
    import peft

    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        **config,
    )
    with old_peft():
        adapted = peft.get_peft_model(copy.deepcopy(model), settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                factor = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.copy_(factor.to(torch.bfloat16))
    # With the head as a target PEFT writes copies of the vocabulary matrices into the file.
    adapted.save_pretrained(folder, save_embedding_layers="lm_head" in targets)
    return folder


@contextlib.contextmanager
def old_peft() -> Iterator[None]:
    """PEFT 0.21 asks for an attribute by the name it had before transformers 5.24."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def adapted_by_peft(model: nn.Module, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in `dtype` that runs the adapter through PEFT."""
    import peft

    copied = copy.deepcopy(model)
    if dtype == torch.float64:
        copied.to(dtype)
        copied.set_experts_implementation("eager")  # the default one has no fp64
    with old_peft():
        return peft.PeftModel.from_pretrained(copied, folder).eval()


def merged_by_peft(model: nn.Module, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in `dtype` with the adapter merged into its weights by PEFT."""
    return adapted_by_peft(model, folder, dtype).merge_and_unload()


def random_ids(*shape: int, seed: int = 7) -> torch.Tensor:
    """Token ids without the special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, COMMON["vocab_size"], shape, generator=generator)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of a bf16 tensor, all NaN made one."""
    return torch.where(t.isnan(), 0x7FC0, t.view(torch.int16).to(torch.int32))
