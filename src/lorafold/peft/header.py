"""The header of a safetensors file, checked before a byte of data is read.

A header is JSON: per tensor its dtype, shape and offsets. It is accepted only if the tensors fill
the data of the file exactly, without gap and without overlap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = ["RepeatedKeyError", "TensorInfo", "check_header", "read_json"]

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_AXES = 64  # of a tensor of PyTorch; and the product of a longer shape could take hours


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor.

    Example:
        >>> TensorInfo("F32", (8, 64), "adapter_model.safetensors").dtype
        'F32'
    """

    dtype: str
    shape: tuple[int, ...]
    file: str


class RepeatedKeyError(ValueError):
    """A JSON object names one key twice.

    Attributes:
        key: the key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key `{key[:200]}` is repeated")
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(key)
        found[key] = value
    return found


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def read_json(text: bytes) -> Any:
    """Parse JSON strictly: repeated keys, NaN and Infinity are errors.

    Raises:
        RepeatedKeyError: if an object names a key twice.
        ValueError: if the text is not JSON, or nests too deeply.

    Example:
        >>> read_json(b'{"r": 8}')
        {'r': 8}
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_header(header: bytes, data_bytes: int, file: str) -> dict[str, TensorInfo]:
    """The tensors that a header declares.

    Args:
        header: the JSON text, without the 8 bytes of its length.
        data_bytes: bytes of the file after the header.
        file: the name of the file, recorded in the result.

    Raises:
        RepeatedKeyError: if a tensor is declared twice.
        ValueError: if the header is malformed, or does not describe exactly `data_bytes` bytes.

    Example:
        >>> header = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
        >>> check_header(header, 8, "a.safetensors")["x"].shape
        (2,)
    """
    entries = read_json(header)
    metadata = entries.pop("__metadata__", {}) if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("the header must be a JSON object, its metadata a map of strings")
    infos: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        infos[name], (start, stop) = _check_entry(name[:200], entry, file)
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ValueError(f"`{name[:200]}` starts at byte {start} of the data, not at {end}")
        end = stop
    if end != data_bytes:
        raise ValueError(f"the header describes {end} bytes of data; the file has {data_bytes}")
    return infos


def _check_entry(name: str, entry: object, file: str) -> tuple[TensorInfo, tuple[int, int]]:
    """What a header says of one tensor: itself, and where it begins and ends in the data."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of `{name}` is malformed")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise ValueError(f"the shape or the offsets of `{name}` are malformed")
    if len(shape) > _MAX_AXES:
        raise ValueError(f"`{name}` has {len(shape)} axes; allowed: {_MAX_AXES}")
    item_bytes = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item_bytes is None:
        raise ValueError(f"the dtype of `{name}` is not known: {str(dtype)[:50]}")
    start, stop = span
    if stop - start != prod(shape) * item_bytes:
        raise ValueError(f"`{name}` has the offsets {span} for {shape} of {dtype}")
    return TensorInfo(dtype, tuple(shape), file), (start, stop)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
