"""Race counts: what `make races` counts, and which cases it runs first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hostile.race_counts as race_counts
import pytest
import test_hostile_callers as callers


class ServerThatFinds:
    """In the place of a server of scenarios: notes its orders, and finds a defect in the slice with that seed."""

    def __init__(self, bad_seed: int | None = None) -> None:
        self.bad_seed, self.orders = bad_seed, []

    def run(self, subject: str, scenario: str, **options: Any) -> dict[str, Any]:
        self.orders.append((options["seed"], options["rounds"]))
        findings = ["a thread hangs"] if options["seed"] == self.bad_seed else []
        return {"skipped": None, "findings": findings, "output": ""}


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The case whose rounds are counted in a file of this test's own."""
    monkeypatch.setattr(race_counts, "FILE", tmp_path / "race_counts.json")
    monkeypatch.setenv(race_counts.VARIABLE, "address")
    monkeypatch.setattr(callers, "ROUNDS", 250)
    return "Store-fork_beside_calls"


def race(server: ServerThatFinds) -> None:
    callers.test_a_thousand_rounds_of_each_race({"hostile.stores": server}, "Store", "fork_beside_calls")


def test_rounds_are_counted_by_sanitizer_and_no_slice_has_the_seed_of_another(counted, monkeypatch):
    race(server := ServerThatFinds())
    assert server.orders == [(0, 100), (100, 100), (200, 50)]
    monkeypatch.setattr(callers, "ROUNDS", 300)
    race(server)
    assert server.orders[3:] == [(250, 50)]
    with pytest.raises(pytest.skip.Exception, match="had 300 rounds"):
        race(server)
    assert race_counts.read() == {counted: {"address": 300}} and race_counts.rounds(counted, "none") == 0


def test_a_slice_with_a_finding_is_not_counted(counted):
    with pytest.raises(AssertionError, match="a thread hangs"):
        race(ServerThatFinds(bad_seed=100))
    assert race_counts.rounds(counted, "address") == 100


def test_the_counts_are_of_cases_that_there_are():
    assert set(race_counts.read()) <= {f"{subject}-{scenario}" for subject, scenario in callers.cases()}
