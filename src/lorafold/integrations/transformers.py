"""Load a causal language model and its tokenizer from disk, ready for `lorafold.attach`.

Any model object of transformers can be attached to; these are the settings that suit it: bfloat16,
evaluation mode, no gradients, no hub kernels, padding on the left. The routing of `generate` itself
is in runtime.py and needs nothing of transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lorafold.errors import BackendError, ModelError
from lorafold.layers.experts import run_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_model", "load_tokenizer", "register_experts"]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        path: a folder with `config.json` and weights, or a name on the Hugging Face hub.
        dtype: of the weights; lorafold's operators take bfloat16.
        device: where the model goes.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        BackendError: if transformers is not installed.
        ModelError: if the path holds an adapter, or no causal language model.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     LlamaForCausalLM(config).save_pretrained(folder)
        ...     model = load_model(folder)
        >>> model.dtype, model.training
        (torch.bfloat16, False)
    """
    _check(path)
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_kernels=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"no causal language model at {str(path)!r}: {error}") from error
    if model.device != torch.device(device):
        model.to(device)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with padding on the left, as generating for a batch needs it.

    Args:
        path: as for `load_model`.

    Returns:
        The tokenizer; without a padding token of its own, it pads with its end-of-sequence token.

    Raises:
        BackendError: if transformers is not installed.
        ModelError: if the path holds an adapter, or no tokenizer.
    """
    _check(path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer at {str(path)!r}: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def register_experts() -> None:
    """Make "lorafold" an experts implementation that models of transformers can be set to.

    Attaching does not need it. It is for a plain model that is compared, bit by bit, with the base
    rows of an attached one: both then sum the products of experts in the same way.

    Raises:
        BackendError: if transformers is not installed.

    Example:
        >>> register_experts()
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=8,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     num_key_value_heads=1,
        ...     num_local_experts=4,
        ... )
        >>> model = MixtralForCausalLM(config)
        >>> model.set_experts_implementation("lorafold")
        >>> model.get_experts_implementation()
        {'': 'lorafold'}

    Source: the experts interface of transformers.
    """
    _require_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("lorafold", run_experts)


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise BackendError(
            "models are loaded by transformers, which is not installed\n"
            "hint: pip install 'lorafold[transformers]'"
        )


def _check(path: str | Path) -> None:
    _require_transformers()
    # transformers would load the base model and graft the adapter on it.
    if (Path(path) / "adapter_config.json").is_file():
        raise ModelError(
            f"{str(path)!r} holds an adapter; give its base model here, and the adapter to "
            "`MultiLora.load`"
        )
