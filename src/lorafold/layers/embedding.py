"""An embedding whose rows name their adapters.

The shrink of a looked-up token is a column of A: what the dot products with a one-hot row of the
vocabulary's length give, without computing them. The expand and the fold are the operators'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorafold.errors import RouteError
from lorafold.layers.routing import Routing
from lorafold.ops import apply_lora_bgmv
from lorafold.route import LoraRoute

__all__ = ["RoutedEmbedding", "plain_lookup"]

_BF16_BYTES = 2


def plain_lookup(embedding: Any, ids: Tensor) -> Tensor:
    """The rows of an embedding's weight, times its `embed_scale` where it has one (Gemma).

    Args:
        embedding: has `weight` [num_tokens, hidden].
        ids: any shape, int64 or int32.

    Returns:
        [..., hidden] in the dtype of the weight.

    Example:
        >>> embedding = nn.Embedding(4, 2)
        >>> torch.equal(plain_lookup(embedding, torch.tensor([3])), embedding(torch.tensor([3])))
        True
    """
    rows = F.embedding(ids, embedding.weight)
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, Tensor):
        scale = scale.to(rows.dtype)
    return rows if scale is None else rows * scale


class RoutedEmbedding(nn.Module):
    """An embedding, plus per token the delta of the token's adapter.

        y = base(ids);  y[i] += scale[s] * xa[i] B[s]^T,  xa[i] = A[s][:, ids[i]],  s = seq_slot[i]

    Where the embedding multiplies what it looks up (`embed_scale`), so does this the delta: the
    scale of the fold is their product in float32. The output head keeps its weight, also where that
    is the embedding's.

    Args:
        base: the wrapped embedding, called as it is.
        route: the tables over slots of this target; k_in is the number of tokens. Every A that they
            may ever point to lies in the one tensor `route.storage`, as in a pool.
        routing: the slots of the current forward's rows, shared by the whole model.
        name: the target's path in the model, for messages.

    Raises:
        RouteError: if the route holds another number of tensors than one.

    Example:
        >>> from lorafold.adapter import Adapter, LoraWeights, TargetShape
        >>> from lorafold.pool import Pool
        >>> base = nn.Embedding(4, 2, dtype=torch.bfloat16).requires_grad_(False)
        >>> a = torch.tensor([[0.0, 0.0, 3.0, 0.0]]).bfloat16()
        >>> b = torch.ones(2, 1, dtype=torch.bfloat16)
        >>> pool = Pool({"embed": TargetShape(4, 2)}, max_loras=1, max_rank=1)
        >>> pool.place(Adapter("sql", {"embed": LoraWeights(a, b, scale=2.0)}))
        0
        >>> routing = Routing(torch.device("cpu"), max_loras=1)
        >>> layer = RoutedEmbedding(base, pool.route("embed"), routing)
        >>> routing.begin([0, 0])
        >>> ids = torch.tensor([[1], [2]])  # A is zero but for token 2
        >>> (layer(ids) == base(ids)).all(dim=-1).tolist()
        [[True], [False]]
    """

    def __init__(
        self, base: nn.Module, route: LoraRoute, routing: Routing, *, name: str = ""
    ) -> None:
        super().__init__()
        if len(route.storage) != 1:
            raise RouteError(
                f"the route of `{name}` must point into one tensor; given: {len(route.storage)}"
            )
        self.base = base
        self.route = route
        self.routing = routing
        self.name = name
        self.training = base.training
        self._memory = route.storage[0].view(-1)
        # A number: a compiler cannot trace the question where a tensor is.
        self._address = self._memory.data_ptr()
        self._embed_scale = _embed_scale(base)
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._steps = torch.arange(route.max_rank, device=route.device) * route.k_in
            self._expand = _expand_of(route, copies_scale=self._embed_scale is not None)

    @property
    def num_embeddings(self) -> int:
        """Tokens of the wrapped embedding."""
        return self.route.k_in

    @property
    def embedding_dim(self) -> int:
        """Features of a token."""
        return self.route.n_out

    @property
    def padding_idx(self) -> Any:
        """The padding token of the wrapped embedding."""
        return self.base.padding_idx

    @property
    def weight(self) -> Any:
        """The weight of the wrapped embedding: model code asks for its size and dtype."""
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Call the wrapped embedding, then fold in place.

        Args:
            ids: any shape, int64 or int32: one token per row of the forward.

        Returns:
            [..., embedding_dim] bfloat16.

        Raises:
            RouteError: if there is another number of tokens than the forward has.
        """
        out: Tensor = self.base(ids)
        rows = self.routing.rows
        if rows is None:
            return out
        num_rows = rows.seq_slot.shape[0]
        if ids.numel() != num_rows:
            raise RouteError(
                f"`{self.name}` got {tuple(ids.shape)} tokens, but this forward has {num_rows}; "
                "call the whole model, with one adapter per sequence"
            )
        flat = out.reshape(num_rows, self.embedding_dim)
        xa = self._columns(ids.reshape(-1), rows.seq_slot)
        if self._embed_scale is not None:
            torch.mul(self.route.scale_table, self._embed_scale, out=self._expand.scale_table)
        apply_lora_bgmv(self._expand, xa, flat, rows.seq_slot, plan=rows.plan)
        return flat.view(out.shape)

    def _columns(self, ids: Tensor, seq_slot: Tensor) -> Tensor:
        """[n, max_rank] bfloat16: each token's column of its slot's A, padding included.

        Rows without an adapter get some other column, which nothing reads.
        """
        table = self.route.a_table
        starts = torch.where(table != 0, table - self._address, 0) // _BF16_BYTES
        slots = seq_slot.clamp(0, self.route.max_loras - 1).long()
        return self._memory[(starts[slots] + ids).unsqueeze(1) + self._steps]

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"max_loras={self.route.max_loras}, max_rank={self.route.max_rank}"


def _embed_scale(embedding: Any) -> float | None:
    """What an embedding multiplies its rows by, as it does so; None where it does not."""
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, Tensor):
        scale = scale.to(embedding.weight.dtype)
    return None if scale is None else float(scale)


def _expand_of(route: LoraRoute, *, copies_scale: bool) -> LoraRoute:
    """A route that takes xa for x: its A is the identity, which changes no number.

    Products with 1, sums with 0 and the rounding of what is in bfloat16 already are exact under
    both numerics, but that -0 becomes +0, as in a dot product with a one-hot row.
    """
    unit = torch.eye(route.max_rank, dtype=torch.bfloat16, device=route.device)
    scales = route.scale_table.clone() if copies_scale else route.scale_table
    return LoraRoute(
        torch.full_like(route.a_table, unit.data_ptr()),
        route.b_table,
        scales,
        route.rank_table,
        k_in=route.max_rank,
        n_out=route.n_out,
        max_rank=route.max_rank,
        storage=(unit, *route.storage),
    )
