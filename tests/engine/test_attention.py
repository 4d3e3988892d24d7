"""Attention over a packed batch, by itself: right, and blind to the neighbours, in bits."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from lorafold.engine.attention import PackedAttention
from lorafold.engine.flash import Flash, find_flash
from lorafold.engine.kv import KvCache
from lorafold.engine.step import Piece, Step
from lorafold.errors import ModelError, RouteError
from tests.tiny_models import bits

# A model's eager attention stands in the module of its layers.
eager_attention_forward = modeling_llama.eager_attention_forward

HEADS, KV_HEADS, WIDTH = 4, 2, 32
SCALE = WIDTH**-0.5
# (tokens already there, new tokens) of each sequence.
BATCH = [(0, 9), (70, 1), (3, 5), (0, 1), (200, 1), (31, 33)]


class Layer(modeling_llama.LlamaAttention):
    """As much of an attention layer as attention functions look at."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.layer_idx, self.num_key_value_groups, self.is_causal = 0, HEADS // KV_HEADS, True


def attention(usual: str, device: str) -> PackedAttention:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=usual), device=torch.device(device)
    )
    return PackedAttention(model, KvCache(1024, torch.device(device)))


def inputs(seed: int, length: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [heads, length, width] of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, length, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    return q, k, v


def run(
    attention: PackedAttention, batch: list[tuple[int, int, int]], device: str, **kwargs: Any
) -> list[Tensor]:
    """The outputs of sequences (seed, tokens there, new tokens), computed in one step."""
    layer, pieces, parts, reserved = Layer(), [], [], []
    for seed, there, new in batch:
        stretch = attention.cache.reserve(there + new)
        assert stretch is not None
        reserved.append(stretch)
        q, k, v = inputs(seed, there + new, device)
        places = torch.arange(stretch.start, stretch.start + there, device=device)
        attention.cache.write(0, places, k[:, :there].transpose(0, 1), v[:, :there].transpose(0, 1))
        pieces.append(Piece([0] * new, there, stretch, -1, wants_logits=True))
        parts.append([t[:, there:] for t in (q, k, v)])
    query, key, value = (torch.cat(t, dim=1)[None] for t in zip(*parts, strict=True))
    with attention.stepping(Step.of(pieces, torch.device(device))):
        out = attention.attend(layer, query, key, value, **{"scaling": SCALE} | kwargs)
    for stretch in reserved:
        attention.cache.release(stretch)
    return list(out[0].split([new for _, _, new in batch]))


def exact(seed: int, there: int, new: int, window: int | None) -> Tensor:
    """The same in float64, one query at a time."""
    q, k, v = (t.double() for t in inputs(seed, there + new, "cpu"))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (k, v))
    rows = []
    for at in range(there, there + new):
        first = 0 if window is None else max(0, at + 1 - window)
        scores = (q[:, at, None] * k[:, first : at + 1]).sum(-1) * SCALE
        rows.append((scores.softmax(-1).unsqueeze(-1) * v[:, first : at + 1]).sum(1))
    return torch.stack(rows)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.usefixtures("exact_base")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usual", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [None, 7, 64])
def test_each_sequence_gets_what_it_gets_alone(usual: str, device: str, window: int | None) -> None:
    packed = attention(usual, device)
    kwargs = {} if window is None else {"sliding_window": window}
    batch = [(seed, there, new) for seed, (there, new) in enumerate(BATCH)]
    together = run(packed, batch, device, **kwargs)
    for sequence, out in zip(batch, together, strict=True):
        assert torch.equal(bits(run(packed, [sequence], device, **kwargs)[0]), bits(out))
        reference = exact(*sequence, window)
        assert float((out.cpu().double() - reference).norm() / reference.norm()) < 0.01
    # Were the window not looked at, the long ones would differ.
    if window is not None:
        assert not torch.equal(run(packed, [batch[4]], device)[0], together[4])


def test_other_numbers_of_rows_are_refused() -> None:
    packed, (q, k, v) = attention("sdpa", "cpu"), inputs(0, 3, "cpu")
    with pytest.raises(RouteError, match="no packed forward of 3 rows"):
        packed.attend(Layer(), q[None], k[None], v[None])
    stretch = packed.cache.reserve(4)
    assert stretch is not None
    piece = Piece([1, 2], 0, stretch, -1, wants_logits=True)
    step = Step.of([piece], torch.device("cpu"))
    with packed.stepping(step), pytest.raises(RouteError, match="no packed forward of 3 rows"):
        packed.attend(Layer(), q[None], k[None], v[None])


