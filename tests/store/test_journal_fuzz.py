"""Frames of a journal that somebody else wrote: filling a store from them is an error, or the store adds up."""

from __future__ import annotations

import collections
import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_damage import TELLING, nested

import geartrain as gt
from geartrain.errors import GeartrainError
from geartrain.store.journal_format import ALIGNMENT, BEGIN, HEADER, PARTS, ROWS, STATE, STEPS
from geartrain.store.saved_parts import PART, ROW

FIELDS = {"x": gt.Field((2,), "float32"), "id": gt.Field((), "int64", per_row=True)}
FIELDS_OF_PARTS = {"x": gt.Field(("x",), "int32"), "text": gt.Text(), "id": gt.Field((), "int64")}
TASKS = {
    "answer": gt.Task({"ids": gt.Field(("ids",), "int32"), "cut": gt.Field(("n",), "int32", divides="ids")}),
    "reward": gt.Task({"why": gt.Text("n")}, after="answer"),
    "train": gt.Task(after="reward"),
}
LENGTH, CAPACITY = 3, 8
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 63, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def frames_of(data: bytes) -> list[tuple[np.ndarray[Any, Any], bytearray]]:
    """Headers and payloads of a segment file."""
    found, at = [], 0
    while at < len(data):
        header = np.frombuffer(data, HEADER, 1, at).copy()
        payload = int(header["payload_bytes"][0])
        at += HEADER.itemsize
        found.append((header, bytearray(data[at : at + payload])))
        at += payload + -payload % ALIGNMENT
    return found


def bytes_of(frames: list[tuple[np.ndarray[Any, Any], bytearray]], table_bytes: list[int]) -> bytes:
    """A segment file whose checksums are right, as somebody who knows the format would write it."""
    data = b""
    for (header, payload), size in zip(frames, table_bytes, strict=True):
        header["table_crc"] = crc = zlib.crc32(payload[:size])
        header["payload_crc"] = zlib.crc32(payload[size:], crc)
        header["header_crc"] = 0
        header["header_crc"] = zlib.crc32(header.tobytes())
        data += header.tobytes() + payload + bytes(-len(payload) % ALIGNMENT)
    return data


def damage(path: Path, chance: random.Random) -> None:
    frames = frames_of(path.read_bytes())
    records = {ROWS: 56, 3: 8, 4: 16, STEPS: 16, PARTS: ROW.itemsize}

    def table_bytes(header: np.ndarray[Any, Any], payload: bytearray) -> int:
        kind = int(header["kind"][0])
        if kind in (BEGIN, STATE):
            return len(payload)
        return int(header["count"][0]) * records[kind] + int(header["steps"][0]) * PART.itemsize * (kind == PARTS)

    sizes = [table_bytes(header, payload) for header, payload in frames]
    for _ in range(chance.randint(1, 2)):
        number = chance.randrange(len(frames))
        header, payload = frames[number]
        kind = chance.randrange(4)
        if kind == 0:
            name = chance.choice(("kind", "count", "steps", "number", "synced", "next_sequence", "payload_bytes"))
            header[name] = chance.choice(NUMBERS) % (1 << 8 * header.dtype[name].itemsize)
        elif number == 0 or header["kind"] == STATE:  # JSON
            content = json.loads(payload)
            within = content
            if (
                inner := chance.choice([None, *(key for key in content if isinstance(content[key], dict))])
            ) is not None:
                within = content[inner]
            key = chance.choice(list(within))
            within[key] = chance.choice((*TELLING, nested(500)))
            payload[:] = json.dumps(content).encode()
            header["payload_bytes"], sizes[number] = len(payload), len(payload)
        elif kind == 1 and len(payload) > 8:
            del payload[-chance.choice((1, 4, 8)) :]
            header["payload_bytes"], sizes[number] = len(payload), min(sizes[number], len(payload))
        elif sizes[number] >= 4:
            at = 4 * chance.randrange(sizes[number] // 4)
            payload[at : at + 4] = (chance.choice(NUMBERS) % 2**32).to_bytes(4, "little")
    path.write_bytes(bytes_of(frames, sizes))


def _of_parts(path: Path) -> dict[str, Any]:
    """A journal of rows that are inserted, answered, finished, taken and gone."""
    options: dict[str, Any] = {"tasks": TASKS, "capacity": CAPACITY, "span_bytes": 1 << 14}
    with gt.Store.create(FIELDS_OF_PARTS, journal=path, reserve=False, **options) as store:
        keys = store.insert({"x": [[1, 2], [], [3], [4], [5]], "text": ["a", "ä", "", "b", "c"], "id": list(range(5))})
        store.claim("answer", 4).put(ids=[[1, 2, 3], [4], [5], []], cut=[[1, 2], [1], [0, 1], []])
        store.sync_journal()
        store.claim("reward", 3).put(why=["one", "", "two", "three", "four"])
        store.update_priorities(store.keys()[:1], [0.5])
        first = store.keys()[1:2]
        store.native.count_samples(first.row, first.generation, 3, np.zeros(1, np.uint32))
        store.delete(keys[2:3])
        store.sync_journal()
    return options


@pytest.fixture(scope="module", params=["row", "step", "parts"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A journal of all kinds of frames, the fields and the options of its store."""
    path = tmp_path_factory.mktemp("journals") / request.param
    if request.param == "parts":
        return path, FIELDS_OF_PARTS, _of_parts(path)
    options = {"max_length": LENGTH, "capacity": CAPACITY, "priority_per": request.param, "journal_sync_s": 0.0}
    with gt.Store.create(FIELDS, journal=path, **options) as store:
        keys = store.insert({"x": np.ones((5, LENGTH, 2), "float32"), "id": np.arange(5)}, lengths=[1, 2, 3, 3, 2])
        store.update_priorities(keys[2].of_steps(1) if request.param == "step" else keys[2:3], [0.5])
        store.sync_journal()
        store.delete(keys[:1])
        store.sync_journal()
    return path, FIELDS, options


@pytest.mark.parametrize("runs", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_frames_of_any_content_are_an_error_or_a_store(
    original: tuple[Path, Any, dict[str, Any]], tmp_path: Path, runs: int
) -> None:
    ended: collections.Counter[str] = collections.Counter()
    path, fields, options = original
    for number in range(runs):
        chance = random.Random(f"frames {number}")
        directory = tmp_path / f"journal-{number}"
        shutil.copytree(path, directory)
        damage(chance.choice(sorted(directory.glob("segment-*.bin"))), chance)
        try:
            with gt.Store.create(fields, journal=directory, **options) as store:
                assert store.audit() == [], number
                assert len(store.status()["length"]) == len(store)
            ended["filled"] += 1
        except GeartrainError as error:
            ended[type(error).__name__] += 1
        except Exception as error:
            raise AssertionError(f"run {number}") from error
        shutil.rmtree(directory)
    assert ended["JournalError"] > runs // 8 and ended["filled"] > runs // 20, ended
