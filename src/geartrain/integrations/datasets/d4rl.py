"""Importer of HDF5 files in D4RL's layout: flat arrays of steps, split into episodes by their flags.

    observations (N, ...)   actions (N, ...)   rewards (N,)   terminals (N,)   [timeouts (N,)]
    [next_observations (N, ...)]   [infos/... (N, ...)]   [metadata/...]

A step whose `terminals` or `timeouts` flag is set is the *last* step of its episode. Files without `timeouts` are split
at terminals alone. If such a file was recorded with a step limit, pass it as `episode_steps` to split there too. Steps
after the last flag are an unfinished episode, which is kept unless `keep_unfinished=False`.

| stored | found |
|---|---|
| obs, action, reward, terminated, truncated | observations, actions, rewards, terminals, timeouts |
| final_obs (one per row) | the last step's next_observations, where the file has them |
| next_obs, infos.qpos, ... | next_observations, infos/qpos, ...: only when `fields` names them |
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.extras import require
from geartrain.errors import SourceError
from geartrain.integrations.datasets.episode import (
    SLICE_BYTES,
    Array,
    Episode,
    FieldChoice,
    FormatSource,
    Metadata,
    choose,
    ever,
    flags,
    reading,
    total,
)

LOOKS_FOR = "an HDF5 file with observations, actions, rewards and terminals"

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_TERMS = {
    "observations": "obs",
    "next_observations": "next_obs",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
}
_NEEDED = ("observations", "actions", "rewards", "terminals")
_SCALARS = ("rewards", "terminals", "timeouts")
_USUAL = ("obs", "action", "reward", "terminated", "truncated", "final_obs")
_FLAGS = ("terminated", "truncated")
_FLAGS_PER_READ = 1 << 20


def recognise(path: Path) -> bool:
    """Whether the path is an HDF5 file, by its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_HDF5_MAGIC)) == _HDF5_MAGIC


