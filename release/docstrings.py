"""Griffe extension of the documentation site: `Example:` in a docstring holds doctests, as `Examples:` does."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DoctestSections(griffe.Extension):
    """Renames the heading, which griffe would take for that of a note with prose."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
