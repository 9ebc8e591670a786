"""Reads and publishes weights in mutated copies of real segments: `weights_fuzz_worker.py SEED RUNS DIRECTORY`.

Anything but an error of geartrain ends the process. The last line of stdout counts how the runs ended, as JSON.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import random
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

from geartrain import weights
from geartrain.errors import GeartrainError, StoreError, WaitTimeoutError
from geartrain.weights.format import HEADS_AT, LAYOUT_AT, SCHEMA_AT, SLOTS_AT

TELLING = (0, 1, 2, 3, 63, 64, 65, 255, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)
RECORDS = ((0, 64), (LAYOUT_AT, 64), (HEADS_AT, 64), (HEADS_AT + 64, 64), *((SLOTS_AT + 32 * i, 32) for i in range(3)))
TEXTS = (
    b'"|O"',
    b'"<f8"',
    b'"torch.float32"',
    b'"torch.load"',
    b"-1",
    b"4096",
    b"[]",
    b"null",
    b"1e9",
    b"[9999999999]",
)


def seal(image: bytearray, first: int, size: int) -> None:
    struct.pack_into("<I", image, first + size - 4, zlib.crc32(bytes(image[first : first + size - 4])))


def mutate(image: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 3)):
        first, size = chance.choice(RECORDS)
        width = chance.choice((1, 4, 8))
        at = first + width * chance.randrange((size - 4) // width)
        value = chance.choice(TELLING) if chance.random() < 0.7 else chance.getrandbits(64)
        image[at : at + width] = struct.pack("<Q", value)[:width]
        if chance.random() < 0.8:
            seal(image, first, size)
    if chance.random() < 0.1:
        struct.pack_into("<I", image, 256 + 4 * chance.randrange(3), chance.choice((1, 2**32 - 1)))  # signals
    if chance.random() < 0.4:  # of the schema, with a checksum that fits
        (length,) = struct.unpack_from("<Q", image, LAYOUT_AT + 8)
        length = min(length, 4096)
        text = bytearray(image[SCHEMA_AT : SCHEMA_AT + length])
        for _ in range(chance.randint(1, 2)):
            word = chance.choice(TEXTS)
            at = chance.choice([i for i, byte in enumerate(text) if byte in b'"[0123456789'] or [0])
            text[at : at + len(word)] = word
        text = text[:length]
        image[SCHEMA_AT : SCHEMA_AT + len(text)] = text
        struct.pack_into("<I", image, LAYOUT_AT + 4, zlib.crc32(bytes(text)))
        seal(image, LAYOUT_AT, 64)
    if chance.random() < 0.1:
        del image[chance.randrange(len(image)) :]


def use(directory: Path) -> str:
    weights.names(directory)
    try:
        weights.describe("w", directory)
        with weights.Reader("w", directory=directory, timeout_s=0) as reader:
            total = sum(float(np.asarray(value, np.float64).sum()) for value in flat(reader.latest()))
            assert reader.version is not None or total == 0
        ended = "read"
    except (StoreError, WaitTimeoutError) as error:
        ended = type(error).__name__
    try:
        with weights.Publisher("w", directory=directory, timeout_s=0) as publisher:
            publisher.publish(1, {"a": np.ones(7), "b": {"c": np.zeros((2, 3), "int32")}})
    except GeartrainError:
        pass
    return ended


def flat(content: object) -> list[object]:
    """The leaves of a nesting."""
    if hasattr(content, "items"):
        return [leaf for _, value in content.items() for leaf in flat(value)]
    return [content]


def main() -> None:
    """Runs; prints the number of a run that fails before the traceback."""
    seed, runs, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.enable()
    path = directory / "geartrain-weights.w"
    with weights.Publisher("w", directory=directory) as publisher:
        for version in (1, 2):
            publisher.publish(version, {"a": np.arange(7.0), "b": {"c": np.ones((2, 3), "int32")}})
        original = path.read_bytes()
    ended: collections.Counter[str] = collections.Counter()
    for number in range(runs):
        chance = random.Random(seed * 1_000_003 + number)
        image = bytearray(original)
        if number:
            mutate(image, chance)
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_bytes(image)
        try:
            ended[use(directory)] += 1
        except BaseException:
            print(f"run {number} of seed {seed}", file=sys.stderr)
            raise
        gc.collect(0)
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
