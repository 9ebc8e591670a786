"""Each Triton kernel agrees with a reference in torch, refuses what it cannot take, and compiles for GPUs that
are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_worker import Interpreter

from geartrain.errors import ArgumentError

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import geartrain.device.kernels as kernels  # noqa: E402
import geartrain.device.kernels.philox as philox  # noqa: E402
import geartrain.device.kernels.top_rows as top_rows  # noqa: E402
import geartrain.device.kernels.weighted_draw as weighted_draw  # noqa: E402

BIG = 2**32 - 1


def priorities_of(n: int, seed: int = 0, zeros: float = 0.3) -> Any:
    rng = np.random.default_rng([n, seed])
    priorities = rng.integers(0, 2**32, n, dtype=np.uint32)
    priorities[rng.random(n) < zeros] = 0
    return torch.from_numpy(priorities)


# --- references ------------------------------------------------------------------------------------------------


def reference_tile_sums(values: Any, selectable: Any | None = None) -> Any:
    """The sum of each tile's values, those of unselectable rows left out."""
    whole = weighted_draw.whole_numbers(values)
    if selectable is not None:
        whole = whole * selectable
    return torch.nn.functional.pad(whole, (0, -len(whole) % weighted_draw.TILE)).reshape(-1, weighted_draw.TILE).sum(1)


def reference_draw(
    values: Any, selectable: Any | None, key: weighted_draw.DrawKey, numbers: list[int], strata: int = 0
) -> tuple[Any, Any]:
    """Rows and probabilities of draws, from running sums over all rows."""
    whole = weighted_draw.whole_numbers(values)
    if selectable is not None:
        whole = whole * selectable
    running = whole.cumsum(0)
    total = int(running[-1])
    targets = []
    for number in numbers:
        bits = philox.reference_bits(key.seed, key.step, key.word, number)
        if strata == 0:
            targets.append(philox.reference_below(bits, total))
        else:
            first, last = number * total // strata, (number + 1) * total // strata
            targets.append(min(first + philox.reference_below(bits, max(last - first, 1)), total - 1))
    rows = torch.searchsorted(running, torch.tensor(targets, dtype=torch.int64), right=True)
    return rows, whole[rows].to(torch.float64) / float(total)


def reference_draw_distinct(values: Any, seed: int, step: int, round: int, n: int, excluded: list[int]) -> list[int]:
    """The rows, one draw after the other. `values` are int64."""
    left = values.clone()
    word = philox.counter_word(philox.DISTINCT_STREAM, round)
    running, total = values.cumsum(0), int(values.sum())
    seen = set(excluded)
    chosen: list[int] = []
    for draw in range(4 * n + 64):
        target = philox.reference_below(philox.reference_bits(seed, step, word, draw), total)
        row = int(torch.searchsorted(running, target, right=True))
        if row not in seen and len(chosen) < n:
            seen.add(row)
            chosen.append(row)
    left[list(seen)] = 0
    word = philox.counter_word(philox.DISTINCT_STREAM, round, philox.ATTEMPTS_PER_ROUND - 1)
    for draw in range(4 * n + 64, 4 * n + 64 + n - len(chosen)):
        target = philox.reference_below(philox.reference_bits(seed, step, word, draw), int(left.sum()))
        row = int(torch.searchsorted(left.cumsum(0), target, right=True))
        left[row] = 0
        chosen.append(row)
    return chosen


def reference_first_rows(
    priorities: Any,
    selectable: Any | None,
    sequence: Any | None,
    order: int,
    n: int,
    after: int,
    excluded: list[int],
) -> list[int]:
    """The rows, by sorting all of them."""
    priority = weighted_draw.whole_numbers(priorities).tolist()
    place = list(range(1, len(priority) + 1)) if sequence is None else sequence.tolist()
    rows = [
        row
        for row in range(len(priority))
        if (selectable is None or selectable[row]) and place[row] > after and row not in set(excluded)
    ]
    rank = {
        top_rows.OLDEST: lambda row: place[row],
        top_rows.NEWEST: lambda row: -place[row],
        top_rows.HEAVIEST: lambda row: (-priority[row], place[row]),
    }
    return sorted(rows, key=rank[order])[:n]


