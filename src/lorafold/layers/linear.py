"""A linear layer whose rows name their adapters.

`RoutedLinear` takes the place of a linear layer, calls it as it is, and folds the rows' deltas
into its output. Quantised layers are wrapped like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.errors import RouteError
from lorafold.layers.routing import Routing, Rows
from lorafold.ops import apply_lora_beside
from lorafold.ops.levers import NO_FFN
from lorafold.route import LoraRoute

__all__ = ["RoutedLinear", "SharedInput"]


class RoutedLinear(nn.Module):
    """A linear layer, plus per row the delta of the row's adapter.

        y = base(x);  y[i] += scale[s] * (x[i] A[s]^T) B[s]^T,  s = seq_slot[i]

    While every row is base, this is the wrapped module and nothing else. It is for inference: the
    delta has no gradient.

    Args:
        base: the wrapped module, called as it is.
        route: the tables over slots of this target.
        routing: the slots of the current forward's rows, shared by the whole model.
        name: the target's path in the model, for messages.
        is_head: whether this is the output head, which may see fewer rows than the other layers.

    Attributes:
        shared: the siblings that are called with the same x, or None.

    Example:
        >>> import torch
        >>> from lorafold.route import LoraPair
        >>> a, b = torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)
        >>> base = nn.Linear(4, 2, dtype=torch.bfloat16).requires_grad_(False)
        >>> routing = Routing(torch.device("cpu"), max_loras=1)
        >>> layer = RoutedLinear(base, LoraRoute.from_pairs([LoraPair(a, b, 2.0)]), routing)
        >>> x = torch.ones(2, 4, dtype=torch.bfloat16)
        >>> routing.begin([-1, 0])
        >>> (layer(x) == base(x)).all(dim=1).tolist()
        [True, False]
    """

    def __init__(
        self,
        base: nn.Module,
        route: LoraRoute,
        routing: Routing,
        *,
        name: str = "",
        is_head: bool = False,
    ) -> None:
        super().__init__()
        self.base = base
        self.route = route
        self.routing = routing
        self.name = name
        self.is_head = is_head
        self.shared: SharedInput | None = None
        self._is_off = NO_FFN and _is_feed_forward(name)
        self.training = base.training

    @property
    def in_features(self) -> int:
        """Input features of the wrapped module."""
        return self.route.k_in

    @property
    def out_features(self) -> int:
        """Output features of the wrapped module."""
        return self.route.n_out

    @property
    def weight(self) -> Any:
        """The weight of the wrapped module: model code asks a layer's weight for its dtype."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """The bias of the wrapped module."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """Call the wrapped module, then fold in place.

        Args:
            x: [..., in_features] bfloat16, one row per token of the forward.

        Returns:
            [..., out_features] bfloat16.

        Raises:
            RouteError: if x has another number of rows than the forward, or is not bfloat16.
        """
        rows = self.routing.head_rows if self.is_head else self.routing.rows
        if rows is None or self._is_off:
            out: Tensor = self.base(x)
            return out
        # A compiler sees no versions of tensors, and an inference tensor has none.
        if self.shared is None or torch.compiler.is_compiling() or x.is_inference():
            return _routed_outputs((self,), x, rows)[0]
        return self.shared.output(self, x, rows)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"max_loras={self.route.max_loras}, max_rank={self.route.max_rank}"


class SharedInput:
    """Layers that a model calls one after the other with one and the same x (q/k/v, gate/up).

    The first call runs all of them, so that their deltas cost one operator call, and keeps the
    other outputs until they are asked for. An output is handed out once, and only for the very
    tensor it was made from, unchanged since and in the same step; otherwise it is made anew. So
    this changes no bits, only when the siblings run.

    Args:
        layers: at least two, with the same number of input features.

    Example:
        >>> from lorafold.route import LoraPair
        >>> a, b = torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)
        >>> route, routing = LoraRoute.from_pairs([LoraPair(a, b, 2.0)]), Routing(a.device, 1)
        >>> bases = [nn.Linear(4, 2, dtype=torch.bfloat16).requires_grad_(False) for _ in range(2)]
        >>> gate, up = (RoutedLinear(base, route, routing) for base in bases)
        >>> gate.shared = up.shared = SharedInput([gate, up])
        >>> routing.begin([0])
        >>> x = torch.ones(1, 4, dtype=torch.bfloat16)
        >>> gate(x).shape, up(x).shape  # the second call finds its output ready
        (torch.Size([1, 2]), torch.Size([1, 2]))
    """

    def __init__(self, layers: Sequence[RoutedLinear]) -> None:
        self.layers = tuple(layers)
        self._source: tuple[Tensor, int, Rows] | None = None
        self._ready: dict[RoutedLinear, Tensor] = {}

    def output(self, layer: RoutedLinear, x: Tensor, rows: Rows) -> Tensor:
        """What `layer` gives for x."""
        if not self._is_made_from(x, rows) or layer not in self._ready:
            outs = _routed_outputs(self.layers, x, rows)
            self._source = (x, x._version, rows)
            self._ready = dict(zip(self.layers, outs, strict=True))
        out = self._ready.pop(layer)
        if not self._ready:
            self._source = None
        return out

    def _is_made_from(self, x: Tensor, rows: Rows) -> bool:
        if self._source is None:
            return False
        source, version, source_rows = self._source
        return source is x and version == x._version and source_rows is rows


def _is_feed_forward(name: str) -> bool:
    """Whether `LORAFOLD_NO_FFN` means this target: feed-forward layers, and a GDN's out_proj."""
    segments = set(name.split("."))
    return bool(segments & {"mlp", "feed_forward", "block_sparse_moe"}) or name.endswith(
        "linear_attn.out_proj"
    )


def _routed_outputs(layers: Sequence[RoutedLinear], x: Tensor, rows: Rows) -> list[Tensor]:
    """Call the wrapped modules of the layers with x and fold the rows' deltas into the outputs."""
    num_rows, k_in = rows.seq_slot.shape[0], layers[0].in_features
    if x.numel() != num_rows * k_in:
        raise RouteError(
            f"`{layers[0].name}` got {tuple(x.shape)}, but this forward has {num_rows} rows of "
            f"{k_in} features for it; call the whole model, with one adapter per sequence"
        )
    outs: list[Tensor] = []

    def base() -> list[Tensor]:
        outs.extend([layer.base(x) for layer in layers])
        # reshape copies where it cannot make a view, so its results are what is returned.
        return [out.reshape(num_rows, out.shape[-1]) for out in outs]

    flat = apply_lora_beside(
        [layer.route for layer in layers],
        x.reshape(num_rows, k_in),
        base,
        rows.seq_slot,
        plan=rows.plan,
    )
    return [folded.view(out.shape) for folded, out in zip(flat, outs, strict=True)]
