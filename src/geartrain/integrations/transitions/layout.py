"""Layout of a replay buffer's store: the fields of a step, their flags, and numbers of transitions.

A row is a piece of one environment's stream of steps. Step s holds an observation and the transition that led to it:
action, reward and flags. So a transition is a window of two steps, and each observation is stored once. The newest
transition can be sampled as soon as it is added.

    step      0       1        2        3        4       5        6
    obs      o0      o1       o2       o3       o0'     o1'      o2'       o3 ended an episode, o0' begins the next one
    action    -      a0       a1       a2        -      a0'      a1'
    flags     0      TRANSITION ...    | DONE    0      TRANSITION ...

A step without the flag TRANSITION holds an observation alone. It begins an episode, or any stream that does not
continue the step before it. A full row ends with a step of zeros, and the next row repeats its last steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_text
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, IncompatibleStoreError
from geartrain.store.recorder import recorded_fields
from geartrain.store.store import Store

#: Bits of the field `flags`: the step is a transition's; its episode is over; and not by the rules of the environment.
TRANSITION, DONE, TIMEOUT = 1, 2, 4

#: Names of the fields beside observations and infos.
ACTION, REWARD, FLAGS, NUMBER, INFO = "action", "reward", "flags", "number", "info"
OBSERVATION = "obs"

# A transition's number: whose it is (20 bits), its environment (12), and how many that environment had before (31).
_COUNT_BITS, _ENVIRONMENT_BITS, _WRITER_BITS = 31, 12, 20
_ROWS_OF_WRITER = 2  # that each of its environments writes, or has just begun
_MORE_WRITERS = 8
MOST_ENVIRONMENTS = 2**_ENVIRONMENT_BITS
MOST_WRITERS = 2**_WRITER_BITS


def fields_of(
    observations: Mapping[str, tuple[tuple[int, ...], Any]],
    action: tuple[tuple[int, ...], Any],
    info_bytes: int,
) -> dict[str, Field]:
    """The fields of a store, from shapes and dtypes; with `info_bytes` also those of pickled infos."""
    fields = {name: Field(shape, np.dtype(dtype).name) for name, (shape, dtype) in observations.items()}
    fields[ACTION] = Field(action[0], np.dtype(action[1]).name)
    fields[REWARD] = Field((), "float32")
    fields[FLAGS] = Field((), "uint8")
    fields[NUMBER] = Field((), "int64")
    if info_bytes:
        fields[INFO] = Field((info_bytes,), "uint8")
    return recorded_fields(fields, overlap=True)


def observation_field(key: str | None) -> str:
    """The field of an observation, or of an entry of a dict observation."""
    return OBSERVATION if key is None else f"{OBSERVATION}.{key}"


def row_steps(buffer_size: int, overlap: int) -> int:
    """Steps of a row, for `buffer_size` transitions of each environment: a sixteenth of them, from 16 to 512."""
    return max(16, min(512, buffer_size // 16)) + overlap + 1


def rows_needed(buffer_size: int, n_envs: int, steps: int, overlap: int, writers: int) -> int:
    """Rows for `buffer_size` transitions of each environment, an eighth of other steps, and rows that are written."""
    fresh = steps - 1 - overlap
    whole = -(-(buffer_size * 9 // 8 + 1) // fresh)
    return (whole + _ROWS_OF_WRITER * max(1, writers)) * n_envs


def store_or_name(store: Any) -> str | Store | None:
    """The store that a buffer was given, or its name as text."""
    if store is None or isinstance(store, Store):
        return store
    return check_text("store", os.fspath(store) if isinstance(store, os.PathLike) else store)


def check_capacity(store: Store, buffer_size: int, n_envs: int, overlap: int, writers: int) -> None:
    """Raises unless a store that is joined is one for `buffer_size` transitions of each environment.

    It may have been made for more writers than this process knows of: for eight of them, or an eighth of its rows.

    Raises:
        IncompatibleStoreError: it holds fewer, or clearly more; or its rows are of another length.
    """
    steps = row_steps(buffer_size, overlap)
    least = rows_needed(buffer_size, n_envs, steps, overlap, writers)
    more, odd = divmod(store.capacity - least, _ROWS_OF_WRITER * n_envs)
    if (
        store.max_length == steps
        and not odd
        and 0 <= more <= max(_MORE_WRITERS, least // (8 * _ROWS_OF_WRITER * n_envs))
    ):
        return
    raise IncompatibleStoreError(
        f"the store {store.name!r} is of a buffer of another capacity: it has {store.capacity} rows of "
        f"{store.max_length} steps, and {buffer_size} transitions{f' of {n_envs} environments' * (n_envs > 1)} need "
        f"{least} of {steps} with writers={writers}. All who join give the same capacity and writers"
    )


def numbers(writer: int, n_envs: int, count: int) -> NDArray[np.int64]:
    """Numbers of the transitions that a writer's environments have next, (n_envs,)."""
    if not 0 <= writer < MOST_WRITERS or not 1 <= n_envs <= MOST_ENVIRONMENTS:
        raise ArgumentError(f"a replay buffer records 1 to {MOST_ENVIRONMENTS} environments, found {n_envs}")
    streams = (writer << _ENVIRONMENT_BITS) + np.arange(n_envs, dtype=np.int64)
    return (streams << _COUNT_BITS) + count


def count_of(number: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many transitions of its environment came before."""
    count: NDArray[np.int64] = number & (2**_COUNT_BITS - 1)
    return count


def environment_of(number: NDArray[np.int64]) -> NDArray[np.int64]:
    """A transition's environment."""
    environment: NDArray[np.int64] = (number >> _COUNT_BITS) & (MOST_ENVIRONMENTS - 1)
    return environment


def writer_of(number: NDArray[np.int64]) -> NDArray[np.int64]:
    """A transition's writer."""
    return number >> (_COUNT_BITS + _ENVIRONMENT_BITS)


__all__ = [
    "ACTION",
    "DONE",
    "FLAGS",
    "INFO",
    "MOST_ENVIRONMENTS",
    "MOST_WRITERS",
    "NUMBER",
    "OBSERVATION",
    "REWARD",
    "TIMEOUT",
    "TRANSITION",
    "check_capacity",
    "count_of",
    "environment_of",
    "fields_of",
    "numbers",
    "observation_field",
    "row_steps",
    "rows_needed",
    "store_or_name",
    "writer_of",
]
