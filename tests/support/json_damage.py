"""JSON that somebody else wrote: its entries, in turn or at random, replaced by what does not belong there."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any


def nested(depth: int) -> Any:
    """Lists within each other."""
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


TELLING: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 9, 16, 55, 56, 63, 64, 2**31, 2**32, 2**63, 2**64, 2**70, 1e300, 0.5),
    *(float("nan"), float("inf"), "", "x", "\ud800", "a\0b", "float32", "object", "../../etc/passwd", "rows.bin", "/"),
    *("0" * 70, [], {}, [0], [2, 2], [[]], {"a": 1}, "lifo", 10**40, -(10**18), "9" * 5000, nested(30)),
)


def places_of(content: Any) -> list[tuple[Any, Any]]:
    """Every container and key in JSON."""
    found: list[tuple[Any, Any]] = []
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else []
    for key in keys:
        found.append((content, key))
        found += places_of(content[key])
    return found


def mutate(content: dict[str, Any], chance: random.Random) -> None:
    """Changes up to three places."""
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice(places_of(content))
        kind = chance.randrange(8)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[chance.choice(("x", "capacity", "../x", "rows.bin", ""))] = container.pop(key)
        elif kind == 2 and isinstance(container[key], int):
            container[key] += chance.choice((-1, 1, 8, 2**32))
        elif kind == 3 and isinstance(container[key], list):
            container[key] = container[key] * 2
        else:
            container[key] = copy.deepcopy(chance.choice(TELLING))


def damaged(content: Any, runs: int | None = None, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Copies of JSON, each with one entry replaced or left out, and what was done: all, or so many at random."""
    every = list(itertools.product(range(len(places_of(content))), (*TELLING, nested(500), ...)))
    for number, value in every if runs is None else random.Random(seed).sample(every, min(runs, len(every))):
        made = copy.deepcopy(content)
        container, key = places_of(made)[number]
        if value is ...:
            del container[key]
        else:
            container[key] = value
        yield f"{key!r} is {value!r:.40}", made


def texts_of_no_object() -> list[bytes]:
    """Files that are no object of JSON."""
    deep = b"[" * 100_000
    return [b"", b"{", b"\xff\xfe", b"null", b"[]", b"3", b"NaN", b'"x"', deep, b'{"a": ' + deep, b"9" * 5000]


def as_bytes(content: Any) -> bytes:
    """JSON as it is in a file."""
    return json.dumps(content).encode()
