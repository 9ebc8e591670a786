"""Values of wrong types and ranges at the public calls: taken, or refused by an error of geartrain's, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import deadlines
import hostile.doors_datasets  # registers them
import hostile.doors_jobs
import hostile.doors_peers
import hostile.doors_rate_limiters
import hostile.doors_recorders
import hostile.doors_replays
import hostile.doors_stores
import hostile.doors_tasks  # noqa: F401
import pytest
from hostile.subject import Tools
from hostile.values import DOORS, refused, sweep

# `make test` tries these; the others, which make nodes, groups or stores by the dozen, are for `make test-all`.
SHORT = ("transport.", "Connection.", "Listener.")
SHORT += (
    "fetch",
    "Windows",
    "Placement",
    "Convert",
    "Candidates",
    "Store.insert",
    "Store.row",
    "Row",
    "Store.write",
    "Store.up",
    "Keys",
    "StepRecorder",
    "RateLimiter",
    "Field",
)
#: Of these the slow ones: they import torch.
LONG = ("Row.torch", "Convert", "Placement")


@pytest.fixture
def tools(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    if request.node.get_closest_marker("slow"):
        pytest.importorskip("torch")  # here, and not within a call that is to end soon
    monkeypatch.chdir(tmp_path)  # a value that is taken for a path may be written to
    one = Tools("hostile-values", deadlines.factor())
    yield one
    one.clean()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith(SHORT) and name not in LONG else [pytest.mark.slow])
        for name in DOORS
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_parameter_takes_a_value_or_refuses_it_by_an_error_of_geartrains(tools: Tools, name: str) -> None:
    found = sweep(tools, name)
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("name", [name for name in DOORS if name.startswith(SHORT) and name not in LONG])
def test_what_equals_an_argument_that_is_taken_is_taken(tools: Tools, name: str) -> None:
    found = refused(tools, name)
    assert not found, "\n".join(found)
