"""Hierarchical all-reduce of 4 hosts x 4 ranks, processes in network namespaces: bytes of the links, a killed rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

HERE = Path(__file__).parents[1] / "support"
HOSTS, RANKS = 4, 4
COUNT = 2 << 20  # elements: 8 MB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(Hosts.viable() is not None, reason=f"no hosts here: {Hosts.viable()}"),
    pytest.mark.timeout(300),
]


def start(hosts: Hosts, root: Path, ranks: int, **options: Any) -> list[subprocess.Popen[str]]:
    root.mkdir()
    return [
        hosts.popen(
            host,
            [
                sys.executable,
                str(HERE / "hierarchical_host.py"),
                *map(str, (root, host, ranks, HOSTS)),
                json.dumps({"steps": 2, "count": COUNT, **options}),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(HOSTS)
    ]


def said(processes: list[subprocess.Popen[str]]) -> dict[int, dict[str, Any]]:
    """The last line of each rank."""
    found = {}
    for process in processes:
        out, _ = process.communicate(timeout=patience(60))
        for line in out.splitlines():
            words = json.loads(line)
            if "ready" not in words:
                found[words["rank"]] = words
    return found


def test_four_ranks_a_host_move_the_bytes_of_one(tmp_path: Path) -> None:
    moved, digests = {}, {}
    with Hosts(HOSTS, rate_mbit=1000) as hosts:
        for name, ranks, hierarchical in (("one", 1, False), ("flat", RANKS, False), ("hierarchical", RANKS, True)):
            before = [hosts.bytes(host) for host in range(HOSTS)]
            found = said(start(hosts, tmp_path / name, ranks, hierarchical=hierarchical))
            after = [hosts.bytes(host) for host in range(HOSTS)]
            assert len(found) == ranks * HOSTS and all("digest" in words for words in found.values()), found
            assert len({words["digest"] for words in found.values()}) == 1, "other bits on some ranks"
            digests[name] = found[0]["digest"]
            moved[name] = [(b.sent - a.sent, b.received - a.received) for a, b in zip(before, after, strict=True)]
            if hierarchical:  # within the host through memory alone, and across with one rank a host
                assert all(words["links"] == {"tcp": HOSTS - 1, "shm": 2 * (RANKS - 1)} for words in found.values())
    bound = 2 * 2 * (HOSTS - 1) / HOSTS * 4 * COUNT  # of two steps
    print({name: [round(sent / bound, 3) for sent, _ in of_hosts] for name, of_hosts in moved.items()})
    for one, flat, both in zip(moved["one"], moved["flat"], moved["hierarchical"], strict=True):
        for way in range(2):
            assert both[way] < 1.05 * one[way], moved
            assert both[way] > 0.99 * bound, moved
            assert flat[way] > 3.5 * one[way], moved  # what there is to gain
    assert digests["hierarchical"] != digests["flat"], "the order of sums is another one, as documented"
    assert digests["hierarchical"] == expected()


def expected() -> str:
    """What two steps sum to: in rank order within each host, then in the order of the hosts."""
    import hashlib

    digest = hashlib.sha256()
    for step in range(2):
        total = None
        for host in range(HOSTS):
            of_host = None
            for rank in range(host * RANKS, (host + 1) * RANKS):
                array = np.random.default_rng(1000 * step + rank).standard_normal(COUNT).astype(np.float32)
                of_host = array if of_host is None else of_host + array
            total = of_host if total is None else total + of_host
        assert total is not None
        digest.update(total.tobytes())
    return digest.hexdigest()


def test_unmodified_ddp_moves_the_bytes_of_one_rank_a_host_by_a_variable(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    steps, parameters = 12, 32 * 512 + 512 + 512 * 512 + 512 + 512 * 8 + 8
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "host0", "--master-port", "29500"]
    script = ["-m", "geartrain_autoload", str(HERE.parents[1] / "examples" / "allreduce_ddp.py"), "--steps", str(steps)]
    with Hosts(2) as hosts:
        before = hosts.bytes(1).sent
        jobs = [
            hosts.popen(
                host,
                [*command, "--node-rank", str(host), *script],
                env={"GEARTRAIN_ALLREDUCE_HIERARCHICAL": "1", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
            for host in range(2)
        ]
        out = [job.communicate(timeout=patience(60))[0] for job in jobs]
        sent = hosts.bytes(1).sent - before
    assert [job.returncode for job in jobs] == [0, 0]
    assert "geartrain, 4 ranks" in out[0]
    bound = steps * 4 * parameters  # 2 (H-1)/H K for two hosts, as often as there are steps; twice that in rank order
    assert bound < sent < 1.4 * bound, sent / bound  # with DDP's own broadcasts, and everybody's rendezvous


def test_a_killed_rank_is_an_error_by_name_on_all_others(tmp_path: Path) -> None:
    victim, gate = 6, tmp_path / "gate"
    with Hosts(HOSTS) as hosts:
        # Many steps: the others are in all stages of some when the rank dies.
        processes = start(
            hosts, tmp_path / "job", RANKS, hierarchical=True, steps=1_000_000, count=100_000, gate=str(gate)
        )
        pid = 0
        for process in processes:
            assert process.stdout is not None
            for _ in range(RANKS):
                words = json.loads(process.stdout.readline())
                assert words.get("ready"), words
                pid = words["pid"] if words["rank"] == victim else pid
        os.kill(pid, signal.SIGKILL)
        gate.touch()
        found = said(processes)
    assert sorted(found) == [rank for rank in range(HOSTS * RANKS) if rank != victim]
    for rank, words in found.items():
        assert words.get("error") == "RankLostError" and words["ranks"] == [victim], (rank, words)
        assert f"rank {victim} " in words["text"], words