def reference_scatter_update(priorities: Any, rows: Any, values: Any) -> Any:
    """The priorities afterwards, one row at a time."""
    after = priorities.clone()
    for row, value in zip(rows.tolist(), values.view(torch.int32).tolist(), strict=True):
        after.view(torch.int32)[row] = value
    return after


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123's kat_vectors, read as counter and key words."""
    ones = 2**32 - 1
    assert philox.reference_bits(0, 0, 0, 0) == 0x6627E8D5_E169C58D_BC57AC4C_9B00DBD8
    assert philox.reference_bits(2**64 - 1, 2**64 - 1, ones, ones) == 0x408F276D_41C83B0E_A20BC7C6_6D5451FD
    pi = philox.reference_bits(0x299F31D0_A4093822, 0x03707344_13198A2E, 0x85A308D3, 0x243F6A88)
    assert pi == 0xD16CFE09_94FDCCEB_5001E420_24126EA1


def test_words_of_counters_keep_streams_rounds_and_attempts_apart() -> None:
    words = {philox.counter_word(s, r, a) for s in range(3) for r in range(50) for a in range(64)}
    assert len(words) == 3 * 50 * 64
    assert philox.counter_word(2, 1, 63) == 2 << 24 | 127


# --- kernels against references --------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 3, 2**32 - 1, 2**32 + 1, 2**62 + 12345, 2**63 - 1])
def test_numbers_below_a_bound_carry_all_128_bits(interpreter: Interpreter, total: int) -> None:
    key = (2**64 - 3, 2**33 + 1, philox.counter_word(philox.ROW_STREAM, 5))
    bits = [philox.reference_bits(*key, draw) for draw in range(300)]
    found = interpreter.numbers(total, key, 300, 0)
    assert found.tolist() == [philox.reference_below(b, total) for b in bits]
    for strata in (300, 2**32 - 1):
        expected = []
        for draw in range(300):
            first, last = draw * total // strata, (draw + 1) * total // strata
            expected.append(min(first + philox.reference_below(bits[draw], max(last - first, 1)), total - 1))
        assert interpreter.numbers(total, key, 300, strata).tolist() == expected


@pytest.mark.parametrize("n", [1, 256, 257, 5000, 2_000_003])
def test_tile_sums(interpreter: Interpreter, n: int) -> None:
    priorities = priorities_of(n)
    selectable = torch.arange(n) % 3 != 0
    found = interpreter.call("weighted_draw.tile_sums", priorities.numpy())
    assert found.tolist() == reference_tile_sums(priorities).tolist()
    found = interpreter.call("weighted_draw.tile_sums", priorities.numpy(), selectable.numpy())
    assert found.tolist() == reference_tile_sums(priorities, selectable).tolist()


@pytest.mark.parametrize("strata", [0, 700])
@pytest.mark.parametrize("masked", [False, True])
def test_draws(interpreter: Interpreter, strata: int, masked: bool) -> None:
    priorities = priorities_of(3001)
    selectable = torch.arange(3001) % 3 != 0 if masked else None
    candidates = interpreter.candidates(priorities.numpy(), None if selectable is None else selectable.numpy())
    rows, _, probability, _ = candidates.draw(True, 2**63 + 5, 2**40 + 1, 3, 700, strata)
    key = weighted_draw.DrawKey(2**63 + 5, 2**40 + 1, philox.counter_word(philox.ROW_STREAM, 3))
    expected = reference_draw(priorities, selectable, key, list(range(700)), strata)
    assert rows.tolist() == expected[0].tolist()
    assert probability.tolist() == expected[1].tolist()


def test_draws_without_replacement(interpreter: Interpreter) -> None:
    priorities = priorities_of(90, zeros=0.5)
    positive = int((priorities.numpy() > 0).sum())
    rows = interpreter.candidates(priorities.numpy()).draw_distinct(True, 1, 2, 0, positive - 2, np.array([], int))[0]
    whole = weighted_draw.whole_numbers(priorities)
    assert rows.tolist() == reference_draw_distinct(whole, 1, 2, 0, positive - 2, [])


