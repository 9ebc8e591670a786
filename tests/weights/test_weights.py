"""Versions of weights: whole or not at all, shared by all readers of a host, and there after whoever was killed."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from weights_processes import filled, heard, kill, run

import geartrain.core.futex as futex
from geartrain import weights
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    IncompatibleStoreError,
    NoSpaceError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.weights import reader as readers
from geartrain.weights import segment as segments
from geartrain.weights.segment import WeightsSegment

# --- versions -------------------------------------------------------------------------------------------------------


def test_what_is_published_is_read_whatever_its_dtype_and_nesting(host: Path) -> None:
    torch = pytest.importorskip("torch")
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
    dtypes += [torch.complex64, torch.uint8, torch.float8_e4m3fn]
    given = {
        "policy": {f"layers.{i}.{dtype}": torch.arange(7).to(dtype) for i, dtype in enumerate(dtypes)},
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "array": np.arange(5, dtype=">u2"),
        "count": np.int64(7),
    }
    with weights.Publisher("p", directory=host) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(4, given)
        read = reader.latest()
        assert read.version == 4
        assert list(read) == list(given)
        for name, tensor in given["policy"].items():
            assert read["policy"][name].dtype == tensor.dtype
            assert torch.equal(read["policy"][name].view(torch.uint8), tensor.view(torch.uint8)), name
        for name in ("scalar", "nothing", "parameter", "transposed"):
            assert torch.equal(read[name], given[name]), name
        assert (read["array"] == given["array"]).all()
        assert read["count"] == 7


def test_a_model_loads_a_snapshot_by_copy_or_as_it_is(host: Path) -> None:
    torch = pytest.importorskip("torch")
    trained, actor = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).requires_grad_(False)
    with weights.Publisher("p", directory=host) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, trained.state_dict())
        actor.load_state_dict(reader.latest())
        assert torch.equal(actor.weight, trained.weight)
        read = reader.latest()
        actor.load_state_dict(read, assign=True)
        assert actor.weight.data_ptr() == read["weight"].data_ptr()
        assert torch.equal(actor(torch.ones(4)), trained(torch.ones(4)))


def test_writing_to_a_snapshot_is_refused_and_reaches_nobody(host: Path) -> None:
    torch = pytest.importorskip("torch")
    with weights.Publisher("p", directory=host) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, {"t": torch.zeros(5), "n": np.zeros(5)})
        read = reader.latest()
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            read["t"].add_(1)
        with pytest.raises(ValueError, match="read-only"):
            read["n"][0] = 1
        read["t"].data.add_(1)
        with weights.Reader("p", directory=host) as another:
            assert another.latest()["t"].tolist() == [0] * 5


def test_versions_grow_and_weights_keep_their_form(host: Path) -> None:
    with weights.Publisher("p", directory=host) as publisher:
        publisher.publish(3, filled(3))
        with pytest.raises(ArgumentError, match="3 cannot follow 3"):
            publisher.publish(3, filled(3))
        with pytest.raises(ArgumentError, match=r"must be from 0 to"):
            publisher.publish(2**63, filled(3))
        with pytest.raises(ArgumentError, match=r"a: <i8 \[1000\] has become <i4 \[1000\]"):
            publisher.publish(4, {**filled(4), "a": np.zeros(1000, np.int32)})
        with pytest.raises(ArgumentError, match=r"b.weight is missing; c: <f8 \[1\] is new"):
            publisher.publish(4, {"a": np.zeros(1000, np.int64), "c": np.zeros(1)})
        with pytest.raises(ArgumentError, match="the order of the names"):
            publisher.publish(4, dict(reversed(filled(4).items())))
        publisher.publish(4, filled(4))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "no weights"),
        ({"a": {}}, "no weights in a"),
        ({"a": 3}, "a is a int"),
        ({1: np.zeros(1)}, "key 1"),
        ({"a": np.array([None])}, "plain numbers"),
        ([np.zeros(1)], "from names to tensors, found"),
    ],
)
def test_what_is_no_weights_is_refused(host: Path, given: object, why: str) -> None:
    with weights.Publisher("p", directory=host) as publisher, pytest.raises(ArgumentError, match=why):
        publisher.publish(1, given)  # type: ignore[arg-type]


def test_tensors_without_plain_memory_are_refused(host: Path) -> None:
    torch = pytest.importorskip("torch")
    with weights.Publisher("p", directory=host) as publisher:
        for tensor, why in ((torch.zeros(2, 2).to_sparse(), "sparse"), (torch.zeros(2, device="meta"), "meta")):
            with pytest.raises(ArgumentError, match=why):
                publisher.publish(1, {"t": tensor})


def test_a_snapshot_stays_as_it_is_while_a_single_tensor_of_it_lives(host: Path) -> None:
    with (
        weights.Publisher("p", directory=host, buffers=3) as publisher,
        weights.Reader("p", directory=host) as reader,
    ):
        publisher.publish(1, filled(1))
        part = reader.latest()["b.weight"][5:7]
        for version in range(2, 12):
            publisher.publish(version, filled(version))
        assert (part == 1).all()
        assert (reader.latest()["a"] == 11).all()


def test_a_snapshot_is_the_same_object_until_there_is_a_newer_one(host: Path) -> None:
    with weights.Publisher("p", directory=host) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, filled(1))
        first = reader.latest()
        assert reader.latest() is first
        publisher.publish(2, filled(2))
        assert reader.version == 2
        assert reader.latest() is not first


def test_readers_never_see_a_mix(host: Path) -> None:
    stop, seen, errors = threading.Event(), set(), []

    def read() -> None:
        with weights.Reader("p", directory=host) as reader:
            while not stop.is_set():
                found = reader.latest()
                values = {int(v) for array in found.values() for v in np.unique(array)}
                if values != {found.version}:
                    errors.append((found.version, values))
                seen.add(found.version)

    threads = [threading.Thread(target=read) for _ in range(3)]
    with weights.Publisher("p", directory=host, buffers=5) as publisher:
        publisher.publish(1, filled(1))
        for thread in threads:
            thread.start()
        version, until_s = 1, time.monotonic() + patience(20)
        while version < 400 or (len(seen) <= 3 and time.monotonic() < until_s):
            version += 1
            publisher.publish(version, filled(version), timeout_s=patience(10))
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(seen) > 3


def test_a_reader_that_was_overtaken_does_not_take_another_version_for_its_own(host: Path) -> None:
    with weights.Publisher("p", directory=host, buffers=2) as publisher:
        publisher.publish(1, filled(1))
        here = WeightsSegment.open("p", host)
        head = here.head()
        assert head is not None
        mapped = here.map(head)
        assert mapped is not None
        mapped.close()
        for version in (2, 3):  # the latter in the buffer of the first
            publisher.publish(version, filled(version))
        assert here.map(head) is None
        here.close()


# --- buffers --------------------------------------------------------------------------------------------------------


def test_when_readers_hold_all_buffers_the_publisher_says_so(host: Path) -> None:
    with weights.Publisher("p", directory=host, buffers=2) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, filled(1))
        held = reader.latest()
        publisher.publish(2, filled(2))
        with pytest.raises(weights.BuffersHeldError, match=r"1 of the 2 buffers of 'p' for 0\.0[0-9]{1,6} s,"):
            publisher.publish(3, filled(3), timeout_s=0.05)
        assert (held["a"] == 1).all()
        assert reader.latest().version == 2
        del held
        publisher.publish(3, filled(3), timeout_s=patience(5))
        assert reader.latest().version == 3


def test_a_waiting_publisher_goes_on_when_a_snapshot_is_let_go(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from geartrain.weights import writer

    monkeypatch.setattr(writer, "_CHECK_EVERY_S", 60.0)  # so that only being woken helps
    with weights.Publisher("p", directory=host, buffers=2) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, filled(1))
        held = [reader.latest()]
        publisher.publish(2, filled(2))
        waits, real = threading.Event(), WeightsSegment.wait_released

        def wait_released(self: WeightsSegment, seen: int, timeout_s: float) -> None:
            waits.set()
            real(self, seen, timeout_s)

        monkeypatch.setattr(WeightsSegment, "wait_released", wait_released)
        thread = threading.Thread(target=publisher.publish, args=(3, filled(3)))
        thread.start()
        assert waits.wait(patience(10))
        held.clear()
        thread.join(patience(10))
        assert not thread.is_alive()
        assert reader.version == 3


def test_a_killed_reader_holds_nothing(host: Path) -> None:
    with weights.Publisher("p", directory=host, buffers=2) as publisher:
        publisher.publish(1, filled(1))
        child = run(
            "r = weights.Reader('p', directory=sys.argv[1]); held = r.latest(); say(held.version); sys.stdin.read()",
            host,
        )
        assert heard(child) == "1"
        publisher.publish(2, filled(2))
        with pytest.raises(weights.BuffersHeldError):
            publisher.publish(3, filled(3), timeout_s=0.05)
        kill(child)
        publisher.publish(3, filled(3), timeout_s=patience(10))


def test_a_forked_childs_snapshot_is_held_until_both_let_go(host: Path, fork: Callable[..., int]) -> None:
    ready, go = os.pipe(), os.pipe()
    with weights.Publisher("p", directory=host, buffers=2) as publisher:
        reader = weights.Reader("p", directory=host)
        publisher.publish(1, filled(1))
        held = [reader.latest()]

        def body() -> int:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            with pytest.raises(StoreClosedError, match="forked from"):
                publisher.publish(9, filled(9))
            right = (held[0]["a"] == 1).all() and reader.latest().version == 2
            return 0 if right else 1

        child = fork(body)
        os.read(ready[0], 1)
        publisher.publish(2, filled(2))
        held.clear()  # the child's is still there
        with pytest.raises(weights.BuffersHeldError):
            publisher.publish(3, filled(3), timeout_s=0.05)
        os.write(go[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        publisher.publish(3, filled(3), timeout_s=patience(10))
        reader.close()
    for pipe in (*ready, *go):
        os.close(pipe)


def test_a_full_file_system_is_an_error_and_nothing_is_lost(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with weights.Publisher("p", directory=host) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, filled(1))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(NoSpaceError, match="shm-size"):
                publisher.publish(2, filled(2))
        assert reader.latest().version == 1
        publisher.publish(2, filled(2))
        assert reader.latest().version == 2


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_waiting_reader_has_a_deadline_and_says_what_is_there(host: Path) -> None:
    with weights.Reader("p", directory=host) as reader:
        with pytest.raises(WaitTimeoutError, match=r"no version was published, within 0.02 s; no publisher"):
            reader.latest(timeout_s=0.02)
        with weights.Publisher("p", directory=host) as publisher:
            publisher.publish(1, filled(1))
            with pytest.raises(WaitTimeoutError, match=r"newest version is 1, and 2 was requested.*is alive"):
                reader.latest(at_least=2, timeout_s=0.02)


def test_a_waiting_reader_sleeps_and_is_woken(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps, real, asleep = [], futex.wait, threading.Event()

    def wait(word: np.ndarray, seen: int, timeout_s: float) -> None:
        sleeps.append(timeout_s)
        asleep.set()
        real(word, seen, timeout_s)

    monkeypatch.setattr(futex, "wait", wait)
    monkeypatch.setattr(readers, "_CHECK_EVERY_S", 60.0)  # so that it looks only when it is woken
    found: list[int] = []
    with weights.Reader("p", directory=host) as reader:  # before there is a publisher
        thread = threading.Thread(
            target=lambda: found.append(reader.latest(at_least=5, timeout_s=patience(60)).version)
        )
        thread.start()
        assert asleep.wait(patience(10))
        with weights.Publisher("p", directory=host) as publisher:
            for version in (1, 5):
                publisher.publish(version, filled(version))
            thread.join(patience(10))
        assert found == [5]
    assert len(sleeps) <= 3  # once before each version, and not every few milliseconds


def test_a_reader_that_is_dropped_leaves(host: Path) -> None:
    weights.Reader("p", directory=host)
    gc.collect()
    assert not list(host.iterdir())


def test_a_late_reader_gets_the_newest(host: Path) -> None:
    with weights.Publisher("p", directory=host) as publisher:
        for version in range(1, 5):
            publisher.publish(version, filled(version))
        with weights.Reader("p", directory=host) as reader:
            assert (reader.latest(timeout_s=0)["a"] == 4).all()


def test_closing_wakes_who_waits(host: Path) -> None:
    reader, errors = weights.Reader("p", directory=host), []

    def read() -> None:
        try:
            reader.latest(timeout_s=patience(60))
        except GeartrainError as error:
            errors.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    reader.close()
    thread.join(patience(10))
    assert errors == [StoreClosedError]


@pytest.mark.parametrize("again", [1, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_closing_a_publisher_ends_a_publish_that_waits_for_a_buffer(
    host: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    from geartrain.weights import writer

    monkeypatch.setattr(writer, "_CHECK_EVERY_S", 60.0)  # so that only being woken helps
    random_ = random.Random(1)
    for round_ in range(again):
        publisher, errors = weights.Publisher("p", directory=host, buffers=2), []
        with weights.Reader("p", directory=host) as reader:
            publisher.publish(1, filled(1))
            held = reader.latest()
            publisher.publish(2, filled(2))
            waits, real = threading.Event(), WeightsSegment.wait_released

            def wait_released(self: WeightsSegment, *args: Any, real: Any = real, waits: Any = waits) -> None:
                waits.set()
                real(self, *args)

            with monkeypatch.context() as patched:
                patched.setattr(WeightsSegment, "wait_released", wait_released)

                def publish(publisher: weights.Publisher = publisher, errors: list[type] = errors) -> None:
                    try:
                        publisher.publish(3, filled(3), timeout_s=patience(60))
                    except GeartrainError as error:
                        errors.append(type(error))

                threads = [threading.Thread(target=publish)]
                threads[0].start()
                if round_ == 0:
                    assert waits.wait(patience(10))
                else:
                    time.sleep(random_.random() * 2e-3)
                began_s = time.monotonic()
                threads += [threading.Thread(target=publisher.close) for _ in range(2)]
                for thread in threads[1:]:
                    thread.start()
                for thread in threads:
                    thread.join(patience(1))
                    assert not thread.is_alive()
                assert time.monotonic() - began_s < patience(1)
            assert errors == [StoreClosedError]
            assert (held["a"] == 1).all()
            del held


# --- processes that come and go -------------------------------------------------------------------------------------


def test_a_damaged_header_or_schema_is_refused(host: Path) -> None:
    with weights.Publisher("p", directory=host) as publisher:
        publisher.publish(1, filled(1))
        path = host / "geartrain-weights.p"
        for at, why in ((20, "header is damaged"), (4100, "schema in .* is damaged")):
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
            with pytest.raises(IncompatibleStoreError, match=why), weights.Reader("p", directory=host) as reader:
                reader.latest()
            with path.open("r+b") as file:
                file.seek(at)
                file.write(byte)


def test_the_records_of_a_segment_keep_their_bytes() -> None:
    layout = {
        "HEADER": ["magic", "format_version", "header_bytes", "segment_id", "created_ns", "reserved", "checksum"],
        "LAYOUT": [
            "buffers",
            "schema_checksum",
            "schema_bytes",
            "version_bytes",
            "data_offset",
            "stride",
            "reserved",
            "checksum",
        ],
        "HEAD": ["sequence", "version", "published_ns", "buffer", "reserved", "checksum"],
        "SLOT": ["sequence", "version", "reserved", "checksum"],
    }
    offsets = {"HEADER": [0, 8, 12, 16, 32, 40, 60], "LAYOUT": [0, 4, 8, 16, 24, 32, 40, 60]}
    offsets |= {"HEAD": [0, 8, 16, 24, 28, 60], "SLOT": [0, 8, 16, 28]}
    assert segments.FORMAT_VERSION == 1
    for name, fields in layout.items():
        dtype = getattr(segments, name)
        assert dtype.names == tuple(fields)
        assert [dtype.fields[field][1] for field in fields] == offsets[name]
