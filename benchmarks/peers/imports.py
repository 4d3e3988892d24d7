"""Import a few files of a large package, with stand-ins for everything else they import.

No `__init__` of the package runs: its folders become empty packages. The modules stay known under
their own names, because some of their functions import again when called, until the same package is
imported once more or forgotten.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["forget", "import_files", "stand_in"]


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module of that name with nothing but the given contents."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module


def forget(package: str) -> None:
    """Remove the package and all below it from the imported modules."""
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        del sys.modules[name]


def import_files(
    root: Path,
    names: Iterable[str],
    stand_ins: Iterable[ModuleType],
    shadows: Iterable[ModuleType] = (),
) -> tuple[ModuleType, ...]:
    """Import modules of one package from files below `root`, freshly.

    Args:
        root: the folder in which the package's own folder lies.
        names: full names of the modules to import.
        stand_ins: modules that take the place of others of the package.
        shadows: modules that take the place of other packages while the files are imported.

    Returns:
        The modules, in the order of their names.

    Raises:
        FileNotFoundError: if the package is not below root.
    """
    names, stand_ins, shadows = list(names), list(stand_ins), list(shadows)
    package = names[0].partition(".")[0]
    if not (root / package).is_dir():
        raise FileNotFoundError(
            f"{root / package} is not there\nhint: python -m benchmarks.peers.fetch {package}"
        )
    forget(package)
    parents = {parent for name in names for parent in _parents(name)}
    parents |= {parent for module in stand_ins for parent in _parents(module.__name__)}
    parents -= {module.__name__ for module in stand_ins}
    for parent in sorted(parents):
        sys.modules[parent] = stand_in(parent, __path__=[str(root.joinpath(*parent.split(".")))])
    for module in stand_ins:
        sys.modules[module.__name__] = module
        above, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[above], last, module)
    shadowed = {module.__name__: sys.modules.get(module.__name__) for module in shadows}
    try:
        sys.modules.update({module.__name__: module for module in shadows})
        return tuple(importlib.import_module(name) for name in names)
    except BaseException:
        forget(package)
        raise
    finally:
        for name, original in shadowed.items():
            if original is None:
                del sys.modules[name]
            else:
                sys.modules[name] = original


def _parents(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
