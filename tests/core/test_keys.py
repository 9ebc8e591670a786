"""Keys: whose rows they name, what they hold, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError

ONE, OTHER = 0xFEDC_BA98_7654_3210, 7


def test_a_key_keeps_its_store_through_pieces_joins_and_pickles() -> None:
    keys = Keys([1, 2, 3], [1, 3, 1], store=ONE)
    assert keys[1].store == ONE and keys[:2].store == ONE and keys[[True, False, True]].store == ONE
    joined = keys + Keys([9], [1], store=OTHER)
    assert joined.store.tolist() == [ONE, ONE, ONE, OTHER] and joined.store.dtype == np.uint64
    assert joined[3].store.tolist() == [OTHER] and (keys + keys).store == ONE
    for each in (keys, joined, joined.of_shard(3), Keys([1], [1])):
        copied = pickle.loads(pickle.dumps(each))
        assert copied == each and np.array_equal(copied.store, each.store)
    assert joined.is_of(OTHER).tolist() == [False, False, False, True]
    assert keys.is_of(OTHER).tolist() == [False] * 3 and Keys([1], [1]).is_of(OTHER).tolist() == [True]
    assert Keys.empty() + keys == keys and (keys + Keys.empty()).store == ONE


def test_keys_of_another_store_are_refused_by_count_and_ids() -> None:
    keys = Keys([1, 2, 3], [1, 3, 1], store=[ONE, OTHER, OTHER])
    with pytest.raises(ArgumentError, match="2 of 3 keys belong to another store: 'mine' has the id fedcba9876543210"):
        keys.check_store(ONE, "mine")
    keys[0].check_store(ONE, "mine")
    keys[[False] * 3].check_store(5, "mine")  # none are of any store
    Keys.empty().check_store(5, "mine")
    Keys([1], [1]).check_store(5, "mine")
    with pytest.raises(ArgumentError, match="have shards but no store"):
        Keys([1], [1]).of_shard(0).check_store(ONE, "mine")
    keys[1].of_store(ONE).check_store(ONE, "mine")


def test_places_follow_the_store_and_not_the_number_that_another_replay_gave_it() -> None:
    stores = np.array([5, ONE, OTHER, ONE], np.uint64)
    keys = Keys(np.arange(5), np.ones(5, int), store=[OTHER, 5, ONE, ONE, OTHER])
    assert keys.places_among(stores).tolist() == [2, 0, 1, 1, 2]
    told = Keys(keys.row, keys.generation, [2, 1, 3, 0, 900], None, keys.store)
    assert told.places_among(stores).tolist() == [2, 0, 3, 1, 2]
    assert Keys([1, 2], [1, 1], store=OTHER).places_among(stores).tolist() == [2, 2]
    assert Keys([1, 2], [1, 1], [3, 0]).places_among(stores).tolist() == [3, 0]
    assert Keys([1, 2], [1, 1]).places_among(stores[:1]).tolist() == [0, 0]
    assert Keys.empty().places_among(stores).tolist() == []
    for foreign, message in [
        (Keys([4], [1], store=6), "1 of 1 keys belong to none of the 4 stores"),
        (Keys([4, 3], [1, 1], [0, 1], None, [5, 6]), r"1 of 2 keys .* \(first: row 3 of the store with id 0{15}6\)"),
        (Keys([4], [1]), "there are 4 stores"),
        (Keys([4], [1], [4]), "there are 4 stores"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            foreign.places_among(stores)


def test_places_are_those_of_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        ids = random.integers(0, 6, random.integers(1, 7)).astype(np.uint64) << np.uint64(61)
        n = int(random.integers(0, 30))
        store = random.choice(ids, n)
        shard = random.integers(0, 9, n).astype(np.uint16)
        wanted = [
            int(told) if told < len(ids) and ids[told] == of else ids.tolist().index(of)
            for told, of in zip(shard, store, strict=True)
        ]
        rows = np.arange(n)
        assert Keys(rows, rows, shard, None, store).places_among(ids).tolist() == wanted
        assert Keys(rows, rows, None, None, store).places_among(ids).tolist() == [ids.tolist().index(s) for s in store]


@pytest.mark.parametrize(
    "arguments",
    [
        ([-1], [1]),
        ([2**32], [1]),
        ([1], [2**32]),
        ([1.5], [1]),
        ([1], [True]),
        (["1"], [1]),
        ([np.nan], [1]),
        ([1, 2], [1]),
        ([[1]], [[1]]),
        (None, None),
        ([1], [1], [2**16]),
        ([1], [1], [0, 1]),
        ([1], [1], [0.0]),
        ([1], [1], None, [0, 1]),
        ([1], [1], None, [2**63]),
        ([1], [1], None, None, -1),
        ([1], [1], None, None, 2**64),
        ([1], [1], None, None, True),
        ([1], [1], None, None, 1.0),
        ([1], [1], None, None, "store"),
        ([1], [1], None, None, [1, 2]),
        ([1], [1], None, None, [-1]),
    ],
)
def test_what_no_row_generation_shard_or_store_has_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ArgumentError):
        Keys(*arguments)


@pytest.mark.parametrize(
    "keys",
    [
        Keys([3, 2**32 - 1], [7, 2**32 - 1], store=2**64 - 2),
        Keys([3], [7]),
        Keys([3, 4], [7, 8], [0, 65535], [0, 2**40], np.array([2**63, 1], np.uint64), [0, 2**32 - 1]),
        Keys.empty(),
    ],
)
def test_keys_come_back_from_their_numbers(keys: Keys) -> None:
    numbers = keys.as_array()
    assert (numbers.shape, numbers.dtype) == ((len(keys), 6), np.int64)
    for given in (numbers, np.asfortranarray(numbers), numbers[None]):
        found = Keys.from_array(given)
        for name in ("row", "generation", "shard", "draw", "store", "step"):
            value, expected = getattr(found, name), getattr(keys, name)
            assert (value is None) == (expected is None) or not len(keys), name
            assert value is None or (np.asarray(value) == np.asarray(expected)).all(), name


@pytest.mark.parametrize("wrong", [np.zeros((2, 6)), np.zeros((2, 5), np.int64), np.int64(6), np.full((1, 6), -1)])
def test_numbers_that_are_no_keys_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ArgumentError):
        Keys.from_array(wrong)


def test_what_cannot_be_joined_or_is_no_key_is_refused() -> None:
    with pytest.raises(ArgumentError, match="without one"):
        Keys([1], [1], store=1) + Keys([1], [1])
    with pytest.raises(ArgumentError, match="keys with a shard"):
        Keys([1], [1]) + Keys([1], [1]).of_shard(0)
    with pytest.raises(ArgumentError):
        Keys([1], [1]).of_shard(-1)
    with pytest.raises(ArgumentError, match=r"geartrain\.Keys, .* found ndarray"):
        check_keys(np.arange(3))
