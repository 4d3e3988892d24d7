"""The changes to vLLM's classes, made in the processes that hold a model with LoRA, and only there.

BaseLayerWithLoRA.set_mapping           every layer gets its own view of the step
LoRAModel.from_lora_tensors             scales and copies of base weights are set aside
WorkerLoRAManager._load_adapter         tensors are checked before anything is evicted
LoRAModelManager.activate_adapter       the tables of the slot are written
"""

from __future__ import annotations

import functools
import os
from typing import Any

import vllm
from vllm.distributed import parallel_state
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from lorafold.errors import BackendError
from lorafold.integrations.vllm import TESTED, adapters, ranks
from lorafold.integrations.vllm.punica import Punica

__all__ = ["LorafoldPunica", "check_version", "install"]

_PREFIX = "base_model.model."
_COPY = ".base_layer.weight"


class LorafoldPunica(Punica):
    """What vLLM builds for a model with LoRA; see `Punica`.

    Raises:
        BackendError: if this version of vLLM was not tested, or a setting cannot be served.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(vllm.__version__)
        if os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM", "0") not in ("", "0"):
            raise BackendError(
                "VLLM_LORA_ENABLE_DUAL_STREAM adds deltas to all rows, rounded twice; "
                "hint: unset it, or set LORAFOLD_VLLM=0"
            )
        install()
        super().__init__(*args, **kwargs)


def check_version(version: str) -> None:
    """Whether the plugin was run with a version of vLLM; what comes after a + does not count.

    Raises:
        BackendError: if it was not.
    """
    if version.partition("+")[0] not in TESTED:
        raise BackendError(
            f"lorafold's plugin was tested with vLLM {', '.join(TESTED)}; given: {version}; hint: "
            "install a tested version, or set LORAFOLD_VLLM=0 to serve with vLLM's own operators"
        )


def install() -> None:
    """Change vLLM's classes, once per process."""
    if hasattr(BaseLayerWithLoRA.set_mapping, "__wrapped__"):
        return
    BaseLayerWithLoRA.set_mapping = _set_mapping(BaseLayerWithLoRA.set_mapping)
    LoRAModel.from_lora_tensors = classmethod(
        _from_lora_tensors(LoRAModel.from_lora_tensors.__func__)
    )
    WorkerLoRAManager._load_adapter = _load_adapter(WorkerLoRAManager._load_adapter)
    LoRAModelManager.activate_adapter = _activate_adapter(LoRAModelManager.activate_adapter)
    LoRAModelRunnerMixin.add_lora = _add_lora(LoRAModelRunnerMixin.add_lora)


def _set_mapping(original: Any) -> Any:
    @functools.wraps(original)
    def set_mapping(layer: Any, punica_wrapper: Any) -> None:
        original(layer, punica_wrapper.target(layer))

    return set_mapping


def _from_lora_tensors(original: Any) -> Any:
    @functools.wraps(original)
    def from_lora_tensors(
        cls: Any, lora_model_id: int, tensors: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        model = original(cls, lora_model_id, tensors, *args, **kwargs)
        adapters.set_scales_aside(model)
        model.lorafold_copies = {
            name.removeprefix(_PREFIX).removesuffix(_COPY): tensor
            for name, tensor in tensors.items()
            if name.endswith(_COPY)
        }
        return model

    return from_lora_tensors


def _load_adapter(original: Any) -> Any:
    @functools.wraps(original)
    def _load_adapter(worker: Any, lora_request: Any) -> Any:
        model = original(worker, lora_request)
        adapters.check_adapter(worker._adapter_manager, model, lora_request.lora_name)
        return model

    return _load_adapter


def _activate_adapter(original: Any) -> Any:
    @functools.wraps(original)
    def activate_adapter(manager: Any, lora_id: int) -> bool:
        if lora_id in manager._active_adapters or None not in manager.lora_index_to_id:
            return bool(original(manager, lora_id))
        slot = manager.lora_index_to_id.index(None)
        adapters.clear_slot(manager, slot)
        original(manager, lora_id)
        adapters.fill_slot(manager, manager.get_adapter(lora_id), slot)
        return True

    return activate_adapter


def _add_lora(original: Any) -> Any:
    @functools.wraps(original)
    def add_lora(runner: Any, lora_request: Any) -> bool:
        if not hasattr(runner, "lora_manager"):
            return bool(original(runner, lora_request))
        # In the order in which vLLM numbers the ranks of a replica.
        names = ("get_tp_group", "get_pcp_group", "get_pp_group")
        groups = [getattr(parallel_state, name)() for name in names]
        add = functools.partial(original, runner, lora_request)
        return ranks.add_on_all_ranks(add, runner.lora_manager, lora_request, groups)

    return add_lora
