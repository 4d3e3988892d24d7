"""One folder for all pages; no page changes what another reads."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.docs.place import write_place

    return write_place(tmp_path_factory.mktemp("docs"))
