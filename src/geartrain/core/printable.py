"""Makes text safe to print: untrusted text such as file names, and text for streams that are not UTF-8."""

from __future__ import annotations

import codecs
from typing import Any

#: Characters of tables and bars, and ASCII characters of the same width.
_DRAWN = str.maketrans({"█": "#", "▀": "#", "▲": "^", "▼": "v", "…": "."})


def printable(text: str, lines: bool = False) -> str:
    r"""The text with escapes such as `\n`, `\x1b` and `\u202e` for whatever a terminal would obey.

    It escapes control characters, line ends and separators. It also escapes characters without width, characters that
    change the direction of writing, and halves of surrogate pairs. Letters of all languages stay.

    Args:
        text: from elsewhere, of any content.
        lines: leave `\n` as it is, for text that has several lines.
    """
    return "".join(each if each.isprintable() or (lines and each == "\n") else ascii(each)[1:-1] for each in text)


def never_fails(stream: Any) -> None:
    """Makes a text stream write characters that its encoding lacks: bars and arrows as ASCII, others as escapes."""
    # A program may have put something else in the stream's place.
    if hasattr(stream, "reconfigure") and codecs.lookup(stream.encoding).name != "utf-8":
        stream.reconfigure(errors="geartrain.shown")


def _shown(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    drawn = error.object[error.start].translate(_DRAWN)
    return drawn.encode("ascii", "backslashreplace").decode(), error.start + 1


codecs.register_error("geartrain.shown", _shown)

__all__ = ["never_fails", "printable"]
