"""One vLLM engine in a process of its own: `python -m tests.integrations.vllm_run JOB RESULT`.

JOB is a JSON file: the arguments of the engine and what to do with it, step by step. RESULT takes
one JSON value per step; log-probabilities are written so that equal text means equal bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    engine = Engine(job)
    results = [getattr(engine, step.pop("do"))(**step) for step in job["steps"]]
    Path(result_file).write_text(json.dumps(results))


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        if job["compiled"]:
            compile_on_cpu()
        self.folders: dict[str, str] = job["adapters"]
        ids = {name: i + 1 for i, name in enumerate(self.folders)}
        self.requests = {n: LoRARequest(n, ids[n], path) for n, path in self.folders.items()}
        self.llm = LLM(job["model"], **job["engine"])

    def generate(self, requests: list[tuple[str | None, list[int]]], tokens: int = 8) -> list[Any]:
        """[[token, log-probability] per token] per request."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True
        )
        done = self.llm.generate(
            [{"prompt_token_ids": prompt} for _, prompt in requests],
            sampling,
            lora_request=[self.requests.get(name) for name, _ in requests],
            use_tqdm=False,
        )
        return [
            [
                [token, float(entry[token].logprob).hex()]
                for token, entry in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
            ]
            for o in done
        ]

    def add(self, name: str) -> Any:
        """Load an adapter: whether it was, or why it was refused."""
        try:
            return self.llm.llm_engine.add_lora(self.requests[name])
        except Exception as error:  # from a process of its own it comes as another class
            return {"error": type(error).__name__, "message": str(error)}

    def remove(self, name: str) -> bool:
        return self.llm.llm_engine.remove_lora(self.requests[name].lora_int_id)

    def names(self) -> list[str]:
        loaded = self.llm.llm_engine.list_loras()
        return [name for name, request in self.requests.items() if request.lora_int_id in loaded]

    def slot_bytes(self) -> list[int]:
        """Bytes of one slot over all layers, per rank."""
        return self.llm.collective_rpc(slot_bytes)

    def audit(self, requests: list[tuple[str | None, list[int]]]) -> dict[str, int]:
        """Elements compared per layer: every fold of a generation against the CPU reference."""
        from lorafold.integrations.vllm.target import Target

        audit = Audit(self)
        methods = {
            name: getattr(Target, name)
            for name in ("add_lora_linear", "add_lora_embedding", "add_lora_logits")
        }
        for name, method in methods.items():
            setattr(Target, name, audit.watched(name, method))
        self.generate(requests, tokens=3)
        for name, method in methods.items():
            setattr(Target, name, method)
        return audit.compared


def compile_on_cpu() -> None:
    """Let vLLM compile as it does for GPUs: on a CPU it turns that off where LoRA is on."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        original(cls, config)
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        config.compilation_config.backend = "inductor"

    platform.check_and_update_config = classmethod(check_and_update_config)
    # This pass compares with operators that only the GPU builds of vLLM have.
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def slot_bytes(worker: Any) -> int:
    """Bytes that a worker has allocated for one slot of all its layers."""
    manager = worker.model_runner.lora_manager._adapter_manager
    total = 0
    for layer in manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            for t in (stacked,) if isinstance(stacked, Tensor) else stacked:
                total += t.nbytes // t.shape[0]
    return total


class Audit:
    """The truth of every fold, from the files that PEFT wrote."""

    def __init__(self, engine: Engine) -> None:
        core = engine.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self.manager = runner.lora_manager._adapter_manager
        self.names = {id(m.punica_wrapper): n for n, m in self.manager.modules.items()}
        self.adapters = {
            request.lora_int_id: adapter_factors(Path(engine.folders[name]))
            for name, request in engine.requests.items()
        }
        self.compared: dict[str, int] = {}

    def watched(self, name: str, method: Callable[..., None]) -> Callable[..., None]:
        def watched(target: Any, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
            step = target.punica
            rows = step.samples if name == "add_lora_logits" else step.tokens
            expected = self.truth(target, y.clone(), x, rows.slots[: y.shape[0]].tolist())
            before = y.clone()
            method(target, y, x, *args, **kwargs)
            assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), name
            layer = self.names[id(target)]
            if not torch.equal(y, before):
                self.compared[layer] = self.compared.get(layer, 0) + y.numel()

        return watched

    def truth(self, target: Any, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        from lorafold.ops import reference

        layer = self.names[id(target)]
        parts = self.manager.packed_modules.get(layer, [layer])
        columns = y[:, : sum(target.tables.n_outs)].split(target.tables.n_outs, dim=1)
        for i, slot in enumerate(slots):
            id_ = self.manager.lora_index_to_id[slot] if slot >= 0 else None
            for part, view in zip(parts, columns, strict=True):
                factors = self.adapters.get(id_, {}).get(part)
                if factors is None:
                    continue
                a, b, scale, is_embedding = factors
                row = x[i : i + 1]
                if is_embedding:
                    xa = row[:, : b.shape[1]].contiguous()
                    delta = reference.round_bf16(reference.dot(xa, b, "gemv"))
                else:
                    delta = reference.delta_rows(row, a, b, "gemv")
                view[i] = reference.fold(view[i : i + 1], delta, scale)[0]
        return y


def adapter_factors(folder: Path) -> dict[str, tuple[Tensor, Tensor, float, bool]]:
    """A, B, scale and "is an embedding" per module of a plain PEFT folder."""
    from safetensors.torch import load_file

    if not (folder / "adapter_model.safetensors").is_file():
        return {}
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in tensors.items():
        for letter, kind in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A",) * 2):
            if name.endswith(letter):
                b = tensors[name.removesuffix(letter) + kind.replace("_A", "_B")]
                module = name.removeprefix("base_model.model.").removesuffix(f".{letter}")
                alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
                rank = a.shape[0]
                scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
                found[module] = a.bfloat16(), b.bfloat16(), scale, "embedding" in letter
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
