"""All-gather over a slow link: needs root, for network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

WORKER = Path(__file__).parents[1] / "support" / "exchanges_network_worker.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(Hosts.viable() is not None, reason=f"no hosts here: {Hosts.viable()}"),
    pytest.mark.timeout(300),
]


def test_an_all_gather_keeps_both_directions_of_a_link_busy_however_large_the_window(tmp_path: Path) -> None:
    # A reduce-scatter moves as many bytes each way, and no rank of it runs ahead. Where a rank sent a window before the
    # open that the other waits for, or reports of what was received stood behind one, it took twice that.
    ranks, count = 2, 1 << 18
    with Hosts(ranks, rate_mbit=100) as hosts:
        workers = [
            hosts.popen(
                rank,
                [sys.executable, str(WORKER), str(tmp_path), *map(str, (rank, ranks, count, 4 << 20))],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [worker.communicate(timeout=patience(100))[0] for worker in workers]
        assert all(worker.returncode == 0 for worker in workers)
    seconds = json.loads(said[0].splitlines()[-1])["seconds"]
    assert seconds["reduce_scatter"] > 0.9 * 4 * count * 8 / 100e6, "the link is faster than it was made"
    assert seconds["all_gather"] < 1.4 * seconds["reduce_scatter"], seconds
