"""Ranks that are processes: the same promises where they can be killed, whatever carries their messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpo
import packed_rows
import preloaded
import pytest
import ranks_worker
from deadlines import patience

import geartrain as gt
from geartrain.tools.testing import Hosts

pytest.importorskip("torch")

WORKER = Path(__file__).parents[1] / "support" / "ranks_worker.py"


def start(scenario: str, name: str, ranks: int, tmp_path: Path, **env: str) -> list[subprocess.Popen[str]]:
    """Ranks that find each other through a file, so that no port is needed."""
    processes = []
    for rank in range(ranks):
        settings = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        settings["MEET"] = f"file://{tmp_path}/meet"
        processes.append(
            preloaded.Popen(
                [sys.executable, str(WORKER), scenario, name],
                env={**os.environ, **settings, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    return processes


def lines(process: subprocess.Popen[str], code: int | None = 0, timeout_s: float = 60) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=patience(timeout_s))
    assert code is None or process.returncode == code, err[-3000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_processes_make_the_same_global_batch_however_many_there_are(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        said = [lines(p) for p in start("batches", store_name(), ranks, folder)]
        steps = []
        for step in range(5):
            pairs = [pair for each in said for pair in zip(each[step]["draw"], each[step]["number"], strict=True)]
            steps.append([number for _, number in sorted(pairs)])
        found.append(steps)
        stats = [each[-1]["stats"] for each in said]
        assert sum(s["sent_bytes"] for s in stats) == sum(s["received_bytes"] for s in stats)
        assert all(s["local_share"] > 0.6 for s in stats)
        assert all(s.get("peers_by_shm", 0) == ranks - 1 for s in stats)
    assert found[0] == found[1]


@pytest.mark.slow
def test_processes_whose_updates_take_effect_later_make_the_same_batches_however_many_there_are(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    found = []
    for ranks, carrier in ((1, "auto"), (3, "auto"), (3, "tcp"), (3, "gloo")):
        folder = tmp_path / f"{ranks}-{carrier}"
        folder.mkdir()
        env = {"GEARTRAIN_RANK_CARRIER": carrier, "UPDATE_LAG": "3"}
        found.append(drawn([lines(p) for p in start("batches", store_name(), ranks, folder, **env)]))
    assert all(each == found[0] for each in found)


@contextmanager
def ended(processes: list[subprocess.Popen[str]], name: str) -> Iterator[None]:
    """Context at whose end ranks are killed, and what they left in /dev/shm under that name is removed."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for rank in range(len(processes)):
            Path(f"/dev/shm/geartrain.{name}-{rank}").unlink(missing_ok=True)


def drawn(said: list[list[dict[str, Any]]]) -> list[list[int]]:
    """The rows of each global batch."""
    return [
        [n for _, n in sorted(p for each in said for p in zip(each[step]["draw"], each[step]["number"], strict=True))]
        for step in range(5)
    ]


@pytest.mark.parametrize(
    "carrier", ["shm", pytest.param("tcp", marks=pytest.mark.slow), pytest.param("gloo", marks=pytest.mark.slow)]
)
def test_every_carrier_makes_the_packed_batches_of_one_process(
    store_name: Callable[[], str], tmp_path: Path, carrier: str
) -> None:
    env = {"GEARTRAIN_RANK_CARRIER": "auto" if carrier == "shm" else carrier}
    said = [lines(p) for p in start("packed", store_name(), 3, tmp_path, **env)]
    with (
        ranks_worker.packed_store(store_name(), 0, ranks_worker.N) as store,
        gt.Replay(store, gt.selection.Uniform(seed=3), ranks_worker.B, num_batches=5) as replay,
    ):
        assert drawn(said) == [batch["number"].tolist() for batch in replay]
    stats = [each[-1]["stats"] for each in said]
    assert sum(s["sent_bytes"] for s in stats) == sum(s["received_bytes"] for s in stats) > 100_000
    assert all(s[f"peers_by_{carrier}"] == 2 and s["balance"] < 1.02 for s in stats)


