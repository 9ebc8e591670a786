"""Writer of transitions: adds one step of n environments to a replay buffer's store with one native call."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError
from geartrain.integrations.transitions.layout import MOST_WRITERS, NUMBER, numbers
from geartrain.store.recorder import REPEATS, REQUIRED_FIELDS, RecorderPriority
from geartrain.store.store import Store

#: Entries of an info that are not stored: it is the transition's next observation.
_NOT_STORED = "terminal_observation"
#: Numbers of transitions that are made at once.
_NUMBERS_AT_ONCE = 1024


class TransitionWriter(RecorderPriority):
    """Appends the transitions of one process's environments. One thread at a time; a forked child makes its own.

    Args:
        store: with the fields of `layout.fields_of`.
        observations: its fields that are observations.
        n_envs: environments.
        overlap: steps that a row repeats of the one before.
        writer: of whom the transitions are; None: a new one.
        count: transitions that each environment had before.
    """

    def __init__(
        self,
        store: Store,
        observations: Sequence[str],
        n_envs: int,
        overlap: int,
        *,
        writer: int | None = None,
        count: int = 0,
    ) -> None:
        self.writer = int.from_bytes(os.urandom(4), "little") % MOST_WRITERS if writer is None else writer
        self.count = count
        self._n_envs = n_envs
        # Row `_place` has the numbers of what is added next: made in advance, an addition costs as much as a step. Of
        # one environment they are Python's, which the recorder takes faster than arrays.
        self._numbers = numbers(self.writer, n_envs, count) + np.arange(_NUMBERS_AT_ONCE)[:, None]
        self._place = 0
        self._first = int(numbers(self.writer, 1, 0)[0]) if n_envs == 1 else None
        self._recorder = store.recorder(n_envs, obs=[NUMBER], publish_every=1, overlap=overlap, autoreset="disabled")
        fields = store.fields
        self._begun = False
        self._no: Any = False if n_envs == 1 else np.zeros(n_envs, np.bool_)
        self._nothing: dict[str, Any] = {
            name: np.zeros((n_envs, *fields[name].shape), fields[name].numpy_dtype)
            for name in fields
            if name not in (*observations, NUMBER, REPEATS, *REQUIRED_FIELDS)
        }

    def add(self, observations: dict[str, Any], step: dict[str, Any]) -> None:
        """Appends one transition of every environment: arrays (n_envs, ...) of the fields' dtypes and shapes.

        Args:
            observations: what was acted on. An environment whose last transition did not lead to it begins anew.
            step: what the actions led to and brought, by field.
        """
        if not self._begun:
            self._begin(observations, np.ones(self._n_envs, np.bool_))
        elif (others := self._recorder.differing(observations)) is not None:
            self._begin(observations, others)
        place = self._place + 1
        if place == _NUMBERS_AT_ONCE:
            self._numbers, place = self._numbers + _NUMBERS_AT_ONCE - 1, 1
            self._place = 0
        no = self._no
        number = self._numbers[place] if self._first is None else self._first + self.count + 1
        self._recorder.record(number, step, no, no)
        self._place = place
        self.count += 1

    def _begin(self, observations: Mapping[str, Any], mask: NDArray[np.bool_]) -> None:
        """Records the observations of environments that do not continue as a step of their own."""
        if not self._begun:
            self._recorder.reset(self._numbers[self._place])
        no = self._no
        self._recorder.record(self._numbers[self._place], {**observations, **self._nothing}, no, no, mask=mask)
        self._begun = True

    def cut(self) -> None:
        """Ends the rows in progress. The next transitions begin new ones."""
        self._recorder.cut()
        self._begun = False


def packed_infos(infos: Sequence[Mapping[str, Any]], size: int) -> NDArray[np.uint8]:
    """Infos as pickles of `size` bytes each, (n, size); without the observations that ended episodes.

    Raises:
        ArgumentError: one takes more.
    """
    packed = np.zeros((len(infos), size), np.uint8)
    for place, info in enumerate(infos):
        kept = {name: value for name, value in info.items() if name != _NOT_STORED}
        if not kept:
            continue
        raw = pickle.dumps(kept, protocol=5)
        if len(raw) > size:
            raise ArgumentError(
                f"the info of environment {place} takes {len(raw)} bytes, this buffer keeps {size}: raise info_bytes "
                f"(replay_buffer_kwargs); its entries are {', '.join(map(str, kept))}"
            )
        packed[place, : len(raw)] = np.frombuffer(raw, np.uint8)
    return packed


def unpacked_infos(packed: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """The infos that `packed_infos` packed."""
    return [pickle.loads(raw.tobytes()) if raw[0] else {} for raw in packed]


__all__ = ["TransitionWriter", "packed_infos", "unpacked_infos"]