def literal_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
    num_splits: int | None = None,
) -> tuple[Tensor, None]:
    """What the operator behind PyTorch's variable-length attention does, one row at a time."""
    assert {cum_seq_q.dtype, cum_seq_k.dtype, seqused_k.dtype} == {torch.int32}
    assert all(t.is_contiguous() for t in (cum_seq_q, cum_seq_k, seqused_k))
    assert cum_seq_k.diff().min() >= 0
    assert (dropout_p, return_debug_mask, window_size_right) == (0.0, False, 0)
    assert is_causal == (window_size_left < 0)
    rows = []
    for at, used in enumerate(seqused_k.tolist()):
        first, end = cum_seq_q[at : at + 2].tolist()
        start, stop = cum_seq_k[at : at + 2].tolist()
        assert used <= min(stop - start, max_k)
        assert end - first <= max_q
        for row in range(first, end):
            # Causal from the end: the last row sees all keys that are used.
            last = used - (end - 1 - row)
            low = 0 if window_size_left < 0 else max(0, last - 1 - window_size_left)
            keys, values = (
                t[start + low : start + last].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
                for t in (key, value)
            )
            scores = (query[row].double() * keys).sum(-1) * scale
            rows.append((scores.softmax(0).unsqueeze(-1) * values).sum(0))
    return torch.stack(rows).to(query.dtype), None


def recording(asked: list[int | None]) -> Any:
    """`literal_flash` that writes down `num_splits`."""

    def operator(*args: Any, num_splits: int | None = None, **kwargs: Any) -> Any:
        asked.append(num_splits)
        return literal_flash(*args, **kwargs)

    return operator


@pytest.mark.parametrize("can_split", [True, False])
@pytest.mark.parametrize("window", [None, 7, 64])
def test_variable_length_attention_is_told_the_shape_of_the_batch(
    window: int | None, can_split: bool
) -> None:
    packed, asked = attention("sdpa", "cpu"), list[int | None]()
    packed._flash = Flash(recording(asked), can_split=can_split, max_keys=1024)
    kwargs = {} if window is None else {"sliding_window": window}
    batch = [(seed, there, new) for seed, (there, new) in enumerate(BATCH)]
    packed.cache.reserve(40)  # so that the stretches do not begin at 0
    for sequence, out in zip(batch, run(packed, batch, "cpu", **kwargs), strict=True):
        reference = exact(*sequence, window)
        assert float((out.double() - reference).norm() / reference.norm()) < 0.005
    assert asked == [1 if can_split else None]


@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_what_variable_length_attention_cannot_do_is_left_to_the_models_own(extra: str) -> None:
    packed = attention("eager", "cpu")
    usual = run(packed, [(0, 0, 5)], "cpu")
    packed._flash = Flash(literal_flash, can_split=True, max_keys=1024)
    assert not torch.equal(run(packed, [(0, 0, 5)], "cpu", scaling=1.0)[0], usual[0])
    assert torch.equal(run(packed, [(0, 0, 5)], "cpu", **{extra: 1.0})[0], usual[0])


def test_the_installed_operator_takes_these_arguments() -> None:
    assert find_flash(16) is not None
    schema = torch.ops.aten._flash_attention_forward.default._schema
    ours = inspect.signature(literal_flash).parameters
    positional = [p.name for p in schema.arguments if not p.kwarg_only]
    assert positional == [p.name for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    assert {p.name for p in schema.arguments} >= ours.keys() - {"num_splits"}


def test_without_the_pieces_only_variable_length_attention_will_do() -> None:
    packed, (q, k, v) = attention("sdpa", "cpu"), inputs(0, 1, "cpu")
    step = Step(torch.zeros(1, dtype=torch.int64), ())
    with packed.stepping(step), pytest.raises(ModelError, match="would need to know its length"):
        packed.attend(Layer(), q[None], k[None], v[None])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
def test_flash_sees_what_the_models_own_function_sees(window: int | None) -> None:
    """Single rows, and chunks that see the keys before them."""
    kwargs = {} if window is None else {"sliding_window": window}
    batch = [(seed, there, new) for seed, (there, new) in enumerate(BATCH)]
    flash, usual = attention("sdpa", "cuda"), attention("sdpa", "cuda")
    assert flash._flash is not None
    usual._flash = None
    for one, other in zip(
        run(flash, batch, "cuda", **kwargs), run(usual, batch, "cuda", **kwargs), strict=True
    ):
        assert float((one - other).norm() / other.norm()) < 0.01


@pytest.mark.gpu
def test_flash_gives_a_row_the_same_bits_whatever_is_beside_it() -> None:
    """Alone, among many, and beside the longest sequence there is room for: keys are not split."""
    packed = attention("sdpa", "cuda")
    assert packed._flash is not None
    (alone,) = run(packed, [(1, 300, 1)], "cuda")
    for others in ([(2, 5, 1)], [(2, 600, 1)], [(2, 0, 70)], [(n, 20, 1) for n in range(2, 18)]):
        assert torch.equal(bits(run(packed, [(1, 300, 1), *others], "cuda")[0]), bits(alone))
