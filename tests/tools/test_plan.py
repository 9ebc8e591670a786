"""Predictions: bytes are those that the real assignment moves, times follow what bounds them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.errors import ArgumentError
from geartrain.replay.distributed.assignment import Replica, assign
from geartrain.tools.plan import Cluster, Constants, check, measure, moved_rows, predict, surplus_rows
from geartrain.tools.plan.machine import DEFAULTS, read_constants

FOUR = Cluster(hosts=4, gpus=1, rows=4000, batch=256, row_bytes=102_400, link_gbit=0.2)


def moved_by_assignment(hosts: int, gpus: int, batch: int, arm: str, shares: Any, batches: int) -> tuple[float, float]:
    """Rows whose reader is on another host than their replica, in all and through the busiest link: the real code."""
    random = np.random.default_rng(7)
    shards = 1 if arm == "central" else hosts
    replicas = [
        Replica((r,), (frozenset({r // gpus}) if r // gpus < shards else frozenset(),)) for r in range(hosts * gpus)
    ]
    shard_ranks = [list(range(host * gpus, (host + 1) * gpus)) for host in range(shards)]
    moved, busiest = [], []
    for _ in range(batches):
        shard = random.choice(shards, batch, p=None if arm == "central" else shares)
        found = assign(shard, replicas, shard_ranks, "ordered" if arm == "ordered" else "local_first")
        source, sink = found.reader // gpus, found.replica // gpus
        apart = source != sink
        out, into = (np.bincount(host[apart], minlength=hosts) for host in (source, sink))
        moved.append(int(apart.sum()))
        busiest.append(max(out.max(), into.max()))
    return float(np.mean(moved)), float(np.mean(busiest))


# --- bytes ------------------------------------------------------------------------------------------------------


def test_the_surplus_is_the_exact_mean_of_a_multinomial() -> None:
    # By hand: two draws over two hosts land apart in half of the cases, and otherwise one row moves.
    assert surplus_rows(2, (0.5, 0.5)) == pytest.approx(0.5)
    assert surplus_rows(4, (1.0, 0.0)) == 2
    for batch, shares in ((256, (0.25,) * 4), (96, (0.4, 0.3, 0.2, 0.1)), (33, (1 / 3,) * 3)):
        counts = np.random.default_rng(0).multinomial(batch, shares, 200_000)
        simulated = np.maximum(counts - batch / len(shares), 0).sum(1).mean()
        assert surplus_rows(batch, shares) == pytest.approx(simulated, rel=0.01)
    assert surplus_rows(256, (0.25,) * 4) == pytest.approx(math.sqrt(256 * 3 / (2 * math.pi)), rel=0.01)


@pytest.mark.parametrize("arm", ["local_first", "ordered", "central"])
@pytest.mark.parametrize(
    ("hosts", "gpus", "batch", "shares"),
    [(4, 1, 256, (0.25,) * 4), (3, 2, 48, (1 / 3,) * 3), (4, 2, 128, (0.4, 0.3, 0.2, 0.1))],
)
def test_the_bytes_are_those_that_the_real_assignment_moves(
    hosts: int, gpus: int, batch: int, shares: tuple[float, ...], arm: str
) -> None:
    cluster = Cluster(hosts, gpus, 1e6, batch, 1e5, 10, shares=shares)
    moved, busiest = moved_rows(cluster, arm)  # type: ignore[arg-type]
    real_moved, real_busiest = moved_by_assignment(hosts, gpus, batch, arm, shares, 300)
    assert moved == pytest.approx(real_moved, rel=0.06)
    assert busiest == pytest.approx(real_busiest, rel=0.06)


# --- times ------------------------------------------------------------------------------------------------------


def test_four_hosts_behind_200_mbit_train_as_fast_as_one_only_if_little_moves() -> None:
    slow = replace(FOUR, step_ms=50, one_machine=True)
    alone = predict(replace(slow, hosts=1, batch=64, rows=1000), "local_first", DEFAULTS)
    together = {arm: predict(slow, arm, DEFAULTS) for arm in ("local_first", "ordered", "central")}  # type: ignore[arg-type]
    per_host = {arm: found.samples_per_s / 4 for arm, found in together.items()}
    assert alone.bound_by == "training"
    assert per_host["local_first"] > 0.85 * alone.samples_per_s
    assert per_host["ordered"] < alone.samples_per_s / 3
    assert per_host["central"] < alone.samples_per_s / 10
    assert together["ordered"].bound_by == together["central"].bound_by == "network"
    # 192 rows of 102,400 bytes through 200 Mbit/s less headers: 0.83 s.
    assert together["central"].exchange_ms == pytest.approx(1e3 * 192 * 102_400 * 8 / (0.95 * 200e6), rel=0.01)


@pytest.mark.parametrize("asked", [[], ["--hosts", "2", "--cores", "64"]], ids=["known-clusters", "cores"])
def test_a_files_constants_are_the_machines_and_not_those_of_other_hosts(tmp_path: Path, asked: list[str]) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from geartrain.tools.cli.app import app

    known, saved = tmp_path / "known.json", tmp_path / "saved.json"
    mine = replace(DEFAULTS, source="mine", cores=4, host_copy_gb_per_s=11.0)
    known.write_text(json.dumps({"constants": mine.as_json()}))
    done = CliRunner().invoke(app, ["plan", "ranks", *asked, "--constants", str(known), "--json", str(saved)])
    assert done.exit_code == 0, done.output
    assert read_constants(saved) == mine


#: Words of a heading that say what its plain numbers are.
UNITS = {"GB/s", "ms", "MB", "K", "N", "hops", "reducers", "steps/s", "unit"}


def columns_of(said: str) -> list[tuple[str, list[str]]]:
    """Headings and cells of the tables that rich printed."""
    found = []
    for table in re.findall(r"┏.*?└", said, re.DOTALL):
        head, body = re.split(r"┡.*\n", table)
        cells = [
            [line.strip().split(mark)[1:-1] for line in part.splitlines() if mark in line]
            for part, mark in ((head, "┃"), (body, "│"))
        ]
        found += [
            (" ".join(" ".join(lines).split()), [cell.strip() for cell in column])
            for lines, column in zip(zip(*cells[0], strict=True), zip(*cells[1], strict=True), strict=True)
        ]
    return found


@pytest.mark.parametrize(
    "words",
    [
        "ranks",
        "ranks --hosts 3",  # a batch that 24 ranks can share without being asked for
        "allreduce --workers 8x100Gbit --reducers 14x32Gbit --bytes 1.2GB --rtt 0.1ms",
        "allreduce --workers 8x1Gbit --bytes 1GB",
        "allreduce --workers 8x1Gbit --reducers 4x1Gbit --bytes 1GB --price-worker 30 --price-reducer 0.7",
    ],
)
def test_every_number_of_a_plan_has_its_unit(words: str) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from geartrain.tools.cli.app import app

    done = CliRunner().invoke(app, ["plan", *words.split()])
    assert done.exit_code == 0, done.output
    columns = columns_of(done.output)
    assert columns
    for heading, cells in columns:
        plain = [cell for cell in cells if re.fullmatch(r"[\d,.]+( \(cheapest\))?", cell)]
        assert not plain or UNITS & set(re.split(r"[ ,:]+", heading)), f"{heading!r}: {plain}"


# --- against what was measured ----------------------------------------------------------------------------------


def measured(**changes: Any) -> dict[str, Any]:
    """A result of `geartrain bench ranks` with one case, as the model would have it."""
    case = {
        "case": "200 Mbit/s", "arm": "ordered", "strategy": "prioritized", "hosts": 4, "ranks": 4, "batch": 256,
        "rows": 4000, "row_bytes": 102_400, "link_gbit": 0.2, "train_ms": 0.0,
    }  # fmt: skip
    # Links are measured by their payload: headers are taken off already.
    found = predict(replace(FOUR, one_machine=True), "ordered", replace(DEFAULTS, link_share=1.0))
    case |= {"moved_bytes": found.moved_bytes, "median_samples_per_s": found.samples_per_s, **changes}
    return {"bench": "ranks", "constants": DEFAULTS.as_json(), "cases": [case]}


def test_a_prediction_is_held_against_what_was_measured() -> None:
    checked = check(measured())
    assert [(each.what, round(each.ratio, 2)) for each in checked] == [("moved", 1.0), ("samples", 1.0)]
    assert check(measured(moved_bytes=1e6))[0].ratio > 19, "a model that is wrong shows"
    assert check(measured(strategy="top-k")) == [], "no model, no check"
    with pytest.raises(ArgumentError, match="not a result of `geartrain bench ranks"):
        check({"bench": "store"})


def test_constants_survive_a_file_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(measured()))
    assert read_constants(path) == DEFAULTS
    path.write_text(json.dumps({"constants": {"cores": 2}}))
    with pytest.raises(ArgumentError, match=r"constants are .*found cores"):
        read_constants(path)
    path.write_text("[]")
    with pytest.raises(ArgumentError, match="not a JSON object"):
        read_constants(path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_constants(tmp_path / "missing.json")


@pytest.mark.usefixtures("preloaded_children")
def test_this_machine_can_be_measured() -> None:
    pytest.importorskip("torch")
    found = measure()
    assert 0.01 < found.copy_gb_per_s < 1000 and 0.001 < found.tcp_gb_per_s < 1000
    assert 1 < found.round_us < 1e6 and 1 < found.batch_us < 1e6
    assert all(0.1 < ns < 1e5 for ns in (found.target_ns, *found.descent_ns.values()))
    assert Constants.from_json(json.loads(json.dumps(found.as_json()))) == found
    assert not list(Path("/dev/shm").glob("geartrain.tools.plan-*"))


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 255}, "255 rows cannot be divided evenly over 4 ranks"),
        ({"hosts": 0}, "hosts must be a finite number from 1 to 1024"),
        ({"link_gbit": 0}, "link_gbit must be a finite number of at least 1e-09"),
        ({"rows": math.inf}, "rows must be a finite number from 1"),
        ({"row_bytes": math.nan}, "row_bytes must be a finite number from 1"),
        ({"shares": (0.5, 0.5)}, "shares are 4 numbers that add up to 1"),
    ],
)
def test_a_cluster_that_is_none_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(FOUR, **changes)


def test_an_arm_there_is_not_is_refused() -> None:
    with pytest.raises(ArgumentError, match="arm is one of 'local_first', 'ordered', 'central', found 'nearest'"):
        predict(FOUR, "nearest", DEFAULTS)  # type: ignore[arg-type]
