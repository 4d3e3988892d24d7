"""A tiny model with a tokenizer and a chat template in one folder, as transformers writes them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import COMMON

TEMPLATE = "w4 {% for turn in messages %}{{ turn.content }} w5 {% endfor %}"
"""A chat of one turn is its text with a word before it and one after."""


def write_chat_model(model: nn.Module, folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write the model, and a tokenizer of the words w3 .. w95, of which every prompt consists."""
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(3, COMMON["vocab_size"])}
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        chat_template=template,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    return folder
