"""A device: whether it is there, and how much memory it has left.

So that commands and pools can refuse with what there is, before anything is done.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from lorafold.errors import BackendError

__all__ = ["free_bytes", "usable_device"]


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


def usable_device(device: torch.device | str | None) -> torch.device:
    """The CPU or a CUDA device of this machine; None for CUDA where there is a device.

    Raises:
        BackendError: if it is neither, or not there.

    Example:
        >>> usable_device("cpu")
        device(type='cpu')
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if count else "cpu")
    with suppress(RuntimeError):  # torch's, for what names no device
        found = torch.device(device)
        if found.type == "cpu" or (found.type == "cuda" and (found.index or 0) < count):
            return found
    here = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
    raise BackendError(f"device `{device}` is not there; devices here: {here}")
