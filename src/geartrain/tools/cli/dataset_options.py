"""Options that `geartrain import` and `geartrain export` share: dtypes to convert, options of a format."""

from __future__ import annotations

import re
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
    """Options of a format, from key=value: numbers and true or false as such, the rest as text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key.isidentifier():
            raise ArgumentError(f"--option takes key=value, found {pair!r}")
        if key in values:
            raise ArgumentError(f"--option {key} is given twice")
        values[key] = _value(value)
    return values


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,3})?", text) else text
