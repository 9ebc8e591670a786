"""The benchmark of messages between hosts measures every system that is here, beside a raw socket."""

from __future__ import annotations

import importlib.util
import re

import pytest

import geartrain_bench.messages.across_hosts as across_hosts
from geartrain.tools.testing import Hosts

pytest.importorskip("torch")


@pytest.mark.slow(reason="starts six interpreters")
def test_every_system_is_measured_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    reason = Hosts.viable()
    if reason is not None:
        pytest.skip(reason)
    across_hosts.measure([20_480, 1_310_720], 2, None, 5.0)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("two hosts, an unshaped link")
    systems = {"raw TCP", "geartrain", "TensorPipe"}
    if importlib.util.find_spec("pynng") is not None:
        systems.add("nng, pickled")
    assert [line.split(" MB, ")[0].strip() for line in lines] == ["0.02048", "1.31072"]
    for line in lines:
        found = re.findall(r"[:;] ([^:;]+?) ([0-9.]+) \(([0-9.]+)\) ([0-9.]+)", line)
        assert {name for name, *_ in found} == systems
        assert all(float(fastest) <= float(median) for _, median, fastest, _ in found)
        assert all(float(median) > 0 for _, median, *_ in found)
