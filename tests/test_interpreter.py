"""Every function that `tests.interpreter` patches, shown bit for bit by a small kernel.

On a GPU the interpreter is off, and so are these tests.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lorafold.numerics import HOPPER, TensorCoreModel
from lorafold.ops.reference import fold, mma_chain, mma_dot, round_bf16
from lorafold.verify.golden import RECORDINGS
from tests import interpreter
from tests.ops import literal
from tests.ops.literal import assert_same, random_bf16

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

FP32 = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def patched():
    interpreter.install()
    yield
    interpreter.install(HOPPER)


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def dot_kernel(
    x_ptr, w_ptr, c_ptr, out_ptr, k_in, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows, cols, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    at = rows[:, None] * N + cols[None, :]
    acc = tl.load(c_ptr + at)
    for k in range(0, k_in, BLOCK_K):
        inside = (k + ks < k_in)[None, :]
        x = tl.load(x_ptr + rows[:, None] * k_in + k + ks[None, :], mask=inside, other=0.0)
        w = tl.load(w_ptr + cols[:, None] * k_in + k + ks[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    tl.store(out_ptr + at, acc)


@triton.jit
def segment_kernel(
    x_ptr, w_ptr, out_ptr, k_in, SEGMENT: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows, ks = tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros([N, N], dtype=tl.float32)
    for begin in range(0, k_in, SEGMENT):
        acc = tl.zeros([N, N], dtype=tl.float32)
        for k in range(begin, min(begin + SEGMENT, k_in), BLOCK_K):
            inside = (k + ks < k_in)[None, :]
            x = tl.load(x_ptr + rows[:, None] * k_in + k + ks[None, :], mask=inside, other=0.0)
            w = tl.load(w_ptr + rows[:, None] * k_in + k + ks[None, :], mask=inside, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc)
        total += acc.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
    tl.store(out_ptr + rows[:, None] * N + rows[None, :], total)


@triton.jit
def batched_dot_kernel(
    x_ptr, w_ptr, out_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    batch = tl.arange(0, B)[:, None, None]
    rows, ks, cols = tl.arange(0, M)[None, :, None], tl.arange(0, K), tl.arange(0, N)
    x = tl.load(x_ptr + batch * M * K + rows * K + ks[None, None, :])
    w = tl.load(w_ptr + batch * K * N + ks[None, :, None] * N + cols[None, None, :])
    tl.store(out_ptr + batch * M * N + rows * N + cols[None, None, :], tl.dot(x, w))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, less_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x * y)
    tl.store(out_ptr + 2 * N + i, x - y)
    tl.store(less_ptr + i, (x < y).to(tl.int32))


@triton.jit
def fold_kernel(out_ptr, delta_ptr, scale_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    out = tl.load(out_ptr + i).to(tl.float32)
    delta = tl.load(delta_ptr + i).to(tl.float32)
    tl.store(out_ptr + i, (out + tl.load(scale_ptr) * delta).to(tl.bfloat16))


@triton.jit
def table_kernel(table_ptr, slot_ptr, out_ptr, N: tl.constexpr):
    """Rows through a table of addresses, one by one and as a block of pointers."""
    tl.extra.cuda.gdc_wait()
    slot = tl.load(slot_ptr + tl.program_id(0))
    if slot < 0:
        return
    i = tl.arange(0, N)
    row = tl.load(table_ptr + slot).to(tl.pointer_type(tl.bfloat16))
    tl.store(out_ptr + tl.program_id(0) * 2 * N + i, tl.load(row + i, mask=i < 5, other=0.0))
    both = tl.load(table_ptr + tl.arange(0, 2)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    values = tl.load(both[:, None] + i[None, :])
    halves = tl.permute(tl.reshape(values, [2, 2, N // 2]), [0, 2, 1])
    first, second = tl.split(halves)
    total = tl.where((i < N // 2)[None, :], tl.join(first, second).reshape(2, N), values)
    low, high = tl.split(tl.trans(total))
    tl.store(out_ptr + tl.program_id(0) * 2 * N + N + i, tl.where(i % 2 == 0, low, high))
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def scan_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    total = tl.zeros([N], dtype=tl.int32) + tl.sum(x, 0) + tl.max(x, 0) + tl.cdiv(N, 3)
    tl.store(out_ptr + i, total + tl.cumsum(x, 0))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, N)), 0, _larger))


def test_every_bf16_widens_exactly():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(1 << 16)
    cast_kernel[(1,)](x, out, 1 << 16)
    assert_same(out, x.float())


@pytest.mark.parametrize("top", [0x7FFFFFFF, 0x00FFFFFF], ids=["all", "subnormal"])
def test_fp32_narrows_to_nearest_even(top):
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, top, (1 << 15,), generator=generator, dtype=torch.int32)
    patterns[::4] |= 0x8000
    patterns[::8] &= ~0x7FFF  # ties
    patterns[::3] |= -(1 << 31)
    x, out = patterns.view(torch.float32), torch.empty(1 << 15, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, out, 1 << 15)
    assert_same(out, round_bf16(x))
    truncated = (patterns >> 16).to(torch.int16).view(torch.bfloat16)
    assert (out != truncated).sum() > 1 << 13, "control: truncation gives other bits"


@settings(deadline=None)
@given(FP32, FP32, FP32)
def test_fma_rounds_once(x, y, z):
    values = np.array([x, y, z], dtype=np.uint32).view(np.float32)
    expected = literal.fma(*map(float, values))
    result = interpreter.fused_multiply_add(*(values[i : i + 1] for i in range(3)))
    assert_same(torch.from_numpy(result), torch.tensor([expected], dtype=torch.float64).float())


@settings(deadline=None)
@given(st.lists(st.integers(1, 2**24 - 1), min_size=2, max_size=2), st.integers(-1, 1))
def test_fma_near_ties(factors, side):
    """The exact sum lies on a midpoint of two fp32, or the least possible step beside it."""
    x, y = map(float, factors)
    z = -float(np.float32(x * y)) if side == 0 else side * 2.0 ** (24 + side * 24)
    arrays = (np.array([v], dtype=np.float32) for v in (x, y, z))
    expected = torch.tensor([literal.fma(x, y, z)], dtype=torch.float64).float()
    assert_same(torch.from_numpy(interpreter.fused_multiply_add(*arrays)), expected)


def test_fma_in_a_kernel():
    generator = torch.Generator().manual_seed(1)
    x, y, z = torch.randn(3, 1024, generator=generator)
    out = torch.empty(1024)
    fma_kernel[(1,)](x, y, z, out, 1024)
    expected = [literal.fma(*v) for v in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)]
    assert_same(out, torch.tensor(expected, dtype=torch.float64).float())
    assert not torch.equal(out, x * y + z), "control: two roundings give other bits"


@pytest.mark.parametrize("block_k", [16, 64])
@pytest.mark.parametrize(("k", "spread"), [(16, 0.0), (100, 0.0), (304, 12.0), (64, 50.0)])
def test_dot_is_a_chain_of_steps(k, spread, block_k):
    x, w = random_bf16(3, 16, k, spread=spread), random_bf16(4, 32, k, spread=spread)
    c, out = random_bf16(5, 16, 32, spread=spread).float(), torch.empty(16, 32)
    dot_kernel[(1,)](x, w, c, out, k, 16, 32, block_k)
    assert_same(out, mma_chain(x, w, c))
    if not spread:
        assert not torch.equal(out, c + x.float() @ w.float().T), "control: fp32 sums differ"


def test_dot_equals_the_recorded_hardware():
    golden = load_file(RECORDINGS)
    for case in sorted({name.rsplit("/", 1)[0] for name in golden if name.startswith("step/")}):
        x, w, c, expected = (golden[f"{case}/{name}"] for name in ("x", "w", "c", "out"))
        out = torch.empty(64, 64)
        dot_kernel[(1,)](x, w, c, out, 16, 64, 64, 16)
        assert_same(out, expected)


def test_dot_follows_another_model():
    x, w, c, out = (
        random_bf16(6, 16, 64),
        random_bf16(7, 32, 64),
        torch.zeros(16, 32),
        torch.empty(16, 32),
    )
    old = TensorCoreModel(step=8, bits=24)
    interpreter.install(old)
    dot_kernel[(1,)](x, w, c, out, 64, 16, 32, 16)
    assert_same(out, mma_chain(x, w, model=old))
    assert not torch.equal(out, mma_chain(x, w))


@pytest.mark.parametrize("block_k", [16, 256])
@pytest.mark.parametrize("k", [1000, 2050])
def test_segments_in_a_kernel(k, block_k):
    x, w, out = random_bf16(8, 16, k), random_bf16(9, 16, k), torch.empty(16, 16)
    segment_kernel[(1,)](x, w, out, k, 1024, 16, block_k)
    assert_same(out, mma_dot(x, w))


def test_batched_dot():
    x, w, out = (random_bf16(10, 2, 16, 32), random_bf16(11, 2, 32, 8), torch.empty(2, 16, 8))
    batched_dot_kernel[(1,)](x, w, out, 2, 16, 8, 32)
    assert_same(out, mma_chain(x, w.transpose(1, 2)))


def test_bf16_arithmetic_and_comparison():
    x, y = random_bf16(12, 256, spread=40.0), random_bf16(13, 256, spread=40.0)
    x[:3], y[:3] = (
        torch.tensor([torch.nan, torch.inf, -0.0]),
        torch.tensor([1.0, -torch.inf, 0.0]),
    )
    out, less = (torch.empty(3, 256, dtype=torch.bfloat16), torch.empty(256, dtype=torch.int32))
    arithmetic_kernel[(1,)](x, y, out, less, 256)
    assert_same(out, torch.stack([x + y, x * y, x - y]))
    assert torch.equal(less.bool(), x < y)


def test_fold_in_a_kernel():
    out, delta, scale = (random_bf16(14, 4096), random_bf16(15, 4096), torch.tensor([4 / 3]))
    expected = fold(out, delta, scale)
    fold_kernel[(1,)](out, delta, scale, 4096)
    assert_same(out, expected)


def test_tables_of_addresses_and_rearrangements():
    held, out = random_bf16(16, 2, 8), torch.full((3, 16), 9.0).bfloat16()
    table = torch.tensor([held[0].data_ptr(), held[1].data_ptr()])
    table_kernel[(3,)](table, torch.tensor([1, -1, 0], dtype=torch.int32), out, 8)
    assert_same(out[0, :8], torch.nn.functional.pad(held[1, :5], (0, 3)))
    assert_same(out[2, :8], torch.nn.functional.pad(held[0, :5], (0, 3)))
    assert (out[1] == 9).all()
    woven = torch.stack([held[:, :4], held[:, 4:]], -1).reshape(2, 8)
    total = torch.where(torch.arange(8) < 4, woven, held)
    assert_same(out[0, 8:], torch.where(torch.arange(8) % 2 == 0, total[0], total[1]))


def test_the_standard_library_works_launch_after_launch():
    for offset in (0, 3):
        x, out = torch.arange(offset, offset + 8, dtype=torch.int32), torch.empty(8).int()
        scan_kernel[(1,)](x, out, 8)
        assert out.tolist() == (x.cumsum(0) + x.sum() + x.max() + 3).tolist()
        cast_kernel[(1,)](x, out, 8)
        assert torch.equal(out, x)


def test_what_would_be_wrong_is_refused():
    error = triton.runtime.errors.InterpreterError
    x = random_bf16(17, 64)
    with pytest.raises(error, match="reduction or scan of bf16"):
        reduce_kernel[(1,)](x, torch.empty(1, dtype=torch.bfloat16), 64)
    with pytest.raises(error, match="interpreted conversion"):
        cast_kernel[(1,)](torch.ones(16, dtype=torch.int32), x, 16)
    with pytest.raises(error, match="interpreted conversion"):
        cast_kernel[(1,)](torch.ones(16, dtype=torch.float64), x, 16)
    with pytest.raises(error, match="interpreted fma"):
        fma_kernel[(1,)](x, x, x, x, 16)
    with pytest.raises(error):  # tensor cores take no K below 16
        dot_kernel[(1,)](x, x, torch.zeros(16, 16), torch.zeros(16, 16), 4, 16, 16, 4)


def test_install_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        interpreter.install()
