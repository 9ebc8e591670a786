"""The benchmark of hosts that are far from each other runs a case with a delay and without, and prints their ratio."""

from __future__ import annotations

import pytest

import geartrain_bench.distributed_replay.delay as delay
from geartrain.tools.testing import Hosts

pytest.importorskip("torch")


@pytest.mark.slow
def test_a_case_is_measured_with_the_delay_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    reason = Hosts.viable()
    if reason is not None:
        pytest.skip(reason)
    asked = {"--hosts": "2", "--delay-ms": "30", "--train-ms": "0", "--prefetch": "0", "--batches": "8"}
    delay.main([word for pair in asked.items() for word in pair] + ["--extra-lag", "none", "1"])
    *_, plain, lagged = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert plain[:4] == ["2", "0", "0", "none"] and lagged[:4] == ["2", "0", "0", "1"]
    for words, trips in ((plain, 3), (lagged, 2)):
        without, with_delay, ratio = (float(word) for word in words[4:7])
        assert 0 < with_delay <= 64 / (trips * 0.03) * 1.05  # so many messages after each other take that long
        assert ratio == pytest.approx(with_delay / without, abs=0.02)
