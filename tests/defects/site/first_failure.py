"""Pytest plug-in that tells `plant.py` which test runs, and which one failed first, in the file GEARTRAIN_TEST_REPORT.

A file, because a test may end the whole process. Tests that are marked slow or long are run only where they are named:
of a file that is named they are left out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_report = Path(os.environ["GEARTRAIN_TEST_REPORT"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = tuple(each for each in config.args if "::" in each)

    def takes_long(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(mark) for mark in ("slow", "long"))

    left_out = [item for item in items if takes_long(item) and not item.nodeid.startswith(named)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logstart(nodeid: str) -> None:
    _report.write_text(f"runs {nodeid}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and not _report.read_text().startswith("failed"):
        _report.write_text(f"failed {report.nodeid}")


def pytest_sessionfinish() -> None:
    if _report.exists() and _report.read_text().startswith("runs"):
        _report.write_text("passed")
