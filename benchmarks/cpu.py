"""A decode step of SmolLM2-135M on the CPU, every row with its adapter: ours beside PEFT's.

    python -m benchmarks.cpu [--rows 8,16] [--adapters 4,8] [--ranks 8,16] [--json [FILE]]

The model is the real one; the adapters are random, made by PEFT for all linear layers, and the same
for all. A step is one forward of one token per sequence over a KV cache; rows are dealt over the
adapters. Ours is `lorafold.attach` with the numerics "gemv"; PEFT's is `adapter_names`, with
factors in float32, which it makes of them by default, and in bfloat16. All take turns, in another
order each round, so that what else the machine does meets all of them. A ratio is the median over
the rounds of our time over theirs of the same round. `base_ms` is the step without adapters.

Before anything is timed, sampled rows of every projection of one layer are compared with the
reference's row alone, bit for bit, and PEFT's logits must be ours up to rounding.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import add_json_option, describe, save
from lorafold import MultiLora, attach
from lorafold.bench import geomean, rounded
from lorafold.layers.linear import RoutedLinear
from lorafold.ops import reference

__all__ = ["Contest", "Decode", "check_bits", "check_logits", "contest", "main", "measure"]

SCALE = 4 / 3  # shows a fold that rounds once too little
PEFT = {"peft": torch.float32, "peft_bf16": torch.bfloat16}
"""Column -> the dtype of PEFT's factors."""


@dataclass(frozen=True)
class Contest:
    """One model, its weights shared: plain, attached, and in PEFT with the same adapters.

    Args:
        base: the plain model.
        ours: the attached one.
        theirs: column -> PEFT's.
        folders: adapter -> where it is.
    """

    base: Any
    ours: MultiLora
    theirs: dict[str, Any]
    folders: dict[str, Path]


def contest(model: Any, ranks: Sequence[int], count: int, folder: Path) -> Contest:
    """`count` adapters of each rank, called `<rank>-<number>`, in all.

    Args:
        model: a causal language model in bfloat16.
        ranks: of the adapters.
        count: adapters of each rank.
        folder: where to save them.
    """
    theirs = _peft_model(_sharing(model), ranks, count)
    names = list(theirs.peft_config)
    theirs.save_pretrained(folder, selected_adapters=names, save_embedding_layers=False)
    ours = attach(_sharing(model), max_loras=len(names), max_rank=max(ranks))
    folders = {name: folder / name for name in names}
    for name, path in folders.items():
        ours.load(name, path)
    return Contest(model, ours, {c: _with_factors(theirs, d) for c, d in PEFT.items()}, folders)


