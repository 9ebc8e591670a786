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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(GeartrainError, match="fetch cannot be timed on a GPU here"):
        fetch.main()
