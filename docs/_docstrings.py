"""Docstrings say `Example:`; Griffe knows sections of the name `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Has examples set as code and not as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
