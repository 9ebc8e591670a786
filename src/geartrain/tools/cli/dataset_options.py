"""Options that `geartrain import` and `geartrain export` share: dtypes to convert, options of a format."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from geartrain.errors import ArgumentError

Casts = Annotated[list[str] | None, typer.Option(help="Convert dtypes, e.g. float64=float32. Repeatable.")]
FormatOptions = Annotated[
    list[str] | None,
    typer.Option(help="An option of the format as key=value, e.g. split=train or fps=30. Repeatable."),
]
Quiet = Annotated[bool, typer.Option(help="No progress bar.")]


def key_values(pairs: list[str]) -> dict[str, Any]:
    """Options of a format, from key=value: whole numbers and true or false as such, the rest as text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key.isidentifier():
            raise ArgumentError(f"--option takes key=value, found {pair!r}")
        if key in values:
            raise ArgumentError(f"--option {key} is given twice")
        whole = value.isascii() and value.isdigit()
        values[key] = {"true": True, "false": False}.get(value, int(value) if whole else value)
    return values
