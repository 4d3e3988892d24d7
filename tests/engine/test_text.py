"""TextStream: the pieces add up to the whole text, in whole characters, and end before a stop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lorafold.engine.text import TextStream


def byte_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Tokens of single bytes, as GPT-2's or as Llama's tokenizer splits what it does not know."""
    if kind == "byte level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens.decoder = decoders.ByteLevel()
    else:
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258}
        tokens = Tokenizer(models.BPE(vocab, merges=[], byte_fallback=True))
        tokens.pre_tokenizer = pre_tokenizers.Metaspace()
        tokens.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


TOKENIZERS = {kind: byte_tokenizer(kind) for kind in ("byte level", "byte fallback")}
TEXT = st.text(st.sampled_from("ab é語🙂\n"), max_size=12)


def pieces(kind: str, text: str, stop: Sequence[str] = ()) -> list[str]:
    """What comes out, token by token, and at the end."""
    stream = TextStream(TOKENIZERS[kind], stop)
    out = []
    for token in TOKENIZERS[kind](text)["input_ids"]:
        out.append(stream.push(token))
        if stream.is_stopped:
            break
    return [*out, stream.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXT)
@example(text="🙂🙂")
@example(text=" a")
def test_pieces_add_up_in_whole_characters(kind: str, text: str) -> None:
    out = pieces(kind, text)
    assert "".join(out) == TOKENIZERS[kind].decode(TOKENIZERS[kind](text)["input_ids"])
    assert "\ufffd" not in "".join(out)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXT, stop=st.lists(st.text("ab 🙂", min_size=1, max_size=3), max_size=3))
@example(text="aab", stop=["ab"])
@example(text="abab", stop=["bb", "ba"])
def test_text_ends_before_the_first_stop_string(kind: str, text: str, stop: list[str]) -> None:
    whole = "".join(pieces(kind, text))
    # Each token here completes one character at most, so the first to be complete is cut at; of
    # several with the same end, the one that begins first.
    found = [(whole.find(each) + len(each), whole.find(each)) for each in stop if each in whole]
    expected = whole[: min(found)[1]] if found else whole
    assert "".join(pieces(kind, text, stop)) == expected


def test_what_is_said_and_what_is_read_are_counted() -> None:
    stream, counts = TextStream(TOKENIZERS["byte level"], ["abb"]), []
    for token in TOKENIZERS["byte level"]("éabaabb")["input_ids"]:
        stream.push(token)
        counts.append((stream.num_said, stream.num_read))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3), (3, 4), (4, 5), (4, 6), (4, 4)]
    stream = TextStream(TOKENIZERS["byte level"], ["abb"])
    assert stream.push(TOKENIZERS["byte level"]("a")["input_ids"][0]) + stream.flush() == "a"
    assert (stream.num_said, stream.num_read) == (1, 1)


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    assert pieces("byte level", "abaabb", ["abb"]) == ["", "", "ab", "a", "", "", ""]
    assert pieces("byte level", "aba", ["abb"]) == ["", "", "ab", "a"]


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    stream = TextStream(TOKENIZERS["byte level"])
    half = TOKENIZERS["byte level"]("é")["input_ids"][0]
    assert stream.push(half) == ""
    assert stream.flush() == "\ufffd"


def test_a_stop_string_completed_by_the_flush_still_cuts() -> None:
    stream = TextStream(TOKENIZERS["byte level"], ["\ufffd"])
    stream.push(TOKENIZERS["byte level"]("é")["input_ids"][0])
    assert stream.flush() == ""
    assert stream.is_stopped
