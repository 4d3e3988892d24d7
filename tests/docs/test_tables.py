"""The front page's tables of what works say what the tests and the package's metadata say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lorafold.integrations.vllm import TESTED
from tests.moe_models import MOE_FAMILIES
from tests.tiny_models import FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins with a column of this head."""
    table = README.partition(f"\n| {head} |")[2].partition("\n\n")[0]
    assert table, head
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.split("\n")[2:]]


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def test_the_models_are_those_of_the_tests() -> None:
    listed = {}
    for names, linear, experts, _ in rows("models of transformers"):
        assert linear.startswith("yes")
        for name in re.sub(r"\(.*?\)", "", names).split(","):
            listed[plain(name)] = experts == "yes"
    assert listed.keys() == {*map(plain, FAMILIES), *map(plain, MOE_FAMILIES)}
    assert {name for name, has in listed.items() if has} == {*map(plain, MOE_FAMILIES)}


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("Python", r'requires-python = ">=([\d.]+)"'),
        ("torch", r'"torch>=([\d.]+)"'),
        ("transformers", r'"transformers>=([\d.]+)"'),
    ],
)
def test_the_least_versions_are_those_of_the_package(name: str, least: str) -> None:
    found = re.search(least, PYPROJECT)
    assert found
    (cell,) = [cells[1] for cells in rows("versions") if cells[0] == name]
    assert f"{found[1]} is the least" in cell


def test_vllm_is_named_with_the_versions_that_were_run() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (cell,) = [cells[1] for cells in rows("versions") if cells[0].startswith("vLLM")]
    for version in TESTED:
        assert version in cell
        assert version in page
