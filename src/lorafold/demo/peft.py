"""The demo's batch against PEFT: the logits of the same tokens, one adapter at a time.

PEFT is optional: without it the checks say so and nothing fails.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lorafold.demo.rows import Generated, Progress
from lorafold.device import free_bytes
from lorafold.errors import LoraError

__all__ = ["PeftCheck", "compare_with_peft"]

_ERROR_RATIO = 2.0


@dataclass(frozen=True)
class PeftCheck:
    """The logits of the rows of one adapter in the batch, and PEFT's for the same tokens.

    Args:
        adapter: its name.
        status: "close" if our error is at most twice PEFT's, "differs" if not, "skipped" if that
            could not be computed.
        tokens: tokens of the answers, one row of logits each.
        same_tokens: how many times the likeliest token is the same one.
        largest: largest difference between our logits and PEFT's, both with the model in bfloat16.
        error: root mean square of our logits minus those of PEFT with the model in float32.
        peft_error: the same for PEFT with the model in bfloat16.
        base_error: the same for the model without the adapter: how far off a missing adapter is.
        note: why it was skipped.

    Example:
        >>> PeftCheck("sql", "skipped", note="PEFT is not installed").tokens
        0
    """

    adapter: str
    status: Literal["close", "differs", "skipped"]
    tokens: int = 0
    same_tokens: int = 0
    largest: float = 0.0
    error: float | None = None
    peft_error: float | None = None
    base_error: float | None = None
    note: str = ""


def compare_with_peft(
    model: nn.Module,
    folders: Mapping[str, Path],
    batch: Generated,
    adapters: Sequence[str | None],
    progress: Progress,
) -> list[PeftCheck]:
    """Feed the batch's own tokens to PEFT, a row and an adapter at a time, and compare logits.

    Nothing in bfloat16 equals anything that sums in another order. The yardstick is PEFT itself,
    unmerged, once with the model in bfloat16 and once in float32: its own error, which ours may
    exceed at most twice. The model is changed: PEFT's layers stay in it, and it becomes float32.

    Args:
        model: the detached model, in bfloat16.
        folders: per adapter, where it is.
        batch: the mixed batch.
        adapters: the adapter of every sequence of the batch.
        progress: told how many rows are done.

    Returns:
        One check per adapter.
    """
    if importlib.util.find_spec("peft") is None:
        return [PeftCheck(name, "skipped", note="PEFT is not installed") for name in folders]
    try:
        peft_model = _with_adapters(model, folders)
    except Exception as error:  # what PEFT cannot load says nothing about the batch
        note = f"PEFT cannot load the adapters: {str(error)[:200]}"
        return [PeftCheck(name, "skipped", note=note) for name in folders]
    rows = [(i, name) for i, name in enumerate(adapters) if name is not None]

    def logits_of(what: str, *, with_adapter: bool = True) -> list[Tensor]:
        found = []
        for done, (row, name) in enumerate(rows):
            progress(what, done, len(rows))
            found.append(_logits(peft_model, name if with_adapter else None, batch, row))
        return found

    logits = {
        "ours": [batch.logits[row, : batch.lengths[row]] for row, _ in rows],
        "theirs": logits_of("PEFT, one adapter at a time"),
    }
    if (why := _why_not_float32(model)) is None:
        peft_model.float()
        logits["exact"] = logits_of("PEFT in float32, for its error")
        logits["base"] = logits_of("the base in float32", with_adapter=False)
    checks = []
    for name in folders:
        mine = [k for k, (_, other) in enumerate(rows) if other == name]
        joined = {kind: torch.cat([each[k] for k in mine]) for kind, each in logits.items()}
        checks.append(_peft_check(name, joined, why or ""))
    return checks


def _with_adapters(model: nn.Module, folders: Mapping[str, Path]) -> Any:
    """The model with every adapter loaded by PEFT."""
    from peft import PeftModel

    (first, folder), *others = folders.items()
    with warnings.catch_warnings():
        # PEFT asks transformers 5.24 for an attribute by the name it had before.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # It would go on without what it cannot find.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        peft_model = PeftModel.from_pretrained(model, folder, adapter_name=first)
        for name, folder in others:
            if missing := peft_model.load_adapter(folder, adapter_name=name).missing_keys:
                raise LoraError(f"it finds no tensor for {missing[0]}")
    return peft_model.eval()


def _logits(peft_model: Any, name: str | None, batch: Generated, row: int) -> Tensor:
    """[length of the answer, vocabulary] float32: what PEFT gives for each token of a row."""
    ids, length = batch.text_ids(row), batch.lengths[row]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if name is None:
            stack.enter_context(peft_model.disable_adapter())
        else:
            peft_model.set_adapter(name)
        out: Tensor = peft_model(input_ids=ids, use_cache=False).logits
    return out[0, -length:].float()


def _why_not_float32(model: nn.Module) -> str | None:
    """Why the model cannot be turned into float32, or None if it can."""
    parameters = list(model.parameters())
    needed = sum(4 * parameter.numel() for parameter in parameters)
    free = free_bytes(parameters[0].device)
    if free is None or free > needed:
        return None
    return f"no room for the model in float32: {needed} bytes, free are {free}"


def _peft_check(name: str, logits: Mapping[str, Tensor], note: str) -> PeftCheck:
    ours, theirs = logits["ours"], logits["theirs"]
    figures: dict[str, Any] = {
        "tokens": len(ours),
        "same_tokens": int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        "largest": float((ours - theirs).abs().max()),
    }
    if "exact" not in logits:
        return PeftCheck(name, "skipped", **figures, note=note)
    error, peft_error, base_error = (
        _rms(logits[kind] - logits["exact"]) for kind in ("ours", "theirs", "base")
    )
    figures |= {"error": error, "peft_error": peft_error, "base_error": base_error}
    allowed = _ERROR_RATIO * peft_error
    if not error <= allowed:  # NaN included
        return PeftCheck(name, "differs", **figures)
    # A missing adapter must be further off than what is allowed, or the check could not fail.
    if base_error <= allowed:
        note = "the adapter moves the logits no further than rounding does"
        return PeftCheck(name, "skipped", **figures, note=note)
    return PeftCheck(name, "close", **figures)


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt())
