"""Layout of trajectories in a store: each trajectory is a row, and its samples are steps of the row.

A sample is a window of two steps, so an observation is stored once. Step s holds the observation that the sample led
to, and the sample's other entries: action, rewards, flags. If a sample does not continue the previous one, a step
without TRANSITION comes first, which holds only an observation. The environments of a trajectory follow each other.
Here o0 to o3 belong to one environment and p0 to p2 to the next:

    step      0       1        2        3        4       5       6
    obs      o0      o1       o2       o3       p0      p1      p2
    actions   -      a0       a1       a2        -      b0      b1
    flags     0      TRANSITION ...              0      TRANSITION ...

There is a second layout, for trajectories without observations, or whose samples rarely continue each other. There
every step is a sample with both of its observations. A trajectory that is longer than a row takes several rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.schema import Field
from geartrain.errors import IncompatibleStoreError, SchemaError
from geartrain.integrations.rlinf.samples import GROUPS, STORED_AS, Place, TrajectorySamples, tensor_of
from geartrain.integrations.transitions.layout import FLAGS, TRANSITION
from geartrain.store.row import Row, RowView

#: Fields that a row has once: the trajectory's number, from 1, in the order of additions; samples that were added up to
#: its last one; and those in the row.
NUMBER, TOTAL, COUNT = "trajectory.number", "trajectory.total", "trajectory.count"
_CURRENT, _NEXT = GROUPS[:2]
_SHARED, _SAMPLE = "obs", "sample"
_OF_ROWS = {name: Field((), "int64", per_row=True) for name in (NUMBER, TOTAL, COUNT)}
_SHARED_PREFIX = f"{_SHARED}."
# Steps of fewer bytes are put into a row all at once, others environment by environment.
_SMALL_BYTES = 4096


class SampleEntry(NamedTuple):
    """A tensor of samples: its place in a trajectory, its field, its shape of one sample, its dtype."""

    place: Place
    field: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of_field(name: str, field: Field) -> SampleEntry:
        """Of a field of a store. Raises `KeyError` where the name is none of this layout."""
        path, _, lacking = name.partition(":")
        group, _, key = path.partition(".")
        if not key or group not in (_SHARED, _SAMPLE, *GROUPS):
            raise KeyError(name)
        dtype = {str(each).removeprefix("torch."): each for each in STORED_AS}[lacking] if lacking else None
        place = (key,) if group == _SAMPLE else (_CURRENT if group == _SHARED else group, key)
        return SampleEntry(place, name, field.shape, dtype or getattr(torch, field.dtype))

    def stored(self) -> Field:
        """The field."""
        return Field(self.shape, STORED_AS.get(self.dtype, self.dtype))


class SampleLayout:
    """Entries of a buffer's trajectories, and their places in a row.

    Attributes:
        entries: entries by place. Next observations of keys in `shared` have no entry: they are the observations one
            step later.
        shared: keys of observations that are stored once.
        window: steps of a sample.
    """

    def __init__(self, entries: Mapping[Place, SampleEntry], shared: list[str]) -> None:
        self.entries, self.shared = dict(entries), shared
        self.window = 2 if shared else 1  # steps of a sample
        self._wanted = {place: (entry.shape, entry.dtype) for place, entry in self.entries.items()}
        self._wanted |= {(_NEXT, key): self._wanted[_CURRENT, key] for key in shared}
        # What each field is written from: its last steps, and what is in front of them in shared ones.
        self._sources = [
            (entry.field, (_NEXT, place[1]), place)
            if entry.field.startswith(_SHARED_PREFIX)
            else (entry.field, place, None)
            for place, entry in self.entries.items()
        ]

    @staticmethod
    def of_samples(samples: TrajectorySamples) -> SampleLayout:
        """Layout of a buffer, from its first trajectory."""
        arrays = samples.arrays
        shared = [
            key
            for group, key in (place for place in arrays if len(place) == 2)
            if group == _CURRENT
            and (other := arrays.get((_NEXT, key))) is not None
            and other.shape == arrays[group, key].shape
            and samples.dtypes[_NEXT, key] == samples.dtypes[group, key]
        ]
        # Steps in front cost what they save where samples follow each other in less than half of the cases.
        if shared and samples.total > 1 and samples.begins(shared).sum() * 2 > samples.total + samples.environments:
            shared = []
        entries = {}
        for place, array in arrays.items():
            if place[0] == _NEXT and place[-1] in shared and len(place) == 2:
                continue
            dtype = samples.dtypes[place]
            group = _SAMPLE if len(place) == 1 else _SHARED if place[0] == _CURRENT and place[1] in shared else place[0]
            name = f"{group}.{place[-1]}" + (f":{str(dtype).removeprefix('torch.')}" if dtype in STORED_AS else "")
            if ":" in place[-1]:
                raise SchemaError(f"{'.'.join(place)}: names of tensors have no colon")
            entries[place] = SampleEntry(place, name, array.shape[2:], dtype)
        return SampleLayout(entries, shared)

    @staticmethod
    def of_fields(name: str, fields: Mapping[str, Field]) -> SampleLayout:
        """Layout of an existing store.

        Raises:
            IncompatibleStoreError: it has other fields.
        """
        try:
            found = [
                SampleEntry.of_field(each, field)
                for each, field in fields.items()
                if each != FLAGS and each not in _OF_ROWS
            ]
        except (KeyError, AttributeError):
            found = []
        shared = [entry.place[1] for entry in found if entry.field.startswith(_SHARED_PREFIX)]
        layout = SampleLayout({entry.place: entry for entry in found}, shared)
        if not found or layout.fields() != dict(fields):
            raise IncompatibleStoreError(f"the store {name!r} is of no replay buffer of trajectories: {list(fields)}")
        return layout

    def fields(self) -> dict[str, Field]:
        """The fields of the buffer's store."""
        return {
            **{entry.field: entry.stored() for entry in self.entries.values()},
            FLAGS: Field((), "uint8"),
            **_OF_ROWS,
        }

    def drawn(self) -> list[str]:
        """The fields of batches."""
        return [*(entry.field for entry in self.entries.values()), FLAGS]

    def steps_for(self, first: TrajectorySamples, most: int) -> int:
        """Steps of a row for trajectories of `most` samples that continue as often as those of the first one."""
        if not self.shared:
            return most
        in_front = int(first.begins(self.shared).sum())
        return min(2 * most, most + -(-in_front * most // first.total) + most // 16)

    def check(self, samples: TrajectorySamples) -> None:
        """Raises `SchemaError` unless a trajectory has the entries of the first one, in their shapes and dtypes."""
        wanted, dtypes = self._wanted, samples.dtypes
        found = {place: (array.shape[2:], dtypes[place]) for place, array in samples.arrays.items()}
        if wanted == found:
            return
        for place in {**wanted, **found}:
            if wanted.get(place) != found.get(place):
                raise SchemaError(
                    f"{'.'.join(place)} of a trajectory is {_described(found.get(place))}; the first trajectory's was "
                    f"{_described(wanted.get(place))}, and so is the buffer"
                )

    # --- writing ----------------------------------------------------------------------------------------------

    def parts(self, samples: TrajectorySamples, most: int) -> list[TrajectoryPart]:
        """The rows of at most `most` steps that a trajectory takes."""
        count = samples.total
        begins = np.zeros(count, np.int64)
        if self.shared:
            found_begins = samples.begins(self.shared)
            length = count + samples.environments
            if length <= most and np.count_nonzero(found_begins) == samples.environments:
                return [TrajectoryPart(0, count, length, None)]
            begins[:] = found_begins.reshape(-1)
        elif count <= most:
            return [TrajectoryPart(0, count, count, None)]
        places = np.arange(count) + np.cumsum(begins)
        found, first = [], 0
        while first < count:
            # Where a row begins within a run of samples, it has a step in front all the same.
            before = places[first] - (1 if self.shared else 0)
            end = int(np.searchsorted(places, before + most))
            found.append(TrajectoryPart(first, end, int(places[end - 1] - before) + 1, places[first:end] - before))
            first = end
        return found

    def write(self, block: Row | RowView, samples: TrajectorySamples, part: TrajectoryPart) -> None:
        """Puts the samples of a part into a row."""
        block[COUNT] = part.end - part.first
        if part.places is None:
            self._write_whole(block, samples, part.length)
        else:
            self._write_part(block, samples, part, part.places)

    def _write_whole(self, block: Row | RowView, samples: TrajectorySamples, length: int) -> None:
        """Puts all samples into a row, each environment's one behind the other."""
        environments, window, arrays = samples.environments, self.window, samples.arrays
        of_each = samples.steps + window - 1
        flags = block[FLAGS][:length]
        flags[:] = TRANSITION
        if window == 2:
            flags[::of_each] = 0
        for field, source, in_front in self._sources:
            array = arrays[source]
            to = block[field][:length].reshape(environments, of_each, *array.shape[2:])
            to[:, window - 1 :] = array.swapaxes(0, 1)
            if in_front is not None:
                to[:, 0] = arrays[in_front][0]

    def _write_part(
        self, block: Row | RowView, samples: TrajectorySamples, part: TrajectoryPart, places: NDArray[np.int64]
    ) -> None:
        """Puts the samples of a part at their places in a row."""
        flags = block[FLAGS]
        flags[: part.length] = 0
        flags[places] = TRANSITION
        if self.shared:
            begins = np.flatnonzero(flags[: part.length] == 0) - np.arange(part.length - len(places))
            b, t = np.divmod(part.first + begins, samples.steps)
            in_front_of = places[begins] - 1
        for field, source, in_front in self._sources:
            to, array = block[field], samples.arrays[source]
            if array[0, 0].nbytes < _SMALL_BYTES:
                to[places] = array.swapaxes(0, 1).reshape(-1, *array.shape[2:])[part.first : part.end]
            else:
                for begin, end in part.runs(places, samples.steps):
                    of, step = divmod(begin, samples.steps)
                    first = places[begin - part.first]
                    to[first : first + end - begin] = array[step : step + end - begin, of]
            if in_front is not None:
                to[in_front_of] = samples.arrays[in_front][t, b]

    # --- batches ----------------------------------------------------------------------------------------------

    def batch(self, fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Tensors by place, from windows (n, window, ...) of all fields: dicts of trajectories are dicts here."""
        found: dict[str, Any] = {}
        for place, entry in self.entries.items():
            windows = fields[entry.field]
            if len(place) == 1:
                found[place[0]] = tensor_of(np.ascontiguousarray(windows[:, -1]), entry.dtype)
            elif entry.field.startswith(_SHARED_PREFIX):
                for group, step in ((_CURRENT, 0), (_NEXT, 1)):
                    found.setdefault(group, {})[place[1]] = tensor_of(windows[:, step], entry.dtype)
            else:
                values = np.ascontiguousarray(windows[:, -1])
                found.setdefault(place[0], {})[place[1]] = tensor_of(values, entry.dtype)
        return found

    def samples_of(self, steps: Mapping[str, NDArray[Any]]) -> TrajectorySamples:
        """The samples of one row, as a trajectory of one environment: its steps (length, ...) of all fields."""
        places = np.flatnonzero(steps[FLAGS] & TRANSITION)
        arrays: dict[Place, NDArray[Any]] = {}
        dtypes: dict[Place, torch.dtype] = {}
        for place, entry in self.entries.items():
            values = steps[entry.field]
            if entry.field.startswith(_SHARED_PREFIX):
                arrays[_NEXT, place[1]], dtypes[_NEXT, place[1]] = values[places][:, None], entry.dtype
                values = values[places - 1]
            else:
                values = values[places]
            arrays[place], dtypes[place] = values[:, None], entry.dtype
        return TrajectorySamples(len(places), 1, arrays, dtypes)


class TrajectoryPart(NamedTuple):
    """Part of a trajectory in one row: samples `first` to `end`, environment by environment, and their steps.

    Attributes:
        length: steps of the row.
        places: steps of the samples. None if they are the whole trajectory, and each sample continues the previous one
            of its environment.
    """

    first: int
    end: int
    length: int
    places: NDArray[np.int64] | None

    def runs(self, places: NDArray[np.int64], steps: int) -> Iterator[tuple[int, int]]:
        """Samples that follow each other in the row and in one environment of `steps` steps: first, and end."""
        number = np.arange(self.first, self.end)
        begins = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (number % steps == 0)) + self.first
        yield from zip(begins.tolist(), [*begins[1:].tolist(), self.end], strict=True)


def _described(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if found is None else f"{found[1]} {found[0]}"


__all__ = ["COUNT", "NUMBER", "TOTAL", "SampleEntry", "SampleLayout", "TrajectoryPart"]
