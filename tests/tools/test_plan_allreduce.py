"""Plans of all-reduce: the references' numbers, the cheapest number of reducers, and what people type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geartrain.errors import ArgumentError
from geartrain.tools.plan.allreduce import ALGORITHMS, FORMULAS, Network, cheapest, cost, growing, plan, with_reducers
from geartrain.tools.plan.units import (
    bytes_text,
    parse_bytes,
    parse_links,
    parse_rate,
    parse_seconds,
    rate_text,
    seconds_text,
)

SAMPLE = Network((12.5e9,) * 8, (4e9,) * 14, 1.2e9, 1e-4)


def test_the_reduction_servers_sample_is_planned_as_published() -> None:
    found = plan(SAMPLE)
    assert (found.needed, found.needed_dedicated, found.needed_rate) == (25, 25, 4e9)
    times = {one.algorithm: (one.seconds - one.latency_s) / SAMPLE.unit_s for one in found.costs}
    published = {"root": 7, "ring": 1.75, "tree": 1.75, "dedicated": 1.7857143, "hybrid": 1.2323944}
    assert times == pytest.approx({**published, "single": 8 * 12.5 / 4})
    assert sum(found.shares) == pytest.approx(1) and len(found.shares) == len(found.moved) == 22
    assert found.seconds == pytest.approx(
        max(m / r for m, r in zip(found.moved[:8], SAMPLE.workers, strict=True)) + 1e-4
    )


def test_one_worker_that_sums_for_all_takes_as_long_as_published_and_is_the_fastest_one() -> None:
    for workers, seconds in ((2, 1.2), (10, 10.8)):  # Deep Speech at 1 GB/s
        assert cost(Network((1e9,) * workers, nbytes=1.2e9), "root").seconds == pytest.approx(seconds)
    uneven = cost(Network((1.0, 4.0, 1.0), nbytes=1.0), "root")
    assert (uneven.seconds, uneven.worker_bytes) == (1.0, 2.0), "its link is not the slowest then"


def test_latency_is_hops_times_half_a_round_trip() -> None:
    assert {name: cost(SAMPLE, name).latency_s for name in ALGORITHMS} == pytest.approx(
        {"single": 1e-4, "root": 1e-4, "ring": 7e-4, "tree": 3e-4, "dedicated": 1e-4, "hybrid": 1e-4}
    )
    rows = growing(SAMPLE, [1, 2, 64])
    assert [one.hops for one in rows[0]] == [0, 0, 0, 0, 0, 0]
    assert [one.hops for one in rows[2]] == [2, 2, 126, 12, 2, 2]
    moved = [1, 63, 1.96875, 1.96875, 1, 1.844]
    assert [one.worker_bytes / 1.2e9 for one in rows[2]] == pytest.approx(moved, abs=1e-3)
    assert rows[2][4].reducers == 200, "as many as 64 workers of 100 Gbit/s need"


def test_a_single_reducer_costs_what_there_are_workers_times_the_array() -> None:
    for workers in (2, 8, 64):
        given = cost(Network((12.5e9,) * workers, (4e9, 8e9), 1.2e9), "single")  # the faster one
        assert (given.reducers, given.worker_bytes, given.busiest_bytes) == (1, 1.2e9, workers * 1.2e9)
        assert given.seconds == pytest.approx(workers * 1.2 / 8)
        assert cost(Network((2.0,) * workers, nbytes=1.0), "single").seconds == workers / 2  # like a worker
    alone = cost(Network((1.0,), (1.0,)), "single")
    assert (alone.seconds, alone.hops, alone.reducers) == (0, 0, 0)
    assert list(FORMULAS) == list(ALGORITHMS)


def test_the_cheapest_number_is_found_by_trying_all_and_depends_on_the_price() -> None:
    for price, expected in ((0.0, 25), (0.7, 25), (1e6, 0)):
        least, priced = cheapest(SAMPLE, price_worker=30, price_reducer=price, compute_s=0.2)
        assert least.reducers == expected and len(priced) == 26
        assert least.cost == min(one.cost for one in priced)
    # By hand: 25 reducers, a step of 0.2 s + 96 ms + 0.1 ms, 8 workers at 30 and 25 reducers at 0.7 an hour.
    least, _ = cheapest(SAMPLE, price_worker=30, price_reducer=0.7, compute_s=0.2)
    assert least.cost == pytest.approx((240 + 17.5) * 0.2961 / 3600)
    with pytest.raises(ArgumentError, match="one kind"):
        cheapest(Network((1.0, 1.0), (1.0, 2.0)), price_worker=1, price_reducer=1, compute_s=0)
    with pytest.raises(ArgumentError, match="price_worker must be a finite number of at least 0"):
        cheapest(SAMPLE, price_worker=-1, price_reducer=1, compute_s=0)


def test_every_reducer_helps_until_there_are_enough() -> None:
    times = with_reducers(Network((1.0,) * 4, nbytes=1.0), 1.0, 5)
    assert [hybrid for hybrid, _ in times] == pytest.approx([1.5, 4 / 3, 1.2, 12 / 11, 1, 1])
    assert [dedicated for _, dedicated in times[1:]] == pytest.approx([4, 2, 4 / 3, 1, 1])


def test_links_are_read_as_people_write_them() -> None:
    assert parse_links("8x100Gbit") == (12.5e9,) * 8
    assert parse_links("1x100Mbit + 3x400Mbit/s") == (12.5e6, 50e6, 50e6, 50e6)
    assert parse_links("25Gbit") == (3.125e9,)
    assert parse_links("") == parse_links("0") == ()
    assert parse_rate("3GB/s") == 3e9 and parse_rate("100Mbps") == 12.5e6 and parse_rate("8 kbit") == 1000
    assert (parse_bytes("1.2GB"), parse_bytes("16MiB"), parse_bytes("4096"), parse_bytes("4k")) == (
        1.2e9,
        2**24,
        4096,
        4e3,
    )
    assert (parse_seconds("0.1ms"), parse_seconds("40 ms"), parse_seconds("0"), parse_seconds("1h")) == (
        1e-4,
        0.04,
        0,
        3600,
    )
    assert (bytes_text(1.2e9), rate_text(12.5e9), seconds_text(0.096)) == ("1.2 GB", "100 Gbit/s", "96 ms")


@pytest.mark.parametrize(
    "text", ["100", "8x", "ax100Mbit", "8x100Foo", "8x0Gbit", "-8x100Gbit", "8x100Gbit+", "1000000x1Gbit"]
)
def test_links_that_are_none_are_refused_with_what_was_found(text: str) -> None:
    with pytest.raises(ArgumentError, match="found"):
        parse_links(text)


def test_times_and_bytes_that_are_none_are_refused() -> None:
    for text in ("12", "5 parsecs", "", "-1s"):
        with pytest.raises(ArgumentError, match="found"):
            parse_seconds(text)
    for text in ("", "much", "-1GB"):
        with pytest.raises(ArgumentError, match="found"):
            parse_bytes(text)
    with pytest.raises(ArgumentError, match="at least 0"):
        Network((1.0,), rtt_s=-1)
    with pytest.raises(ArgumentError, match="at least one worker"):
        Network(())
    with pytest.raises(ArgumentError, match="'bus'"):
        cost(SAMPLE, "bus")


def test_the_command_prints_the_plan_and_writes_it(tmp_path: Path) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    pytest.importorskip("matplotlib")
    import geartrain.tools.cli.app as app

    def run(*words: str) -> tuple[int, str]:
        done = typer_testing.CliRunner().invoke(app, ["plan", "allreduce", *words])
        return done.exit_code, done.output

    json_path, plot_path = tmp_path / "plan.json", tmp_path / "plan.png"
    code, said = run(
        "--workers", "8x100Gbit", "--reducers", "14x32Gbit", "--bytes", "1.2GB", "--rtt", "0.1ms",
        "--price-worker", "30", "--price-reducer", "0.7", "--compute", "0.2s",
        "--json", str(json_path), "--plot", str(plot_path),
    )  # fmt: skip
    assert code == 0, said
    assert "25 dedicated of 32 Gbit/s" in said and "1.787" in said and "cheapest 25 reducers" in said
    assert "N K, the reducer" in said and "single:" in said
    assert "25 (cheapest)" in said and "1,000 steps, in the prices' unit" in said
    written = json.loads(json_path.read_text())
    assert written["cheapest"]["reducers"] == 25 and written["needed_dedicated"] == 25
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    code, said = run("--workers", "1x100Mbit+3x400Mbit", "--bytes", "16MB")
    assert code == 0 and "1.000 K/B" in said and "owns 0.00%" in said
    code, said = run("--workers", "1x100Mbit", "--bytes", "16MB")
    assert code == 0 and "time     0 s" in said
    for words, reason in (
        (("--workers", "8x100Foo", "--bytes", "1GB"), "found '100Foo'"),
        (("--workers", "8x1Gbit", "--bytes", "1GB", "--price-worker", "3"), "need each other"),
        (("--workers", "8x1Gbit", "--bytes", "1GB", "--price-worker", "3", "--price-reducer", "1"), "one kind"),
    ):
        code, said = run(*words)
        assert code == 2 and reason in said
