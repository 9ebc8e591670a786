"""Every implementation of native/selection/selection.h chooses the same rows, bit for bit: the native one, the Triton
kernels in Triton's interpreter and, where there is one, on a GPU, all against the NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_worker import Interpreter
from selection_reference import HEAVIEST, OLDEST, ReferenceCandidates

import geartrain as gt
from geartrain import _native
from geartrain.errors import ArgumentError, EmptyStoreError, GeartrainError, NotEnoughRowsError

NONE = np.empty(0, np.uint32)
BIG = 2**32 - 1
Make = Callable[..., Any]  # (priorities, selectable=None, sequence=None) -> candidates


def on_cuda(*arrays: Any) -> Any:
    import torch

    from geartrain.device.kernels.candidates import DeviceCandidates

    moved = [None if array is None else torch.from_numpy(array.copy()).cuda() for array in arrays]
    return DeviceCandidates(*moved)


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


NEEDS_CUDA = [pytest.mark.skipif(not has_cuda(), reason="no CUDA device")]
DEVICES = ["interpreter", pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.fixture(params=["native", *DEVICES])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an implementation's candidates from priorities."""
    return _maker(request)


@pytest.fixture(params=DEVICES)
def make_on_device(request: pytest.FixtureRequest) -> Make:
    """The same for implementations that take selectable bits and sequence numbers as arrays."""
    return _maker(request)


def _maker(request: pytest.FixtureRequest) -> Make:
    if request.param == "native":
        return _native.Candidates
    if request.param == "cuda":
        return on_cuda
    one: Interpreter = request.getfixturevalue("interpreter")
    return one.candidates


def as_numpy(chosen: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.cpu().numpy() if hasattr(part, "cpu") else part for part in chosen)


def same(candidates: Any, reference: ReferenceCandidates, method: str, *arguments: Any) -> None:
    """Both choose the same, or both refuse with the same error."""
    try:
        expected = getattr(reference, method)(*arguments)
    except GeartrainError as error:
        with pytest.raises(type(error)):
            getattr(candidates, method)(*arguments)
        return
    found = as_numpy(getattr(candidates, method)(*arguments))
    meant = expected[3] if method == "first" else len(expected[0])
    equal = (
        np.array_equal(found[0], expected[0])
        and found[3] == expected[3]
        and found[1].astype(int)[:meant].tolist() == [1] * meant
        and np.array_equal(found[2][:meant], expected[2][:meant])
    )
    assert equal, f"{method}{arguments}: {found}, and not {expected}"


def some_priorities(rng: np.random.Generator, most: int) -> np.ndarray:
    n = int(rng.integers(1, most + 1))
    kind = rng.integers(6)
    if kind == 0:
        return np.full(n, rng.choice([1, 7, 65536, BIG]), np.uint32)
    if kind == 1:
        return rng.choice(np.array([1, BIG], np.uint32), n)
    if kind == 2:
        return np.exp2(rng.uniform(0, 32, n)).clip(1, BIG).astype(np.uint32)
    priorities = rng.integers(0, 2**32, n, dtype=np.uint32)
    if kind == 3:
        priorities[rng.random(n) < 0.7] = 0
    if kind == 4:
        priorities = (priorities % 3).astype(np.uint32)
    if kind == 5:
        priorities[rng.random(n) < 0.99] = 0
    return priorities


