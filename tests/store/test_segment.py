"""The segment as bytes: golden bytes of its head, and everything that is not such a segment is refused."""

from __future__ import annotations

import errno
import functools
import hashlib
import platform
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience
from mounts import file_system
from tasked_stores import in_all_states

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    IncompatibleStoreError,
    NoSpaceError,
    SchemaError,
    StaleStoreError,
    StoreExistsError,
    StoreMissingError,
)

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "done": gt.Field((), "bool"),
    "task": gt.Field((), "int64", per_row=True),
    "mean": gt.Field((5,), "bfloat16", per_row=True),
}

# Offsets of the header's members, native/segment/segment.h.
FORMAT_VERSION, FINGERPRINT, REQUIRED_FEATURES, SEGMENT_BYTES = 8, 16, 24, 32
CREATED_NS, STORE_ID, REGIONS, FIELDS_OFFSET = 96, 104, 112, 8192


def head_of(path: Path) -> tuple[bytes, bytes]:
    """The header, without what differs from store to store, and the field records."""
    with path.open("rb") as file:
        header = bytearray(file.read(112 + 16 * 16))
        header[CREATED_NS : CREATED_NS + 16] = bytes(16)
        file.seek(FIELDS_OFFSET)
        return bytes(header), file.read(64 * 128)


# --- golden bytes -----------------------------------------------------------------------------------------------

# Over header and records, but for times, the store's id, and the fingerprint, in which the size of a mutex counts.
GOLDEN_SHA256 = "09866234b16a8e92da3b854a6efbeab76efb9c5c5469c5ea6199b69d1d9512b3"
GOLDEN_FINGERPRINT_X86_64 = 5279200056871984542


def test_the_header_and_field_records_are_these_bytes(name):
    options = {"max_rows": 9, "max_age_s": 1.9615, "max_times_sampled": 3, "priority_fraction_bits": 8}
    with gt.Store.create(
        name, FIELDS, max_length=7, capacity=10, remover="lowest_priority", persist=True, **options
    ) as store:
        header, records = head_of(store.path)
        store.unlink()
    magic, version, header_bytes, fingerprint, features = struct.unpack_from("<8sIIQQ", header)
    assert (magic, version, header_bytes, features) == (b"GEARTRN\n", 2, len(header), 2)
    assert struct.unpack_from("<QQQQ", header, SEGMENT_BYTES)[1:] == (10, 9, 1_961_500_000)
    assert struct.unpack_from("<8I", header, 64) == (7, 4, 256, 16, 2, 3, 8, 1)
    regions = [struct.unpack_from("<QQ", header, REGIONS + 16 * i) for i in range(16)]
    assert regions == [
        (32768, 10 * 48),  # status
        (36864, 16 * 8),  # words
        (40960, 16 * 8),  # priority nodes
        (45056, 16 * 8),  # bits
        (49152, 16 * 8),  # bit nodes
        (53248, 10 * 4),  # heap
        (57344, 4 * 4096),  # columns
        *[(0, 0)] * 9,
    ]
    assert struct.unpack_from("<Q", header, SEGMENT_BYTES) == (57344 + 4 * 4096,)
    for i, (field, dtype, ndim, timed, itemsize, shape, block, stride) in enumerate(
        [
            (b"obs", 12, 2, 1, 4, (7, 3), 84, 128),
            (b"done", 1, 1, 1, 1, (7,), 7, 64),
            (b"task", 9, 0, 0, 8, (), 8, 64),
            (b"mean", 11, 1, 0, 2, (5,), 10, 64),
        ]
    ):
        record = struct.unpack_from("<64s4B8II3Q", records, 128 * i)
        assert record[0].rstrip(b"\0") == field
        assert record[1:5] == (dtype, ndim, timed, itemsize)
        assert record[5:13] == shape + (0,) * (8 - len(shape))
        assert record[13:] == (0, block, stride, 57344 + 4096 * i)
    assert not any(records[4 * 128 :])
    # The whole of it: a change of any of these bytes needs a new format version.
    plain = header[:FINGERPRINT] + bytes(8) + header[FINGERPRINT + 8 :]
    assert hashlib.sha256(plain + records).hexdigest() == GOLDEN_SHA256
    if platform.machine() == "x86_64":
        assert fingerprint == GOLDEN_FINGERPRINT_X86_64


# The same of a store with axes and tasks, with the table of these.
GOLDEN_TASKS_SHA256 = "851cc89220dcd50302ce5d04b3fc61692bca48944e700bc28a28027c5fb8f811"
GOLDEN_TASKS_FINGERPRINT_X86_64 = 13467998232233133464
TASKS_REGION, TASK_WORDS_REGION, DUE_REGION, SPANS_REGION = 10, 11, 12, 13


