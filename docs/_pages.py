"""What the site needs beyond docs/: the root's pages, and lists as GitHub reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""A file of the root -> its page."""


def on_files(files: Files, config: Any) -> Files:
    """Add the root's files as pages; their links lead to docs/, which is the site's root."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the root's files at their pages; let a list begin without an empty line."""
    for source, page in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(source)}", f"]({page}", markdown)
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    parts[::2] = [_with_lists(part) for part in parts[::2]]
    return "".join(parts)


def _with_lists(text: str) -> str:
    """Python-Markdown takes items right under a paragraph for part of it."""
    return re.sub(r"^(?! *(?:[-*]|\d+\.) )(\S.*\n)(?=(?:[-*]|1\.) )", r"\1\n", text, flags=re.M)