@pytest.mark.slow
def test_a_killed_rank_is_an_error_on_all_others_of_packed_batches(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    name = store_name()
    processes = start("packed", name, 3, tmp_path, KILL_AT="3")
    with ended(processes, name):
        first, killed, last = (lines(p, code) for p, code in zip(processes, (0, -signal.SIGKILL, 0), strict=True))
    assert len(killed) == 3
    for each in (first, last):
        assert len(each) <= 5 and re.search(r"rank 1 (was lost|did not answer|aborted)", each[-1]["error"])


@pytest.mark.slow
def test_a_killed_job_draws_the_same_batches_again_on_another_number_of_ranks(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    name, rows = store_name(), 96
    for shard in range(2):
        store = grpo.new_store(f"{name}-{shard}", capacity=rows)
        grpo.insert(store, range(shard * rows // 2, (shard + 1) * rows // 2))
        packed_rows.claimed_rows(store, ("answer", "reward", "ref", "advantage"), grpo.work)
        store.finish()
        store.close(keep=True)
    by_step: dict[int, set[tuple[int, ...]]] = {}
    begun = []
    for ranks, at in ((2, 1), (4, 4), (2, 7), (6, -1)):
        folder = tmp_path / str(at)
        folder.mkdir()
        processes = start("kept", name, ranks, folder, KILL_AT=str(at), STATE=str(tmp_path / "state.json"))
        said = [lines(p, 0 if at < 0 else -signal.SIGKILL) for p in processes]
        if at < 0:
            assert all(each.pop() == {"kept": 0, "left": 0, "wrong": []} for each in said)
        begun.append(said[0][0]["step"])
        for parts in zip(*said, strict=False):
            assert len({part["step"] for part in parts}) == 1
            pairs = sorted(pair for part in parts for pair in zip(part["draw"], part["number"], strict=True))
            assert [place for place, _ in pairs] == list(range(8))
            by_step.setdefault(parts[0]["step"], set()).add(tuple(number for _, number in pairs))
    assert begun == [0, 0, 3, 6]  # behind the last state
    assert sorted(by_step) == list(range(rows // 8)) and all(len(each) == 1 for each in by_step.values())
    assert sorted(number for each in by_step.values() for batch in each for number in batch) == list(range(rows))


@pytest.mark.slow
def test_every_carrier_makes_the_same_batches(store_name: Callable[[], str], tmp_path: Path) -> None:
    found = []
    for carrier, peers in (("auto", {"peers_by_shm": 2}), ("tcp", {"peers_by_tcp": 2}), ("gloo", {"peers_by_gloo": 2})):
        folder = tmp_path / carrier
        folder.mkdir()
        said = [lines(p) for p in start("batches", store_name(), 3, folder, GEARTRAIN_RANK_CARRIER=carrier)]
        found.append(drawn(said))
        for each in said:
            assert {name: n for name, n in each[-1]["stats"].items() if name.startswith("peers_by")} == peers
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_ranks_share_memory_within_a_host_and_use_tcp_across(store_name: Callable[[], str], tmp_path: Path) -> None:
    reason = Hosts.viable()
    if reason is not None:
        pytest.skip(reason)

    names: list[str] = []

    def run(hosts: Hosts, scenario: str, port: int, **env: str) -> list[subprocess.Popen[str]]:
        names.append(store_name())
        return [
            hosts.popen(
                host,
                [sys.executable, str(WORKER), scenario, names[-1]],
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "MEET": f"tcp://10.77.0.1:{port}",
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate((0, 0, 1))
        ]

    with Hosts(2) as hosts:
        said = [lines(p) for p in run(hosts, "batches", 29500)]
        alone = tmp_path / "alone"
        alone.mkdir()
        assert drawn(said) == drawn([lines(p) for p in start("batches", store_name(), 1, alone)])
        ways = [{k: v for k, v in each[-1]["stats"].items() if k.startswith("peers_by")} for each in said]
        assert ways == [{"peers_by_shm": 1, "peers_by_tcp": 1}] * 2 + [{"peers_by_tcp": 2}]
        processes = run(hosts, "killed", 29501, HOW="kill", PREFETCH="2")
        for rank in (0, 2):
            (told,) = lines(processes[rank])
            assert "rank 1 was lost" in told["error"] and told["waited_s"] < patience(1.5)
        processes[1].wait(patience(10))
        for host, ranks in ((0, (0, 1)), (1, (2,))):  # what ranks share between them goes with them
            left = hosts.run(host, ["ls", "/dev/shm"]).split()
            # A worker ends at once, by `os._exit`: where it has lived long enough to write a report, that stays.
            left = [name for name in left if not name.startswith("geartrain-report-")]
            assert left == [f"geartrain.{names[-1]}-{rank}" for rank in ranks]


def test_a_forked_child_is_refused_and_its_parent_goes_on(store_name: Callable[[], str], tmp_path: Path) -> None:
    one, other = (lines(p) for p in start("forks", store_name(), 2, tmp_path))
    assert "was forked from it" in one[0]["child"]
    assert one[1]["drawn"] and other[0]["drawn"]


@pytest.mark.slow
def test_processes_draw_the_same_steps_however_many_there_are(store_name: Callable[[], str], tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        said = [lines(p) for p in start("steps", store_name(), ranks, folder)]
        batches = []
        for step in range(6):
            parts = [zip(each[step]["draw"], each[step]["action"], each[step]["weights"], strict=True) for each in said]
            batches.append([what for _, *what in sorted(one for part in parts for one in part)])
        found.append(batches)
        assert all(each[-1]["wrong"] == [] for each in said)
        assert sum(each[-1]["stats"]["sent_bytes"] for each in said) > 0 or ranks == 1
    assert found[0] == found[1] == found[2]


def test_a_mesh_says_who_reads_what(store_name: Callable[[], str], tmp_path: Path) -> None:
    said = [lines(p) for p in start("mesh", store_name(), 4, tmp_path)]
    for step in range(2):
        heads, tails = [said[rank][step] for rank in (0, 1)], [said[rank][step] for rank in (2, 3)]
        for head, tail in zip(heads, tails, strict=True):
            assert head["fields"] == ["x"] and tail["fields"] == ["number"]
            assert head["draw"] == tail["draw"] and head["rows"] == tail["rows"]
        assert sorted(heads[0]["draw"] + heads[1]["draw"]) == list(range(24))
    for one, other in ((0, 1), (2, 3)):
        assert sorted(said[one][2]["slice"] + said[other][2]["slice"]) == list(range(24))


def test_settings_that_one_rank_cannot_follow_are_an_error_on_all(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    tls = dict.fromkeys(("GEARTRAIN_TLS_CERT", "GEARTRAIN_TLS_KEY", "GEARTRAIN_TLS_CA"), "/nowhere.pem")
    gloo = {"GEARTRAIN_RANK_CARRIER": "gloo"}
    cases: list[tuple[list[dict[str, str]], list[str]]] = [
        ([{}, tls], ["rank 1 of the group", "/nowhere.pem"]),
        ([{}, {"GEARTRAIN_TLS_CERT": "/nowhere.pem"}], ["rank 1 of the group", "GEARTRAIN_TLS_KEY"]),
        ([{**gloo, **tls}, {}], ["rank 0 of the group", "GEARTRAIN_RANK_CARRIER says gloo", "GEARTRAIN_TLS_"]),
        ([{}, {"GLOO_SOCKET_IFNAME": "eth-none"}], ["rank 1 of the group", "GLOO_SOCKET_IFNAME names 'eth-none'"]),
    ]
    settings = json.dumps([case for case, _ in cases] + [[{}, gloo], [gloo, gloo]])
    for rank, process in enumerate(start("opens", store_name(), 2, tmp_path, CASES=settings)):
        *refused, one, both = lines(process)
        for found, (_, words) in zip(refused, cases, strict=True):
            assert all(word in found["error"] for word in words), found
            assert not found["warned"]
        # Gloo is what rank 1 asked for, and no news to it.
        assert one["peers"] == both["peers"] == {"gloo": 1} and both["warned"] == []
        why = "the ranks exchange rows over Gloo, which is slower, because of rank 1: GEARTRAIN_RANK_CARRIER says gloo"
        assert one["warned"] == ([why] if rank == 0 else [])


def test_replays_follow_each_other_on_ranks_with_groups_of_their_own(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    one, other = (lines(p)[0]["drawn"] for p in start("again", store_name(), 2, tmp_path))
    assert len(one) == len(other) == 2


def test_a_script_that_closes_nothing_leaves_nothing(names: Callable[[], str], tmp_path: Path) -> None:
    name = names()
    for process in start("leaves", name, 2, tmp_path):
        lines(process)
    assert not list(Path("/dev/shm").glob(f"geartrain.{name}-*"))


@pytest.mark.parametrize("prefetch", ["0", "2"])
def test_an_interrupt_is_not_kept_waiting_by_a_rank_that_does_not_answer(
    store_name: Callable[[], str], tmp_path: Path, prefetch: str
) -> None:
    name = store_name()
    processes = start("interrupted", name, 2, tmp_path, PREFETCH=prefetch)
    try:
        (said,) = lines(processes[0])
        assert said["waited_s"] < patience(5)
    finally:
        processes[1].kill()
        processes[1].communicate()
        for rank in range(2):
            Path(f"/dev/shm/geartrain.{name}-{rank}").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("how", "prefetch", "extra_lag"),
    [("kill", "0", "0"), ("kill", "2", "0"), ("stop", "2", "0"), ("kill", "2", "1"), ("stop", "2", "1")],
)
def test_a_rank_killed_or_stopped_is_a_named_error_within_the_deadline(
    store_name: Callable[[], str], tmp_path: Path, how: str, prefetch: str, extra_lag: str
) -> None:
    name = store_name()
    processes = start("killed", name, 3, tmp_path, HOW=how, PREFETCH=prefetch, EXTRA_LAG=extra_lag)
    with ended(processes, name):
        for rank in (0, 2):
            (said,) = lines(processes[rank])
            assert "rank 1 was lost" in said["error"] or "rank 1 did not answer within 3" in said["error"]
            assert said["waited_s"] < patience(1.5 if how == "kill" else 6)
            # What it had in memory stays, for the job that is started again.
            assert Path(f"/dev/shm/geartrain.{name}-{rank}").exists()
        processes[1].send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(
    ("direct", "where"),
    [("1", "before"), ("1", "told one"), ("1", "after"), ("0", "before"), ("0", "between"), ("0", "after")],
)
def test_a_rank_that_ends_or_stops_in_the_exchange_of_a_read_is_named_by_all_others(
    store_name: Callable[[], str], tmp_path: Path, how: str, direct: str, where: str
) -> None:
    name = store_name()
    processes = start("dies_in_the_agreement", name, 3, tmp_path, HOW=how, DIRECT=direct, WHERE=where)
    with ended(processes, name):
        for rank in (0, 2):
            said, then = lines(processes[rank])
            # Rank 0 was told, and goes on to the next exchange, in which neither of the others is: the deadline of rank
            # 2, which waits for rank 1, and its own pass together, and either may be first.
            either = rank == 0 and (how, where) == ("stop", "told one")
            for error in (said["error"], then["again"]):
                named = "rank [12]" if either else "rank 1"
                assert re.search(f"{named} (was lost|did not answer within 3)", error), error
            assert said["waited_s"] < patience(1.5 if how == "kill" else 6)
            assert then["closed_s"] < patience(1)
