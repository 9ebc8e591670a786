"""Options that `geartrain import` and `geartrain export` share: dtypes to convert, options of a format."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from geartrain.errors import ArgumentError, SourceError

Casts = Annotated[list[str] | None, typer.Option(help="Convert dtypes, e.g. float64=float32. Repeatable.")]
FormatOptions = Annotated[
    list[str] | None,
    typer.Option(help="An option of the format as key=value, e.g. split=train or fps=30. Repeatable."),
]
Quiet = Annotated[bool, typer.Option(help="No progress bar.")]


@contextlib.contextmanager
def as_options() -> Iterator[None]:
    """Errors that name arguments of Python's name those of the command line."""
    try:
        yield
    except (ArgumentError, SourceError) as error:
        told = re.sub(r"\bskip_unsupported=True", "--skip-unsupported", str(error))
        told = re.sub(r"(?<![\w'\"-])(untimed|ends|lengths)=", r"--option \1=", told)
        if told == str(error):
            raise
        raise type(error)(told) from None


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
