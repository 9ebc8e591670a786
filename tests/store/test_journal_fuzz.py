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
from geartrain.store.journal_format import ALIGNMENT, BEGIN, HEADER, ROWS, STEPS

FIELDS = {"x": gt.Field((2,), "float32"), "id": gt.Field((), "int64", per_row=True)}
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
    records = {ROWS: 56, 3: 8, 4: 16, STEPS: 16}
    sizes = [
        len(payload) if header["kind"] == BEGIN else int(header["count"][0]) * records[int(header["kind"][0])]
        for header, payload in frames
    ]
    for _ in range(chance.randint(1, 2)):
        number = chance.randrange(len(frames))
        header, payload = frames[number]
        kind = chance.randrange(4)
        if kind == 0:
            name = chance.choice(("kind", "count", "steps", "number", "synced", "next_sequence", "payload_bytes"))
            header[name] = chance.choice(NUMBERS) % (1 << 8 * header.dtype[name].itemsize)
        elif number == 0:  # the begin
            content = json.loads(payload)
            key = chance.choice(list(content))
            content[key] = chance.choice((*TELLING, nested(500)))
            payload[:] = json.dumps(content).encode()
            header["payload_bytes"], sizes[number] = len(payload), len(payload)
        elif kind == 1 and len(payload) > 8:
            del payload[-chance.choice((1, 4, 8)) :]
            header["payload_bytes"], sizes[number] = len(payload), min(sizes[number], len(payload))
        elif sizes[number] >= 4:
            at = 4 * chance.randrange(sizes[number] // 4)
            payload[at : at + 4] = (chance.choice(NUMBERS) % 2**32).to_bytes(4, "little")
    path.write_bytes(bytes_of(frames, sizes))


@pytest.fixture(scope="module", params=["row", "step"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A journal of all kinds of frames, and the options of its store."""
    path = tmp_path_factory.mktemp("journals") / request.param
    options = {"max_length": LENGTH, "capacity": CAPACITY, "priority_per": request.param, "journal_sync_s": 0.0}
    with gt.Store.create(FIELDS, journal=path, **options) as store:
        keys = store.insert({"x": np.ones((5, LENGTH, 2), "float32"), "id": np.arange(5)}, lengths=[1, 2, 3, 3, 2])
        store.update_priorities(keys[2].of_steps(1) if request.param == "step" else keys[2:3], [0.5])
        store.sync_journal()
        store.delete(keys[:1])
        store.sync_journal()
    return path, options


@pytest.mark.parametrize("runs", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_frames_of_any_content_are_an_error_or_a_store(
    original: tuple[Path, dict[str, Any]], tmp_path: Path, runs: int
) -> None:
    ended: collections.Counter[str] = collections.Counter()
    path, options = original
    for number in range(runs):
        chance = random.Random(f"frames {number}")
        directory = tmp_path / f"journal-{number}"
        shutil.copytree(path, directory)
        damage(chance.choice(sorted(directory.glob("segment-*.bin"))), chance)
        try:
            with gt.Store.create(FIELDS, journal=directory, **options) as store:
                assert store.audit() == [], number
                assert len(store.status()["length"]) == len(store)
            ended["filled"] += 1
        except GeartrainError as error:
            ended[type(error).__name__] += 1
        except Exception as error:
            raise AssertionError(f"run {number}") from error
        shutil.rmtree(directory)
    assert ended["JournalError"] > runs // 8 and ended["filled"] > runs // 20, ended
