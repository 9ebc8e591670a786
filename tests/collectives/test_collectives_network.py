"""All-reduce over links with a rate and a delay: needs root.

`pytest -m long -s tests/collectives/test_collectives_network.py` prints the figures of docs/benchmarks/allreduce.md,
"Fixed and adaptive windows".
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

HERE = Path(__file__).parents[1] / "support"
MB = 1 << 20
WINDOWS = [None, 256 << 10, MB]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(Hosts.viable() is not None, reason=f"no hosts here: {Hosts.viable()}"),
    pytest.mark.timeout(600),
]


def measure(root: Path, ranks: int, reducers: int, rate_mbit: float, rtt_ms: float) -> dict[str, Any]:
    """Seconds of an all-reduce by size and window, on rank 0."""
    secret = root / "secret"
    secret.write_text("shared")
    with Hosts(ranks + reducers, rate_mbit=rate_mbit, rtt_ms=rtt_ms) as hosts:
        addresses = [f"10.77.0.{ranks + i + 1}:7000" for i in range(reducers)]
        for i, address in enumerate(addresses):
            command = [sys.executable, "-m", "geartrain", "reducer", "--bind", address, "--secret-file", str(secret)]
            process = hosts.popen(ranks + i, command, stdout=subprocess.PIPE, text=True)
            assert "listening" in process.stdout.readline()  # type: ignore[union-attr]
        shares = [0.0] * ranks + [1 / reducers] * reducers if reducers else "equal"
        options = {"windows": WINDOWS, "sizes": [4096, MB, 16 * MB], "reducers": addresses, "shares": shares}
        workers = [
            hosts.popen(
                rank,
                [
                    sys.executable,
                    str(HERE / "collectives_network_worker.py"),
                    str(root),
                    str(rank),
                    str(ranks),
                    json.dumps(options),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [worker.communicate(timeout=patience(300))[0] for worker in workers]
        assert all(worker.returncode == 0 for worker in workers)
    found: dict[str, Any] = json.loads(said[0])
    print(f"\n{ranks} ranks, {reducers} reducers, {rate_mbit} Mbit/s, {rtt_ms} ms: {json.dumps(found)}")
    return found


@pytest.mark.parametrize(
    ("ranks", "reducers", "rate_mbit", "rtt_ms"),
    [(4, 0, 200, 10), (8, 0, 100, 10), (4, 4, 200, 40), (8, 8, 100, 10), (4, 4, 200, 0)],
)
def test_the_window_is_never_much_worse_than_the_better_of_two_fixed_ones(
    tmp_path: Path, ranks: int, reducers: int, rate_mbit: float, rtt_ms: float
) -> None:
    found = measure(tmp_path, ranks, reducers, rate_mbit, rtt_ms)
    for nbytes, seconds in found["seconds"].items():
        if int(nbytes) >= MB:
            assert seconds["None"] < 1.25 * min(seconds[str(window)] for window in WINDOWS[1:]), (nbytes, seconds)


def test_a_small_array_takes_little_more_than_one_round_trip_on_any_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (2, 8):
        root = tmp_path / str(ranks)
        root.mkdir()
        seconds = measure(root, ranks, 0, 100, 10)["seconds"]["4096"]["None"]
        assert seconds < 0.016
