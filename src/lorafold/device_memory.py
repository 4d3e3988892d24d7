"""How much memory a device has left, so that a pool can refuse with figures before it allocates."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["free_bytes"]


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes, None where it cannot be told.

    Example:
        >>> free = free_bytes(torch.device("cpu"))
        >>> free is None or free > 0
        True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