def _sharing(model: Any) -> Any:
    """Another model with the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _peft_model(model: Any, ranks: Sequence[int], count: int) -> Any:
    """PEFT's model with random factors that bfloat16 can hold."""
    from peft import LoraConfig, get_peft_model

    peft_model: Any = None
    with warnings.catch_warnings():
        # PEFT asks transformers 5.24 for an attribute by the name it had before.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        for rank in ranks:
            config = LoraConfig(
                r=rank, lora_alpha=SCALE * rank, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            for name in (f"{rank}-{i}" for i in range(count)):
                if peft_model is None:
                    peft_model = get_peft_model(model, config, adapter_name=name)
                else:
                    peft_model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(0)
    for name, factor in peft_model.named_parameters():
        if "lora_" in name:
            size = factor.shape[1] ** -0.5 * (1.0 if "lora_A" in name else 0.25)
            random = torch.randn(factor.shape, generator=generator) * size
            factor.data.copy_(random.bfloat16())
    return peft_model.eval()


def _with_factors(peft_model: Any, dtype: torch.dtype) -> Any:
    """The same with its factors in a dtype."""
    other = _sharing(peft_model)
    for module in other.modules():
        for part in ("lora_A", "lora_B"):
            for factor in getattr(module, part, {}).values():
                factor.weight = torch.nn.Parameter(factor.weight.to(dtype), requires_grad=False)
    return other


class Decode:
    """A decode step over a KV cache that holds the same tokens every time.

    Args:
        forward: the model, or a call of it.
        ids: [rows, tokens + 1]: the prompts, and the token of the step.
    """

    def __init__(self, forward: Callable[..., Any], ids: Tensor) -> None:
        from transformers import DynamicCache

        self._forward, self._token, self._cache = forward, ids[:, -1:], DynamicCache()
        self._forward(input_ids=ids[:, :-1], past_key_values=self._cache)

    def __call__(self) -> Tensor:
        """[rows, vocabulary] logits."""
        out: Any = self._forward(input_ids=self._token, past_key_values=self._cache)
        self._cache.crop(-1)
        logits: Tensor = out.logits[:, -1]
        return logits


def check_bits(both: Contest, step: Decode, names: Sequence[str], samples: int = 3) -> int:
    """Compare rows of each projection of layer 1 with the reference; how many elements.

    Args:
        both: the models.
        step: ours, inside `rows` of the names.
        names: the adapter of every row.
        samples: rows to compare.
    """
    seen = _seen(both.ours.model, step)
    compared = 0
    for row in torch.linspace(0, len(names) - 1, samples).int().tolist():
        adapter = both.ours.read(names[row], both.folders[names[row]])
        for path, (x, base, out) in seen.items():
            own = adapter.weights[path]
            delta = reference.delta_rows(x[row : row + 1], own.a, own.b, "gemv")
            truth = reference.fold(base[row : row + 1], delta, own.scale)[0]
            if not torch.equal(out[row].view(torch.int16), truth.view(torch.int16)):
                raise SystemExit(f"{path} row {row}: bits differ")
            if torch.equal(out[row], base[row]):
                raise SystemExit(f"{path} row {row}: the adapter changes nothing")
            compared += truth.numel()
    return compared


def _seen(model: Any, step: Decode) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Path -> x, the base's output and the folded one of a step, each [rows, features]."""
    given: dict[str, tuple[Tensor, Tensor]] = {}
    folded: dict[str, Tensor] = {}

    def watch_base(path: str, _: Any, args: tuple[Tensor], out: Tensor) -> None:
        given[path] = args[0].flatten(0, -2).clone(), out.flatten(0, -2).clone()

    def watch(path: str, _: Any, args: tuple[Tensor], out: Tensor) -> None:
        folded[path] = out.flatten(0, -2).clone()

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, RoutedLinear) and ".layers.1." in path:
                hooks = (
                    module.base.register_forward_hook(partial(watch_base, path)),
                    module.register_forward_hook(partial(watch, path)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
        step()
    return {path: (*given[path], out) for path, out in folded.items()}


def check_logits(ours: Tensor, theirs: Tensor, base: Tensor) -> float:
    """How far their logits are from ours, in parts of how far the base's are; at most 1/4.

    Example:
        >>> ours, base = torch.ones(2, 4), torch.zeros(2, 4)
        >>> check_logits(ours, ours * 1.125, base)
        0.125
    """
    error, effect = ((other.float() - ours.float()).square().mean() for other in (theirs, base))
    ratio = float((error / effect).sqrt())
    if not ratio <= 0.25:
        raise SystemExit(f"their logits are off by {ratio:.3g} of what the adapters do")
    return rounded(ratio)


def measure(
    both: Contest, rank: int, num_rows: int, num_adapters: int, *, past: int, rounds: int
) -> dict[str, Any]:
    """One row of the table: `num_rows` sequences with `past` tokens each in the KV cache."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = both.base.config.vocab_size
    ids = torch.randint(0, vocabulary, (num_rows, past + 1), generator=generator)
    names = [f"{rank}-{i % num_adapters}" for i in range(num_rows)]
    row: dict[str, Any] = {"rank": rank, "rows": num_rows, "adapters": num_adapters}
    with torch.no_grad(), both.ours.rows(names):
        steps = {"ours": Decode(both.ours.model, ids), "base": Decode(both.base, ids)}
        for column, model in both.theirs.items():
            steps[column] = Decode(partial(model, adapter_names=names), ids)
        row["elements"] = check_bits(both, steps["ours"], names)
        logits = {column: step() for column, step in steps.items()}
        for column in both.theirs:
            off = check_logits(logits["ours"], logits[column], logits["base"])
            row[f"{column}_off"] = off
        times = take_turns(steps, rounds)
    row |= {f"{c}_ms": rounded(statistics.median(ms)) for c, ms in times.items()}
    for column in both.theirs:
        pairs = zip(times["ours"], times[column], strict=True)
        row[f"of_{column}"] = rounded(statistics.median(own / other for own, other in pairs))
    return row


def take_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round, by column.

    Example:
        >>> [len(times) for times in take_turns({"one": list, "other": dict}, rounds=3).values()]
        [3, 3]
    """
    times: dict[str, list[float]] = {column: [] for column in steps}
    order = list(steps)
    for _ in range(rounds):
        for column in order:
            start = time.perf_counter()
            steps[column]()
            times[column].append((time.perf_counter() - start) * 1e3)
        order.append(order.pop(0))
    return times


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="8,16", help="sequences of the batch")
    parser.add_argument("--adapters", default="4,8")
    parser.add_argument("--ranks", default="8,16")
    parser.add_argument("--past", type=int, default=64, help="tokens in the KV cache")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser, "cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    from lorafold.demo.model import load_smollm2

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    ranks, rows, adapters = (
        [int(number) for number in given.split(",")]
        for given in (args.ranks, args.rows, args.adapters)
    )
    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        both = contest(load_smollm2()[0], ranks, max(adapters), Path(folder))
        for rank in ranks:
            for num_rows in rows:
                for count in adapters:
                    row = measure(both, rank, num_rows, count, past=args.past, rounds=args.rounds)
                    results.append(row)
                    print(*(f"{name} {value!s:<7}" for name, value in row.items()), flush=True)
                    means = {f"of_{c}": geomean([r[f"of_{c}"] for r in results]) for c in PEFT}
                    setting = {"threads": args.threads, "past": args.past, "geomean": means}
                    record = describe("cpu", results, **setting)
                    save(record, args.json)
    print(f"geometric means of our time over theirs: {means}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
