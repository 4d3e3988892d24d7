"""A module that takes the place of another one in a model, and still looks like it to the model."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """Stands where `base` was; attributes it has not itself are those of `base`.

    Model code reads attributes of its submodules (a router's weight, a number of experts), which
    must not notice who stands there.

    Args:
        base: the module whose place it takes.

    Example:
        >>> StandIn(nn.Linear(4, 2)).in_features
        4
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.training = base.training

    def __getattr__(self, name: str) -> Any:
        """What the module itself has, or else what `base` has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)
