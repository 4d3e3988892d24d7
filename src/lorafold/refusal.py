"""Every reason for which an adapter is refused: one stable code each.

The codes are part of the public interface: they travel on the error as `.code`, and
docs/formats.md lists the same ones. They never change their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from lorafold.errors import AdapterError, AdapterFormatError, AdapterMismatchError

__all__ = ["DOWNGRADABLE", "Decisions", "Refusal", "listed", "printable", "refuse"]


class Refusal(Enum):
    """One reason to refuse an adapter; the value is the code, `meaning` a sentence.

    Example:
        >>> Refusal.DORA.value
        'dora'
        >>> Refusal("pickle").meaning
        'the weights are a pickle file'
    """

    meaning: str

    def __new__(cls, code: str, meaning: str) -> Refusal:
        """A member whose value is the code."""
        member = object.__new__(cls)
        member._value_ = code
        member.meaning = meaning
        return member

    # Files
    MISSING_FILE = "missing-file", "the folder, its config or its weights are not there"
    AMBIGUOUS_FILES = "ambiguous-files", "several files could be the weights"
    PICKLE = "pickle", "the weights are a pickle file"
    ESCAPING_PATH = "escaping-path", "a link or a shard name leads out of the folder"
    BROKEN_FILE = "broken-file", "a safetensors file is truncated, oversized or malformed"
    BAD_INDEX = "bad-index", "the index of a sharded file does not agree with its shards"
    DTYPE = "dtype", "a factor is not float32, float16, bfloat16 or float8"
    # Tensors
    FOREIGN_FORMAT = "foreign-format", "the file is of another tool and must be converted"
    SEVERAL_ADAPTERS = "several-adapters", "one file holds the tensors of several adapters"
    DUPLICATE_TENSOR = "duplicate-tensor", "two tensors are the same factor of one module"
    UNPAIRED_TENSOR = "unpaired-tensor", "an A without its B, or a B without its A"
    UNKNOWN_TENSOR = "unknown-tensor", "a tensor is no part of any format that is known"
    EMPTY_ADAPTER = "empty-adapter", "the file holds no LoRA factor"
    SHAPE = "shape", "a factor has the wrong number of axes, or A and B disagree on the rank"
    EMPTY_FACTOR = "empty-factor", "a factor has an axis of size 0"
    NON_FINITE = "non-finite", "a factor holds NaN or infinity"
    OVERFLOW = "overflow", "a value is finite as stored and infinite in bfloat16"
    INERT = "inert", "every B, or every scale, is zero: the adapter changes nothing"
    # Config
    BAD_CONFIG = "bad-config", "adapter_config.json is not valid"
    NOT_LORA = "not-lora", "peft_type, or a tensor name, is that of another method"
    TASK_TYPE = "task-type", "the adapter is not for causal language modelling"
    UNKNOWN_FIELD = "unknown-field", "the config sets a field that is not known"
    RANK_MISMATCH = "rank-mismatch", "the config and the tensors disagree on a rank"
    AMBIGUOUS_SCALE = "ambiguous-scale", "two settings give one module different ranks or alphas"
    UNMATCHED_PATTERN = "unmatched-pattern", "a rank or alpha pattern matches no tensor"
    UNSAFE_PATTERN = "unsafe-pattern", "a pattern may take exponential time to match"
    UNMATCHED_TARGET = "unmatched-target", "the config targets a module that has no tensor"
    EXCLUDED_TENSOR = "excluded-tensor", "a tensor belongs to a module that the config excludes"
    # What is not plain LoRA
    DORA = "dora", "DoRA scales the base output"
    BIAS = "bias", "the adapter replaces biases of the base"
    LORA_BIAS = "lora-bias", "B has a bias of its own"
    BASE_WEIGHTS = "base-weights", "the file replaces a weight of the base"
    MODULES_TO_SAVE = "modules-to-save", "the adapter replaces whole modules of the base"
    RESIZED_VOCABULARY = "resized-vocabulary", "the vocabulary differs from the base's"
    TRAINABLE_TOKENS = "trainable-tokens", "the adapter replaces rows of the embedding"
    BASE_CHANGING_INIT = "base-changing-init", "the initialisation changed the base weights"
    UNKNOWN_INIT = "unknown-init", "the initialisation is not known"
    ALORA = "alora", "the adapter acts from an invocation sequence onwards only"
    ARROW = "arrow", "the adapter routes among other adapters"
    QALORA = "qalora", "the input is pooled before A"
    BDLORA = "bdlora", "a factor is block-diagonal and stored compactly"
    LAYER_REPLICATION = "layer-replication", "the base was rebuilt with repeated layers"
    MEGATRON = "megatron", "the adapter belongs to parallel layers of Megatron"
    CONV = "conv", "the target is a convolution"
    # Model
    EMBEDDING = "embedding", "the adapter changes an embedding, and none is a target"
    UNMATCHED_PATH = "unmatched-path", "a module of the adapter is no target of the model"
    AMBIGUOUS_PATH = "ambiguous-path", "a module of the adapter may be several targets"
    SHAPE_MISMATCH = "shape-mismatch", "a factor does not fit the target's in or out features"
    FUSED_SLICES = "fused-slices", "a fused target cannot be cut into the adapter's slices"
    FUSED_SCALES = "fused-scales", "slices of a fused target have scales that do not combine"
    EXPERT_LAYOUT = "ambiguous-expert-layout", "the expert factors can be read in several ways"
    INCOMPLETE_EXPERTS = "incomplete-experts", "some experts, or one of gate and up, are missing"
    # Pool
    RANK_ABOVE_MAX = "rank-above-max", "a rank is above the pool's max_rank"


DOWNGRADABLE = frozenset(
    {
        Refusal.UNKNOWN_FIELD,
        Refusal.UNMATCHED_PATTERN,
        Refusal.UNMATCHED_TARGET,
        Refusal.UNMATCHED_PATH,
        Refusal.INCOMPLETE_EXPERTS,
    }
)
"""What `strict=False` turns from an error into a line of the report. Nothing else."""

_MISMATCHES = frozenset(
    {
        Refusal.EMBEDDING,
        Refusal.UNMATCHED_PATH,
        Refusal.SHAPE_MISMATCH,
        Refusal.RANK_ABOVE_MAX,
    }
)


def refuse(refusal: Refusal, message: str, *, adapter: str) -> AdapterError:
    """The error for one reason, to be raised; its `.code` is the reason's code.

    Args:
        refusal: the reason.
        message: what was given, what is allowed, what to do.
        adapter: the name or the folder of the adapter.

    Returns:
        `AdapterMismatchError` where a well-formed adapter does not fit this model or pool, else
        `AdapterFormatError`.

    Example:
        >>> error = refuse(Refusal.PICKLE, "convert it", adapter="sql")
        >>> error.code, str(error)
        ('pickle', '`sql`: convert it [pickle]')
    """
    text = printable(f"`{adapter}`: {message} [{refusal.value}]")
    kind = AdapterMismatchError if refusal in _MISMATCHES else AdapterFormatError
    return kind(text, adapter=adapter, code=refusal.value)


def printable(text: str) -> str:
    r"""The text with escapes for what a terminal would obey, or what UTF-8 cannot hold.

    Words of an adapter's files are untrusted: a name may hold any character.

    Example:
        >>> printable("q\x1b[31m")
        'q\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def listed(names: Iterable[object], limit: int = 8) -> str:
    """The names in back-ticks, sorted, with a count instead of the rest.

    Example:
        >>> listed(["b", "a", "c"], limit=2)
        '`a`, `b` and 1 more'
    """
    every = sorted(map(str, names))
    shown = ", ".join(f"`{name[:200]}`" for name in every[:limit])
    rest = len(every) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


