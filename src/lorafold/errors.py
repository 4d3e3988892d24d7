"""The exception tree: everything that lorafold raises on purpose.

    LoraError
    ├── AdapterError    .adapter .code    something is wrong with one adapter
    │   ├── AdapterFormatError            files missing, broken, or using what is not supported
    │   ├── AdapterMismatchError          the targets or shapes do not fit this model
    │   └── AdapterNotFoundError          no adapter of that name is loaded
    ├── PoolFullError   .max_loras        every slot is pinned or in use
    ├── RouteError                        tensors, slots or a route do not fit together
    ├── ModelError                        the model cannot be attached to
    └── BackendError                      a backend or device was asked for that is not there

A message says what was given, what is allowed and what to do. Where users expect a built-in
exception, the class is that too.
"""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "AdapterFormatError",
    "AdapterMismatchError",
    "AdapterNotFoundError",
    "BackendError",
    "LoraError",
    "ModelError",
    "PoolFullError",
    "RouteError",
]


class LoraError(Exception):
    """Anything this library raises on purpose.

    Example:
        >>> from lorafold.errors import LoraError, RouteError
        >>> issubclass(RouteError, LoraError)
        True
    """


class AdapterError(LoraError):
    """Something is wrong with one adapter.

    Attributes:
        adapter: the name or path of the adapter.
        code: a stable word for the reason, such as ``"dora"``, where docs/formats.md lists one.
    """

    def __init__(self, message: str, *, adapter: str = "", code: str = "") -> None:
        super().__init__(message)
        self.adapter = adapter
        self.code = code


class AdapterFormatError(AdapterError, ValueError):
    """The adapter's files are missing, broken, or use something that is not supported."""


class AdapterMismatchError(AdapterError, ValueError):
    """The adapter's targets or shapes do not fit this model."""


class AdapterNotFoundError(AdapterError, KeyError):
    """No adapter of that name is loaded."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0]) if self.args else ""


class PoolFullError(LoraError):
    """Every slot is pinned or in use.

    Attributes:
        max_loras: the number of slots of the pool.
    """

    def __init__(self, message: str, *, max_loras: int = 0) -> None:
        super().__init__(message)
        self.max_loras = max_loras


class RouteError(LoraError, ValueError):
    """Tensors, slots or a route do not fit together (dtype, device, shape, stride, range)."""


class ModelError(LoraError, ValueError):
    """The model cannot be attached to."""


class BackendError(LoraError, RuntimeError):
    """A backend or device was asked for that is not there."""
