"""The demo: one batch over several adapters and the base, on a real model, with its proof.

Loads, generates and checks; `lorafold.cli.demo` shows the result. Without arguments it is
SmolLM2-135M-Instruct with the three adapters of `examples/adapters`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorafold.demo.model import SMOLLM2_NAME, load_smollm2
from lorafold.demo.peft import PeftCheck, compare_with_peft
from lorafold.demo.rows import (
    BitCheck,
    Generated,
    Progress,
    compare_logits,
    recording,
    rows_alone,
    untouched_rows,
)
from lorafold.errors import LoraError, ModelError
from lorafold.numerics import default_numerics
from lorafold.peft import AdapterSpec, parse, ranks_of, targets_of
from lorafold.runtime import attach

__all__ = ["PROMPTS", "Answer", "DemoReport", "example_adapters", "run_demo"]

PROMPTS = ("What is the capital of Spain?", "What do bees make?")
"""What is asked when nothing else is given; neither is in the training data of the examples."""

_EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "adapters"


@dataclass(frozen=True)
class Answer:
    """One row of the batch.

    Args:
        prompt: what was asked.
        adapter: who answered; None is the base.
        text: the answer.
        tokens: its tokens.

    Example:
        >>> Answer("What do bees make?", None, "Honey.", tokens=3).adapter is None
        True
    """

    prompt: str
    adapter: str | None
    text: str
    tokens: int


@dataclass(frozen=True)
class DemoReport:
    """The answers, and what was counted.

    Args:
        model: name or folder.
        device: where it ran.
        numerics: how the operators summed.
        answers: one per row, prompt by prompt.
        bit_checks: what must be equal in every bit.
        peft_checks: what must be close.
        seconds: wall time of everything, loading included.

    Example:
        >>> DemoReport("m", "cpu", "gemv", (), (BitCheck("x", 1, 8, 1),), (), 1.0).ok
        False
    """

    model: str
    device: str
    numerics: str
    answers: tuple[Answer, ...]
    bit_checks: tuple[BitCheck, ...]
    peft_checks: tuple[PeftCheck, ...]
    seconds: float

    @property
    def statuses(self) -> list[str]:
        """What became of each check."""
        found: list[str] = [check.status for check in self.bit_checks]
        return found + [check.status for check in self.peft_checks]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return "differs" not in self.statuses

    def to_json(self) -> dict[str, Any]:
        """The report as values that JSON has."""
        bit_checks = [asdict(check) | {"status": check.status} for check in self.bit_checks]
        return {"ok": self.ok} | asdict(self) | {"bit_checks": bit_checks}


def example_adapters() -> dict[str, Path]:
    """The adapters of `examples/adapters`, by name, if lorafold runs from its repository.

    Raises:
        LoraError: if there are none.

    Example:
        >>> sorted(example_adapters())  # doctest: +SKIP
        ['json', 'pirate', 'telegram']
    """
    found = sorted(_EXAMPLES.glob("*/adapter_config.json"))
    if not found:
        raise LoraError(
            "the example adapters are not here: they are in lorafold's repository and not in the "
            "installed package\nhint: run the demo from a checkout, or on your own: "
            "lorafold demo --model PATH --adapter NAME=PATH"
        )
    return {config.parent.name: config.parent for config in found}


def run_demo(
    model: str | None = None,
    adapters: Mapping[str, Path] | None = None,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 32,
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
) -> DemoReport:
    """Ask every prompt of the base and of every adapter, in one batch, and check what came out.

    Args:
        model: a folder or a name on the hub; None for SmolLM2-135M-Instruct.
        adapters: per name, a PEFT folder; None for those of `examples/adapters`.
        prompts: put into the model's chat template, where it has one.
        max_new_tokens: of each answer, at most.
        device: "cpu" or a CUDA device.
        progress: called with what is being done, how much of it is done, and of how much.

    Raises:
        LoraError: if the model or an adapter cannot be loaded.

    Example:
        >>> run_demo("no/such/model", {"sql": Path("no/such/folder")})
        Traceback (most recent call last):
        lorafold.errors.AdapterFormatError: `no/such/folder`: there is no such folder ...
    """
    started = time.perf_counter()
    folders = dict(adapters) if adapters else example_adapters()
    # Adapters are read first: a refusal need not wait for the model.
    specs = {name: parse(folder) for name, folder in folders.items()}
    progress(f"loading {model or SMOLLM2_NAME.rpartition('/')[2]}", 0, None)
    # So small a model gains little from threads, and loses minutes where cores are shared.
    with _threads(1 if model is None else torch.get_num_threads()):
        plain, tokenizer = _load(model, device)
        rows = [(prompt, name) for prompt in prompts for name in (None, *folders)]
        inputs = _inputs(tokenizer, [prompt for prompt, _ in rows], device)
        decode = partial(_decode, plain, inputs, tokenizer, max_new_tokens, progress)
        names = [name for _, name in rows]
        batch, bit_checks = _batch(plain, decode, specs, names, progress)
        peft_checks = compare_with_peft(plain, folders, batch, names, progress)
    return DemoReport(
        model=model or SMOLLM2_NAME,
        device=device,
        numerics=default_numerics(torch.device(device)),
        answers=_answers(tokenizer, rows, batch),
        bit_checks=tuple(bit_checks),
        peft_checks=tuple(peft_checks),
        seconds=time.perf_counter() - started,
    )


def _batch(
    plain: Any,
    decode: Callable[..., Generated],
    specs: Mapping[str, AdapterSpec],
    names: Sequence[str | None],
    progress: Progress,
) -> tuple[Generated, list[BitCheck]]:
    """Run the mixed batch, and one without adapters, and compare bits; the model is as before."""
    max_rank, max_expert_rank = ranks_of(specs.values())
    if max_expert_rank is None:
        base_check = "base = untouched model"
        without = decode("the untouched model", plain.generate)
    progress("attaching", 0, len(specs))
    lora = attach(
        plain,
        max_loras=len(specs),
        max_rank=max_rank,
        targets=targets_of(specs.values()),
        max_expert_rank=max_expert_rank,
    )
    for done, (name, spec) in enumerate(specs.items(), start=1):
        lora.load(name, spec)
        progress("attaching", done, len(specs))
    if max_expert_rank is not None:
        # Attaching experts changes how the base sums them, so the attached model is compared with.
        base_check, base_rows = "base = batch of base rows", [None] * len(names)
        without = decode("a batch of base rows", partial(lora.generate, adapters=base_rows))
    with recording(plain, len(names)) as calls:
        batch = decode("one batch, token by token", partial(lora.generate, adapters=names))

    recorded = {call.target for call in calls}
    weights = {
        name: {t: w for t, w in lora.read(name, spec).weights.items() if t in recorded}
        for name, spec in specs.items()
    }
    checks = [rows_alone(name, weights[name], calls, names, progress) for name in specs]
    checks.append(untouched_rows(weights, calls, names))
    checks.append(compare_logits(base_check, batch, without, names))
    lora.detach()
    return batch, checks


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Let torch use so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(model: str | None, device: str) -> tuple[Any, Any]:
    """The model on its device, and its tokenizer, which pads on the left."""
    if model is None:
        return load_smollm2(device=device)
    from lorafold.integrations.transformers import load_model, load_tokenizer

    tokenizer = load_tokenizer(model)
    if tokenizer.pad_token is None:
        raise ModelError(
            f"the tokenizer of {model!r} has neither a padding nor an end-of-sequence token, "
            "and a batch of prompts needs one"
        )
    return load_model(model, device=device), tokenizer


def _inputs(tokenizer: Any, prompts: Sequence[str], device: str) -> dict[str, Tensor]:
    """The prompts as users' turns, where the model has a chat template, as one padded batch."""
    texts = list(prompts)
    if tokenizer.chat_template is not None:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=tokenizer.chat_template is None,
    )
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


