"""A module that takes the place of another one in a model, and still looks like it to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """Stands where `base` was; attributes it has not itself are those of `base`.

    Model code reads attributes of its submodules (a router's weight, a number of experts), which
    must not notice who stands there. A compiled model leaves its graph to run it: what subclasses
    do in `run` is not for a compiler to trace.

    Args:
        base: the module whose place it takes.

    Example:
        >>> stand_in = StandIn(nn.Linear(4, 2))
        >>> stand_in.in_features, stand_in(torch.ones(3, 4)).shape
        (4, torch.Size([3, 2]))
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.training = base.training
        # Not a decorator: that would load the compiler with the library.
        disable: Any = torch.compiler.disable
        self._eagerly = disable(_call)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`run`, outside of any graph of a compiler."""
        return self._eagerly(self.run, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What `base` does; subclasses do it in their way."""
        return self.base(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the module itself has, or else what `base` has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
