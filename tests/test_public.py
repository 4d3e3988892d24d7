"""What the outside relies on: names, docstrings, import weight and order, README's code, sizes."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    {"adapter", "device_memory"},
    {"peft", "slot_layout"},
    {"transfer"},
    {"expert_pool"},
    {"pool"},
    {"store"},
    {"layers"},
    {"runtime"},
    {"engine", "verify", "demo_model"},
    {"demo_rows"},
    {"demo_peft"},
    {"integrations", "server"},
    {"demo"},
    {"cli"},
    {"__main__", "lorafold"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
# Modules that need an extra; imported on demand only.
HEAVY = ["triton", "transformers", "peft", "typer", "rich", "fastapi", "matplotlib", "vllm"]
# Modules whose import needs something that the tests do not install.
NEEDS_MORE = re.compile(r"lorafold\.(server|integrations\.vllm|__main__)")


def modules() -> list[str]:
    return ["lorafold", *(m.name for m in pkgutil.walk_packages([str(SOURCE)], "lorafold."))]


def part_of(module: str) -> str:
    """The name of the table that a module belongs to."""
    return module.split(".")[1] if "." in module else "lorafold"


def imports_of(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it but under TYPE_CHECKING."""
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
            found |= {a.name for a in node.names if a.name.startswith("lorafold.")}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "lorafold":
                found |= {f"lorafold.{a.name}" for a in node.names}
            elif node.module.startswith("lorafold."):
                found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_down(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    me = "lorafold" if parts == ("__init__",) else parts[0]
    assert me in LEVEL, f"`{me}` has no place in the table of imports"
    for module in imports_of(path):
        other = part_of(module)
        if other == me:
            continue
        assert other in LEVEL, f"{path.name} imports {module}, which has no place in the table"
        assert LEVEL[other] < LEVEL[me], f"{path.name} imports {module}, which stands below it"


def test_import_is_light():
    code = f"import lorafold, sys; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", [lorafold, lorafold.ops, errors], ids=lambda m: m.__name__)
def test_public_names(module):
    assert len(set(module.__all__)) == len(module.__all__)
    error_names = set(errors.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        text = inspect.getdoc(value)
        assert text, f"`{name}` has no docstring"
        raises = re.search(r"Raises:\n((?:    .*\n?)+)", text)
        for line in raises[1].splitlines() if raises else []:
            if named := re.match(r"    (\w+Error):", line):
                assert named[1] in error_names, f"`{name}` documents {named[1]}, which is not ours"


def test_version_is_the_changelogs():
    top = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    pyproject = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert top
    assert pyproject
    assert top[1] == pyproject[1] == lorafold.__version__


def code_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)


def test_readme_code_runs():
    blocks = code_blocks("README.md")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("name", [m for m in modules() if not NEEDS_MORE.match(m)])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testmod(module, optionflags=flags)
    assert not result.failed


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_a_file_fits_its_budget(path):
    assert len(path.read_text().splitlines()) <= 400
