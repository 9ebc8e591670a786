"""Memory and time of decoding are in proportion to the bytes that came, whatever a header claims."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from geartrain.errors import MessageError
from geartrain.transport.codec import MAX_DEPTH, Message, decode, encode, pack

MEGABYTE = 1 << 20
MODULUS = (1 << 61) - 1  # of Python's hashes of numbers


def count(tag: bytes, n: int) -> bytes:
    return tag + struct.pack("<I", n)


def nested(tag: bytes, values_each: int = 1, key: bytes = b"", size: int = MEGABYTE) -> bytes:
    """Containers in each other, each of which claims all the bytes that are left; `key` precedes each of them."""
    header = b""
    for _ in range(MAX_DEPTH - 2):
        left = size - len(header) - 5
        header += count(tag, left // values_each) + key
    return header + b"N" * (size - len(header))


def mixed(size: int = MEGABYTE) -> bytes:
    """The same, of lists, tuples and dicts in turns."""
    header = b""
    for depth in range(MAX_DEPTH - 2):
        tag, each, key = ((b"t", 1, b""), (b"l", 1, b""), (b"m", 2, b"N"))[depth % 3]
        header += count(tag, (size - len(header) - 5) // each) + key
    return header + b"N" * (size - len(header))


def array_of(axes: list[int], which: bytes = b"a", in_line: int = 1, code: int = 12) -> bytes:
    return which + bytes([code, len(axes), in_line]) + b"".join(struct.pack("<Q", axis) for axis in axes)


LIES = {
    "tuples": nested(b"t"),
    "lists": nested(b"l"),
    "dicts": nested(b"m", 2, b"N"),
    "sets": nested(b"e"),
    "tuples in sets": b"".join(count(b"z" if i % 2 == 0 else b"t", MEGABYTE - 400) for i in range(60))
    + b"N" * MEGABYTE,
    "all": mixed(),
    "siblings": count(b"l", MEGABYTE // 2) + (count(b"t", MEGABYTE // 4) + b"N") * (MEGABYTE // 8),
    "one list": count(b"l", 2**32 - 1) + b"N" * MEGABYTE,
    "one dict": count(b"m", MEGABYTE) + b"N" * MEGABYTE,  # twice as many values as bytes
    "text": count(b"l", 3) + count(b"s", 2**32 - 1) + b"x" * MEGABYTE,
    "bytes": count(b"l", 3) + count(b"b", MEGABYTE) + b"x" * (MEGABYTE - 100),
    "an int": count(b"I", MEGABYTE) + b"\1" * MEGABYTE,
    "a shape": array_of([2**20, 2**10]) + b"x" * MEGABYTE,
    "a shape that overflows": array_of([2**32, 2**32, 4]) + b"x" * MEGABYTE,
    "axes": b"a" + bytes([12, 255, 1]) + b"\1\0\0\0\0\0\0\0" * 255,
    "a dtype": array_of([4], code=255) + b"x" * MEGABYTE,
    "a buffer": array_of([2**40], in_line=0),
    "a scalar with axes": array_of([2**20], b"g") + b"x" * MEGABYTE,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_megabyte_that_claims_more_is_refused_within_a_few_megabytes(lie: str) -> None:
    message = Message.make(LIES[lie], [])
    tracemalloc.start()
    try:
        with pytest.raises(MessageError) as refusal:
            decode(message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "MemoryError" not in str(refusal.value)
    assert peak < 12 * MEGABYTE


@pytest.mark.parametrize("size", [MEGABYTE // 16, MEGABYTE // 4])
def test_what_is_honest_takes_memory_in_proportion(size: int) -> None:
    """The costliest honest values: a byte is a reference, five bytes are an empty set, or the array of a number."""
    for one, bytes_each in ((b"N", 9), (count(b"e", 0), 60), (b"a" + bytes([2, 0, 1, 7]), 120)):
        header = count(b"l", (size - 5) // len(one)) + one * ((size - 5) // len(one))
        message = Message.make(header, [])
        tracemalloc.start()
        try:
            value = decode(message)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(value) == (size - 5) // len(one)
        assert peak < bytes_each * size


def _int(number: int) -> bytes:
    digits = number.to_bytes(16, "little", signed=True)
    return count(b"I", len(digits)) + digits


COLLIDING = {
    "ints": [_int(i * MODULUS) for i in range(20_000)],  # all of hash 0
    "complex": [b"c" + struct.pack("<dd", 7e12 - 1_000_003.0 * i, i) for i in range(20_000)],
    "tuples": [count(b"t", 1) + _int(i * MODULUS) for i in range(20_000)],
    "frozensets": [count(b"z", 1) + _int(i * MODULUS) for i in range(20_000)],
}


@pytest.mark.parametrize("keys", COLLIDING)
@pytest.mark.parametrize("container", ["set", "frozenset", "dict"])
def test_keys_that_were_chosen_to_collide_are_refused_before_they_cost_a_minute(keys: str, container: str) -> None:
    tag, value = {"set": (b"e", b""), "frozenset": (b"z", b""), "dict": (b"m", b"N")}[container]
    header = count(tag, len(COLLIDING[keys])) + b"".join(key + value for key in COLLIDING[keys])
    with pytest.raises(MessageError, match="same hash"):
        decode(Message.make(header, []))


def test_keys_that_collide_by_chance_are_not_refused() -> None:
    random = np.random.default_rng(0)
    values: list[Any] = [
        set(range(-50_000, 50_000)),
        {(i, j): i for i in range(200) for j in range(200)},
        {complex(i, j) for i in range(-100, 100) for j in range(-100, 100)},
        set(random.standard_normal(50_000).tolist()),
        {i * MODULUS for i in range(60)},
        {float("nan") for _ in range(3)} | {-1, -2},
        {f"field {i}": i for i in range(50_000)},
    ]
    for value in values[:-2]:
        assert decode(pack(encode(value))) == value
    assert len(decode(pack(encode(values[-2])))) == len(values[-2])
    assert decode(pack(encode(values[-1]))) == values[-1]
    # Whoever may send pickles may run what it likes, and also have keys of one hash.
    many = {i * MODULUS for i in range(300)}
    assert decode(pack(encode(many)), pickle=True) == many
