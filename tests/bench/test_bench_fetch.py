"""The bench of fetch runs every path where there is no GPU, and refuses to time one that is not there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import geartrain_bench.fetch.bench as fetch  # noqa: E402
from geartrain.errors import GeartrainError  # noqa: E402


def test_every_case_has_its_floor_and_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CPU_BATCH_BYTES", 4e4), ("CPU_STORE_BYTES", 2e5), ("CPU_LAPS", 2), ("BATCHES_A_LAP", 2)):
        monkeypatch.setattr(fetch, name, value)
    seconds: dict[int, dict[str, float]] = {}
    result = fetch.run("cpu", quick=True, rows={4_000: (50, 20)}, crossover_rows={40_000: (100, 100)}, seconds=seconds)
    assert {size: set(times) for size, times in seconds.items()} == {s: set(fetch.PATHS) for s in (4_000, 40_000)}
    systems = {row.system for row in result.rows}
    assert {"floor", "geartrain gather", "geartrain copy", "geartrain staged", "index_select, pinned copy"} <= systems
    assert all(row.p50 > 0 for row in result.rows)
    steps = {row.system for row in result.rows if row.metric == "training step with a new batch"}
    assert steps == {"floor", *(f"geartrain {path}" for path in (*fetch.PATHS, "(chooser)")), fetch.BY_HAND}
    assert any("do not apply to any GPU" in note for note in result.notes)


def test_the_crossover_is_said_in_words() -> None:
    both = {
        4_000: {"gather": 1.0, "copy": 3.0, "staged": 2.0},
        10**6: {"gather": 4.0, "copy": 1.0, "staged": 5.0},
    }
    note = fetch.crossover_note(both)
    assert "4000: 3.00 and 2.00, 1000000: 0.25 and 1.25" in note
    assert "rows of up to 63246 bytes are gathered" in note


def test_the_crossover_stands_between_the_sizes_that_were_measured() -> None:
    faster, slower = {"gather": 1.0, "staged": 2.0}, {"gather": 2.0, "staged": 1.0}
    assert fetch.found_from({10**4: faster, 10**6: slower, 10**5: faster}) == 316228
    assert fetch.found_from({10**4: faster, 10**6: faster}) == 10**6
    assert fetch.found_from({10**4: slower, 10**6: faster}) == 0
    assert fetch.found_from({10**4: {"gather": 1.01, "staged": 1.0}}) == 10**4, "as fast, within what is measured"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(GeartrainError, match="fetch cannot be timed on a GPU here"):
        fetch.main()
