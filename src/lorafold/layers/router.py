"""The router of a mixture of experts, whose rows name their adapters.

Routers of transformers are no linear layers: their `forward` multiplies by a weight of their own
and goes on to choose the experts. `RoutedRouter` runs that very forward, and folds the deltas into
the one product in it, before anything is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lorafold.errors import RouteError
from lorafold.layers.routing import Routing, Rows
from lorafold.layers.stand_in import StandIn
from lorafold.ops import apply_lora_bgmv
from lorafold.route import LoraRoute

__all__ = ["RoutedRouter", "WeightProduct"]

# What may come between a router's weight and the product: another dtype.
_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.float, Tensor.type_as})


class WeightProduct(TorchFunctionMode):
    """While it is entered, changes what `F.linear` gives for one weight (or a cast of it).

    Args:
        weight: the weight to look for.
        change: (x, product) -> what to give instead.

    Attributes:
        num_products: how many products it has changed.

    Example:
        >>> weight = torch.ones(2, 4, dtype=torch.bfloat16)
        >>> with WeightProduct(weight, lambda x, product: product + x[:, :2]) as products:
        ...     y = F.linear(torch.ones(1, 4), weight.float())
        >>> y.tolist(), products.num_products
        ([[5.0, 5.0]], 1)
    """

    def __init__(self, weight: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.num_products = 0
        self._weights = [weight]
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any function of torch as it is, and change the product that is looked for."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.linear:
            x, weight = _named(args, kwargs, "input"), _named(args[1:], kwargs, "weight")
            if any(weight is each for each in self._weights):
                self.num_products += 1
                return self._change(x, out)
        elif func in _CASTS and any(args[0] is each for each in self._weights):
            self._weights.append(out)
        return out


def _named(args: Any, kwargs: dict[str, Any], name: str) -> Any:
    return args[0] if args else kwargs.get(name)


class RoutedRouter(StandIn):
    """A router, plus per token the delta of the token's adapter on the logits.

    Logits in bfloat16 are folded into as any other output. Where a router computes them in float32
    (DeepSeek), scale * delta is rounded to bfloat16 and then added in float32. Tokens without an
    adapter keep their logits.

    Args:
        base: the router, called as it is.
        route: the tables over slots of this target.
        routing: the slots of the current forward's tokens, shared by the whole model.
        name: the target's path in the model, for messages.

    Example:
        >>> from lorafold.route import LoraPair
        >>> class Router(nn.Module):
        ...     weight = torch.eye(2, 4).bfloat16()
        ...
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         return F.linear(x, self.weight).argmax(dim=-1)
        >>> a, b = torch.ones(1, 4).bfloat16(), torch.tensor([[0.0], [1.0]]).bfloat16()
        >>> routing = Routing(torch.device("cpu"), max_loras=1)
        >>> router = RoutedRouter(Router(), LoraRoute.from_pairs([LoraPair(a, b, 1.0)]), routing)
        >>> routing.begin([-1, 0])
        >>> router(torch.tensor([[2.0, 1.0, 0.0, 0.0]] * 2).bfloat16()).tolist()
        [0, 1]
    """

    def __init__(
        self, base: nn.Module, route: LoraRoute, routing: Routing, *, name: str = ""
    ) -> None:
        super().__init__(base)
        self.route = route
        self.routing = routing
        self.name = name

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the router takes and gives.

        Raises:
            RouteError: if there is another number of tokens than the forward has, or the router
                does not multiply by its weight just once.
        """
        rows = self.routing.rows
        if rows is None:
            return self.base(*args, **kwargs)

        def fold(x: Tensor, logits: Tensor) -> Tensor:
            return self._folded(x, logits, rows)

        weight: Any = self.base.weight
        with WeightProduct(weight, fold) as products:
            out = self.base(*args, **kwargs)
        if products.num_products != 1:
            raise RouteError(
                f"the router `{self.name}` multiplied by its weight {products.num_products} times "
                "in one forward, not once; was its forward replaced after attaching?"
            )
        return out

    def _folded(self, x: Tensor, logits: Tensor, rows: Rows) -> Tensor:
        num_tokens = rows.seq_slot.shape[0]
        if x.numel() != num_tokens * self.route.k_in:
            raise RouteError(
                f"`{self.name}` got {tuple(x.shape)}, but this forward has {num_tokens} tokens; "
                "call the whole model, with one adapter per sequence"
            )
        # Exact: a router that casts its input gets it in bfloat16 (checked when attaching).
        x = x.reshape(num_tokens, -1).bfloat16()
        if logits.dtype == torch.bfloat16:
            out = logits.reshape(num_tokens, -1)
        else:
            # Adding -0.0 changes no number, not even a zero.
            shape = (num_tokens, self.route.n_out)
            out = torch.full(shape, -0.0, dtype=torch.bfloat16, device=logits.device)
        apply_lora_bgmv(self.route, x, out, rows.seq_slot, plan=rows.plan)
        out = out.view(logits.shape)
        return out if logits.dtype == torch.bfloat16 else logits + out

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"max_loras={self.route.max_loras}, max_rank={self.route.max_rank}"
