"""Count of what a plug-in has put geartrain's in the place of: of each case in the report, and of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

count = 0


class Hooks:
    """Each case tells how many were made or called while it ran ("substituted"); a run without any fails.

    Args:
        what: is substituted, for the error.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.user_properties.append(("substituted", "0"))
        item._geartrain_made = (count, len(item.user_properties) - 1)  # type: ignore[attr-defined]
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        before, place = item._geartrain_made  # type: ignore[attr-defined]
        item.user_properties[place] = ("substituted", str(count - before))
        yield

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if count == 0 and session.testscollected:
            session.exitstatus = 1
            raise AssertionError(f"no {self.what} of geartrain's was made: nothing was substituted")
