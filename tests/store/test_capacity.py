"""`capacity_bytes` is what a store takes of its file system: head, metadata and padding included."""

from __future__ import annotations

import pytest

import geartrain as gt
from geartrain.core.schema import round_up
from geartrain.errors import ArgumentError

SMALL = {"x": gt.Field((), "float32", per_row=True)}
STEPS = {
    "obs": gt.Field((11,), "float32"),
    "action": gt.Field((3,), "float32"),
    "task": gt.Field((), "int64", per_row=True),
}


@pytest.mark.parametrize("remover", ["fifo", "lowest_priority"])
@pytest.mark.parametrize(("fields", "max_length"), [(SMALL, None), (STEPS, 1), (STEPS, 200)], ids=["small", "1", "200"])
@pytest.mark.parametrize("nbytes", [70_000, 100_000, 1_000_003, 1 << 20, 33_333_333])
def test_a_store_takes_at_most_the_bytes_it_was_given_and_one_more_row_would_take_more(
    names, fields, max_length, nbytes, remover
):
    made = {"max_length": max_length, "remover": remover}
    one = gt.Store.create(names(), fields, capacity=1, **made)
    one.close()
    if one.nbytes > nbytes:
        with pytest.raises(ArgumentError, match=f"capacity_bytes is {nbytes}, and a store of one row alone takes "):
            gt.Store.create(names(), fields, capacity_bytes=nbytes, **made)
        return
    with gt.Store.create(names(), fields, capacity_bytes=nbytes, **made) as store:
        found = store.path.stat()
        assert found.st_size == store.nbytes <= nbytes
        assert found.st_blocks * 512 <= nbytes
        capacity = store.capacity
    with gt.Store.create(names(), fields, capacity=capacity + 1, **made) as larger:
        assert larger.nbytes > nbytes


@pytest.mark.parametrize(("remover", "metadata"), [("fifo", 57), ("lifo", 57), ("lowest_priority", 61)])
@pytest.mark.parametrize("fields", [SMALL, STEPS], ids=["small", "steps"])
def test_what_a_row_takes_is_what_the_documentation_says(name, fields, remover, metadata):
    max_length = None if fields is SMALL else 7
    with gt.Store.create(name, fields, max_length=max_length, capacity=100_000, remover=remover) as store:
        blocks = sum(round_up(field.block_nbytes(max_length or 1)) for field in fields.values())
        assert store.nbytes / store.capacity == pytest.approx(blocks + metadata, abs=0.8)


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (0, "a store of one row alone takes 57344"),
        (57_343, "a store of one row alone takes 57344"),
        (-1, "capacity_bytes must be at least 0"),
        (1e9, "capacity_bytes must be a whole number, found 1000000000.0"),
        (True, "capacity_bytes must be a whole number, found True"),
        (2**63, "capacity_bytes must be from 0"),
    ],
)
def test_bytes_that_hold_no_store_are_refused(names, nbytes, message):
    with pytest.raises(ArgumentError, match=message):
        gt.Store.create(names(), SMALL, capacity_bytes=nbytes)


def test_a_row_fits_into_exactly_the_bytes_it_needs(name):
    with gt.Store.create(name, SMALL, capacity_bytes=57_344) as store:
        assert store.nbytes == 57_344 and store.capacity == 64, "the rest of the pages is not wasted"
