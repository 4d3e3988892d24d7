"""Rank, alpha and scale of a module: the config's values, and the patterns that override them.

    scale = alpha / rank, or alpha / sqrt(rank) with use_rslora

PEFT takes the first pattern, in the order of the file, whose key matches. That order is lost when a
config is saved with sorted keys, so two keys that give one module different values are refused.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["ScaleRule", "round_scale"]

_MAX_KEYS = 20_000
_MAX_KEY_LENGTH = 512
# A second or so of matching; no more than three open repeats.
_MAX_WAYS = 4_000_000
_WAYS_OF_A_REPEAT = 150
_MATCH_SECONDS = 10.0
_PLAIN_KEY = re.compile(r"[\w.]+")


def round_scale(scale: float) -> float:
    """The scale in float32: rounded once, to nearest even. Infinite where float32 cannot hold it.

    Example:
        >>> round_scale(4 / 3)
        1.3333333730697632
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", scale))[0])
    except OverflowError:
        return math.inf


class _Pattern:
    """One key of a rank or alpha pattern, compiled as PEFT matches it."""

    def __init__(self, key: str, decisions: Decisions) -> None:
        self.key = key
        if len(key) > _MAX_KEY_LENGTH or not _is_safe(key):
            message = (
                f"the pattern `{key[:100]}` could take for ever to match; allowed: at most "
                f"{_MAX_KEY_LENGTH} characters, no repeated group, and three open repeats, or "
                "fewer beside alternatives and optional parts; hint: split it"
            )
            raise decisions.refuse(Refusal.UNSAFE_PATTERN, message)
        try:
            self._regex = re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError) as error:
            message = f"the pattern `{key[:100]}` is no regular expression: {error}"
            raise decisions.refuse(Refusal.BAD_CONFIG, message) from None

    def matches(self, name: str) -> bool:
        return self._regex.match(name) is not None


def _is_safe(key: str) -> bool:
    """Whether there are few ways to match: `re` may try all of them, and cannot be interrupted."""
    if _PLAIN_KEY.fullmatch(key):
        return True
    bare = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "x", key)
    is_group_repeated = re.search(r"\)\s*[*+{?]", bare) is not None
    is_extended = "(?" in bare or re.search(r"\\\d", key) is not None
    return not is_group_repeated and not is_extended and _num_ways(bare) <= _MAX_WAYS


def _num_ways(bare: str) -> int:
    """An open repeat counts as many, an optional part as two, a group as its alternatives.

    Args:
        bare: a pattern without escapes and sets.
    """
    num_repeats, num_optional = (len(re.findall(each, bare)) for each in ("[*+{]", r"[^*+?}]\?"))
    ways: int = _WAYS_OF_A_REPEAT**num_repeats * 2**num_optional
    open_groups = [1]
    for character in bare:
        if character == "(":
            open_groups.append(1)
        elif character == "|":
            open_groups[-1] += 1
        elif character == ")" and len(open_groups) > 1:
            ways *= open_groups.pop()
    return ways * open_groups[0]


