"""The site: built in strict mode, complete, and fetching nothing from other hosts."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = {
    "lorafold": "reference",
    "lorafold.ops": "reference/ops",
    "lorafold.adapter": "reference/adapter",
    "lorafold.pool": "reference/pool",
    "lorafold.expert_pool": "reference/pool",
    "lorafold.store": "reference/pool",
    "lorafold.peft": "reference/peft",
    "lorafold.engine": "reference/engine",
    "lorafold.verify": "reference/verify",
    "lorafold.bench": "reference/bench",
    "lorafold.integrations.transformers": "reference/integrations",
    "lorafold.integrations.vllm": "reference/integrations",
    "lorafold.errors": "reference/errors",
    "lorafold.refusal": "reference/errors",
}
"""A public module -> the page on which all that it exports is."""


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(folder)]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)")
    config = (ROOT / "mkdocs.yml").read_text()
    head, rest = config.partition("\nnav:")[0], config.partition("\nvalidation:")[2]
    head = re.sub(r"^(hooks|watch|extra_css):.*\n", "", head, flags=re.M)
    (tmp_path / "mkdocs.yml").write_text(f"{head}\nvalidation:{rest}")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


def test_every_page_is_there(site: Path) -> None:
    sources = {p.relative_to(ROOT / "docs").with_suffix("") for p in ROOT.glob("docs/**/*.md")}
    for name in [*map(str, sources), "changelog", "contributing"]:
        page = site / name.removesuffix("index") / "index.html"
        assert page.exists(), name
    assert "The guarantee, and its limits" in (site / "index.html").read_text()


def anchors(page: Path) -> set[str]:
    return set(re.findall(r' id="([^"]+)"', page.read_text()))


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_all_that_a_module_exports(site: Path, name: str) -> None:
    # What the package itself exports is documented where it is defined.
    pages = (site / "reference").rglob("*.html") if name == "lorafold" else [site / REFERENCE[name]]
    found = set().union(*(anchors(p if p.is_file() else p / "index.html") for p in pages))
    for each in set(importlib.import_module(name).__all__) - {"__version__"}:
        if f"{name}.{each}" in REFERENCE:
            continue
        entries = [entry for entry in found if re.fullmatch(rf"{name}\.(\w+\.)?{each}", entry)]
        assert entries, f"`{name}.{each}` has no entry"


def test_examples_are_set_as_code(site: Path) -> None:
    for page in (site / "reference").rglob("index.html"):
        assert "<blockquote>" not in page.read_text(), page
    ops = (site / "reference" / "ops" / "index.html").read_text()
    assert ops.count("highlight") > 10


def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    outside = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not outside.search(page.read_text()), page
    assert (site / "performance.svg").exists()
