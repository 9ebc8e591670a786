"""Fuzz counts: every fuzzer is built and counted."""

from __future__ import annotations

import json
import re

from fuzz_native import COUNTS, ROOT, fuzzers


def test_every_fuzzer_is_built_and_counted() -> None:
    built = re.search(r"foreach\(test (segment/segment .*?)\)\n", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)
    assert built is not None
    assert fuzzers() == sorted(f"fuzz_{name.split('/')[1]}" for name in built[1].split())
    counted = json.loads(COUNTS.read_text())
    assert sorted(counted) == fuzzers()
    assert all((entry["executions"] > 0) == (entry["slices"] > 0) for entry in counted.values())
