"""A model with its adapters: attach, load, generate, detach.

Ties names to slots, and slots to the rows of a forward. It does not batch requests, and needs
nothing of transformers but the model it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.adapter import LoadReport, TargetShape
from lorafold.errors import ModelError, RouteError
from lorafold.layers.attach import find_targets, unwrap_targets, wrap_targets
from lorafold.layers.routing import Routing
from lorafold.peft import load_adapter
from lorafold.pool import Pool

__all__ = ["MultiLora", "attach"]


def attach(
    model: nn.Module,
    *,
    max_loras: int = 8,
    max_rank: int = 64,
    targets: Sequence[str] | str | None = None,
) -> MultiLora:
    """Wrap the linear layers of a causal language model, in place, so that rows can name adapters.

    The model is run once on six tokens, to see which layers can be targets. All memory for adapters
    is allocated here, once. While attached, the parameters of a target are called `<path>.base.*`:
    `detach` before saving the model.

    Args:
        model: a causal language model of transformers, in bfloat16, on one device.
        max_loras: adapters that fit at the same time.
        max_rank: the largest rank that fits.
        targets: which layers: None for every linear layer but the output head, a list of words, or
            a regular expression (`find_targets`).

    Returns:
        The object that loads adapters and generates with them.

    Raises:
        ModelError: if the model or the targets do not allow it.
        RouteError: if max_loras or max_rank is below 1.
        BackendError: if the device cannot hold the pool. The model is unchanged after any error.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> lora = attach(LlamaForCausalLM(config).bfloat16(), targets=["q_proj", "v_proj"])
        >>> lora.targets
        ('model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.v_proj')
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> lora.generate(ids, adapters=[None], max_new_tokens=2, pad_token_id=0).shape
        torch.Size([1, 5])
        >>> lora.detach()
    """
    layers = find_targets(model, targets)
    device = next(iter(layers.values())).device
    pool = Pool(
        {path: TargetShape(at.in_features, at.out_features) for path, at in layers.items()},
        max_loras=max_loras,
        max_rank=max_rank,
        device=device,
    )
    has_head = any(layer.is_head for layer in layers.values())
    routing = Routing(device, max_loras, has_head=has_head)
    wrap_targets(model, layers, pool.route, routing)
    return MultiLora(model, pool, routing)


class MultiLora:
    """A model whose rows name their adapters. `attach` makes it.

    One `generate` or `rows` runs at a time: a second thread waits, and a plain forward of the model
    in another thread meanwhile is an error. Gradients are off: the deltas have none.

    Attributes:
        model: the model, with a `RoutedLinear` in the place of every target.
        pool: where the adapters are.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> lora = attach(LlamaForCausalLM(config).bfloat16())
        >>> lora.names(), len(lora.targets)
        ((), 7)
        >>> lora.load("poet", "no/such/folder")
        Traceback (most recent call last):
        lorafold.errors.AdapterFormatError: `no/such/folder`: there is no such folder ...
        >>> lora.generate(torch.tensor([[1, 2]]), adapters=["poet"])
        Traceback (most recent call last):
        lorafold.errors.AdapterNotFoundError: no adapter `poet` is placed; placed are: none
    """

    def __init__(self, model: nn.Module, pool: Pool, routing: Routing) -> None:
        self.model = model
        self.pool = pool
        self._routing = routing
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._is_detached = False
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    @property
    def targets(self) -> tuple[str, ...]:
        """The paths of the layers that adapters may change."""
        return tuple(self.pool.targets)

    def load(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        strict: bool = True,
        allow_inert: bool = False,
    ) -> LoadReport:
        """Read a PEFT adapter and place it in the pool, all of it or nothing.

        An adapter of the same name is replaced. In a full pool the one that was not used for
        longest gives way, unless it is pinned or in use.

        Args:
            name: what rows will call it.
            path: the folder with `adapter_config.json`.
            strict: False lets some harmless oddities pass (`lorafold.peft.parse`).
            allow_inert: accept an adapter that changes nothing.

        Returns:
            What became of every tensor of the file.

        Raises:
            AdapterFormatError: if the files are broken or use what is not supported.
            AdapterMismatchError: if any of it does not fit the targets of this model.
            PoolFullError: if every slot is pinned or in use.
        """
        adapter = load_adapter(
            path,
            self.pool.targets,
            name=name,
            strict=strict,
            allow_inert=allow_inert,
            base_tensor=self._base_tensor,
        )
        self.pool.place(adapter)
        return adapter.report

    def unload(self, name: str) -> None:
        """Take the name of an adapter away, and free its slot as soon as nothing uses it.

        Raises:
            AdapterNotFoundError: if no adapter of that name is loaded.
        """
        self.pool.evict(name)

    def names(self) -> tuple[str, ...]:
        """The loaded adapters, in the order of their slots."""
        return self.pool.names()

    @contextmanager
    def rows(self, adapters: Sequence[str | None]) -> Iterator[None]:
        """Route the forwards of the model inside the `with` block.

        Args:
            adapters: one name per sequence of the batch; None is base.

        Raises:
            RouteError: if a `rows` or `generate` is active in this thread already.
            AdapterNotFoundError: if an adapter is not loaded.

        Example:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> config = LlamaConfig(
            ...     vocab_size=8,
            ...     hidden_size=16,
            ...     intermediate_size=16,
            ...     num_hidden_layers=1,
            ...     num_attention_heads=2,
            ... )
            >>> lora = attach(LlamaForCausalLM(config).bfloat16())
            >>> with lora.rows([None, None]):
            ...     lora.model(torch.tensor([[1, 2, 3], [4, 5, 6]])).logits.shape
            torch.Size([2, 3, 8])
        """
        with self._routed(adapters, may_repeat=False):
            yield

    def generate(self, *args: Any, adapters: Sequence[str | None], **kwargs: Any) -> Any:
        """`model.generate`, each prompt with its own adapter.

        Beams and `num_return_sequences` follow the adapter of their prompt.

        Args:
            *args: as `model.generate` takes them.
            adapters: one name per prompt; None is base.
            **kwargs: as `model.generate` takes them.

        Returns:
            What `model.generate` returns.

        Raises:
            RouteError: if there is not one adapter per prompt, continuous batching is asked for, or
                a `rows` or `generate` is active in this thread already.
            AdapterNotFoundError: if an adapter is not loaded.
        """
        if kwargs.get("cache_implementation") == "paged":
            raise RouteError('cache_implementation="paged" batches by itself and cannot be routed')
        num_prompts = _num_prompts(args, kwargs)
        if num_prompts != len(adapters):
            raise RouteError(
                f"name one adapter (or None) per prompt: {num_prompts} prompts; given: "
                f"{list(adapters)}"
            )
        with self._routed(adapters, may_repeat=True):
            return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    def detach(self) -> None:
        """Put every wrapped layer back; the model is then as it was before `attach`.

        Raises:
            RouteError: if called inside `rows`.
            ModelError: if detached already.
        """
        with self._my_turn():
            self._hook.remove()
            unwrap_targets(self.model)
            self._is_detached = True

    def _base_tensor(self, path: str) -> Tensor | None:
        """The weight of a module, which a copy in an adapter's file is compared with."""
        try:
            weight = getattr(self.model.get_submodule(path), "weight", None)
        except AttributeError:
            return None
        return weight if isinstance(weight, Tensor) else None

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        """One thread at a time, and not inside itself."""
        me = threading.get_ident()
        if self._owner == me:
            raise RouteError("`rows`, `generate` and `detach` cannot be used inside `rows`")
        with self._turn:
            if self._is_detached:
                raise ModelError("the model was detached; call `lorafold.attach` again")
            self._owner = me
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def _routed(self, adapters: Sequence[str | None], *, may_repeat: bool) -> Iterator[None]:
        """Hold the slots of the adapters and route to them; whatever happens, let go of both."""
        if isinstance(adapters, str):
            raise RouteError(f"adapters must be a list of names; given: {adapters!r}")
        with ExitStack() as stack:
            stack.enter_context(self._my_turn())
            stack.enter_context(torch.no_grad())
            slots: dict[str | None, int] = {None: -1}
            for name in dict.fromkeys(adapters):
                if name is not None:
                    slots[name] = self.pool.acquire(name)
                    stack.callback(self.pool.release, slots[name])
            self._routing.begin([slots[name] for name in adapters], may_repeat=may_repeat)
            stack.callback(self._routing.end)
            yield

    def _before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Tell the routing the shape of the forward that is about to run."""
        if not self._routing.is_active:
            return
        # A compiler cannot trace the question.
        if not torch.compiler.is_compiling() and self._owner != threading.get_ident():
            raise RouteError("another thread is in `rows` or `generate` with this model")
        tokens = _first_tensor(*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        if tokens is None or tokens.dim() < 2:
            raise RouteError("the model must be called with input_ids or inputs_embeds")
        num_sequences, num_tokens = tokens.shape[:2]
        keep = kwargs.get("logits_to_keep", 0)
        num_kept = keep.numel() if isinstance(keep, Tensor) else min(keep or num_tokens, num_tokens)
        self._routing.step(num_sequences, num_tokens, num_kept)


def _num_prompts(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many prompts a call of `generate` carries."""
    named = (kwargs.get(key) for key in ("inputs", "input_ids", "inputs_embeds"))
    prompts = _first_tensor(*args[:1], *named)
    # Without a prompt, generate starts from one beginning-of-sequence token.
    return 1 if prompts is None else int(prompts.shape[0])


def _first_tensor(*candidates: Any) -> Tensor | None:
    return next((each for each in candidates if isinstance(each, Tensor)), None)
