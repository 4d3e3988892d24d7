"""The code blocks of the documentation, found by a CommonMark parser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Args:
        page: the page's path from the root.
        language: the first word behind the fence; "" for an indented block.
        title: the title behind it, if there is one.
        text: what is in it.
        line: where it begins.
    """

    page: str
    language: str
    title: str
    text: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def is_next_to(self, other: Block) -> bool:
        """Whether only empty lines stand between the end of the other block and this one."""
        text = (ROOT / self.page).read_text(encoding="utf-8").splitlines()
        between = text[other.line + other.text.count("\n") + 1 : self.line - 1]
        return not any(line.strip() for line in between)

    def commands(self) -> list[str]:
        """The commands of a shell block, one a line, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page, in its order."""
    return [
        Block(
            page=page.relative_to(ROOT).as_posix(),
            language=token.info.partition(" ")[0],
            title=found[1] if (found := re.search(r'title="(.*)"', token.info)) else "",
            text=token.content,
            line=(token.map or [0])[0] + 1,
        )
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        if token.type in ("fence", "code_block")
    ]
