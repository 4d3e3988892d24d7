"""One site, one batch: checked against the reference, then timed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lorafold.bench.figures import rounded
from lorafold.bench.sites import Workload
from lorafold.bench.timing import graph_us, host_us
from lorafold.errors import LoraError
from lorafold.numerics import Numerics
from lorafold.ops import apply_lora_bgmv

__all__ = ["call_site", "check", "measure"]


def call_site(load: Workload, index: int, numerics: Numerics) -> None:
    """The operator on one repetition's operands, whose outputs it changes."""
    call = load.calls[index]
    apply_lora_bgmv(
        call.routes,
        call.x,
        call.outs,
        load.slots,
        plan=load.plan,
        numerics=numerics,
        scratch=load.scratch,
    )


def check(load: Workload, numerics: Numerics, rows: int = 2) -> int:
    """Compare sampled rows of the first call with the CPU reference, bit for bit.

    Args:
        load: a workload whose first call may run.
        numerics: how dot products are summed.
        rows: how many are sampled.

    Returns:
        How many outputs were compared.

    Raises:
        LoraError: if one differs.
    """
    call = load.calls[0]
    sample = torch.linspace(0, load.num_rows - 1, min(rows, load.num_rows)).int().tolist()
    expected = {row: load.truth(call, row, numerics) for row in sample}
    call_site(load, 0, numerics)
    compared = 0
    for row, truths in expected.items():
        for out, truth in zip(call.outs, truths, strict=True):
            if not torch.equal(out[row].cpu().view(torch.int16), truth.view(torch.int16)):
                raise LoraError(
                    f"site {load.site.name}, rank {load.rank}, {load.num_rows} rows: row {row} "
                    "differs from the CPU reference, so it has no time\nhint: lorafold verify"
                )
            compared += truth.numel()
    return compared


def measure(load: Workload, numerics: Numerics) -> dict[str, Any]:
    """Check and time one workload: device time on a GPU, the reference's host time on a CPU.

    Returns:
        The row of a result: site, layers, rank, rows, adapters, elements compared, `us` per call,
        `floor_us` and their ratio `over_floor`.

    Raises:
        LoraError: if a bit differs from the reference's.

    Example:
        >>> from lorafold.bench.sites import Site
        >>> load = Workload(Site("o", 16, (8,)), 4, num_rows=3, num_adapters=2, device="cpu")
        >>> row = measure(load, "gemv")
        >>> row["site"], row["rows"], row["elements"], row["us"] > 0
        ('o', 3, 16, True)
    """
    elements = check(load, numerics)
    calls = [partial(call_site, load, i, numerics) for i in range(len(load.calls))]
    us = (graph_us if load.device.type == "cuda" else host_us)(calls)
    return {
        "site": load.site.name,
        "layers": load.site.layers,
        "rank": load.rank,
        "rows": load.num_rows,
        "adapters": load.num_adapters,
        "elements": elements,
        "us": rounded(us),
        "floor_us": rounded(load.floor_us),
        "over_floor": rounded(us / load.floor_us),
    }
