"""No test gets lost: each of tests/ids/before.txt is still run, under the name that tests/ids/renamed.txt gives it.

before.txt holds the ids of one day, a test below its file and its parameters below the test ([*]: one for each page or
file there is); those behind which "slow" stands were not in `make test`. Whoever renames, moves or parts a test adds a
line to renamed.txt. New tests need none.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

ROOT = Path(__file__).parents[1]
IDS = Path(__file__).parent / "ids"


def renames() -> list[tuple[str, str]]:
    lines = [line for line in (IDS / "renamed.txt").read_text().splitlines() if line and not line.startswith("#")]
    return [(old, new) for old, _, new in (line.partition(" -> ") for line in lines)]


def before() -> list[tuple[str, bool]]:
    """The ids of tests/ids/before.txt by their names of today, and whether each was in `make test`."""
    found: list[tuple[str, bool]] = []
    file = function = ""
    for line in (IDS / "before.txt").read_text().splitlines():
        text = line.strip().removesuffix(" slow")
        quick = not line.endswith(" slow")
        if not line.startswith(" "):
            file = text
        elif not line.startswith("        "):
            function = f"{file}::{text}"
            found.append((function, quick))
        else:
            if found[-1][0] == function:
                found.pop()  # it has parameters
            found.append((function + text, quick))
    table = renames()
    return [(functools.reduce(lambda name, pair: name.replace(*pair), table, name), quick) for name, quick in found]


COLLECT = """
import sys, pytest
class Tell:
    def pytest_collection_finish(self, session):
        for item in session.items:
            later = any(mark.name in ("slow", "long") for mark in item.iter_markers())
            print("later" if later else "quick", item.nodeid)
sys.exit(pytest.main(["--collect-only", "-qq", "-o", "addopts=", "-p", "no:cacheprovider", "tests"], [Tell()]))
"""


def collected() -> tuple[set[str], set[str]]:
    """The ids of `make test`, and all others."""
    done = preloaded.run([sys.executable, "-c", COLLECT], cwd=ROOT, timeout=patience(100))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pairs = [line.split(" ", 1) for line in done.stdout.splitlines() if re.match(r"(quick|later) tests/", line)]
    return tuple({name for when, name in pairs if when == which} for which in ("quick", "later"))  # type: ignore


def test_make_runs_every_test_once() -> None:
    """Three commands with three conditions on marks, of which each test meets one."""
    text = (ROOT / "Makefile").read_text()
    text, again = re.sub(r"\n\t\S*pytest [^\n]*--last-failed[^\n]*", "", text, flags=re.S), text
    assert text != again  # `make test-failed` runs those once more that failed, whatever their marks
    text, again = re.sub(r"\ntest-sanitized: setup[^\n]*\n\t[^\n]*", "", text), text
    assert text != again  # `make test-sanitized` runs some once more, with another native module
    assert set(re.findall(r"-m '([^']*)'", text)) == {"slow and not long", "long"}
    assert "-m 'not slow and not long'" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_every_test_there_was_is_still_run_and_every_promise_has_a_case_in_make_test() -> None:
    quick, rest = collected()
    everything = quick | rest
    functions = {name.partition("[")[0] for name in everything}
    of_quick = {name.partition("[")[0] for name in quick}
    old = before()
    assert len(old) > 1900
    lost = [n for n, _ in old if (n[:-3] not in functions if n.endswith("[*]") else n not in everything)]
    assert not lost, f"{len(lost)} tests are gone, and tests/ids/renamed.txt says nothing of them: {lost[:50]}"
    promises = {name.partition("[")[0] for name, was_quick in old if was_quick}
    assert promises <= of_quick, f"no case is left in make test of: {sorted(promises - of_quick)}"
