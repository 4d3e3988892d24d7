"""Models with random weights, and adapters for them: folders that the benchmark serves."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

__all__ = ["MODEL", "SHAPES", "TARGETS", "adapter_folders", "write_apart", "write_tiny"]

MODEL = "model"
"""The model's folder beside those of its adapters, which are a0, a1 and so on."""

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
"""Settings of Qwen3's configuration."""


def adapter_folders(folder: Path) -> list[Path]:
    """The adapters beside the model, in the order of their numbers."""
    found = [path for path in folder.iterdir() if path.name != MODEL]
    return sorted(found, key=lambda path: int(path.name[1:]))


def write_tiny(folder: Path, *, num_adapters: int, rank: int) -> None:
    """The tests' tiny Llama, and adapters of large random numbers."""
    from tests.tiny_models import make_model, write_adapter
    from tests.tiny_text import save_model

    save_model(folder / MODEL)
    model = make_model()
    for at in range(num_adapters):
        write_adapter(model, folder / f"a{at}", TARGETS, rank=rank, seed=at)


def write_apart(
    folder: Path, settings: dict[str, Any], *, num_adapters: int, rank: int, device: str
) -> None:
    """Write a Qwen3 and its adapters in a process that ends, and with it what it has on the device.

    A folder that is there is kept: it appears whole.
    """
    if folder.exists():
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_write, folder, settings, num_adapters, rank, device).result()


def _write(
    folder: Path, settings: dict[str, Any], num_adapters: int, rank: int, device: str
) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(0)
    config = Qwen3Config(tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, **settings)
    with torch.device(device):  # filled where it is made: normal, 0.02
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(partial / MODEL, max_shard_size="100GB")
    _tokenizer(config.vocab_size).save_pretrained(partial / MODEL)
    _write_adapters(model, partial, num_adapters, rank)
    partial.rename(folder)


def _write_adapters(model: Any, folder: Path, num_adapters: int, rank: int) -> None:
    """Adapters by PEFT, which are about a tenth of the layers that they adapt."""
    import peft
    from tests.tiny_models import old_peft

    settings = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    with old_peft():
        adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    factors = [factor for name, factor in adapted.named_parameters() if "lora_" in name]
    for at in range(num_adapters):
        torch.manual_seed(1 + at)
        with torch.no_grad():
            for factor in factors:
                factor.normal_(std=0.02)
        adapted.save_pretrained(folder / f"a{at}", save_embedding_layers=False)


def _tokenizer(vocab_size: int) -> Any:
    """The tests' letters, and a number as the text of every other token."""
    from tests.tiny_text import make_tokenizer
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = make_tokenizer()
    vocab = letters.get_vocab()
    vocab |= {f"<{token}>": token for token in range(len(vocab), vocab_size)}
    words = Tokenizer(models.BPE(vocab, merges=[], unk_token="?"))
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = letters.chat_template
    return tokenizer
