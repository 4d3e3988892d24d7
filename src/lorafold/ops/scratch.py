"""How much working memory a call needs between its shrink and its expand."""

from __future__ import annotations

from lorafold.numerics import SEGMENT, Numerics

__all__ = ["num_segments", "num_sums", "scratch_bytes"]


def num_segments(k_in: int) -> int:
    """Segments of the contract that k_in elements are cut into."""
    return -(-k_in // SEGMENT)


def num_sums(k_in: int, numerics: Numerics) -> int:
    """The fp32 sums that make up one xa between shrink and expand; 0 where xa is ready in bf16."""
    segments = num_segments(k_in)
    return segments if numerics == "mma" and segments > 1 else 0


def scratch_bytes(num_rows: int, num_routes: int, k_in: int, max_rank: int) -> int:
    """Bytes of scratch that a call of `num_rows` rows over `num_routes` routes can need.

    Args:
        num_rows: rows of the call.
        num_routes: routes that share x in the call.
        k_in: input features.
        max_rank: padded rank.

    Returns:
        The length of a uint8 vector on the routes' device: one fp32 per row, rank and segment.

    Example:
        >>> scratch_bytes(num_rows=8, num_routes=1, k_in=4096, max_rank=16)
        2048
    """
    return num_routes * num_rows * max_rank * 4 * num_segments(k_in)