class Decisions:
    """What was decided while an adapter was read: choices made, and refusals downgraded.

    Args:
        adapter: the name or the folder of the adapter, for messages.
        strict: False turns the refusals of `DOWNGRADABLE` into lines of `skipped`.

    Attributes:
        notes: choices that were made, in order.
        skipped: what `strict=False` let pass, in order, each with its code.

    Example:
        >>> decisions = Decisions("sql", strict=False)
        >>> decisions.tolerate(Refusal.UNKNOWN_FIELD, "`new_flag` is not known")
        >>> decisions.skipped
        ['unknown-field: `new_flag` is not known']
    """

    def __init__(self, adapter: str, *, strict: bool = True) -> None:
        self.adapter = adapter
        self.strict = strict
        self.notes: list[str] = []
        self.skipped: list[str] = []

    def note(self, text: str) -> None:
        """Record a choice."""
        self.notes.append(printable(text))

    def refuse(self, refusal: Refusal, message: str) -> AdapterError:
        """`refuse` for this adapter."""
        return refuse(refusal, message, adapter=self.adapter)

    def tolerate(self, refusal: Refusal, message: str) -> None:
        """Raise the refusal if strict; else record it. Only for members of `DOWNGRADABLE`."""
        if self.strict or refusal not in DOWNGRADABLE:
            hint = "; hint: with strict off it is skipped" if refusal in DOWNGRADABLE else ""
            raise self.refuse(refusal, message + hint)
        self.skipped.append(printable(f"{refusal.value}: {message}"))