class ScaleRule:
    """The rank, alpha and scale that a config gives to a module.

    Args:
        rank: the config's `r`; None takes the rank of the tensors.
        alpha: the config's `lora_alpha`; None takes the rank, which gives a scale of 1.
        use_rslora: divide by sqrt(rank) instead of rank.
        rank_pattern: regular expression -> rank.
        alpha_pattern: regular expression -> alpha.
        decisions: carries the adapter's name for messages.

    Raises:
        AdapterFormatError: if a pattern is no regular expression, or one that is not safe to match.

    Example:
        >>> rule = ScaleRule(8, 16.0, False, {"q_proj": 4}, {}, Decisions("sql"))
        >>> rule.of(["model.layers.0.self_attn.q_proj"])
        (4, 16.0)
        >>> rule.scale(16.0, 4)
        4.0
    """

    def __init__(
        self,
        rank: int | None,
        alpha: float | None,
        use_rslora: bool,
        rank_pattern: Mapping[str, int],
        alpha_pattern: Mapping[str, float],
        decisions: Decisions,
    ) -> None:
        self.rank = rank
        self.alpha = alpha
        self.use_rslora = use_rslora
        self._decisions = decisions
        self._ranks = self._compile(rank_pattern)
        self._alphas = self._compile(alpha_pattern)
        self._used: set[str] = set()
        self._seconds = 0.0

    def _compile(self, pattern: Mapping[str, float]) -> list[tuple[_Pattern, float]]:
        if len(pattern) > _MAX_KEYS:
            message = f"a pattern has {len(pattern)} keys; allowed: {_MAX_KEYS}"
            raise self._decisions.refuse(Refusal.UNSAFE_PATTERN, message)
        return [(_Pattern(key, self._decisions), value) for key, value in pattern.items()]

    def _override(self, patterns: list[tuple[_Pattern, float]], name: str) -> float | None:
        """The value of the patterns that match a name, None if no pattern does."""
        found: dict[float, str] = {}
        for pattern, value in patterns:
            started = time.monotonic()
            if pattern.matches(name):
                self._used.add(pattern.key)
                found.setdefault(value, pattern.key)
            self._seconds += time.monotonic() - started
            if self._seconds > _MATCH_SECONDS:
                message = f"matching the patterns took longer than {_MATCH_SECONDS:.0f} s"
                raise self._decisions.refuse(Refusal.UNSAFE_PATTERN, message)
        if len(found) > 1:
            message = (
                f"the patterns {listed(found.values())} all match `{name}` and give it "
                f"{sorted(found)}; hint: make them exclude each other"
            )
            raise self._decisions.refuse(Refusal.AMBIGUOUS_SCALE, message)
        return next(iter(found), None)

    def of(self, names: Sequence[str]) -> tuple[int | None, float | None]:
        """(rank, alpha) of one module, None where neither the config nor a pattern says.

        Args:
            names: what the module is called, relative to the model; several if the file does not
                tell which parameter of the module is meant.

        Raises:
            AdapterFormatError: if patterns contradict each other, or the names differ.
        """
        found: set[tuple[int | None, float | None]] = set()
        for name in names:
            rank = self._override(self._ranks, name)
            alpha = self._override(self._alphas, name)
            found.add(
                (
                    self.rank if rank is None else int(rank),
                    self.alpha if alpha is None else alpha,
                )
            )
        if len(found) > 1:
            message = f"the file does not tell which of {listed(names)} is adapted, and they differ"
            raise self._decisions.refuse(Refusal.AMBIGUOUS_SCALE, message)
        return found.pop()

    def scale(self, alpha: float | None, rank: int) -> float:
        """The scale in float32, computed in float64 and rounded once.

        Raises:
            AdapterFormatError: if it is not finite.
        """
        divisor = math.sqrt(rank) if self.use_rslora else rank
        scale = round_scale((rank if alpha is None else alpha) / divisor)
        if not math.isfinite(scale):
            message = f"alpha {alpha} over rank {rank} is no finite float32"
            raise self._decisions.refuse(Refusal.BAD_CONFIG, message)
        return scale

    def check_used(self) -> None:
        """Refuse patterns that matched no module of the file.

        Raises:
            AdapterFormatError: if there is one, unless the adapter is read with `strict=False`.
        """
        keys: Iterable[str] = {pattern.key for pattern, _ in self._ranks + self._alphas}
        unused = [key for key in keys if key not in self._used]
        if unused:
            prefixed = any(key.startswith("base_model") for key in unused)
            hint = "; hint: PEFT matches names without `base_model.model.`" if prefixed else ""
            message = f"rank or alpha patterns match no tensor: {listed(unused)}{hint}"
            self._decisions.tolerate(Refusal.UNMATCHED_PATTERN, message)
