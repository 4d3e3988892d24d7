"""What the outside relies on: names, docstrings, import weight and order, examples, sizes."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lorafold
from lorafold import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lorafold"

# The lower a name stands, the more it may import: only what stands above it. Names on one line do
# not import each other, but for parts of one package.
ORDER = [
    {"errors"},
    {"numerics", "refusal", "slots"},
    {"route"},
    {"expert_route"},
    {"ops"},
    {"adapter", "device", "picture"},
    {"peft", "slot_layout"},
    {"transfer"},
    {"expert_pool"},
    {"pool"},
    {"store"},
    {"layers"},
    {"runtime"},
    {"engine", "verify", "bench"},
    {"integrations", "server"},
    {"demo"},
    {"cli"},
    {"__main__", "lorafold"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
# What only some parts import, on demand. Beside these: torch, safetensors, the standard library.
HEAVY = {
    "triton": {"ops", "verify", "integrations"},
    "cuda": {"ops"},
    "transformers": {"demo", "integrations", "engine", "server", "cli"},
    "peft": {"demo"},
    "typer": {"cli"},
    "rich": {"cli"},
    "fastapi": {"server", "cli"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "prometheus_client": {"server", "cli"},
    "uvicorn": {"server", "cli"},
    "matplotlib": {"picture"},
    "vllm": {"integrations"},
}
# What may be missing where the tests run; modules that need it are not imported then.
SCARCE = {"triton", "fastapi", "starlette", "pydantic", "prometheus_client", "uvicorn", "vllm"}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


def modules() -> list[str]:
    found = ["lorafold", *(m.name for m in pkgutil.walk_packages([str(SOURCE)], "lorafold."))]
    return [name for name in found if name != "lorafold.__main__"]


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SCARCE:
            raise
        pytest.skip(f"needs {missing}")


def part_of(module: str) -> str:
    """The name of the table that a module belongs to."""
    return module.split(".")[1] if "." in module else "lorafold"


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it but under TYPE_CHECKING; not the version."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path.name}: imports are absolute"
            if node.module == "lorafold":
                names = {alias.name for alias in node.names} - {"__version__"}
                found |= {f"lorafold.{name}" for name in names}
            else:
                found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_down(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    me = "lorafold" if parts == ("__init__",) else parts[0]
    assert me in LEVEL, f"`{me}` has no place in the table of imports"
    for module in imports_of(path):
        top, other = module.partition(".")[0], part_of(module)
        if top in HEAVY:
            assert me in HEAVY[top], f"{path.name} imports {module}, which is not for `{me}`"
        elif top != "lorafold":
            assert top in {"torch", "safetensors"} | sys.stdlib_module_names, f"{path.name}: {top}"
        elif other != me:
            assert other in LEVEL, f"{path.name} imports {module}, which has no place in the table"
            assert LEVEL[other] < LEVEL[me], f"{path.name} imports {module}, which stands below it"


def test_the_architecture_page_has_the_same_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| | may import |")[2].partition("\n\n")[0]
    rows = [row.split(", ") for row in re.findall(r"^\| ([\w, ]+) \|", table, re.M)]
    assert {name for row in rows for name in row} == LEVEL.keys() - {"__main__", "lorafold"}
    for above, below in itertools.pairwise(rows):
        assert max(LEVEL[name] for name in above) < min(LEVEL[name] for name in below)


def files_of_the_tree() -> set[str]:
    """What the tree of the architecture page names: paths, those of Python files without `.py`."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.partition("    src/lorafold/\n")[2].partition("\n\n")[0]
    found: set[str] = set()
    folders: list[str] = []
    for indent, names in re.findall(r"^ {6}( *)([^\s,]+(?:, [^\s,]+)*)", tree, re.M):
        del folders[len(indent) // 2 :]
        if names.endswith("/"):
            folders.append(names)
        else:
            found |= {"".join(folders) + name for name in names.split(", ")}
    return found


def test_the_architecture_page_has_every_file():
    files = [p.relative_to(SOURCE) for p in SOURCE.rglob("*.*") if "__pycache__" not in p.parts]
    names = [p.with_suffix("") if p.suffix == ".py" else p for p in files]
    assert files_of_the_tree() == {p.as_posix() for p in names if p.name != "__init__"}


def test_import_is_light():
    # PyTorch imports some of `cuda.bindings` itself.
    code = (
        "import sys, torch; before = set(sys.modules); import lorafold; "
        f"print([m for m in {list(HEAVY)} if m in sys.modules and m not in before])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def our_errors(root: type = errors.LoraError) -> Iterator[type]:
    """The exception tree, as far as it is imported."""
    yield root
    for each in root.__subclasses__():
        yield from our_errors(each)


def docstrings(name: str, value: Any) -> Iterator[tuple[str, str | None]]:
    """The docstring of a public name, and those of the public methods of a class."""
    yield name, inspect.getdoc(value)
    if inspect.isclass(value) and not getattr(value, "_is_protocol", False):
        for attribute, member in vars(value).items():
            method = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(method) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", inspect.getdoc(method)


@pytest.mark.parametrize("name", modules())
def test_public_names(name):
    module = load(name)
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    exceptions = {**vars(builtins), **vars(module), **{e.__name__: e for e in our_errors()}}
    for each in names:
        value = getattr(module, each)
        is_own = name == "lorafold" or getattr(value, "__module__", "") == name
        if not is_own or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        for where, text in docstrings(each, value):
            assert text, f"`{where}` has no docstring"
            raises = re.search(r"^Raises:\n((?: .*\n?|\n)+)", text, re.M)
            for named in re.findall(r"^    (\w+):", raises[1] if raises else "", re.M):
                assert named in exceptions, f"`{where}` documents {named}, which does not exist"
                assert issubclass(exceptions[named], BaseException)


def test_version_is_the_changelogs():
    top = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    pyproject = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert top
    assert pyproject
    assert top[1] == pyproject[1] == lorafold.__version__


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    torch.manual_seed(0)  # models of examples have random weights
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testmod(load(name), optionflags=flags)
    assert not result.failed


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_nothing_names_a_place_on_one_machine():
    place = re.compile(r"(?<![\w.])/(work|tmp|root|home|mnt|Users)/")
    for path in [*SOURCE.rglob("*.py"), *PAGES]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not place.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_a_file_fits_its_budget(path):
    assert len(path.read_text().splitlines()) <= 400
