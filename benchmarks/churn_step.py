"""A decode step over a pool, as one CUDA graph where there is a GPU, and the check of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.churn_adapters import Versions
from lorafold.adapter import TargetShape
from lorafold.numerics import default_numerics
from lorafold.ops import (
    Plan,
    apply_lora_bgmv,
    apply_lora_delta,
    make_plan,
    reference,
    scratch_bytes,
)
from lorafold.pool import Pool

__all__ = ["SITES", "Check", "Step", "shapes"]

SITES = {"qkv": (1, (1, 0.25, 0.25)), "down": (4, (1,))}
"""Per operator call: input and output features in multiples of the hidden size."""

Key = tuple[int, int]
"""(adapter, version)."""

_IN_FLIGHT = 64  # steps that the host may be ahead; it looks every half of them


def shapes(hidden: int) -> dict[str, TargetShape]:
    """The targets, in the order of the step's outputs."""
    return {
        f"layers.0.{site}.{part}": TargetShape(k_in * hidden, int(n_out * hidden))
        for site, (k_in, n_outs) in SITES.items()
        for part, n_out in enumerate(n_outs)
    }


@dataclass(frozen=True)
class _Site:
    targets: tuple[str, ...]
    x: Tensor
    bases: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]


class Step:
    """All sites for one batch: the plan, then base outputs and the adapters of each row.

    Args:
        pool: holds the targets of `shapes(hidden)`.
        num_rows: rows of the batch.
        hidden: features.
    """

    def __init__(self, pool: Pool, num_rows: int, hidden: int) -> None:
        self.pool, self.num_rows = pool, num_rows
        device = pool.device
        generator = torch.Generator().manual_seed(1)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).bfloat16().to(device)

        targets = iter(pool.targets.items())
        self.sites: list[_Site] = []
        for k_in, n_outs in SITES.values():
            named = [next(targets) for _ in n_outs]
            bases = tuple(random(num_rows, shape.out_features) for _, shape in named)
            self.sites.append(
                _Site(
                    tuple(name for name, _ in named),
                    random(num_rows, k_in * hidden),
                    bases,
                    tuple(torch.empty_like(base) for base in bases),
                )
            )
        self.slots = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self.plan = Plan.empty(num_rows, pool.max_loras, device)
        size = max(
            scratch_bytes(num_rows, len(s.targets), s.x.shape[1], pool.max_rank) for s in self.sites
        )
        self.scratch = torch.empty(size, dtype=torch.uint8, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.is_cuda = device.type == "cuda"
        # Slots on their way to the device; a buffer is used again when its copy is long over.
        self._coming = torch.empty(_IN_FLIGHT, num_rows, dtype=torch.int32, pin_memory=self.is_cuda)
        self._numbers = self._coming.numpy()
        self._ends = [torch.cuda.Event() for _ in range(2)] if self.is_cuda else []
        self._num_steps = 0

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Make the step one graph; the stream must be the current one."""
        self._run()  # compiles
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._run()

    def __call__(self, slots: Sequence[int]) -> None:
        """One step; on the GPU it is only enqueued."""
        at, half = self._num_steps % _IN_FLIGHT, _IN_FLIGHT // 2
        if self.is_cuda and at % half == 0:
            this = at // half
            self._ends[1 - this].record()
            self._ends[this].synchronize()
        self._numbers[at] = slots
        self.slots.copy_(self._coming[at], non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        self._num_steps += 1

    def _run(self) -> None:
        make_plan(self.slots, self.pool.max_loras, plan=self.plan)
        for site in self.sites:
            for out, base in zip(site.outs, site.bases, strict=True):
                out.copy_(base)
            routes = [self.pool.route(target) for target in site.targets]
            apply_lora_bgmv(
                routes, site.x, site.outs, self.slots, plan=self.plan, scratch=self.scratch
            )


class Check:
    """Compares the rows of a step with the version that each was admitted with, bit for bit.

    On the device against `apply_lora_delta` of pairs that were never in the pool, without waiting
    for the device; a few rows against the CPU reference.

    Args:
        step: whose rows.
        versions: the truth.
        num_references: rows to compare with the CPU reference, at most.
    """

    def __init__(self, step: Step, versions: Versions, num_references: int) -> None:
        self.step, self.versions = step, versions
        self.num_rows = self.num_adapter_rows = self.num_controls = self.num_references = 0
        self._left = num_references
        counters = torch.zeros(2, dtype=torch.int64, device=step.pool.device)
        self._wrong, self._equal_controls = counters
        self._wrong_references = 0
        # More than steps can be in flight between two uses of a buffer.
        self._groups = torch.empty(
            2 * _IN_FLIGHT, step.num_rows, dtype=torch.int32, pin_memory=step.is_cuda
        )
        self._num_calls = 0

    @property
    def num_wrong(self) -> int:
        """Rows of which a bit differed from its own version, in either check."""
        return int(self._wrong) + self._wrong_references

    @property
    def num_equal_controls(self) -> int:
        """Rows that could not be told from those of another version."""
        return int(self._equal_controls)

    def __call__(self, keys: Sequence[Key | None]) -> None:
        """Check the step that was enqueued last; `keys` says what each row should hold."""
        distinct = sorted({key for key in keys if key is not None})
        coming = self._groups[self._num_calls % (2 * _IN_FLIGHT)]
        coming.copy_(torch.tensor([-1 if key is None else distinct.index(key) for key in keys]))
        groups = coming.to(self.step.pool.device, non_blocking=True)
        wrong = torch.zeros_like(groups, dtype=torch.bool)
        for site in self.step.sites:
            for number, target in enumerate(site.targets):
                out, expected = site.outs[number], site.bases[number].clone()
                for group, key in enumerate(distinct):
                    full = self._delta(site, number, key)
                    expected = torch.where((groups == group).unsqueeze(1), full, expected)
                wrong |= _differs(out, expected)
                if distinct and target == self.step.sites[0].targets[0]:
                    self._control(site, number, groups, distinct[0])
        self._wrong += wrong.sum()
        self.num_rows += len(keys)
        self.num_adapter_rows += sum(key is not None for key in keys)
        if self._left:
            self._reference(keys, self._num_calls % len(keys))
        self._num_calls += 1

    def _delta(self, site: _Site, number: int, key: Key) -> Tensor:
        """All rows under one adapter."""
        out = site.bases[number].clone()
        pair = self.versions.pair(*key, site.targets[number])
        apply_lora_delta(pair, site.x, out, scratch=self.step.scratch)
        return out

    def _control(self, site: _Site, number: int, groups: Tensor, key: Key) -> None:
        """The rows of one adapter must differ from what its next version would give."""
        other = self._delta(site, number, (key[0], key[1] + 1))
        mine = groups == 0
        self._equal_controls += (mine & ~_differs(site.outs[number], other)).sum()
        self.num_controls += 1

    def _reference(self, keys: Sequence[Key | None], row: int) -> None:
        """One row against the CPU reference."""
        key = keys[row]
        if key is None:
            return
        self._left -= 1
        self.num_references += 1
        numerics, is_wrong = default_numerics(self.step.pool.device), False
        for site in self.step.sites:
            for target, base, out in zip(site.targets, site.bases, site.outs, strict=True):
                a, b = self.versions.factors(*key, target)
                delta = reference.delta_rows(site.x[row : row + 1].cpu(), a, b, numerics)
                truth = reference.fold(base[row : row + 1].cpu(), delta, self.versions.scale(*key))
                is_wrong |= bool(_differs(out[row : row + 1].cpu(), truth).any())
        self._wrong_references += is_wrong


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """[num_rows] bool: any bit differs."""
    return (one.view(torch.int16) != other.view(torch.int16)).any(dim=1)
