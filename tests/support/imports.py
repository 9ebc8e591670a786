"""What the importers' tests share: names for stores, and rows read back as episodes."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from geartrain.integrations import import_dataset
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store

_numbers, _RUN = itertools.count(), secrets.token_hex(2)


def store_name() -> str:
    """A name that no other test or process uses."""
    return f"test-import-{os.getpid()}-{_RUN}-{next(_numbers)}"


@contextmanager
def imported(source: object, **options: Any) -> Iterator[Store]:
    """The store that an import makes, removed at the end."""
    store = import_dataset(source, store_name(), progress=False, **options)
    try:
        yield store
    finally:
        store.unlink()
        store.close()


def rows(store: Store) -> list[dict[str, np.ndarray]]:
    """Every row, oldest first: timed fields cut to its length, untimed ones whole."""
    batch = fetch(store, store.keys(), fields=list(store.fields), output="numpy")
    lengths = np.asarray(batch.length).tolist()
    return [
        {
            name: np.asarray(batch[name][index][:length] if not field.per_row else batch[name][index])
            for name, field in store.fields.items()
        }
        for index, length in enumerate(lengths)
    ]


def assert_rows(store: Store, expected: list[dict[str, np.ndarray]]) -> None:
    """The store holds exactly these episodes: fields, dtypes, shapes, lengths and bytes."""
    found = rows(store)
    assert len(found) == len(expected)
    for index, (row, episode) in enumerate(zip(found, expected, strict=True)):
        assert row.keys() == episode.keys(), index
        for name, value in episode.items():
            array = np.asarray(value)
            assert row[name].dtype == array.dtype, (index, name)
            assert row[name].shape == array.shape, (index, name)
            assert row[name].tobytes() == array.tobytes(), (index, name)
