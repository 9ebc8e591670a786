"""The overheads bench: every system does what it is measured in. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import geartrain_bench.overheads.bench as overheads


def test_quick_ends_within_a_minute_where_processes_start_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Worker:
        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def kill(self) -> None:
            pass

    def started(_system: str, _folder: Path) -> Worker:
        nonlocal now_s
        now_s += 6.0
        return Worker()

    def lap(_worker: Worker, _case: str, lap_s: float) -> tuple[float, float]:
        nonlocal now_s
        now_s += 1.5 * lap_s
        return 1e-6, 2e-6

    monkeypatch.setattr(overheads, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(overheads, "_worker", started)
    monkeypatch.setattr(overheads, "_lap", lap)
    result = overheads.main(quick=True)
    assert now_s < 60
    assert {row.system for row in result.rows} == set(overheads.SYSTEMS)
    now_s = 0.0
    assert {len(found) for found in overheads.measure(7, budget_s=0.0).values()} == {overheads.LEAST_ROUNDS}
    assert {len(found) for found in overheads.measure(7).values()} == {7}


@pytest.mark.slow
def test_every_system_has_laps_and_writes_what_it_is_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overheads.tempfile, "TemporaryDirectory", lambda **_: _Kept(tmp_path))
    laps = overheads.measure(rounds=2, lap_s=0.7)
    assert set(laps) == {(system, case) for system, cases in overheads.SYSTEMS.items() for case in cases}
    for found in laps.values():
        assert len(found) == 2
        assert all(0 < thread <= process for thread, process in found)
    assert len(list((tmp_path / "journal").glob("segment-*.bin"))) >= 1
    events = json.loads((tmp_path / "trace.json").read_text().rstrip().rstrip(",") + "]")
    names = {event["name"] for event in events}
    assert "make batch" in names
    assert any(name.startswith("call") for name in names)


class _Kept:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        return str(self._path)

    def __exit__(self, *_: object) -> None:
        pass
