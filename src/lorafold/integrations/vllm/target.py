"""One dense layer as vLLM calls it: a linear layer, an embedding or the output head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lorafold.errors import BackendError
from lorafold.integrations.vllm.fold import fold_rows
from lorafold.integrations.vllm.rows import StepRows
from lorafold.integrations.vllm.tables import SlotTables

if TYPE_CHECKING:
    from lorafold.integrations.vllm.punica import Punica

__all__ = ["Target", "require_in_place"]


class Target:
    """One layer's view of the step.

    Args:
        punica: the rows of the step.
        tables: the layer's tables over slots.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from lorafold.integrations.vllm.punica import Punica
        >>> config = SimpleNamespace(max_loras=2, fully_sharded_loras=False)
        >>> layer = SimpleNamespace(
        ...     lora_a_stacked=(torch.ones(2, 1, 8, 32).bfloat16(),),
        ...     lora_b_stacked=(torch.ones(2, 1, 16, 8).bfloat16(),),
        ... )
        >>> punica = Punica(8, 4, "cpu", lora_config=config)
        >>> target = punica.target(layer)
        >>> target.tables.place(0, 0, rank=2, scale=0.25)
        >>> punica.tokens.update(torch.tensor([-1, 0], dtype=torch.int32))
        >>> x, y = torch.ones(2, 32).bfloat16(), torch.zeros(2, 16).bfloat16()
        >>> target.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, (16,))
        >>> y[:, 0].tolist()  # base, and 0.25 * 2 * 32
        [0.0, 16.0]
    """

    def __init__(self, punica: Punica, tables: SlotTables) -> None:
        self.punica = punica
        self.tables = tables

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fold the deltas of a linear layer, packed or not, *in place*.

        Args:
            y: [n, sum of the slices] bfloat16 or float32, the base layer's output.
            x: [n, k_in] bfloat16.
            lora_a_stacked: the tensors that the tables were made from.
            lora_b_stacked: likewise.
            scale: not used; the tables hold each adapter's own.
            output_slices: not used; the tables know them.
            add_inputs: must be True.
            **kwargs: not used.

        Raises:
            BackendError: if add_inputs is False.
            RouteError: if y and x do not fit the layer.
        """
        require_in_place(add_inputs)
        self._fold(y, x, self.punica.tokens)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """Fold the deltas of the input embedding, *in place*.

        Args:
            y: [n, hidden] bfloat16, the base embedding.
            x: [n, max_rank] bfloat16: each token's row of its adapter's A.
            lora_b_stacked: the tensor that the tables were made from.
            add_inputs: must be True.
            **kwargs: not used.

        Raises:
            BackendError: if add_inputs is False.
            RouteError: if y and x do not fit the layer.
        """
        require_in_place(add_inputs)
        self._fold(y, x, self.punica.tokens)

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Fold the deltas of the output head into the logits of sampled rows, *in place*.

        Args:
            y: [n, vocabulary or wider] bfloat16 or float32.
            x: [n, hidden] bfloat16, the hidden states of the sampled rows.
            lora_a_stacked: the tensor that the tables were made from.
            lora_b_stacked: likewise.
            scale: not used; the tables hold each adapter's own.
            **kwargs: not used.

        Raises:
            RouteError: if y and x do not fit the layer.
        """
        self._fold(y, x, self.punica.samples)

    def _fold(self, y: Tensor, x: Tensor, rows: StepRows) -> None:
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        fold_rows(y, x, self.tables, rows, self.punica.numerics)

    @property
    def _embeddings_indices(self) -> Tensor:
        """[max_rows] int64: where each token's rows of A start, for all slots one after another."""
        return self.punica.embedding_indices


def require_in_place(add_inputs: bool) -> None:
    """Refuse the schedule in which vLLM adds the delta itself, in bfloat16, to every row.

    Raises:
        BackendError: if add_inputs is False.
    """
    if not add_inputs:
        raise BackendError(
            "with VLLM_LORA_ENABLE_DUAL_STREAM=1 vLLM adds deltas to all rows by itself, rounded "
            "twice; hint: unset it, or set LORAFOLD_VLLM=0"
        )
