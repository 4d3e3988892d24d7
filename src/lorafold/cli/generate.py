"""`lorafold generate`: text from a model, several adapters in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lorafold.cli.options import BASE, Device, Seed, adapter_paths
from lorafold.cli.output import Json, console, print_json, refusals, usage_error
from lorafold.device import usable_device
from lorafold.errors import BackendError, LoraError
from lorafold.peft import parse, ranks_of, targets_of

__all__ = ["generate"]


def generate(
    model: Annotated[
        str, typer.Argument(help="A folder with a model, or a name on the hub.", show_default=False)
    ],
    prompts: Annotated[
        list[str], typer.Argument(help="One answer is generated for each.", show_default=False)
    ],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="Load it; may be repeated.")
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME",
            help=f"The adapter of a prompt, or `{BASE}`: one for all prompts, or one for each. "
            "Without it every prompt is answered with every adapter.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")
    ] = 0.0,
    seed: Seed = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not put prompts into the model's chat template.")
    ] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Generate with several adapters at a time: all answers come from one batch."""
    paths = adapter_paths(adapter or [], taken={BASE})
    rows = _rows(prompts, with_ or [], paths)
    with refusals(as_json=as_json):
        answers = _answers(
            model,
            paths,
            rows,
            device=usable_device(device),
            raw=raw,
            seed=seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
    if as_json:
        print_json({"answers": answers})
        return
    out = console()
    for answer in answers:
        out.print(f"{answer['adapter'] or BASE}> {answer['prompt']}", style="bold", markup=False)
        out.print(f"{answer['text'].strip()}\n", markup=False)


def _rows(
    prompts: Sequence[str], names: Sequence[str], paths: Mapping[str, Path]
) -> list[tuple[str, str | None]]:
    """(prompt, adapter or None) of every row of the batch."""
    unknown = [name for name in names if name != BASE and name not in paths]
    if unknown:
        raise usage_error(f"--with {unknown[0]}: load it with --adapter {unknown[0]}=PATH")
    chosen = [None if name == BASE else name for name in names]
    if not chosen:
        each: list[str | None] = list(paths) or [None]
        return [(prompt, name) for prompt in prompts for name in each]
    if len(chosen) == 1:
        chosen *= len(prompts)
    if len(chosen) != len(prompts):
        raise usage_error(
            f"--with must be given once, or once per prompt ({len(prompts)}); given: {len(names)}"
        )
    return list(zip(prompts, chosen, strict=True))


def _answers(
    model_path: str,
    paths: Mapping[str, Path],
    rows: Sequence[tuple[str, str | None]],
    *,
    device: torch.device,
    raw: bool,
    seed: int,
    max_new_tokens: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """Load everything, run one batch, cut the answers out of it."""
    # Adapters and prompts are read first: a refusal need not wait for the model.
    specs = {name: parse(path) for name, path in paths.items()}
    rank, expert_rank = ranks_of(specs.values())
    from lorafold.integrations.transformers import load_model, load_tokenizer
    from lorafold.runtime import attach

    tokenizer: Any = load_tokenizer(model_path)
    if tokenizer.pad_token is None:
        raise BackendError("the tokenizer has neither a padding nor an end-of-sequence token")
    texts = [_templated(tokenizer, prompt, raw=raw) for prompt, _ in rows]
    is_templated = texts[0] is not rows[0][0]
    batch = tokenizer(
        texts, return_tensors="pt", padding=True, add_special_tokens=not is_templated
    ).to(device)
    if not bool(batch["attention_mask"].any(dim=1).all()):
        raise LoraError("every prompt needs a token; given: an empty one; hint: leave out --raw")
    lora = attach(
        load_model(model_path, device=device),
        max_loras=max(1, len(paths)),
        max_rank=rank,
        targets=targets_of(specs.values()),
        max_expert_rank=expert_rank,
    )
    for name, spec in specs.items():
        lora.load(name, spec)
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    )
    output = lora.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        adapters=[name for _, name in rows],
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    answers = []
    for (prompt, chosen), tokens in zip(
        rows, output[:, batch["input_ids"].shape[1] :], strict=True
    ):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        answers.append({"prompt": prompt, "adapter": chosen, "text": text})
    return answers


def _templated(tokenizer: Any, prompt: str, *, raw: bool) -> str:
    """The prompt as a user's turn, where the model has a chat template."""
    if raw or tokenizer.chat_template is None:
        return prompt
    turn = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
