"""Whether the tensor cores of a device compute what the contract says, asked of that device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lorafold.numerics import HOPPER, Numerics, TensorCoreModel
from lorafold.ops import reference
from lorafold.verify.apply import device_tensor, model_of
from lorafold.verify.case import Case
from lorafold.verify.check import Extent, Sides, compare

__all__ = [
    "device_step",
    "fitting_model",
    "step_cases",
    "step_launches",
    "steps",
    "tensor_cores_follow",
]

_MODELS = (HOPPER, TensorCoreModel(step=8, bits=24), TensorCoreModel(step=16, bits=24))
_AXES = {"x": ("tiles", "rows", "k"), "w": ("tiles", "cols", "k"), "c": ("tiles", "rows", "cols")}
_ROWS, _COLS, _K = 64, 32, 16
# Zeros, ones, the ends of the subnormal and the normal range, infinities, NaN, and factors whose
# products lie at both ends of fp32.
_SPECIAL = (
    *(0x0000, 0x8000, 0x3F80, 0xBF80, 0x0001, 0x8001, 0x007F, 0x0080, 0x8080, 0x7F7F, 0xFF7F),
    *(0x7F80, 0xFF80, 0x7FC0, 0x1F80, 0x2000, 0xA000, 0x5F80, 0x6000, 0xE07F),
)

_Draw = Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor]]


def _spread(
    generator: torch.Generator, *shape: int, power: float = 0.0, spread: float = 0.0
) -> Tensor:
    """Gaussian times 2**power, exponents spread by a second Gaussian times `spread`; float64."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    powers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * 2.0 ** (power + spread * powers)


def _near(power: float, spread: float, c_power: float | None = None) -> _Draw:
    """Factors near 2**power each; accumulators near their products, or near 2**c_power."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x = _spread(generator, _ROWS, _K, power=power, spread=spread).bfloat16()
        w = _spread(generator, _COLS, _K, power=power, spread=spread).bfloat16()
        near = 2 * power if c_power is None else c_power
        c = _spread(generator, _ROWS, _COLS, power=near, spread=spread).float()
        c[::4] = 0.0
        return x, w, c

    return draw


def _cancelling(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Products that cancel each other, or the accumulator, to zero or nearly."""
    x, w, c = _near(0.0, 4.0)(generator)
    x[:, 8:], w[:, 8:] = -x[:, :8], w[:, :8]
    x[1::4, 15] *= 1.0078125
    c[:] = 0.0
    c[2::4] = -(x[2::4, :1].double() @ w[:, :1].double().T).float()
    x[2::4, 1:] = 0.0
    return x, w, c


