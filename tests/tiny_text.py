"""A tokenizer of single characters for the tiny models, and folders that a server can load."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import COMMON, make_model

LETTERS = "".join(map(chr, range(32, 127)))[: COMMON["vocab_size"] - 3]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, 3 of them special."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate(LETTERS)}
    letters = Tokenizer(models.BPE(vocab, merges=[], unk_token="?"))
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(folder: Path, family: str = "llama") -> Path:
    """A tiny model and its tokenizer, as transformers writes them."""
    model = make_model(family)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
