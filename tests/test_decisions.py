"""docs/decisions: each record is in the index, and each mention of a record leads to one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DECISIONS = ROOT / "docs" / "decisions"
INDEX = (DECISIONS / "README.md").read_text()
RECORDS = {path.name: path.read_text() for path in DECISIONS.glob("*.md") if path.name != "README.md"}
#: Where a record may be named: code, tests, build files and pages.
SUFFIXES = {".py", ".pyi", ".h", ".cc", ".md", ".toml", ".txt", ".yml", ".ipynb"}
FOLDERS = ("src", "native", "docs", "examples", "tests", "release", ".ci")


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def found(record: str, anchor: str) -> bool:
    text = INDEX if record == "README.md" else RECORDS.get(record)
    return text is not None and (not anchor or anchor in anchors(text))


def test_every_record_is_in_the_index_once_with_its_title_and_status() -> None:
    rows = re.findall(r"^\| \[([^\]]+)\]\(([\w-]+\.md)\) \| [^|]+ \| [^|]*\w[^|]* \|$", INDEX, re.MULTILINE)
    titles = {name: text.splitlines()[0].removeprefix("# ") for name, text in RECORDS.items()}
    assert sorted((name, title) for title, name in rows) == sorted(titles.items())


def test_every_old_number_leads_to_a_record() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.+) \|$", INDEX, re.MULTILINE)
    assert [number for number, _ in rows] == [f"{number:03}" for number in range(1, 96)]
    for number, where in rows:
        if where != "not used":
            link = re.fullmatch(r"\[[^\]]+\]\(([\w-]+\.md)#?([\w-]*)\)", where)
            assert link and found(*link.groups()), f"{number} leads to {where}"


def test_mentions_name_records_that_exist() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES] + [ROOT / ".ci" / "run", ROOT / "Makefile"]
    mentions = 0
    for path in files:
        text = path.read_text(errors="replace") if path != Path(__file__) else ""
        if path.parent == DECISIONS:
            text = re.sub(r"\]\((?=[\w-]+\.md)", "](decisions/", text)  # links between records
        for record, anchor in re.findall(r"decisions/([\w-]+\.md)(?:#([\w-]+))?", text):
            mentions += 1
            assert found(record, anchor or ""), f"{path.relative_to(ROOT)} names {record}#{anchor}"
        old = re.search(r"\bdecisions?[ /\n(\[]*(?:#\s*|//\s*)?\d{3}\b", text, re.IGNORECASE)
        assert old is None, f"{path.relative_to(ROOT)} names a record by its old number: {old.group()!r}"
    assert mentions > 50
