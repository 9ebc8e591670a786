"""Export to a Minari dataset (HDF5), the inverse of minari.py.

| stored | written |
|---|---|
| obs, obs.x; final_obs, final_obs.x | observations, T + 1 of them; a Dict space where there are names below |
| action, action.x | actions |
| reward, terminated, truncated | rewards, terminations, truncations |
| infos.x, and every other timed field x | infos/x |

Images are stored as raw arrays, not as JPEG.
"""

from __future__ import annotations

import errno
import inspect
import os
import resource
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.extras import require
from geartrain.core.schema import Field, nested
from geartrain.errors import ArgumentError, MissingDependencyError, ProcessDiedError, SourceError
from geartrain.integrations.datasets.stored_rows import RowGroup
from geartrain.integrations.datasets.writer import (
    DatasetWriter,
    is_dataset_folder,
    not_real,
    raw_bytes,
)
from geartrain.integrations.datasets.writer_process import WriterProcess

_FLAGS = ("terminated", "truncated")
_REQUIRED = ("obs", "action", "reward", *_FLAGS)
# An HDF5 dataset that can grow takes an index of 2 KB and a header, whatever is in it: 2.7 KB were measured.
_LEAST_OVERHEAD = 2048
_MOST_OVERHEAD = 16 << 10


class MinariWriter(DatasetWriter):
    """A Minari dataset's folder, written by the minari package an episode at a time.

    Args:
        dataset_id: the dataset's name in its metadata, such as "hopper/mine-v0"; "exported/rows-v0" by default.
        repeat_last_obs: if the store has no `final_obs`, write each row's last observation twice. The dataset's last
            next observation is then wrong, which matters if you train on next observations.
    """

    FOLDER = True

    def __init__(
        self,
        path: Path,
        *,
        fields: Mapping[str, Field],
        about: str,
        dataset_id: str = "exported/rows-v0",
        repeat_last_obs: bool = False,
    ) -> None:
        if not _is_dataset_id(dataset_id):
            raise ArgumentError(f"dataset_id is namespace/name-vN, such as hopper/mine-v0, found {dataset_id!r}")
        self._fields = dict(fields)
        self._names = {top: _below(top, self._fields) for top in ("obs", "final_obs", "action")}
        missing = [top for top in _REQUIRED if top not in self._fields and not self._names.get(top)]
        if missing:
            raise SourceError(
                f"a Minari dataset needs {', '.join(_REQUIRED)}, and the rows have no {', '.join(missing)}; "
                f"fields='obs=NAME' writes one under another name"
            )
        for name in _FLAGS:
            if self._fields[name].dtype != "bool" or self._fields[name].shape:
                raise SourceError(
                    f"{name} is one bool a step in a Minari dataset, the store holds {_said(fields[name])}"
                )
        if self._fields["reward"].shape:
            raise SourceError(
                f"reward is one number a step in a Minari dataset, the store holds {_said(fields['reward'])}"
            )
        self._repeat = not self._names["final_obs"]
        if self._repeat and not repeat_last_obs:
            raise SourceError(
                "a Minari dataset has one more observation than actions, and the rows have no final_obs (once a row); "
                "the option repeat_last_obs=true writes the last one twice"
            )
        for name in self._names["final_obs"]:
            obs = "obs" + name.removeprefix("final_obs")
            if self._fields.get(obs, None) is None or not _alike(self._fields[obs], self._fields[name]):
                raise SourceError(f"{name} is not what {obs} has a step of, or {obs} is not there")
        if not self._repeat and len(self._names["final_obs"]) != len(self._names["obs"]):
            raise SourceError(f"some of {', '.join(self._names['obs'])} have no final_obs")
        used = {name for names in self._names.values() for name in names} | set(_REQUIRED)
        self._infos = {name: name.removeprefix("infos.") for name, field in self._fields.items() if name not in used}
        self._check_infos()
        self._path = path
        path.mkdir()
        (path / "data").mkdir()
        self._process = WriterProcess(
            f"{__name__}:MinariFile",
            {
                "path": path,
                "fields": self._fields,
                "names": self._names,
                "infos": self._infos,
                "repeat": self._repeat,
                "metadata": {"dataset_id": dataset_id, "description": f"exported from {about} by geartrain"},
            },
            f"the Minari dataset {path}",
        )

    @classmethod
    def refused(cls, name: str, field: Field) -> str | None:
        """Types that a Box has none of; what a row has once but `final_obs`."""
        if field.per_row and name.partition(".")[0] != "final_obs":
            return "once a row, and a Minari episode has such values only for final_obs"
        if not field.per_row and name.partition(".")[0] == "final_obs":
            return "final_obs is what a row has once"
        if "/" in name:
            return "a name with a slash is a group in HDF5; write it as another with fields='other=...'"
        return not_real(field, "a Minari space")

    @classmethod
    def needed_bytes(cls, fields: Mapping[str, Field], rows: int, steps: int) -> int:
        """The values, which HDF5 does not compress, the observation after the last step, and an index a dataset."""
        timed = {name: field for name, field in fields.items() if not field.per_row}
        values = sum(raw_bytes(timed, rows, steps).values())
        return values + rows * (_last_obs_bytes(timed) + _LEAST_OVERHEAD * len(timed))

    @classmethod
    def replaces(cls, path: Path) -> bool:
        """A folder with data/metadata.json that has nothing but a dataset's files, of any of Minari's layouts."""
        kinds = {"data": (".hdf5", ".json", ".arrow", ".parquet")}
        return is_dataset_folder(path, kinds, "data/metadata.json", "data_format")

    def write(self, group: RowGroup) -> int:
        """Writes each row as an episode."""
        nbytes = sum(raw_bytes(self._fields, len(group.lengths), int(group.lengths.sum())).values())
        self._check_room(nbytes, len(group.lengths))
        try:
            self._process.call("write", group)
        except (OSError, RuntimeError, ValueError, ProcessDiedError) as error:
            full = self._full(nbytes, len(group.lengths))  # filled meanwhile, whatever HDF5 made of it
            if full is None:
                raise
            raise full from error
        return nbytes

    def finish(self) -> None:
        """Nothing is left to be done: an episode is complete once it is written."""

    def close(self) -> None:
        """Ends the child process; the file is open only while episodes are written."""
        self._process.close()

    def _check_room(self, nbytes: int, rows: int) -> None:
        """Raises where the disk or the limit of file sizes would run out, before HDF5 meets it."""
        full = self._full(nbytes, rows)
        if full is not None:
            raise full

    def _full(self, nbytes: int, rows: int) -> OSError | None:
        """The error of a disk or limit of file sizes that has no room for some rows.

        Chunks that stick out over a dataset's edge make twice the values at most.
        """
        needed = 2 * nbytes + rows * (_last_obs_bytes(self._fields) * 2 + _MOST_OVERHEAD * len(self._fields))
        about = os.statvfs(self._path)
        if needed > about.f_bavail * about.f_frsize:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and needed + (self._path / "data" / "main_data.hdf5").stat().st_size > limit:
            return OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return None

    def _check_infos(self) -> None:
        taken: dict[str, str] = {}
        for name, to in self._infos.items():
            for other, its in taken.items():
                if to == its or to.startswith(its + ".") or its.startswith(to + "."):
                    raise SourceError(f"{name} and {other} would both be infos/{min(to, its, key=len)}")
            taken[name] = to


