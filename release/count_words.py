"""Words and sentences of the documentation, page by page.

python3 release/count_words.py                      # the pages of the working tree
python3 release/count_words.py --since 011037c9     # beside those of a commit

Pages are README.md, docs/*.md, docs/first-hour/*.md and docs/recipes/*.md, without benchmark pages. A word is a token
with a letter or digit in it; code blocks are left out. In a sentence, code in backticks is one word. The mean is over
the sentences of paragraphs and list items; sentences that are too long are also looked for in table cells.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs/", "docs/first-hour/", "docs/recipes/")
#: Pages of measurements.
BENCHMARKS = {"docs/benchmarks.md", "docs/bench-rpc-rl.md", "docs/results.md"}
#: Words of a page, words of a sentence, mean words of the sentences of a page.
MOST_PAGE, MOST_SENTENCE, MOST_MEAN = 1800, 35, 16.0

_LEFT_OUT = re.compile(r"^([ \t]*)```.*?^\1```[^\n]*$|<!--.*?-->", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*>\s?")
# After a stop, and before a capital letter, code, a number or a quotation. "e.g." and "i.e." end no sentence.
_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[\"')*_]*\s+(?=[\"'(*_`]*[A-Z0-9`])")


@dataclass(frozen=True)
class Page:
    """What is counted of a page.

    Attributes:
        words: of its text, headings and tables.
        sentences: of its paragraphs and list items.
        cells: sentences of its table cells.
    """

    words: int
    sentences: tuple[str, ...]
    cells: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean words of a sentence; 0 without sentences."""
        return sum(map(words_of, self.sentences)) / max(1, len(self.sentences))

    def too_long(self) -> list[str]:
        """Sentences above the limit, those of table cells too."""
        return [text for text in (*self.sentences, *self.cells) if words_of(text) > MOST_SENTENCE]


def words_of(text: str) -> int:
    """Tokens with a letter or a digit in them."""
    return sum(any(one.isalnum() for one in token) for token in text.split())


def counted(markdown: str) -> Page:
    """The counts of a page."""
    text = _LINK.sub(r"\1", _LEFT_OUT.sub("", markdown))
    blocks: list[str] = [""]
    cells: list[str] = []
    for line in re.sub(r"`[^`]+`", "`code`", text).splitlines():
        if line.lstrip().startswith("|"):
            cells += [cell.strip() for cell in line.strip().strip("|").split("|")]
            blocks.append("")
        elif line.startswith("#") or not line.strip():
            blocks.append("")
        else:
            if _ITEM.match(line):
                blocks.append("")
            blocks[-1] += " " + _ITEM.sub("", line).strip()
    sentences = [part.strip() for block in blocks for part in _END.split(block) if words_of(part)]
    inside = [part.strip() for cell in cells for part in _END.split(cell) if words_of(part)]
    return Page(words_of(text), tuple(sentences), tuple(inside))


def is_counted(path: str) -> bool:
    """Whether a page of this path counts."""
    folder, name = path[: path.rfind("/") + 1], path[path.rfind("/") + 1 :]
    if folder == "":
        return name == "README.md"
    return folder in FOLDERS and name.endswith(".md") and path not in BENCHMARKS


def pages(commit: str | None = None) -> dict[str, Page]:
    """Each page by its path, of the working tree or of a commit."""
    if commit is None:
        paths = [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    else:
        paths = _git("ls-tree", "-r", "--name-only", commit, "README.md", "docs").splitlines()
    found = {}
    for path in sorted(filter(is_counted, paths)):
        found[path] = counted((ROOT / path).read_text() if commit is None else _git("show", f"{commit}:{path}"))
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Prints a line a page, and the sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", metavar="COMMIT", help="also count the pages of this commit")
    parser.add_argument("--long", action="store_true", help="print the sentences that are too long")
    given = parser.parse_args()
    now, before = pages(), pages(given.since) if given.since else {}
    print(f"{'page':<34}{'words':>7}{'before':>8}{'mean':>7}{'too long':>10}")
    for path, page in now.items():
        old = str(before[path].words) if path in before else "new" if before else ""
        print(f"{path:<34}{page.words:>7}{old:>8}{page.mean:>7.1f}{len(page.too_long()):>10}")
        if given.long:
            for text in page.too_long():
                print(f"    {words_of(text)}: {text}")
    sentences = [text for page in now.values() for text in page.sentences]
    mean = sum(map(words_of, sentences)) / max(1, len(sentences))
    total = sum(page.words for page in now.values())
    long = sum(len(page.too_long()) for page in now.values())
    print(f"{'all':<34}{total:>7}{sum(page.words for page in before.values()) or '':>8}{mean:>7.1f}{long:>10}")
    if before:
        kept = sum(page.words for path, page in now.items() if path in before)
        print(f"pages that were there before: {kept} words, {kept / sum(page.words for page in before.values()):.2f}")


if __name__ == "__main__":
    main()