@pytest.mark.parametrize("order", range(3))
def test_first_rows(interpreter: Interpreter, order: int) -> None:
    rng = np.random.default_rng(order)
    priorities = torch.from_numpy(rng.integers(0, 4, 2500, dtype=np.uint32))  # most are equal
    selectable = torch.from_numpy(rng.random(2500) < 0.8)
    sequence = torch.from_numpy(rng.permutation(2500) + 10**12)
    age = (sequence - 10**12).to(torch.int32)
    for n in (1, 7, 300, 4000):
        found = interpreter.call(
            "top_rows.first_rows", priorities.numpy(), selectable.numpy(), age.numpy(), order, n, 100
        )
        expected = reference_first_rows(priorities, selectable, sequence, order, n, 10**12 + 99, [])
        assert found.tolist() == expected


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "updates"), [(1, 100), (40, 500), (5000, 3000), (300_000, 20)])
def test_of_duplicate_updates_the_last_wins_and_sums_follow(
    interpreter: Interpreter, n: int, updates: int, masked: bool
) -> None:
    rng = np.random.default_rng(n)
    priorities, values = priorities_of(n), priorities_of(updates, seed=1)
    values[: min(updates, 50)] = torch.arange(1, min(updates, 50) + 1).to(torch.uint32)  # equal to bids of others
    rows = torch.from_numpy(rng.integers(0, n, updates))
    selectable = torch.from_numpy(rng.random(n) < 0.6) if masked else None
    sums = reference_tile_sums(priorities, selectable)
    arrays = (priorities.numpy(), rows.numpy(), values.numpy(), sums.numpy())
    if selectable is not None:
        arrays += (selectable.numpy(),)
    after = interpreter.call("scatter_update.scatter_update", *arrays)
    expected = reference_scatter_update(priorities, rows, values)
    assert after[0].tolist() == expected.numpy().tolist()
    assert after[3].tolist() == reference_tile_sums(expected, selectable).tolist()


def test_updated_candidates_draw_what_rebuilt_ones_draw(interpreter: Interpreter) -> None:
    rng = np.random.default_rng(5)
    priorities = priorities_of(2000).numpy()
    candidates = interpreter.candidates(priorities)
    for _ in range(3):
        rows, values = rng.integers(0, 2000, 100), rng.integers(0, 2**32, 100, dtype=np.uint32)
        candidates.update(rows, values)
        for row, value in zip(rows, values, strict=True):
            priorities[row] = value
    assert candidates.priorities(np.arange(2000)).tolist() == priorities.tolist()
    fresh = interpreter.candidates(priorities)
    assert candidates.total_priority() == fresh.total_priority()
    assert candidates.draw(True, 1, 1, 0, 200)[0].tolist() == fresh.draw(True, 1, 1, 0, 200)[0].tolist()
    assert candidates.sequences(np.array([3, 9])).tolist() == [4, 10]


# --- at the door -----------------------------------------------------------------------------------------------


def test_tensors_of_the_cpu_are_refused_where_kernels_are_compiled() -> None:
    if kernels.interpreting():
        pytest.skip("TRITON_INTERPRET is set")
    with pytest.raises(ArgumentError, match="kernels take CUDA tensors"):
        weighted_draw.tile_sums(priorities_of(5))


