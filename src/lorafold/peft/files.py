"""The files of an adapter's folder: found, checked by their headers, and read.

A folder is not trusted. Nothing outside it is opened, nothing is unpickled, and no tensor is
allocated before the header that declares it agrees with the size of its file. Files are read, not
mapped, so that one which shrinks meanwhile is an error and not a signal.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lorafold.errors import AdapterError
from lorafold.peft.header import RepeatedKeyError, TensorInfo, check_header, read_json
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["MAX_CONFIG_BYTES", "MAX_HEADER_BYTES", "Folder", "open_folder"]

MAX_HEADER_BYTES = 32 << 20
"""The longest header that is read: about two hundred thousand tensors."""

MAX_CONFIG_BYTES = 8 << 20
"""The longest adapter_config.json that is read."""

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_INDEXES = ("adapter_model.safetensors.index.json", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def _allowed_roots(folder: Path) -> list[Path]:
    """The folder itself; and for a snapshot of the Hugging Face cache the blobs that it links to.

    There, models--x/snapshots/<revision>/<file> is a link to models--x/blobs/<hash>.
    """
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    return roots


def _open_plainly(path: Path) -> BinaryIO:
    """Open a regular file, without following a link or waiting for the other end of a pipe.

    Raises:
        OSError: if it cannot be opened, or is no regular file.
    """
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"):  # not every system has all
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


@dataclass(frozen=True)
class _Shard:
    """One open safetensors file, with what its checked header says."""

    name: str
    file: BinaryIO
    size: int
    infos: Mapping[str, TensorInfo]


class Folder:
    """The checked files of one adapter, open for reading; made by `open_folder`.

    Attributes:
        config: the text of adapter_config.json, None where there is none.
        infos: per tensor, what the headers say.
    """

    def __init__(self, path: Path, decisions: Decisions, stack: ExitStack) -> None:
        self._decisions = decisions
        self._stack = stack
        try:
            self._path = path.resolve(strict=True)
            names = sorted(entry.name for entry in self._path.iterdir())
        except (OSError, RuntimeError, ValueError) as error:
            raise self._missing(f"there is no such folder ({error})") from None
        self.config = self._read_text(_CONFIG, Refusal.BAD_CONFIG) if _CONFIG in names else None
        chosen = self._choose(names)
        index = self._read_index(chosen) if chosen in _INDEXES else None
        shards = [chosen] if index is None else sorted(set(index.values()))
        self._shards = [self._open_shard(name) for name in shards]
        self.infos = self._join_infos(index)

    def read(self) -> dict[str, Tensor]:
        """All tensors, as stored, on the CPU.

        Raises:
            AdapterFormatError: if a file changed since it was opened.
        """
        tensors: dict[str, Tensor] = {}
        for shard in self._shards:
            try:
                shard.file.seek(0)
                found = load(shard.file.read(shard.size))
            except (OSError, SafetensorError, MemoryError, KeyError, RuntimeError) as error:
                raise self._broken(shard.name, str(error)) from error
            shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
            if shapes != {name: info.shape for name, info in shard.infos.items()}:
                raise self._broken(shard.name, "it changed while it was read")
            tensors |= found
        return tensors

    def _missing(self, message: str) -> AdapterError:
        return self._decisions.refuse(Refusal.MISSING_FILE, message)

    def _broken(self, name: str, message: str) -> AdapterError:
        return self._decisions.refuse(Refusal.BROKEN_FILE, f"`{name}`: {message}")

    def _open(self, name: str) -> tuple[BinaryIO, int]:
        """Open a regular file of the folder, for as long as the folder is open; with its size."""
        try:
            real = (self._path / name).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._missing(f"`{name}` cannot be found ({error})") from None
        if not any(real.is_relative_to(root) for root in _allowed_roots(self._path)):
            message = f"`{name}` is a link out of the folder, to {real}; hint: copy the file"
            raise self._decisions.refuse(Refusal.ESCAPING_PATH, message)
        try:
            file = self._stack.enter_context(_open_plainly(real))
        except OSError as error:
            raise self._broken(name, str(error)) from None
        return file, os.fstat(file.fileno()).st_size

    def _read_text(self, name: str, refusal: Refusal) -> bytes:
        file, size = self._open(name)
        if size > MAX_CONFIG_BYTES:
            message = f"`{name}` has {size} bytes; allowed: {MAX_CONFIG_BYTES}"
            raise self._decisions.refuse(refusal, message)
        return file.read(MAX_CONFIG_BYTES)

    def _choose(self, names: list[str]) -> str:
        """The name of the file with the weights, or of the index of its shards."""
        found = [name for name in (_WEIGHTS, *_INDEXES) if name in names]
        if not found:
            # Tools other than PEFT name the file after the adapter.
            found = [name for name in names if name.endswith(".safetensors")]
        if len(found) > 1:
            message = f"several files could hold the weights: {listed(found)}; hint: keep one"
            raise self._decisions.refuse(Refusal.AMBIGUOUS_FILES, message)
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if found:
            unread = [name for name in pickles if name.startswith("adapter_model")]
            if unread:
                self._decisions.note(f"pickle files were not read: {listed(unread)}")
            return found[0]
        if pickles:
            message = (
                f"the weights are pickle files ({listed(pickles)}), which can run code when they "
                "are read; hint: convert with torch.load(..., weights_only=True) and "
                f"safetensors.torch.save_file(..., '{_WEIGHTS}')"
            )
            raise self._decisions.refuse(Refusal.PICKLE, message)
        inner = [name for name in names if (self._path / name / _CONFIG).is_file()]
        hint = f"; hint: adapters are in the sub-folders {listed(inner)}" if inner else ""
        raise self._missing(f"`{_WEIGHTS}` is not there{hint}")

    def _read_index(self, name: str) -> dict[str, str]:
        """Per tensor the shard that an index names, each checked to be a plain file name."""
        try:
            index = read_json(self._read_text(name, Refusal.BAD_INDEX))
        except ValueError as error:
            if isinstance(error, AdapterError):
                raise
            raise self._decisions.refuse(Refusal.BAD_INDEX, f"`{name}`: {error}") from None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise self._decisions.refuse(Refusal.BAD_INDEX, f"`{name}` has no weight_map")
        for shard in weight_map.values():
            is_plain = isinstance(shard, str) and shard == Path(shard).name
            if not is_plain or not shard.endswith(".safetensors"):
                message = f"`{name}` names the file {shard!r}; allowed: *.safetensors of the folder"
                raise self._decisions.refuse(Refusal.ESCAPING_PATH, message)
        return dict(weight_map)

    def _open_shard(self, name: str) -> _Shard:
        file, size = self._open(name)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            message = (
                f"the header claims {length} bytes; the file has {size}, and at most "
                f"{MAX_HEADER_BYTES} are allowed; hint: the download may be incomplete"
            )
            raise self._broken(name, message)
        try:
            infos = check_header(file.read(length), size - 8 - length, name)
        except RepeatedKeyError as error:
            raise self._decisions.refuse(Refusal.DUPLICATE_TENSOR, f"`{name}`: {error}") from None
        except ValueError as error:
            raise self._broken(name, str(error)) from None
        return _Shard(name, file, size, infos)

    def _join_infos(self, index: Mapping[str, str] | None) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for shard in self._shards:
            twice = infos.keys() & shard.infos.keys()
            if twice:
                message = f"several shards hold {listed(twice)}"
                raise self._decisions.refuse(Refusal.DUPLICATE_TENSOR, message)
            infos.update(shard.infos)
        if index is not None:
            differing = index.items() ^ {(name, info.file) for name, info in infos.items()}
            if differing:
                names = {name for name, _ in differing}
                message = f"the index and the shards disagree on {listed(names)}"
                raise self._decisions.refuse(Refusal.BAD_INDEX, message)
        return infos


@contextmanager
def open_folder(path: str | os.PathLike[str], decisions: Decisions) -> Iterator[Folder]:
    """Open an adapter's folder and check its headers; no tensor is read yet.

    Args:
        path: the folder.
        decisions: takes the notes, and carries the name for messages.

    Raises:
        AdapterFormatError: if files are missing, pickled, broken, or lead out of the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as empty, open_folder(empty, Decisions("sql")):
        ...     pass
        Traceback (most recent call last):
        lorafold.errors.AdapterFormatError: `sql`: `adapter_model.safetensors` is not there ...
    """
    with ExitStack() as stack:
        yield Folder(Path(path), decisions, stack)
