"""Engines of vLLM for the tests of the plugin: a tiny model, adapters by PEFT, runs of engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.tiny_models import write_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {
        "targets": ALL, "rank": 8, "alpha": 12,
        "rank_pattern": {"k_proj": 3}, "alpha_pattern": {"v_proj": 9, "up_proj": 5},
    },
    "attention": {"targets": ["q_proj", "v_proj"], "rank": 16, "alpha": 21.3},
    "vocabulary": {
        "targets": ["o_proj", "lm_head", "embed_tokens"], "rank": 4, "alpha": 5.3,
    },
    "small": {"targets": ["up_proj", "down_proj"], "rank": 1, "alpha": 2, "use_rslora": True},
    "columns": {"targets": ["k_proj", "gate_proj"], "rank": 5, "alpha": 7},
}  # fmt: skip
PROMPTS: dict[str | None, list[int]] = {
    None: [5, 6, 7, 8],
    "all": [9, 10, 11, 12, 13],
    "attention": [14, 15, 16],
    "vocabulary": [5, 6, 7, 8],
    "small": [20, 300, 40],
    "columns": [5, 6, 7, 8],
}
REFUSED = ("prefix", "cut", "halved", "tall", "copy", "beyond")
MIXED: list[str | None] = [None, "all", "attention", "all", None]
MANY: list[str | None] = [None, "all", "vocabulary", "attention", "columns", "small", "all"]


def write_folders(root: Path) -> None:
    """model/ and one folder per adapter, good ones and broken ones."""
    model = make_model()
    model.save_pretrained(root / "model")
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(512)}, unk_token="t3"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t2", pad_token="t0", unk_token="t3"
    )
    tokenizer.save_pretrained(root / "model")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        write_adapter(model, root / name, seed=seed + 1, **settings)
    good, vocabulary = load_file(weights(root / "all")), load_file(weights(root / "vocabulary"))
    first = sorted(good)[0]  # a lora_A of the first layer
    prefixed = {n.replace("model.layers", "model.model.layers"): t for n, t in good.items()}
    copy(root, "all", "prefix", prefixed)
    copy(root, "all", "beyond", {n.replace("rs.1.", "rs.7."): t for n, t in good.items()})
    copy(root, "all", "cut", good | {first: good[first][:, :-8].contiguous()})
    copy(root, "all", "halved", {n: t for n, t in good.items() if n != first})
    copy(root, "all", "tall", good, r=4)
    head = next(n for n in vocabulary if n.endswith("lm_head.base_layer.weight"))
    copy(root, "vocabulary", "copy", vocabulary | {head: vocabulary[head] + 1})


def weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def copy(
    root: Path, name: str, new_name: str, tensors: dict[str, torch.Tensor], **config: Any
) -> None:
    """A folder of other tensors, with the config of an adapter, or parts of it changed."""
    (root / new_name).mkdir()
    save_file(tensors, weights(root / new_name), metadata={"format": "pt"})
    fields = json.loads((root / name / "adapter_config.json").read_text()) | config
    (root / new_name / "adapter_config.json").write_text(json.dumps(fields))


def make_model() -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            parameter.data = parameter.to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def run(
    folders: Path,
    steps: list[dict[str, Any]],
    *,
    compiled: bool = False,
    env: dict[str, str] | None = None,
    **engine: Any,
) -> tuple[list[Any], str]:
    """One engine in a process of its own: a result per step, and what it printed."""
    settings = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 8,
        "max_lora_rank": 16,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
    } | engine
    job = {
        "model": str(folders / "model"),
        "adapters": {name: str(folders / name) for name in (*ADAPTERS, *REFUSED)},
        "compiled": compiled,
        "engine": settings,
        "steps": steps,
    }
    job_file, result_file = folders / "job.json", folders / "result.json"
    job_file.write_text(json.dumps(job))
    result_file.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.vllm_run", str(job_file), str(result_file)],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0") | (env or {}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    return json.loads(result_file.read_text()), printed


def environment(**more: str) -> dict[str, str]:
    """This process's, for an engine on one thread that talks to nobody."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return (
        kept
        | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for calls into the workers
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        | more
    )


def generate(names: list[str | None]) -> dict[str, Any]:
    return {"do": "generate", "requests": [(name, PROMPTS[name]) for name in names]}


EACH_ALONE = [generate([name]) for name in PROMPTS]


def by_name(results: list[Any]) -> dict[str | None, Any]:
    return {name: result[0] for name, result in zip(PROMPTS, results, strict=True)}


def tokens(answer: list[Any]) -> list[int]:
    return [token for token, _ in answer]
