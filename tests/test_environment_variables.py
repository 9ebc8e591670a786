"""Environment variables: the table in docs/deployment.md lists exactly those that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs/deployment.md").read_text().split("## Environment variables")[1].split("\n## ")[0]
LISTED = re.findall(r"`(GEARTRAIN_\w+)`", "".join(row.split("|")[1] for row in TABLE.splitlines() if "|" in row))
MOST = 20


def named_in(*folders: str) -> set[str]:
    """Variables that are the whole of a text between quotes, in Python and C++."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cc", ".h")]
    own = [path for path in files if ROOT / "native/tests" not in path.parents]
    assert own, folders
    return set().union(*(re.findall(r'"(GEARTRAIN_[A-Z0-9_]+)"', path.read_text()) for path in own))


def test_the_table_lists_the_variables_that_the_code_reads() -> None:
    found = named_in("src/geartrain", "src/geartrain_autoload", "native")
    assert sorted(LISTED) == sorted(found)
    assert len(found) <= MOST, "make it an option, or remove another variable"


def test_benchmarks_have_no_variables_of_their_own() -> None:
    assert named_in("src/geartrain_bench") <= set(LISTED)


def test_tests_name_their_variables_as_such() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "native/tests").rglob("*.[ch]*")]
    reads = r'(?:environ(?:\.get\(|\[)|getenv\(|_in\(|asked_for\()"(GEARTRAIN_\w+)"'
    found = set().union(*(re.findall(reads, path.read_text()) for path in files))
    assert found, "the pattern finds nothing"
    assert {name for name in found - set(LISTED) if not name.startswith("GEARTRAIN_TEST_")} == set()


def test_pages_and_messages_name_only_variables_that_exist() -> None:
    known = {*LISTED, "GEARTRAIN_TLS_"}
    build = set(re.findall(r"GEARTRAIN_\w+", (ROOT / "CMakeLists.txt").read_text()))
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    for page in [*pages, ROOT / "README.md"]:
        named = set(re.findall(r"\bGEARTRAIN_\w+", page.read_text())) - known - build
        assert {name for name in named if not name.startswith("GEARTRAIN_TEST_")} == set(), page
