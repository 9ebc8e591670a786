"""Griffe extension of the documentation site: inherited docstrings, doctests, and what the site leaves out.

- A method without a docstring shows that of the class that declares it, as `help()` does.
- `Example:` holds doctests, as `Examples:` does.
- A docstring that begins with `Internal:` is for the package's own code, and is not shown.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringSections(griffe.Extension):
    """Edits the docstrings of a package that was loaded."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is None:
            return
        if obj.docstring.value.startswith("Internal:"):
            obj.docstring = None  # the site shows no object without one
            return
        # Griffe would take the heading for that of a note with prose.
        obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Called when every module of a package is known."""
        inherit_docstrings(pkg)


def inherit_docstrings(parent: Any) -> None:
    """Gives members of classes, and of the classes in a module, the docstrings of what they override."""
    for name, member in parent.members.items():
        if member.is_alias:
            continue
        if member.is_module or member.is_class:
            inherit_docstrings(member)
        elif parent.is_class and member.docstring is None and not name.startswith("_"):
            declared = (base.members.get(name) for base in parent.mro())
            member.docstring = next((one.docstring for one in declared if one is not None and one.docstring), None)
