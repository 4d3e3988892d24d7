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

from lorafold.adapter import Adapter, LoadReport
from lorafold.errors import ModelError, RouteError
from lorafold.expert_pool import ExpertPool
from lorafold.layers.attach import find_targets, unwrap_targets, wrap_targets
from lorafold.layers.moe import MoeTargets, find_moe, wrap_moe
from lorafold.layers.routing import Routing, Rows
from lorafold.peft import load_adapter
from lorafold.peft.layouts import ExpertLayout
from lorafold.pool import Pool

__all__ = ["MultiLora", "attach"]


def attach(
    model: nn.Module,
    *,
    max_loras: int = 8,
    max_rank: int = 64,
    targets: Sequence[str] | str | None = None,
    max_expert_rank: int | None = None,
    max_expert_bytes: int | None = None,
) -> MultiLora:
    """Wrap the layers of a causal language model, in place, so that rows can name adapters.

    The model is run once on six tokens, to see which layers can be targets. All memory for adapters
    is allocated here, once. While attached, the parameters of a target are called `<path>.base.*`:
    `detach` before saving the model.

    Args:
        model: a causal language model of transformers, in bfloat16, on one device.
        max_loras: adapters that fit at the same time.
        max_rank: the largest rank that fits.
        targets: which layers: None for every linear layer but the output head, a list of words such
            as ["all-linear", "embed_tokens", "lm_head"], or a regular expression (`find_targets`).
            What is given to a model as `inputs_embeds` passes its embedding by.
        max_expert_rank: for a mixture of experts, the largest rank of its routed experts that fits;
            they and the routers are then targets too, and all experts run as `run_experts` says.
            0 for the routers alone, None for neither. Experts are many: `expert_pool_bytes` says
            how much memory they take.
        max_expert_bytes: refuse to allocate more than this for the experts; None for as much as the
            device has free.

    Returns:
        The object that loads adapters and generates with them.

    Raises:
        ModelError: if the model or the targets do not allow it.
        RouteError: if max_loras or max_rank is below 1, or max_expert_rank below 0.
        BackendError: if the device cannot hold the pool, or its experts take more than
            max_expert_bytes. The model is unchanged after any error.

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
        >>> lora.generate(ids, adapters=[None], min_new_tokens=2, max_new_tokens=2).shape
        torch.Size([1, 5])
        >>> lora.detach()
    """
    layers = find_targets(model, targets)
    device = next(iter(layers.values())).device
    shapes = {path: at.shape for path, at in layers.items()}
    moe, experts = MoeTargets(), None
    if max_expert_rank is not None:
        moe = find_moe(model, device, with_experts=max_expert_rank != 0)
    if moe.experts:
        sizes = {"max_loras": max_loras, "max_rank": max_expert_rank or 0}
        experts = ExpertPool(moe.experts, **sizes, device=device, max_bytes=max_expert_bytes)
    shapes |= moe.routers
    pool = Pool(shapes, max_loras=max_loras, max_rank=max_rank, device=device, experts=experts)
    has_head = any(layer.is_head for layer in layers.values())
    routing = Routing(device, max_loras, has_head=has_head)
    try:
        wrap_targets(model, layers, pool.route, routing)
        wrap_moe(model, moe, pool, routing)
        return MultiLora(model, pool, routing)
    except BaseException:
        unwrap_targets(model)
        raise


class MultiLora:
    """A model whose rows name their adapters. `attach` makes it.

    One `generate` or `rows` runs at a time: a second thread waits, and a plain forward of the model
    in another thread meanwhile is an error. Gradients are off: the deltas have none.

    Attributes:
        model: the model, with a routed layer in the place of every target.
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
        return tuple(self.pool.shapes)

    def load(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        strict: bool = True,
        allow_inert: bool = False,
        expert_layout: ExpertLayout | None = None,
    ) -> LoadReport:
        """Read a PEFT adapter and place it in the pool, all of it or nothing.

        An adapter of the same name is replaced. In a full pool the one that was not used for
        longest gives way, unless it is pinned or in use.

        Args:
            name: what rows will call it.
            path: the folder with `adapter_config.json`; or what `lorafold.peft.parse` made of one,
                which is not read again and keeps the `strict` and `allow_inert` it was parsed with.
            strict: False lets some harmless oddities pass (`lorafold.peft.parse`).
            allow_inert: accept an adapter that changes nothing.
            expert_layout: how the file stores the factors of experts, where that is ambiguous.

        Returns:
            What became of every tensor of the file.

        Raises:
            AdapterFormatError: if the files are broken or use what is not supported.
            AdapterMismatchError: if any of it does not fit the targets of this model.
            PoolFullError: if every slot is pinned or in use.
        """
        adapter = self.read(
            name, path, strict=strict, allow_inert=allow_inert, expert_layout=expert_layout
        )
        self.pool.place(adapter)
        return adapter.report

    def read(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        strict: bool = True,
        allow_inert: bool = False,
        expert_layout: ExpertLayout | None = None,
    ) -> Adapter:
        """Read a PEFT adapter for this model and place it nowhere; arguments as in `load`.

        Raises:
            AdapterFormatError: if the files are broken or use what is not supported.
            AdapterMismatchError: if any of it does not fit the targets of this model.
        """
        return load_adapter(
            path,
            self.pool.shapes,
            name=name,
            strict=strict,
            allow_inert=allow_inert,
            base_tensor=self._base_tensor,
            expert_layout=expert_layout,
        )

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

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep the model to this thread, for a number of forwards with `packed_rows`.

        Raises:
            RouteError: if called inside `rows` or another `turn`.
            ModelError: if detached already.
        """
        with self._my_turn(), torch.no_grad():
            yield

    @contextmanager
    def packed_rows(self, slots: Sequence[int] | Rows, kept: Sequence[int]) -> Iterator[None]:
        """Route one forward whose sequences stand one after the other in one row of the batch.

        The caller keeps the slots (`Pool.acquire`) and the sequences apart: to the model's own
        attention they are one sequence.

        Args:
            slots: one per token of `input_ids` [1, num_tokens]; -1 is base. Or rows of the
                caller's, as `Routing.begin_packed` takes them.
            kept: the tokens that the output head sees, given to it as `logits_to_keep`.

        Raises:
            RouteError: if not called inside `turn`, or the slots or kept tokens do not exist.

        Example: `Routing.begin_packed`; `lorafold.engine.packed` builds on it.
        """
        if self._owner != threading.get_ident():
            raise RouteError("`packed_rows` needs the model to itself; call it inside `turn`")
        self._routing.begin_packed(slots, kept)
        try:
            yield
        finally:
            self._routing.end()

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
            raise RouteError(
                "`rows`, `turn`, `generate` and `detach` cannot be used inside `rows` or `turn`"
            )
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