def one_case(rng: np.random.Generator, make: Make, most: int, whole: bool) -> None:
    """A random population and one choice of each kind. `whole`: with selectable bits and sequence numbers."""
    priorities = some_priorities(rng, most)
    n = len(priorities)
    arrays: tuple[Any, ...] = (priorities,)
    if whole:
        arrays = (priorities, rng.random(n) < rng.choice([0.1, 0.5, 0.95, 1.0]), rng.permutation(n) * 3 + 2**40)
    candidates, reference = make(*arrays), ReferenceCandidates(*arrays)
    assert candidates.total_priority() == reference.total_priority()
    assert candidates.count() == reference.count()
    by_priority = bool(rng.integers(2))
    seed, step = (int(rng.integers(0, 2**64, dtype=np.uint64) >> np.uint64(rng.integers(64))) for _ in range(2))
    round_ = int(rng.choice([0, 0, 1, 2, 1000]))
    draws = int(rng.integers(1, 60))
    numbers = rng.permutation(draws).astype(np.uint32)
    same(candidates, reference, "draw", by_priority, seed, step, round_, numbers)
    far = rng.integers(0, 2**32, draws, dtype=np.uint32)
    same(candidates, reference, "draw", by_priority, seed, step, round_, far)
    same(candidates, reference, "draw", by_priority, seed, step, round_, numbers, draws + int(rng.choice([0, 1, 1000])))
    excluded = rng.permutation(n)[: int(rng.integers(0, min(n, 5) + 1))].astype(np.uint32)
    if rng.random() < 0.5:
        excluded = NONE
    positive = int(np.count_nonzero(reference.by_priority))
    distinct = int(rng.choice([0, 1, min(positive, 40), min(reference.count(), 40), n + 1, min(positive, 40) + 1]))
    same(candidates, reference, "draw_distinct", by_priority, seed, step, round_, distinct, excluded)
    after = int(rng.choice([0, 1, n // 2, n])) + (2**40 if whole and rng.random() < 0.7 else 0)
    wanted = int(rng.choice([0, 1, 5, n // 2, n, n + 3]))
    for order in range(3):
        same(candidates, reference, "first", order, wanted, after, excluded)


@pytest.mark.parametrize("seed", range(2))
def test_random_populations_draws_and_seeds(make: Make, seed: int) -> None:
    rng = np.random.default_rng([1, seed])
    for _ in range(150 if make is _native.Candidates else 2):
        one_case(rng, make, 80, whole=False)
    for _ in range(8 if make is _native.Candidates else 1):
        one_case(rng, make, 3000, whole=False)


def some_unselectable(make: Make, seed: int, small: int, large: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(small):
        one_case(rng, make, 80, whole=True)
    for _ in range(large):
        one_case(rng, make, 3000, whole=True)


def test_random_populations_with_unselectable_rows_and_sequences(make_on_device: Make) -> None:
    some_unselectable(make_on_device, 2, small=4, large=1)


@pytest.mark.slow
def test_more_random_populations_with_unselectable_rows_and_sequences(make_on_device: Make) -> None:
    some_unselectable(make_on_device, 3, small=16, large=4)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "make",
    [
        pytest.param("native", marks=pytest.mark.slow),
        *(
            pytest.param(getattr(p, "values", [p])[0], marks=[*getattr(p, "marks", []), pytest.mark.long])
            for p in DEVICES
        ),
    ],
    indirect=True,
)
def test_many_more_random_populations(make: Make, seed: int) -> None:
    rng = np.random.default_rng([3, seed])
    for _ in range(10_000 if make is _native.Candidates else 400):
        one_case(rng, make, 200, whole=False)
    for _ in range(20):
        one_case(rng, make, 100_000, whole=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_more_with_unselectable_rows(make_on_device: Make) -> None:
    rng = np.random.default_rng(4)
    for _ in range(1000):
        one_case(rng, make_on_device, 2000, whole=True)


@pytest.mark.parametrize("n", [1, 16, 17, 256, 257, 4097, 65537])
def test_sizes_around_the_edges_of_tiles_and_nodes(make: Make, n: int) -> None:
    priorities = np.random.default_rng(n).integers(1, 2**32, n, dtype=np.uint32)
    candidates, reference = make(priorities), ReferenceCandidates(priorities)
    numbers = np.arange(500, dtype=np.uint32)
    same(candidates, reference, "draw", True, 5, n, 0, numbers)
    same(candidates, reference, "draw", True, 5, n, 0, numbers, 500)
    same(candidates, reference, "draw", False, 5, n, 0, numbers)
    same(candidates, reference, "draw_distinct", True, 5, n, 0, min(n, 20), NONE)
    same(candidates, reference, "first", HEAVIEST, 300, 0, NONE)


@pytest.mark.parametrize("place", [0, 255, 256, 699])
def test_the_one_row_with_priority_is_the_one_drawn(make: Make, place: int) -> None:
    priorities = np.zeros(700, np.uint32)
    priorities[place] = 1
    candidates = make(priorities)
    rows, _, probability, _ = as_numpy(candidates.draw(True, 1, 2, 3, np.arange(300, dtype=np.uint32)))
    assert set(rows.tolist()) == {place}
    assert set(probability.tolist()) == {1.0}


def test_one_row_of_the_largest_priority_among_rows_of_the_least(make: Make) -> None:
    priorities = np.ones(1000, np.uint32)
    priorities[600] = BIG
    candidates, reference = make(priorities), ReferenceCandidates(priorities)
    same(candidates, reference, "draw", True, 0, 0, 0, np.arange(2000, dtype=np.uint32))
    same(candidates, reference, "draw", True, 0, 0, 0, np.arange(2000, dtype=np.uint32), 2000)
    same(candidates, reference, "draw_distinct", True, 0, 0, 0, 30, NONE)  # the rest is found one by one


@pytest.mark.parametrize("pattern", [[1, 0, 1, 2, 0], [0] * 299 + [1], [3] + [0] * 512], ids=["dense", "sparse", "far"])
def test_every_target_of_a_small_total_finds_its_row(make: Make, pattern: list[int]) -> None:
    """As many strata as total priority: each draw's target is its number, the edges of tiles and nodes among them."""
    priorities = np.tile(np.array(pattern, np.uint32), 1500 // len(pattern) + 1)
    total, n = int(priorities.sum()), len(priorities)
    rows, *_ = as_numpy(make(priorities).draw(True, 1, 1, 0, np.arange(total, dtype=np.uint32), total))
    assert rows.tolist() == np.repeat(np.arange(n), priorities).tolist()
    rows, *_ = as_numpy(make(priorities).draw(False, 1, 1, 0, np.arange(n, dtype=np.uint32), n))
    assert rows.tolist() == list(range(n))


def test_targets_are_found_as_by_the_native_code(make_on_device: Make) -> None:
    """What shards do: targets come from elsewhere, and those beyond the total find nothing."""
    rng = np.random.default_rng(4)
    for n in (1, 255, 256, 257, 70_000):
        priorities = rng.integers(0, 3, n).astype(np.uint32) * rng.integers(1, 2**20, n).astype(np.uint32)
        priorities[n // 2] = 7
        native, mirror = _native.Candidates(priorities), make_on_device(priorities, np.ones(n, bool))
        for by_priority, total in ((True, int(priorities.sum(dtype=np.uint64))), (False, n)):
            targets = np.append(rng.integers(0, total, 300), [0, total - 1]).astype(np.uint64)
            expected = native.find(by_priority, targets)
            found = as_numpy(mirror.find(by_priority, targets))
            for mine, theirs in zip(found[:3], expected[:3], strict=True):
                assert mine.tolist() == theirs.tolist()
            assert found[3] == expected[3] == 0
            beyond = np.array([total, 0, total + 1000, 2**63 + 5], np.uint64)
            rows, generations, _, missing = as_numpy(mirror.find(by_priority, beyond))
            assert rows[[0, 2, 3]].tolist() == [2**32 - 1] * 3
            assert generations.tolist() == [0, 1, 0, 0]
            assert missing == 3


def test_strata_more_in_number_than_the_total(make: Make) -> None:
    priorities = np.array([0, 1, 0, 2, 1], np.uint32)
    candidates, reference = make(priorities), ReferenceCandidates(priorities)
    same(candidates, reference, "draw", True, 9, 1, 0, np.arange(333, dtype=np.uint32), 333)
    same(candidates, reference, "draw", False, 9, 1, 0, np.arange(333, dtype=np.uint32), 333)
    numbers = np.array([0, 1, BIG - 2, BIG - 1], np.uint32)
    same(candidates, reference, "draw", True, 9, 1, 0, numbers, BIG)


def test_more_draws_than_rows(make: Make) -> None:
    priorities = np.array([3, 0, 5], np.uint32)
    same(make(priorities), ReferenceCandidates(priorities), "draw", True, 1, 1, 0, np.arange(1000, dtype=np.uint32))


SLOW = pytest.mark.slow  # with 12 the rows that draws leave over are found one by one as well


@pytest.mark.parametrize("positive", [1, 12, pytest.param(50, marks=SLOW), pytest.param(100, marks=SLOW)])
def test_all_rows_with_priority_without_replacement(make: Make, positive: int) -> None:
    rng = np.random.default_rng(positive)
    priorities = np.zeros(2 * positive + 1, np.uint32)
    priorities[rng.permutation(len(priorities))[:positive]] = np.exp2(rng.uniform(0, 32, positive)).astype(np.uint32)
    candidates, reference = make(priorities), ReferenceCandidates(priorities)
    for step in range(2):
        same(candidates, reference, "draw_distinct", True, 4, step, 1, positive, NONE)
    with pytest.raises(NotEnoughRowsError):
        candidates.draw_distinct(True, 4, 0, 1, positive + 1, NONE)


def test_excluded_rows_are_neither_drawn_nor_first(make: Make) -> None:
    priorities = np.arange(1, 41, dtype=np.uint32)
    excluded = np.array([39, 0, 20, 38], np.uint32)
    candidates, reference = make(priorities), ReferenceCandidates(priorities)
    for by_priority in (True, False):
        same(candidates, reference, "draw_distinct", by_priority, 1, 1, 0, 36, excluded)
        same(candidates, reference, "draw_distinct", by_priority, 1, 1, 0, 37, excluded)
    for order in range(3):
        same(candidates, reference, "first", order, 40, 7, excluded)


def test_of_equal_priorities_the_older_come_first(make: Make) -> None:
    priorities = np.tile(np.array([5, 9, 9, 0], np.uint32), 500)
    same(make(priorities), ReferenceCandidates(priorities), "first", HEAVIEST, 1300, 0, NONE)


def test_nothing_to_draw_is_an_error(make: Make) -> None:
    candidates = make(np.zeros(300, np.uint32))
    with pytest.raises(EmptyStoreError):
        candidates.draw(True, 0, 0, 0, np.arange(3, dtype=np.uint32))
    with pytest.raises(EmptyStoreError):
        candidates.draw_distinct(True, 0, 0, 0, 3, NONE)


def test_what_makes_no_sense_is_refused(make: Make) -> None:
    candidates = make(np.ones(300, np.uint32))
    with pytest.raises(ArgumentError, match="none of 3 strata"):
        candidates.draw(True, 0, 0, 0, np.array([3], np.uint32), 3)
    with pytest.raises(ArgumentError, match="no row 300"):
        candidates.draw_distinct(True, 0, 0, 0, 1, np.array([300], np.uint32))
    with pytest.raises(ArgumentError, match="no row 300"):
        candidates.first(OLDEST, 1, 0, np.array([300], np.uint32))


def test_more_rows_than_float32_can_count(make_on_device: Make) -> None:
    priorities = np.full(2**24 + 3, BIG, np.uint32)
    priorities[: 2**24 : 3] = 1
    candidates, reference = make_on_device(priorities), ReferenceCandidates(priorities)
    assert candidates.total_priority() == reference.total_priority() > 2**53
    same(candidates, reference, "draw", True, 1, 2, 0, np.arange(200, dtype=np.uint32))
    same(candidates, reference, "draw", True, 1, 2, 0, np.array([0, 198, 199], np.uint32), 200)
    same(candidates, reference, "draw", False, 1, 2, 0, np.array([0, 198, 199], np.uint32), 200)
    rows, _, _, found = as_numpy(candidates.first(HEAVIEST, 3, 2**24, NONE))
    assert (rows.tolist(), found) == ([2**24, 2**24 + 1, 2**24 + 2], 3)


def test_a_store_with_holes_and_its_mirror_choose_the_same_rows(
    make_on_device: Make, store_name: Callable[[], str]
) -> None:
    """Unselectable rows and sequence numbers, as a store has them."""
    rng = np.random.default_rng(6)
    with gt.Store.create(store_name(), {"x": gt.Field((), "int64", per_row=True)}, capacity=150) as store:
        keys = store.insert({"x": np.arange(150)})
        store.delete(keys[rng.permutation(150)[:60]])
        store.insert({"x": np.arange(30)})  # into holes: row numbers and sequence numbers part ways
        native = _native.Candidates(store.native)
        rows, _, _, found = native.first(OLDEST, 150, 0, NONE)
        rows = rows[:found].copy()
        store.update_priorities(store.keys()[:50], rng.uniform(0.1, 9.0, 50))
        priorities, selectable, sequence = np.zeros(150, np.uint32), np.zeros(150, bool), np.zeros(150, np.int64)
        selectable[rows] = True
        priorities[rows] = native.priorities(rows)
        sequence[rows] = native.sequences(rows)
        mirror = make_on_device(priorities, selectable, sequence)
        for step in range(3):
            for by_priority in (True, False):
                numbers = np.arange(64, dtype=np.uint32)
                for strata in (0, 64):
                    a = native.draw(by_priority, 1, step, 0, numbers, strata)
                    b = as_numpy(mirror.draw(by_priority, 1, step, 0, numbers, strata))
                    assert a[0].tolist() == b[0].tolist()
                    assert a[2].tolist() == b[2].tolist()
                a = native.draw_distinct(by_priority, 1, step, 0, found, NONE)
                assert a[0].tolist() == as_numpy(mirror.draw_distinct(by_priority, 1, step, 0, found, NONE))[0].tolist()
            a = native.first(step, 20, 10, rows[:3])
            assert a[0].tolist() == as_numpy(mirror.first(step, 20, 10, rows[:3]))[0].tolist()