class _Ticks:
    """What `generate` calls a streamer: it is told of every step."""

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._num_steps = -1  # the prompt comes first

    def put(self, _: Tensor) -> None:
        self._num_steps += 1
        self._progress(self._what, self._num_steps, self._total)

    def end(self) -> None:
        pass


def _decode(
    model: Any,
    inputs: Mapping[str, Tensor],
    tokenizer: Any,
    max_new_tokens: int,
    progress: Progress,
    what: str,
    generate: Callable[..., Any],
) -> Generated:
    """Greedy answers of the batch."""
    output = generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
        streamer=_Ticks(what, max_new_tokens, progress),
    )
    prompts, mask = inputs["input_ids"], inputs["attention_mask"]
    tokens = output.sequences[:, prompts.shape[1] :]
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    lengths = []
    for row in tokens.tolist():
        end = next((i for i, token in enumerate(row, start=1) if token in ends), len(row))
        lengths.append(end)
    return Generated(prompts, mask, tokens, torch.stack(output.logits, dim=1), tuple(lengths))


def _answers(
    tokenizer: Any, rows: Sequence[tuple[str, str | None]], batch: Generated
) -> tuple[Answer, ...]:
    found = []
    for (prompt, name), tokens, length in zip(rows, batch.tokens, batch.lengths, strict=True):
        text = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        found.append(Answer(prompt, name, text.strip(), length))
    return tuple(found)
