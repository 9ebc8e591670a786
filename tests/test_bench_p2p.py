"""`geartrain bench p2p` measures every system in every case, beside its floor."""

from __future__ import annotations

import pytest

from geartrain.bench import load
from geartrain.bench.p2p import Plan, run


def test_every_system_is_measured_in_every_case() -> None:
    pytest.importorskip("torch")
    result = run(Plan((1_280, 1_310_720), 1, 6.0), {"pigeon": "/usr/bin/python"})
    systems = {"geartrain shm", "geartrain shm, spinning", "geartrain tcp", "raw unix", "raw tcp", "TensorPipe"}
    for metric, cases in (("call", 2), ("one way, and a word back", 2), ("throughput", 2)):
        rows = [row for row in result.rows if row.metric == metric]
        assert len({row.case for row in rows}) == cases
        assert systems <= {row.system for row in rows}
        assert all(row.p50 > 0 and row.ratio_to_floor > 0 for row in rows)
    in_flight = {row.system for row in result.rows if row.metric == "calls"}
    assert in_flight == systems - {"raw unix", "raw tcp"}
    assert "pigeon" in result.peers_missing
    assert load("p2p")