class D4rlSource(FormatSource):
    """Episodes of a D4RL-layout file, read in slices of about 16 MB.

    Args:
        path: the file.
        timeouts: cut at time-outs too, where the file has them.
        episode_steps: cut also after this many steps, for files recorded with a limit they do not flag.
        keep_unfinished: keep the steps after the last cut as an episode.

    Raises:
        SourceError: an array is missing, or not one value per step.
        MissingDependencyError: h5py is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fields: FieldChoice = None,
        skip_unsupported: bool = False,
        timeouts: bool = True,
        episode_steps: int | None = None,
        keep_unfinished: bool = True,
    ) -> None:
        self.name = str(path)
        if episode_steps is not None and episode_steps < 1:
            raise SourceError(f"episode_steps is {episode_steps}; it counts steps, from 1")
        self._h5py = require("h5py", "geartrain[hdf5]", "Reading HDF5")
        with self._open() as file, reading(self.name, "D4RL's layout"):
            self._steps, found = self._columns(file)
            self._chosen = choose(
                self.name,
                fields,
                {name: reason for name, (_, reason) in found.items()},
                [name for name in found if name.partition(".")[0] in _USUAL],
                skip_unsupported,
            )
            self._paths = {name: dataset for name, (dataset, _) in found.items()}
            cut_at = ["terminals"]
            if timeouts and "timeouts" in file:
                cut_at.append("timeouts")
            self._edges = self._cuts(file, cut_at, episode_steps, keep_unfinished)
        self.episodes = len(self._edges) - 1

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The episodes, from slices of the file with no steps of others in between."""
        wanted = np.arange(len(self._edges) - 1) if numbers is None else np.asarray(numbers, np.int64)
        gaps = np.append(np.flatnonzero(np.diff(wanted) != 1), len(wanted) - 1)  # places in front of others
        with self._open() as file:
            with reading(self.name, "D4RL's layout"):
                columns = {stored: file[self._paths[name]] for stored, name in self._chosen.items()}
            step_nbytes = sum(column.nbytes for column in columns.values()) // self._steps
            steps_per_read = max(1, SLICE_BYTES // max(1, step_nbytes))
            at = 0
            while at < len(wanted):
                # As many whole episodes as fit one read; an episode longer than that is read alone.
                index = int(wanted[at])
                begin = int(self._edges[index])
                reach = int(np.searchsorted(self._edges, begin + steps_per_read, side="right")) - 1
                adjacent = int(wanted[gaps[np.searchsorted(gaps, at)]]) + 1
                until = max(index + 1, min(reach, adjacent))
                end = int(self._edges[until])
                data = {}  # also gives up the slice before
                for stored, column in columns.items():
                    place = (
                        f"{self.name}: episodes {index} to {until - 1} (steps {begin} to {end - 1}) of "
                        f"{self._paths[self._chosen[stored]]}"
                    )
                    with reading(place, f"{end - begin} steps"):
                        data[stored] = _values(place, column, begin, end)
                for number in range(index, until):
                    yield self._episode(number, data, begin)
                at += until - index

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """`length` from the flags, which were read when the file was opened. `return`, `terminated` and `truncated` are
        read when they are asked for."""
        figures = {"return": functools.partial(self.figure, "reward", total)}
        figures |= {name: functools.partial(self.figure, name, ever) for name in _FLAGS if name in self._paths}
        for number, length in enumerate(np.diff(self._edges).tolist()):
            later = {name: functools.partial(figure, number) for name, figure in figures.items()}
            yield Metadata(number, {"length": length}, later)

    def _episode(self, number: int, data: dict[str, Array], begin: int) -> Episode:
        start, stop = int(self._edges[number]), int(self._edges[number + 1])
        timed: dict[str, Array] = {}
        once: dict[str, Array] = {}
        follows: dict[str, str] = {}
        stored_as = {name: stored for stored, name in self._chosen.items()}
        for stored, name in self._chosen.items():
            if name.partition(".")[0] == "final_obs":
                once[stored] = data[stored][stop - begin - 1]
                follows[stored] = stored_as.get("obs" + name.removeprefix("final_obs"), "obs")
            else:
                timed[stored] = data[stored][start - begin : stop - begin]
        return Episode(f"episode {number} (steps {start} to {stop - 1})", timed, once, follows)

    def _open(self) -> Any:
        with reading(self.name, "HDF5"):
            return self._h5py.File(self.name, "r")

    def _columns(self, file: Any) -> tuple[int, dict[str, tuple[str, str | None]]]:
        """Number of steps, and field -> (dataset, why it cannot be stored)."""
        missing = [name for name in _NEEDED if name not in file]
        if missing:
            raise SourceError(
                f"{self.name}: is not in D4RL's layout: it lacks {', '.join(missing)}; "
                f"it has {', '.join(file) or 'nothing'}"
            )
        rewards = file["rewards"]
        if not isinstance(rewards, self._h5py.Dataset) or not rewards.shape:
            raise SourceError(f"{self.name}: rewards is one number a step, found {rewards}")
        steps = int(rewards.shape[0])
        if steps == 0:
            raise SourceError(f"{self.name}: holds no step")
        found: dict[str, tuple[str, str | None]] = {}

        def visit(path: str, item: Any) -> None:
            if not isinstance(item, self._h5py.Dataset):
                return
            top, *below = path.split("/")
            name = ".".join([_TERMS.get(top, top), *below])
            shape, dtype = item.shape or (), item.dtype
            if not shape or shape[0] != steps:
                if top in _TERMS:
                    raise SourceError(f"{self.name}: {path} has shape {shape}, rewards has {steps} steps")
                return  # metadata: about the file, not about its steps
            if top in _SCALARS and shape not in ((steps,), (steps, 1)):
                raise SourceError(f"{self.name}: {path} has shape {shape}, one value a step is ({steps},)")
            if top in ("terminals", "timeouts") and dtype.kind not in "biuf":
                raise SourceError(f"{self.name}: {path}: flags are booleans, or numbers 0 and 1; found {dtype}")
            reason = f"dtype {dtype}" if dtype.kind in "OSUV" else None
            found[name] = (path, reason)
            if top == "next_observations":
                found[".".join(["final_obs", *below])] = (path, reason)

        file.visititems(visit)
        held = {path.partition("/")[0] for path, _ in found.values()}
        empty = [name for name in _TERMS if name in file and name not in held]
        if empty:
            raise SourceError(f"{self.name}: {', '.join(empty)} holds no array of {steps} steps")
        return steps, found

    def _cuts(self, file: Any, cut_at: list[str], episode_steps: int | None, keep_unfinished: bool) -> Array:
        """Edges of the episodes: the first is 0, the others are one past a last step."""
        parts = [np.zeros(1, np.int64)]
        for begin in range(0, self._steps, _FLAGS_PER_READ):
            end = min(begin + _FLAGS_PER_READ, self._steps)
            last = np.zeros(end - begin, bool)
            for name in cut_at:
                with reading(f"{self.name}: {name} of steps {begin} to {end - 1}", "flags"):
                    values = np.asarray(file[name][begin:end]).reshape(end - begin)
                last |= flags(f"{self.name}: {name}", values, begin)
            parts.append(begin + np.flatnonzero(last) + 1)
        edges = np.concatenate(parts)
        unfinished = int(edges[-1]) < self._steps
        if unfinished:
            edges = np.append(edges, self._steps)
        if episode_steps is not None:
            pieces = [
                np.arange(start, stop, episode_steps)
                for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            ]
            unfinished = unfinished and (self._steps - int(pieces[-1][-1])) < episode_steps
            edges = np.append(np.concatenate(pieces), self._steps)
        return edges[:-1] if unfinished and not keep_unfinished else edges


def _values(place: str, column: Any, begin: int, end: int) -> Array:
    """One slice; rewards and flags of shape (N, 1) become (N,), and flags become booleans."""
    values: Array = column[begin:end]
    top = column.name.strip("/").partition("/")[0]
    if top in _SCALARS:
        values = values.reshape(end - begin)
    return flags(place, values, begin) if top in ("terminals", "timeouts") else values
