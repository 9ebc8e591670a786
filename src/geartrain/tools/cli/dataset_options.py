"""Shared by `geartrain import` and `geartrain export`: options, and errors that name command-line options."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from geartrain.errors import ArgumentError, DatasetExistsError, SourceError

Casts = Annotated[list[str] | None, typer.Option(help="Convert dtypes, e.g. float64=float32. Repeatable.")]
FormatOptions = Annotated[
    list[str] | None,
    typer.Option(help="An option of the format as key=value, e.g. split=train or fps=30. Repeatable."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


#: Options of formats that errors name as arguments.
_OF_FORMATS = re.compile(r"(?<![\w'\"-])(untimed|ends|lengths|split)=")
#: Arguments that are options of their own; the value, where one is given, without its quotes.
_OWN = re.compile(
    r"(?<![\w'\"-])(fields|episodes|where|cast|format|capacity|max_length|on_too_long)"
    r"(?:=('[^']*'|\w+)?| (?=is one of))"
)
_FLAGS = re.compile(r"(?<![\w'\"-])(skip_unsupported|overwrite|metadata)=True(?: \(--\w+\))?")


def in_words_of_options(text: str) -> str:
    """An error's text with the options of the command line in the place of Python's arguments."""

    def own(found: re.Match[str]) -> str:
        option = "--field" if found[1] == "fields" else "--" + found[1].replace("_", "-")
        value = (found[2] or "").strip("'")
        return f"{option} {value}" if value or found[0].endswith(" ") else option

    text = text.replace("='truncate' or 'skip'", "='truncate or skip'")
    text = _FLAGS.sub(lambda found: "--" + found[1].replace("_", "-"), text)
    return _OF_FORMATS.sub(r"--option \1=", _OWN.sub(own, text))


@contextlib.contextmanager
def as_options() -> Iterator[None]:
    """Errors that name arguments of Python's name those of the command line."""
    try:
        yield
    except (ArgumentError, SourceError, DatasetExistsError) as error:
        told = in_words_of_options(str(error))
        if told == str(error):
            raise
        raise type(error)(told) from None


#: Arguments of Python's that the command line has under another name, or for itself.
_ELSEWHERE = {
    "source": "the command's first argument",
    "path": "the command's second argument",
    "fields": "--field",
    "progress": "--quiet",
    "persist": "an argument of Python only, as an import always stays",
}


def key_values(pairs: list[str], takes: Callable[..., Any]) -> dict[str, Any]:
    """Options of a format, from key=value: numbers and true or false as such, the rest as text.

    Args:
        takes: the function that is called with them; its own arguments are not options of a format.

    Raises:
        ArgumentError: a text that is no key=value, a key given twice, or an argument of the function's own.
    """
    own = inspect.signature(takes).parameters
    values: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key.isidentifier():
            raise ArgumentError(f"--option takes key=value, found {pair!r}")
        if key in own and own[key].kind is not inspect.Parameter.VAR_KEYWORD:
            instead = _ELSEWHERE.get(key, "--" + key.replace("_", "-"))
            raise ArgumentError(f"--option takes options of the format, and {key} is none: it is {instead}")
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
