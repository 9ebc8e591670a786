"""Segments of any content: opening and using one ends in errors of geartrain, never in a crash or a hang."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from fuzz_runs import endings
from segment_images import (
    CLIENTS,
    CONTROL,
    FIELD_RECORDS,
    FIELDS,
    RECORD_BYTES,
    REGIONS,
    STATUS,
    fingerprint,
    images,
    refit,
)

import geartrain as gt
from geartrain.errors import CorruptStoreError, IncompatibleStoreError, StoreError


@pytest.mark.parametrize(
    ("seed", "runs"),
    [(1, 1500), *(pytest.param(seed, 20_000, marks=pytest.mark.long) for seed in (2, 3, 4))],
    ids=["few", "many-2", "many-3", "many-4"],
)
@pytest.mark.timeout(300)
def test_a_segment_of_any_content_never_ends_the_process(tmp_path, seed, runs):
    ended = endings("segment_fuzz_worker.py", seed, runs, tmp_path, 120)
    assert ended["IncompatibleStoreError"] > runs // 5 and ended["used"] > runs // 5 and ended["looked at"] > 0, ended


@pytest.fixture(scope="module")
def closed(tmp_path_factory) -> bytes:
    """A FIFO store of 16 rows, five of them committed, closed in an orderly way."""
    return images(tmp_path_factory.mktemp("images"))[1]


@pytest.fixture
def written(tmp_path):
    """Writes an image to a file."""

    def write(image: bytes) -> Path:
        path = tmp_path / "segment"
        path.touch(0o600)
        path.write_bytes(image)
        return path

    return write


def test_the_images_are_believed_when_nothing_is_wrong(closed, written):
    assert struct.unpack_from("<Q", closed, 16)[0] == fingerprint(closed), "or nothing below tests what it says"
    with gt.Store.open(written(refit(bytearray(closed)))) as store:
        assert store.audit() == [] and len(store) == 7


# What a stranger may write into a header, with a fingerprint that fits.
@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (40, "<Q", 2**32 - 16),  # capacity
        (40, "<Q", 17),
        (48, "<Q", 2**63),  # rows that may be kept
        (64, "<I", 2**30),  # steps of a row
        (68, "<I", 1),  # fields
        (72, "<I", 2**31),  # clients
        (76, "<I", 17),  # children of a node
        (80, "<I", 7),  # remover
        (80, "<I", 2),  # one that needs a heap
        (88, "<I", 63),  # fraction bits
        (92, "<I", 2),  # persistence
        *((REGIONS + 16 * region, "<Q", 2**40) for region in range(8)),
        *((REGIONS + 16 * region, "<Q", 4096) for region in range(8)),
        *((REGIONS + 16 * region + 8, "<Q", 2**50) for region in range(8)),
        (FIELD_RECORDS, "<4s", b"\xff\xff\xff\0"),  # a name that is no text
        (FIELD_RECORDS, "<4s", b"\0\0\0\0"),
        (FIELD_RECORDS + 64, "<B", 0),  # dtypes
        (FIELD_RECORDS + 64, "<B", 99),
        (FIELD_RECORDS + 64, "<B", 9),
        (FIELD_RECORDS + 65, "<B", 200),  # axes
        (FIELD_RECORDS + 65, "<B", 1),
        (FIELD_RECORDS + 66, "<B", 2),  # whether it has time
        (FIELD_RECORDS + 66, "<B", 0),
        (FIELD_RECORDS + 67, "<B", 255),  # bytes of an element
        (FIELD_RECORDS + 67, "<B", 0),
        (FIELD_RECORDS + 68, "<I", 0),  # shape
        (FIELD_RECORDS + 68, "<I", 2**32 - 1),
        (FIELD_RECORDS + 72, "<I", 4),
        (FIELD_RECORDS + 92, "<I", 7),  # an axis that is not there
        (FIELD_RECORDS + 104, "<Q", 2**40),  # block, stride, place
        (FIELD_RECORDS + 112, "<Q", 0),
        (FIELD_RECORDS + 112, "<Q", 2**63),
        (FIELD_RECORDS + 120, "<Q", 2**40),
        (FIELD_RECORDS + 120, "<Q", 0),
        (FIELD_RECORDS + RECORD_BYTES, "<2s", b"x\0"),  # the first field's name
    ],
)
def test_a_layout_that_does_not_follow_from_the_schema_is_refused(closed, written, offset, layout, value):
    image = bytearray(closed)
    struct.pack_into(layout, image, offset, value)
    path = written(refit(image))
    for joining in (
        lambda path: gt.Store.open(path, mode="r"),
        gt.Store.open,
        lambda path: gt.Store.open(path, adopt=True),
    ):
        with pytest.raises(IncompatibleStoreError, match=f"{path} cannot be used: "):
            joining(path)
    assert path.read_bytes() == bytes(image), "left as it is"


@pytest.mark.parametrize("longer", [1, 4096, 1 << 20])
def test_a_file_of_another_length_than_its_schema_needs_is_refused(closed, written, longer):
    with pytest.raises(IncompatibleStoreError, match="the places of its parts do not follow from its schema"):
        gt.Store.open(written(refit(bytearray(closed) + bytearray(longer))))


@pytest.mark.parametrize("value", [16, 2**31, 2**32 - 2])
@pytest.mark.parametrize("end", range(76, 96, 4), ids=["free", "free-tail", "order", "order-tail", "heap"])
def test_lists_that_end_outside_the_rows_are_an_error_and_rebuilt_on_request(closed, written, end, value):
    image = bytearray(closed)
    struct.pack_into("<I", image, CONTROL + end, value + (end == 92))
    path = written(image)
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=r"is damaged: .*adopt=True rebuilds its lists"):
            gt.Store.open(path)
    assert len(gt.Store.open(path, mode="r", adopt=True)) == 7
    with gt.Store.open(path, adopt=True) as store:
        assert store.audit() == []
        assert sorted(gt.fetch(store, store.keys(), output="numpy")["id"].tolist()) == [0, 0, 1, 2, 3, 4, 5]
        store.insert({"x": np.ones((16, 4, 3), "float32"), "id": np.arange(16)})
    gt.Store.open(path).close()


@pytest.mark.parametrize("what", ["link", "circle", "owner"])
def test_rows_that_dead_processes_are_said_to_hold_are_rebuilt(tmp_path, written, what):
    image = bytearray(images(tmp_path)[0])  # copied while a process was extending a row
    held = struct.unpack_from("<I", image, CLIENTS + 16)[0]
    if what == "link":
        struct.pack_into("<I", image, STATUS + 48 * held + 36, 1 << 30)
    elif what == "circle":
        struct.pack_into("<I", image, STATUS + 48 * held + 36, held)
    else:
        struct.pack_into("<H", image, STATUS + 48 * held + 44, 77)
    with gt.Store.open(written(image), adopt=True) as store:
        assert store.audit() == [] and len(store) == 7


@pytest.mark.parametrize("call", ["insert", "keys", "free_rows", "delete", "close"])
def test_a_link_out_of_the_rows_is_an_error_where_it_is_followed_and_mended_by_the_next_call(name, call):
    with gt.Store.create(name, FIELDS, max_length=4, capacity=16) as store, gt.Store.open(name) as other:
        keys = store.insert({"x": np.ones((6, 4, 3), "float32"), "id": np.arange(6)})
        row = other.row()
        memory = store.native.segment()
        status = memory[STATUS : STATUS + 16 * 48].view("<u4").reshape(16, 12)
        status[:, 8:10] = 1 << 20  # previous and next, of every row
        calls = {
            "insert": lambda: store.insert({"x": np.ones((12, 4, 3), "float32"), "id": np.arange(12)}),
            "keys": store.keys,
            "free_rows": store.native.free_rows,
            "delete": lambda: store.delete(keys[2:3]),
            "close": other.close,
        }
        if call == "close":
            with pytest.raises(StoreError):
                other.close()
        else:
            with pytest.raises(CorruptStoreError, match="is damaged: a list leads to row 1048576"):
                calls[call]()
        assert store.audit() == []
        store.insert({"x": np.ones((12, 4, 3), "float32"), "id": np.arange(12)})
        assert store.audit() == []
        if call != "close":
            row.abandon()