def test_the_table_of_axes_and_tasks_is_these_bytes():
    with in_all_states() as store:
        header, records = head_of(store.path)
        features, regions = (
            struct.unpack_from("<Q", header, REQUIRED_FEATURES)[0],
            [struct.unpack_from("<QQ", header, REGIONS + 16 * i) for i in range(16)],
        )
        at, _ = regions[TASKS_REGION]
        with store.path.open("rb") as file:
            file.seek(at)
            table = file.read(16 + 8 * 72 + 65 * 80)
    assert features == 2 | 8
    assert struct.unpack_from("<IIQ", table) == (3, 3, (1 << 16) // 64)  # axes, tasks, units of spans
    axes = [struct.unpack_from("<64sII", table, 16 + 72 * i) for i in range(3)]
    assert [(name.rstrip(b"\0"), owner, divided) for name, owner, divided in axes] == [
        (b"prompt", 0, 0),
        (b"tokens", 1, 5),
        (b"answers", 1, 0),
    ]
    tasks = [struct.unpack_from("<64sQII", table, 16 + 8 * 72 + 80 * i) for i in range(1, 4)]
    assert [(name.rstrip(b"\0"), after, flags) for name, after, flags, _ in tasks] == [
        (b"answer", 0, 1),
        (b"reward", 1, 0),
        (b"train", 3, 4),
    ]
    assert regions[TASK_WORDS_REGION][1] == 8 * 4 * 24  # of 8 rows and 4 tasks: word, version and change
    assert regions[DUE_REGION][1] == 4 * 8 and regions[SPANS_REGION][1] == 1 << 16
    plain = header[:FINGERPRINT] + bytes(8) + header[FINGERPRINT + 8 :]
    assert hashlib.sha256(plain + records + table).hexdigest() == GOLDEN_TASKS_SHA256
    if platform.machine() == "x86_64":
        assert struct.unpack_from("<Q", header, FINGERPRINT)[0] == GOLDEN_TASKS_FINGERPRINT_X86_64


def test_every_block_of_every_column_is_aligned_and_holds_the_rows_bytes(name):
    with gt.Store.create(name, FIELDS, max_length=7, capacity=10) as store:
        obs = np.arange(10 * 21, dtype=np.float32).reshape(10, 7, 3)
        done = np.arange(70).reshape(10, 7) % 3 == 0
        store.insert({"obs": obs, "done": done, "task": np.arange(10), "mean": _bfloat16(np.ones((10, 5), np.float32))})
        raw = np.fromfile(store.path, np.uint8)
        _, records = head_of(store.path)
        for i, values in ((0, obs), (1, done), (2, np.arange(10))):
            block, stride, offset = struct.unpack_from("<3Q", records, 128 * i + 104)
            assert offset % 4096 == 0
            assert stride % 64 == 0
            for row in range(10):
                at = offset + row * stride
                assert raw[at : at + block].tobytes() == values[row].tobytes()


def _bfloat16(array: np.ndarray):
    torch = pytest.importorskip("torch")

    return torch.from_numpy(array).to(torch.bfloat16)


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A closed segment in a file, to be damaged."""
    path = tmp_path / "segment"
    with gt.Store.create(path, FIELDS, max_length=7, capacity=10) as store:
        assert store.options["persist"]
    return path


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GEARBOX\n", "not a geartrain segment"),
        (FORMAT_VERSION, struct.pack("<I", 3), "format version 3, this build reads version 2"),
        (REQUIRED_FEATURES, struct.pack("<Q", 64), r"features this build does not have \(bits 64\)"),
        (SEGMENT_BYTES, struct.pack("<Q", 1 << 40), "was cut: .* bytes on disk, 1099511627776 in the header"),
        (FINGERPRINT, b"\0", "fingerprint"),
        (REGIONS + 3, b"\1", "fingerprint"),
        (FIELDS_OFFSET, b"X", "fingerprint"),
        (FIELDS_OFFSET + 64, b"\x63", "fingerprint"),
        (68, struct.pack("<I", 65), "damaged"),
    ],
)
def test_a_segment_of_another_format_or_a_damaged_one_is_refused_and_left_alone(segment, offset, data, message):
    damage(segment, offset, data)
    before = segment.read_bytes()
    for joining in (
        gt.Store.open,
        functools.partial(gt.Store.open, mode="r"),
        lambda path: gt.Store.open(path, FIELDS, max_length=7, create="missing", capacity=3),
    ):
        with pytest.raises(IncompatibleStoreError, match=message):
            joining(segment)
    with pytest.raises(StoreExistsError, match=rf"the name '{segment}' is taken: .*{message}"):
        gt.Store.create(segment, FIELDS, max_length=7, capacity=10)
    with pytest.raises(IncompatibleStoreError):
        gt.Store.open(segment, FIELDS, max_length=7, create="replace", capacity=3)
    assert segment.read_bytes() == before


@pytest.mark.parametrize("size", [0, 1, 4096, 32767, 32768, 50_000])
def test_a_truncated_segment_is_refused_before_a_byte_of_it_is_believed(segment, size):
    with segment.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(IncompatibleStoreError, match="empty" if size == 0 else "bytes"):
        gt.Store.open(segment)


def test_what_is_no_segment_at_all_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello " * 20_000)
    with pytest.raises(IncompatibleStoreError, match="magic"):
        gt.Store.open(tmp_path / "text")
    with pytest.raises(gt.errors.GeartrainError, match=r"directory|regular file"):
        gt.Store.open(tmp_path)
    with pytest.raises(StoreMissingError, match="No such file"):
        gt.Store.open(tmp_path / "absent")
    with pytest.raises(StoreMissingError):
        gt.Store.create(tmp_path / "no" / "such" / "directory", FIELDS, max_length=7, capacity=1)
    with pytest.raises(ArgumentError, match="a store's name is a word"):
        gt.Store.create("", FIELDS, max_length=7, capacity=1)
    with pytest.raises(SchemaError, match="1 to 200 characters"):
        gt.Store.create("n" * 201, FIELDS, max_length=7, capacity=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_a_copy_of_a_living_segment_is_stale_and_adopting_it_recovers_its_rows(name, tmp_path):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=10) as store:
        store.insert({"x": np.arange(6)}, priorities=np.arange(6))
        open_row = store.row()
        shutil.copy(store.path, tmp_path / "copy")
        open_row.abandon()
    with pytest.raises(StaleStoreError, match="holds 6 rows"):
        gt.Store.open(tmp_path / "copy")
    with gt.Store.open(tmp_path / "copy", adopt=True) as copy:
        assert gt.fetch(copy, copy.keys(), output="numpy")["x"].tolist() == list(range(6))
        assert copy.audit() == []
        assert copy.stats()["free"] == 4


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 4 MiB; skips where this user may not mount one."""
    with file_system(tmp_path, "4m"):
        yield tmp_path


def test_too_little_room_is_an_error_that_says_how_much_there_is_and_leaves_nothing_behind(small_disk):
    with pytest.raises(NoSpaceError, match=r"needs 6\.\d MiB, but .* has 4\.0 MiB free of 4\.0 MiB"):
        gt.Store.create(small_disk / "large", {"x": gt.Field((), "uint8")}, max_length=1 << 16, capacity=100)
    assert list(small_disk.iterdir()) == []
    assert shutil.disk_usage(small_disk).used == 0
    with gt.Store.create(small_disk / "fits", {"x": gt.Field((), "uint8")}, max_length=1 << 16, capacity=50) as store:
        store.insert({"x": np.ones((50, 1 << 16), np.uint8)})  # every page is there: no SIGBUS
        with pytest.raises(NoSpaceError):
            gt.Store.create(small_disk / "second", {"x": gt.Field((), "uint8")}, max_length=1 << 16, capacity=50)


def test_a_file_system_without_a_limit_is_not_taken_for_a_full_one(tmp_path):
    with file_system(tmp_path, "0"):
        gt.Store.create(tmp_path / "fits", FIELDS, max_length=7, capacity=10).close()


def test_signals_that_arrive_while_memory_is_reserved_do_not_fail_the_store(name):
    ticks = 0

    def tick(*_: object) -> None:
        nonlocal ticks
        ticks += 1

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        gt.Store.create(name, {"x": gt.Field((), "uint8")}, max_length=1 << 20, capacity=150).close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ticks > 0, errno.errorcode[errno.EINTR] + " could not have happened"


def test_a_limit_of_a_files_size_is_named_as_one(store_name: Any) -> None:
    code = f"""
import resource, geartrain as gt
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    gt.Store.create({store_name()!r}, {{"x": gt.Field((100_000,), "uint8", per_row=True)}}, capacity=100)
except gt.errors.NoSpaceError as error:
    print(error)
"""
    done = preloaded.run([sys.executable, "-c", code], timeout=patience(60))
    assert "limit of a file's size (ulimit -f) or a quota" in done.stdout, done