class MinariFile:
    """The dataset's HDF5 file, in the child process of a `MinariWriter`."""

    def __init__(
        self,
        path: Path,
        fields: Mapping[str, Field],
        names: Mapping[str, list[str]],
        infos: Mapping[str, str],
        repeat: bool,
        metadata: dict[str, Any],
    ) -> None:
        storage = require("minari.dataset.minari_storage", "geartrain[minari]", "Writing Minari datasets").MinariStorage
        if "jpeg_encoding" not in inspect.signature(storage.new).parameters:
            raise MissingDependencyError("older versions of Minari change images: pip install 'minari>=0.5.4'")
        self._buffer = require("minari.data_collector", "geartrain[minari]", "Writing Minari datasets").EpisodeBuffer
        self._fields, self._names, self._infos, self._repeat = fields, names, infos, repeat
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._dataset = storage.new(
                path / "data",
                observation_space=self._space("obs"),
                action_space=self._space("action"),
                data_format="hdf5",
                jpeg_encoding=False,
            )
        minari = require("minari", "geartrain[minari]", "Writing Minari datasets")
        self._dataset.update_metadata({**metadata, "minari_version": minari.__version__, "requirements": []})

    def write(self, group: RowGroup) -> None:
        """Writes each row as an episode."""
        self._dataset.update_episodes(self._episodes(group))

    def _episodes(self, group: RowGroup) -> Iterator[Any]:
        for index in range(len(group.lengths)):
            row = {
                name: values[index] if self._fields[name].per_row else group.trajectory(name, index)
                for name, values in group.values.items()
            }
            observations = {
                name: np.concatenate([row[name], (row[name][-1:] if self._repeat else row["final_" + name][None])])
                for name in self._names["obs"]
            }
            yield self._buffer(
                id=group.first + index,
                observations=_tree("obs", observations),
                actions=_tree("action", {name: row[name] for name in self._names["action"]}),
                rewards=row["reward"],
                terminations=row["terminated"],
                truncations=row["truncated"],
                infos=nested({to: row[name] for name, to in self._infos.items()}) if self._infos else None,
            )

    def _space(self, top: str) -> Any:
        spaces = require("gymnasium.spaces", "geartrain[minari]", "Writing Minari datasets")

        def box(name: str) -> Any:
            field = self._fields[name]
            dtype = field.numpy_dtype
            if dtype.kind == "b":
                return spaces.Box(False, True, field.shape, np.bool_)
            if dtype.kind == "f":
                return spaces.Box(-np.inf, np.inf, field.shape, dtype.type)
            most = np.iinfo(dtype)
            return spaces.Box(most.min, most.max, field.shape, dtype.type)

        def made(tree: Any) -> Any:
            return spaces.Dict({key: made(value) for key, value in tree.items()}) if isinstance(tree, dict) else tree

        return made(_tree(top, {name: box(name) for name in self._names[top]}))


def _last_obs_bytes(fields: Mapping[str, Field]) -> int:
    return sum(fields[name].nbytes for name in _below("obs", fields))


def _is_dataset_id(text: str) -> bool:
    name, dash, version = text.rpartition("-v")
    return bool(name and dash) and version.isascii() and version.isdigit() and "\0" not in text


def _below(top: str, fields: Mapping[str, Field]) -> list[str]:
    return [name for name in fields if name == top or name.startswith(top + ".")]


def _alike(step: Field, once: Field) -> bool:
    return step.shape == once.shape and step.dtype == once.dtype and not step.per_row


def _said(field: Field) -> str:
    return f"{field.dtype} {field.shape}"


def _tree(top: str, leaves: Mapping[str, Any]) -> Any:
    """Leaves by dotted names below `top` as nested dicts; the leaf itself where `top` is one."""
    if list(leaves) == [top]:
        return leaves[top]
    return nested({name.removeprefix(top + "."): value for name, value in leaves.items()})


__all__ = ["MinariFile", "MinariWriter"]
