"""One term a concept, and short pages and sentences: private words stay out of code and docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "release"))

import count_words  # noqa: E402

COUNTED = count_words.pages()
SUFFIXES = {".py", ".pyi", ".h", ".cc", ".md", ".toml"}
FILES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *(path for folder in ("src", "native", "docs", "examples") for path in (ROOT / folder).rglob("*")),
]
PAGES = sorted(path for path in FILES if path.suffix in SUFFIXES)

# Pattern -> the term to use. Only words without another use in this tree ("head", say, is also an attention head's).
# A word counts inside snake_case and CamelCase too.
BANNED = {
    "docks?": "assembly",
    "parcels?": "message",
    "landings?": "target",
    "bounces?|bounced": "pinned pool, staging buffer",
    "attendants?": "sideband thread",
    "tellers?": "reporter",
    "handovers?|hand(s|ed|ing)? over": "stream handoff; pass, deliver",
    "heads and tails": "first and last pipeline stages",
    "let(s|ting)? go": "release",
    "lends?|lent": "lease, leased",
    "goodbyes?": "shutdown, close",
    "who waits for whom": "rate limiting",
    "(the|whose) books|books": "row metadata",
    "what can be said": "options",
    "is promised": "guarantees, target",
    "change our mind": "Revisit when",
    "(line|thread|process) beside|beside it": "sideband; next to it, with it",
    "steps? aside|stepped aside": "yield",
    "in earnest": "actually",
    "word back": "acknowledgement",
    "speaks? for": "leader of",
    "put(s|ting)? together": "assemble, combine",
    "(could|can) mislead": "threats to validity",
    "falls? short": "misses the target",
    "update_weights|importance_weight": "update_priorities, importance_weights",
}


def whole(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:(?<![^\W_])|(?<=[a-z])(?=[A-Z]))(?i:{pattern})(?![a-z])")


WORDS = [(whole(pattern), term) for pattern, term in BANNED.items()]
ANY = whole("|".join(f"(?:{pattern})" for pattern in BANNED))
GAP = r"\s*\n\s*(?://+|#:?)?\s*| +"


def found_in(text: str) -> list[tuple[int, str, str]]:
    """Line, words and the better term of each banned phrase; a phrase may continue in the next line of a comment."""
    if not ANY.search(re.sub(GAP, " ", text)):  # as in most files, of which no place need be known
        return []
    flat, places = [], []
    for match in re.finditer(rf"{GAP}|\S", text):
        flat.append(match.group() if match.group().strip(" \n\t/#:") else " ")
        places.append(match.start())
    line = "".join(one if len(one) == 1 else " " for one in flat)
    return sorted(
        (text.count("\n", 0, places[match.start()]) + 1, match.group(), term)
        for words, term in WORDS
        for match in words.finditer(line)
    )


def folder(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).parts[:-1][:3]) or "."


@pytest.mark.parametrize("room", sorted({folder(path) for path in PAGES}))
def test_words_are_those_of_the_field(room: str) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}; better: {term}"
        for path in PAGES
        if folder(path) == room
        for line, words, term in found_in(path.read_text())
    ]
    assert not hits, "\n".join(hits)


def test_a_banned_word_is_found_in_names_and_across_lines_and_only_whole() -> None:
    assert found_in("// The thread that\n//   hands\n// over rows.") == [
        (2, "hands over", "stream handoff; pass, deliver")
    ]
    assert [words for _, words, _ in found_in("DeviceDock(parcel_of, Parcels, let_gone)")] == [
        "Dock",
        "Parcels",
        "parcel",
    ]
    assert found_in("Docker, a docket, silent, equivalent, outlet; landed") == []
    assert found_in("\n\n# The books\n# of") == [(3, "The books", "row metadata")]
    assert [words for _, words, _ in found_in("What would change our mind.")] == ["change our mind"]
    assert all(any(path.suffix == suffix for path in PAGES) for suffix in (".py", ".pyi", ".h", ".cc", ".md"))


@pytest.mark.parametrize("path", COUNTED)
def test_a_page_and_its_sentences_are_short(path: str) -> None:
    page = COUNTED[path]
    assert page.words <= count_words.MOST_PAGE
    assert not page.too_long()
    assert page.mean <= count_words.MOST_MEAN


def test_words_and_sentences_are_counted_without_code_and_markup() -> None:
    page = count_words.counted(
        "# Two words\n\nOne `code_a b` [link](x.md). Two\nhere, e.g. 3.\n\n```\nleft out\n```\n\n"
        "- an item\n- second\n\n| a | b |\n|---|---|\n| c d. | E |\n"
    )
    assert page.sentences == ("One `code` link.", "Two here, e.g. 3.", "an item", "second")
    assert page.words == 2 + 4 + 4 + 3 + 5
    assert [len(count_words.counted(" ".join(["w"] * n) + ".").too_long()) for n in (35, 36)] == [0, 1]
