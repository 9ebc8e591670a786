"""Text of strangers, such as names of files, as it is shown: control and bidirectional characters as escapes."""

from __future__ import annotations


def printable(text: str, lines: bool = False) -> str:
    r"""The text with escapes such as `\n`, `\x1b` and `\u202e` for whatever a terminal would obey.

    Those are control characters, line ends and separators, characters that change the direction of writing or have no
    width, and what is no text at all (halves of surrogate pairs). Letters of all languages stay.

    Args:
        text: from elsewhere, of any content.
        lines: leave `\n` as it is, for text that has several lines.
    """
    return "".join(each if each.isprintable() or (lines and each == "\n") else ascii(each)[1:-1] for each in text)


__all__ = ["printable"]
