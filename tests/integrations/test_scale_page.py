"""The reckoning on docs/scale.md, done again from its formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 80, 8192, 28672, 1024, 128256
GPUS, RANK = 8, 16
ALL = ("q", "k", "v", "gate", "up", "o", "down")


def sizes(hidden: int, inner: int, queries: int, keys: int) -> dict[str, tuple[int, int]]:
    return {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "o": (queries, hidden),
        "down": (inner, hidden),
    }


def sharded(
    hidden: int, inner: int, queries: int, keys: int, ranks: int, names: tuple[str, ...] = ALL
) -> int:
    """The page's sum over projections, per layer and unit of rank."""
    total = 0
    for name in names:
        k_in, n_out = sizes(hidden, inner, queries, keys)[name]
        total += k_in // ranks + n_out if name in ("o", "down") else k_in + n_out // ranks
    return total


@pytest.mark.parametrize(
    ("label", "names"), [("all seven", ALL), ("q, k, v, o", ("q", "k", "v", "o"))]
)
def test_the_table(label, names):
    whole = sharded(HIDDEN, INNER, HIDDEN, KEYS, 1, names)
    cut = sharded(HIDDEN, INNER, HIDDEN, KEYS, GPUS, names)
    slot = 2 * LAYERS * cut * RANK
    cells = [
        label,
        f"{whole:,}",
        f"{2 * LAYERS * whole * RANK / 1e6:.0f} MB",
        f"{cut:,}",
        f"{slot / 1e6:.0f} MB",
        f"{64 * slot / 1e9:.1f} GB",
        f"{1000 * slot / 1e9:.0f} GB",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_the_numbers_in_the_text():
    cut = 2 * LAYERS * sharded(HIDDEN, INNER, HIDDEN, KEYS, GPUS) * RANK
    whole = 2 * LAYERS * sharded(HIDDEN, INNER, HIDDEN, KEYS, 1) * RANK
    for value in (
        f"{4 * (VOCABULARY + HIDDEN) * RANK / 1e6:.1f} MB at R = 16",
        f"{GPUS * 1000 * whole / 1e12:.1f} TB",
        f"128 of them are {GPUS * 128 * whole / 1e9:.0f} GB",
        f"{64 * cut / 1e9:.1f} GB, {64 * cut / 4.3e9:.1f} ms",
        f"{8 * cut / 1e9:.1f} GB, {8 * cut / 4.3e9:.1f} ms",
        f"{cut / 1e6:.0f} MB or {cut / 55e6:.1f} ms at 55 GB/s",
    ):
        assert value in PAGE, value
