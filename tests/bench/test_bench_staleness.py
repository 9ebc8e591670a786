"""The store's pace of rollouts and training is that of a simulation, row for row."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain_bench.llm.staleness import OfStore, Pace, Simulated, distance, measure, run, shares


@pytest.mark.parametrize("eta", [0, 2, 4])
def test_a_store_trains_rows_as_stale_as_the_simulation_does(eta: int) -> None:
    pace = Pace(eta)
    flow = OfStore(pace)
    trained = run(flow, pace)
    assert flow.store.audit() == []
    flow.close()
    assert [sorted(each) for each in trained] == [sorted(each) for each in run(Simulated(pace), pace)]
    assert len(trained) == pace.steps and all(len(each) == pace.batch for each in trained)
    rows = np.concatenate(trained)
    assert (rows.max() == 0) if eta == 0 else (0.5 * eta < rows.mean() <= eta)


@pytest.mark.slow
def test_a_run_of_threads_has_the_simulations_histogram_to_the_noise_of_the_machine() -> None:
    pace = Pace(2, steps=20)
    assert distance(shares(measure(pace, 0.02)), shares(run(Simulated(pace), pace))) < 0.4