def test_what_a_kernel_cannot_take_is_refused(interpreter: Interpreter) -> None:
    priorities = priorities_of(50).numpy()
    sums = np.zeros(1, np.int64)
    one, values = np.array([3]), np.array([1], np.uint32)
    refused: list[tuple[str, tuple[Any, ...], str]] = [
        ("weighted_draw.tile_sums", (priorities.astype(np.int64),), "values is torch.uint32 or torch.uint8"),
        ("weighted_draw.tile_sums", (priorities.reshape(5, 10),), r"found torch.uint32 \(5, 10\)"),
        ("weighted_draw.tile_sums", (priorities[:0],), "the number of values must be at least 1, found 0"),
        ("weighted_draw.tile_sums", (priorities, np.ones(49, bool)), "selectable has 49 values, 50 are needed"),
        ("scatter_update.scatter_update", (priorities, one + 47, values, sums), "there is no row 50"),
        ("scatter_update.scatter_update", (priorities, one - 4, values, sums), "there is no row -1"),
        ("scatter_update.scatter_update", (priorities, one, values[:0], sums), "values has 0 values, 1 are needed"),
        ("scatter_update.scatter_update", (priorities, one, values.astype(np.float32), sums), "values is torch.uint32"),
        ("scatter_update.scatter_update", (priorities, one, values, sums[:0]), "sums has 0 values, 1 are needed"),
        ("top_rows.first_rows", (priorities, None, None, 3, 1), "must be from 0 to 2, found 3"),
    ]
    for function, arguments, message in refused:
        with pytest.raises(ArgumentError, match=message):
            interpreter.call(function, *arguments)
    candidates = interpreter.candidates(priorities)
    for arguments, message in [
        ((True, -1, 0, 0, 5), "seed=-1"),
        ((True, 0, 0, 2**18, 5), "round=262144"),
        ((True, 0, 0, 0, 5, 4), "draw 4 is none of 4 strata"),
        ((True, 0, 0, 0, 5, 0, (0, 0, 0)), "no versions, ages or lengths"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            candidates.draw(*arguments)


def test_doctor_has_a_reason_where_kernels_cannot_run() -> None:
    reason = kernels.why_not_viable()
    if torch.cuda.is_available() or kernels.interpreting():
        assert reason is None
    else:
        assert reason is not None
        assert "finds no CUDA device" in reason


# --- compiled for GPUs that are not here -----------------------------------------------------------------------

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"
TARGETS = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]
FIRST = [("cuda:90", "--gather")]  # the rest in make test-all
CACHE = Path(__file__).parents[2] / "build" / "triton"  # Triton compiles a kernel again when its source changes
# What is compiled in one go.
PARTS = {
    "--gather": {
        "gather_rows_kernel", "count_steps_kernel", "look_up_rows_kernel", "mark_torn_kernel",
    },
    "--select": {
        "any_row_kernel", "best_keys_kernel", "bid_kernel", "bits_kernel", "find_rows_kernel", "find_tiles_kernel",
        "settle_kernel", "take_kernel", "take_rows_kernel", "tile_keys_kernel", "tile_sums_kernel", "write_kernel",
    },
}  # fmt: skip


def compiled(*arguments: str) -> Any:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(CACHE), "TRITON_DEFAULT_FP_FUSION": "0"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# A thread's registers. The compiler of Triton 3.9 needs 128 at most, that of 3.7, which torch 2.13 asks for, 160.
MOST_REGISTERS = 128 if tuple(map(int, version("triton").split(".")[:2])) >= (3, 9) else 160


def check_compiled(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["spilled"] == 0, result
        assert result["registers"] <= (256 if result["target"].startswith("hip") else MOST_REGISTERS), result
        if result["kernel"] in ("tile_sums_kernel", "find_rows_kernel"):  # 16 bytes a load, or memory waits
            assert result["wide_loads"] > 0, result
        if result["kernel"] == "gather_rows_kernel":
            check_gather(result)
        if result["kernel"] in ("look_up_rows_kernel", "mark_torn_kernel"):
            check_order(result)
        if result["kernel"] == "best_keys_kernel" and result["constants"]["ORDER"] == top_rows.HEAVIEST:
            assert result["wide_loads"] > 0, result


def check_gather(result: dict[str, Any]) -> None:
    """16 bytes a load whatever the step, and no word of a row, which other launches read before and after."""
    if result["target"].startswith("hip"):
        assert result["wide_loads"] > 0, result
        return
    assert result["wide_loads"] >= result["constants"]["KINDS"], result
    assert not {"acquire", "fence"} & set(result["order"]), result


def check_order(result: dict[str, Any]) -> None:
    """Reads in the order that makes torn rows visible: a word, then the length; at the end a fence, then the word."""
    order = result["order"]
    if result["target"].startswith("hip"):
        return
    if result["kernel"] == "mark_torn_kernel":
        assert order[order.index("fence") :][:2] == ["fence", "word"], order
    elif result["constants"]["KEYED"]:
        assert order[order.index("acquire") :] == ["acquire", "length", "fence", "store"], order


@pytest.mark.timeout(600)  # a quarter of a minute for each where nothing else runs
@pytest.mark.parametrize(
    ("target", "part"),
    [
        pytest.param(target, part, marks=() if (target, part) in FIRST else pytest.mark.slow)
        for target in TARGETS
        for part in PARTS
    ],
)
def test_kernels_compile_for_gpus_that_are_not_here(target: str, part: str) -> None:
    results = compiled(target, part)
    assert {result["kernel"] for result in results} == PARTS[part]
    check_compiled(results)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_launch_compiles_with_its_own_arguments_and_new_seeds_compile_nothing() -> None:
    times = compiled("--launches")
    assert len(times) == 12
    assert times["any_row_kernel"] == 3  # plain, stratified, with numbers
    assert times["find_tiles_kernel"] == 3
    assert times["find_rows_kernel"] <= 3  # all rows, some rows, selectable bits
    assert max(times.values()) <= 6


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=pytest.mark.slow if t == "cuda:90" else pytest.mark.long) for t in TARGETS]
)
def test_every_variant_of_every_kernel_compiles(target: str) -> None:
    check_compiled(compiled("--all", target))
