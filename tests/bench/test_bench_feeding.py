"""The feeding bench: rows and bytes arrive over the link by each way. No timing is judged."""

from __future__ import annotations

import math

import pytest

import geartrain_bench.feeding.bench as feeding
from geartrain.tools.testing.cluster import Hosts

NO_HOSTS = f"no hosts can be made here: {Hosts.viable()}"


def test_without_hosts_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hosts, "viable", staticmethod(lambda: "ip is missing"))
    with pytest.raises(feeding.FeedError, match="network namespaces: ip is missing"):
        feeding.measure(1)


@pytest.mark.slow
@pytest.mark.skipif(Hosts.viable() is not None, reason=NO_HOSTS)
def test_every_way_has_laps_and_none_is_faster_than_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    found = feeding.measure(laps=3, lap_bytes=2_000_000, rate_mbit=400.0)
    assert set(found) == {"floor", "steps", "rows"}
    for seconds in found.values():
        assert len(seconds) == 3 and all(math.isfinite(each) for each in seconds)
        assert min(seconds) > 2_000_000 * 8 / 400e6 * 0.8, "a bucket that was full passes its first 70 KB at once"
