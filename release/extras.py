"""The table of extras in docs/install.md, made of pyproject.toml.

python3 release/extras.py      # writes it
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "install.md"
_TABLE = re.compile(r"(<!-- extras: written by release/extras\.py -->\n).*?(<!-- end of extras -->)", re.DOTALL)


def extras() -> dict[str, tuple[list[str], str]]:
    """Requirements of each extra, and what it is for: the comment behind it, without which this ends with one line."""
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    found = {}
    for line in filter(None, section.splitlines()):
        if line.startswith("#"):
            continue
        parts = re.fullmatch(r'([a-z0-9]+) = \[("[^#]*")\]  # (.+)', line)
        if parts is None:
            raise SystemExit(f"release: pyproject.toml: an extra is NAME = [...]  # what it is for; found {line!r}")
        found[parts[1]] = (re.findall(r'"([^"]+)"', parts[2]), parts[3])
    return found


def shown(requirements: list[str]) -> str:
    """Names of packages, and of the extras that an extra includes."""
    names = []
    for requirement in requirements:
        name, inside = re.match(r"([A-Za-z0-9_.-]+)(?:\[([a-z0-9,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        names += [f"`{extra}`" for extra in inside.split(",")] if name == "geartrain" else [name]
    return ", ".join(names)


def table() -> str:
    """The table, as Markdown."""
    rows = ["| extra | installs | for |", "|---|---|---|"]
    for name, (requirements, purpose) in extras().items():
        linked = re.sub(r"([a-z0-9-]+\.md)", r"[\1](\1)", purpose)
        rows.append(f"| `{name}` | {shown(requirements)} | {linked} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page, with the table between its marks."""
    return _TABLE.sub(lambda marks: f"{marks[1]}\n{table()}\n{marks[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
