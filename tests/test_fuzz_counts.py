"""Fuzz counts: what `make fuzz` runs, counts and says of a finding."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fuzz_native import COUNTS, ROOT, FindingError, fuzzers, run


def program(folder: Path, name: str, body: str) -> Path:
    """An executable in the place of a fuzzer of fuzz_driver.cc."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = -help=1 ] && exit 0\n{body}\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("ends", ["exit 1", "kill -SEGV $$", "echo nothing said"])
def test_a_finding_ends_the_run_with_the_command_that_shows_it_and_counts_nothing(tmp_path: Path, ends: str) -> None:
    counts = tmp_path / "counts.json"
    broken = program(tmp_path, "fuzz_a", f"echo what it said; {ends}")
    with pytest.raises(FindingError, match=r"(?s)fuzz_a 10 20\.0 0 \S+ ended with .*what it said"):
        run([broken], counts, 10, jobs=1)
    assert not counts.exists()


def test_every_fuzzer_is_built_and_counted() -> None:
    built = re.search(r"foreach\(test (segment/segment .*?)\)\n", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)
    assert built is not None
    assert fuzzers() == sorted(f"fuzz_{name.split('/')[1]}" for name in built[1].split())
    counted = json.loads(COUNTS.read_text())
    assert sorted(counted) == fuzzers()
    assert all((entry["executions"] > 0) == (entry["slices"] > 0) for entry in counted.values())
