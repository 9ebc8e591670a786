"""The bench of fetch runs every path where there is no GPU, and refuses to time one that is not there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from geartrain.bench import fetch  # noqa: E402
from geartrain.errors import GeartrainError  # noqa: E402


def test_every_case_has_its_floor_and_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CPU_BATCH_BYTES", 4e4), ("CPU_STORE_BYTES", 2e5), ("CPU_LAPS", 2), ("BATCHES_A_LAP", 2)):
        monkeypatch.setattr(fetch, name, value)
    result = fetch.run("cpu", quick=True, rows={4_000: (50, 20)})
    systems = {row.system for row in result.rows}
    assert {"floor", "geartrain gather", "geartrain staged", "index_select, pinned copy"} <= systems
    assert all(row.p50 > 0 for row in result.rows)
    assert any("say nothing about any GPU" in note for note in result.notes)


def test_the_crossover_is_said_in_words() -> None:
    both = {4_000: {"gather": 1.0, "staged": 2.0}, 10**6: {"gather": 3.0, "staged": 2.0}}
    assert "gather was faster at [4000], staging at [1000000]" in fetch.crossover_note(both)
    assert "faster at every size" in fetch.crossover_note({4_000: both[4_000]})
    assert "should be below 1000000" in fetch.crossover_note({10**6: both[10**6]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(GeartrainError, match="fetch cannot be timed on a GPU here"):
        fetch.main()
