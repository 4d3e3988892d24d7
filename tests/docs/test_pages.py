"""Every code block of README and docs/ runs as it stands, or is listed with the reason."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
pytest.importorskip("typer")
pytest.importorskip("openai")

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of
from tests.docs.run import PageRun, is_like

INSTALLS = "downloads packages; `make setup` installs the same extras"
MAKE = "makes the environment that the tests run in; tests/demo runs the demo"
VLLM = "needs vLLM and a GPU; `make test-vllm` runs the plugin in vLLM's CPU build"
HOSTS = "needs several GPUs or hosts; tests/integrations/test_vllm_hosts.py has two on one machine"
LONG = "tests/test_cli.py runs it; it takes half a minute where other tests run too"
NOT_RUN = {
    ("README.md", "make setup "): MAKE,
    ("docs/start.md", "make setup"): MAKE,
    ("docs/start.md", "pip install '.[server]'"): INSTALLS,
    ("docs/server.md", "pip install '.[server]'"): INSTALLS,
    ("docs/vllm.md", "pip install '.[vllm]'"): INSTALLS,
    ("docs/start.md", "lorafold verify --quick"): LONG,
    ("docs/verify.md", "lorafold verify --quick   # seconds"): LONG,
    ("docs/vllm.md", "vllm serve meta-llama/Llama-3.1-8B-Instruct"): VLLM,
    ("docs/scale.md", "vllm serve meta-llama/Llama-3.1-70B-Instruct"): HOSTS,
    ("docs/scale.md", "# on every host"): HOSTS,
    ("docs/scale.md", "vllm serve MODEL --nnodes 2"): HOSTS,
}
"""(page, how the block begins) of the blocks that cannot run here -> why."""

ELSEWHERE = {"docs/server.md": "tests/server/test_docs.py"}
"""Pages whose blocks another test runs."""

ON_CUDA = "on a CUDA device"
"""The title of blocks that a GPU is needed for."""

BLOCKS = {page.relative_to(ROOT).as_posix(): blocks_of(page) for page in PAGES}
RUN = {"python", "shell"}
SHOWN = {"text", ""}
"""Output, formulas and pictures."""
COMMAND = re.compile(
    r"^ *(?:\$ )?(?:lorafold|pip|make|curl|python3?|vllm|ray|from|import)\b [^ ]", re.M
)


def is_listed(block: Block) -> bool:
    return any(block.page == page and block.text.startswith(text) for page, text in NOT_RUN)


def runs(block: Block) -> bool:
    """Whether a block runs in this file on any machine."""
    if block.page in ELSEWHERE or is_listed(block) or block.title == ON_CUDA:
        return False
    return block.language in RUN


@pytest.mark.parametrize("page", [page for page, all_ in BLOCKS.items() if any(map(runs, all_))])
def test_a_page_runs(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with PageRun() as run:
        for block, after in pairwise([*BLOCKS[page], None]):
            assert block is not None
            if not runs(block):
                continue
            printed = run(block)
            if after is not None and after.language == "text" and after.is_next_to(block):
                assert is_like(after.text, printed), f"{after.where} shows not this:\n{printed}"


@pytest.mark.gpu
@pytest.mark.parametrize("page", [p for p, all_ in BLOCKS.items() if any(b.title for b in all_)])
def test_what_needs_a_cuda_device_runs(page: str) -> None:
    for block in BLOCKS[page]:
        if block.title == ON_CUDA:
            PageRun()(block)


def test_every_block_is_of_a_kind_that_is_run_or_shown() -> None:
    for block in (block for all_ in BLOCKS.values() for block in all_):
        assert block.title in ("", ON_CUDA), block.where
        if block.page in ELSEWHERE:
            continue
        assert block.language in SHOWN | RUN, f"{block.where}: {block.language}"
        if block.language in SHOWN:
            assert not COMMAND.search(block.text), f"{block.where} is code, and nothing runs it"


def test_what_is_listed_exists() -> None:
    for page, text in NOT_RUN:
        found = [block for block in BLOCKS[page] if block.text.startswith(text)]
        assert len(found) == 1, f"{page}: {len(found)} blocks begin with {text!r}"
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


def test_extras_and_make_targets_exist() -> None:
    """Of the commands that are not run, as far as that can be checked without running them."""
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named: dict[str, set[str]] = {"extras": set(), "targets": set()}
    for page in PAGES:
        text = page.read_text()
        for group in re.findall(r"pip install '[^']*\[([\w,]+)\]'", text):
            named["extras"] |= set(group.split(","))
        named["targets"] |= set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M))
    assert named["extras"] >= {"transformers", "cli", "server", "vllm"}
    assert named["targets"] >= {"setup", "demo", "check", "docs"}
    assert not named["extras"] - extras
    assert not named["targets"] - targets


def test_likeness_sees_differences() -> None:
    assert is_like("a ...\nb  c", "a 1 2\nb c\n")
    assert not is_like("a ...\nb", "a 1\nc\n")
    assert not is_like("a", "a\nb")