def _zeros(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros of both signs times huge numbers, beside ordinary terms and accumulators of +-0."""
    x, w, c = _near(0.0, 2.0)(generator)
    huge = _spread(generator, _ROWS, _K, power=100.0, spread=10.0).bfloat16()
    is_zero = torch.rand(_K, generator=generator) < 0.5
    x = torch.where(is_zero, huge, x)
    w[:, is_zero] = torch.tensor([0.0, -0.0]).bfloat16()[torch.arange(_COLS) % 2][:, None]
    c[::3], c[1::3] = 0.0, -0.0
    x[::8] = 0.0
    return x, w, c


def _patterns(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Any pattern of bf16 and fp32, NaN and infinity among them; a third without accumulator."""

    def draw(rows: int) -> Tensor:
        values = torch.randint(-(2**15), 2**15, (rows, _K), generator=generator)
        # Fewer infinities, else hardly a result is finite.
        is_wild = torch.rand(rows, _K, generator=generator) < 0.02
        return torch.where(is_wild, values, values & ~0x4000).short().view(torch.bfloat16)

    c = torch.randint(-(2**31), 2**31, (_ROWS, _COLS), generator=generator).int()
    c[::3] = 0
    return draw(_ROWS), draw(_COLS), c.view(torch.float32)


def _special(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Few terms, drawn from the values at all ends of the formats; the others are zero."""
    table = torch.tensor(_SPECIAL).short().view(torch.bfloat16)

    def draw(rows: int, keep: float) -> Tensor:
        values = table[torch.randint(len(_SPECIAL), (rows, _K), generator=generator)]
        return torch.where(torch.rand(rows, _K, generator=generator) < keep, values, 0.0)

    c = table[torch.randint(len(_SPECIAL), (_ROWS, _COLS), generator=generator)].float()
    c[::2] = 0.0
    return draw(_ROWS, 0.15), draw(_COLS, 0.9), c


_DRAWS: tuple[_Draw, ...] = (
    *(_near(0.0, spread) for spread in (0.0, 3.0, 8.0, 20.0, 40.0)),
    _near(-66.0, 6.0),  # products and sums in the subnormal range of fp32
    _near(-75.0, 3.0),  # and below it
    _near(-128.0, 3.0, 0.0),  # subnormal factors
    _near(0.0, 3.0, -140.0),  # subnormal accumulators
    _near(-64.0, 4.0, -140.0),
    _near(63.5, 1.0, 126.0),  # overflow
    _cancelling,
    _zeros,
    _patterns,
    _special,
)


def step_cases(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """Operands over the whole exponent range, and every edge of the formats."""
    repeats = 2 if extent.quick else 12
    for i, draw in enumerate(_DRAWS):
        generator = torch.Generator().manual_seed(1000 * extent.seed + i)
        drawn = [draw(generator) for _ in range(repeats)]
        x, w, c = (torch.stack(tensors) for tensors in zip(*drawn, strict=True))
        yield Case({"x": x, "w": w, "c": c}, _AXES, numerics)


def device_step(case: Case, device: torch.device, block_rows: int) -> Tensor:
    """out [tiles, rows, cols] = one step of x and w on c, by the device, in tiles of block_rows."""
    from lorafold.verify.step_kernel import step_triton

    x, w, c = (device_tensor(case[name], device) for name in ("x", "w", "c"))
    out = torch.empty_like(c)
    step_triton(x, w, c, out, block_rows)
    return out.cpu()


def _expected(case: Case, model: TensorCoreModel) -> Tensor:
    return reference.mma_chain(case["x"], case["w"], case["c"], model=model)


def steps(case: Case, device: torch.device) -> Sides:
    """The device's tensor cores in tiles of 16 and of 64 rows, and the model of the contract."""
    model = model_of(device)
    assert model is not None  # the check needs it
    computed = [call() for call in step_launches(case, device)]
    return torch.stack(computed), _expected(case, model).expand(2, -1, -1, -1)


def step_launches(case: Case, device: torch.device) -> list[Callable[[], Tensor]]:
    """A call per height of a tile."""
    return [partial(device_step, case, device, block_rows) for block_rows in (16, 64)]


def _follows(device: torch.device, model: TensorCoreModel) -> bool:
    for case in step_cases(Extent(device, quick=True), "mma"):
        expected = _expected(case, model)
        for block_rows in (16, 64):
            if compare(case, device_step(case, device, block_rows), expected).differences:
                return False
    return True


def fitting_model(device: torch.device) -> TensorCoreModel | None:
    """The first known model that the tensor cores of a device follow; None if there is none.

    Args:
        device: a CUDA device.
    """
    return next((model for model in _MODELS if _follows(device, model)), None)


def tensor_cores_follow(device: torch.device | str) -> bool:
    """Whether the tensor cores of a device compute, bit for bit, what its known model says.

    Takes below a second, a moment longer where the kernel is not compiled yet.

    Args:
        device: any device.

    Returns:
        False also where there are no tensor cores, or no model of them is known.

    Example:
        >>> tensor_cores_follow("cpu")
        False
    """
    device = torch.device(device)
    if device.type != "cuda":
        return False
    model = model_of(device)
    return model is not None and _follows(device, model)
