"""RLinf's checkpoint files: one `.pt` file for each trajectory, `metadata.json` and `trajectory_index.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from geartrain.core.json_values import read_object
from geartrain.errors import CheckpointError, SchemaError
from geartrain.integrations.rlinf.samples import TrajectorySamples

METADATA, _INDEX = "metadata.json", "trajectory_index.json"


class TrajectoryFiles:
    """The files of one folder.

    Attributes:
        folder: where they are.
        metadata: contents of `metadata.json`; empty if there is none.

    Raises:
        CheckpointError: damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = read_json(folder / METADATA) if (folder / METADATA).exists() else {}
        index = read_json(folder / _INDEX) if (folder / _INDEX).exists() else {}
        try:
            entries = {int(number): dict(entry) for number, entry in index.get("trajectory_index", {}).items()}
            numbers = [int(number) for number in index.get("trajectory_id_list", [])]
            self._entries = {number: entries[number] for number in numbers}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / _INDEX} is no index of trajectories: {error!r}") from None

    def add(self, trajectory: Any, samples: TrajectorySamples) -> None:
        """Writes a trajectory's file; `flush` writes the index.

        Raises:
            SchemaError: its `model_weights_id` is no part of a file's name.
        """
        number = max(self._entries, default=-1) + 1
        weights = getattr(trajectory, "model_weights_id", "")
        entry = {
            "num_samples": samples.total,
            "trajectory_id": number,
            "max_episode_length": int(getattr(trajectory, "max_episode_length", 0)),
            "shape": [samples.steps, samples.environments],
            "model_weights_id": weights,
        }
        content = {name: _saved(value) for name, value in vars(trajectory).items() if value is not None}
        path = self._path(number, entry)
        part = path.with_name(f"{path.name}.part")
        try:
            torch.save(content, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self._entries[number] = entry

    def flush(self, seed: int | None) -> None:
        """Writes the index and the metadata."""
        write_json(
            self.folder / _INDEX,
            {
                "trajectory_index": {str(number): entry for number, entry in self._entries.items()},
                "trajectory_id_list": list(self._entries),
            },
        )
        self.metadata = {
            "trajectory_format": "pt",
            "size": len(self._entries),
            "total_samples": sum(entry["num_samples"] for entry in self._entries.values()),
            "trajectory_counter": max(self._entries, default=-1) + 1,
            "seed": seed,
        }
        write_json(self.folder / METADATA, self.metadata)

    def numbers(self) -> list[int]:
        """Trajectories whose files are there, oldest first.

        Raises:
            CheckpointError: the files are pickles, which run code of whoever wrote them.
        """
        if self.metadata.get("trajectory_format", "pt") != "pt":
            raise CheckpointError(
                f"the trajectories in {self.folder} are pickles, which are not read: load them with RLinf's buffer and "
                "save them with trajectory_format='pt'"
            )
        return [number for number, entry in self._entries.items() if self._path(number, entry).exists()]

    def sizes(self, numbers: list[int]) -> list[int]:
        """Samples of trajectories by number."""
        return [int(self._entries[number]["num_samples"]) for number in numbers]

    def read(self, numbers: list[int]) -> Iterator[TrajectorySamples]:
        """Trajectories by number, one after the other.

        Raises:
            CheckpointError: a file is damaged, or holds something else than tensors.
        """
        for number in numbers:
            path = self._path(number, self._entries[number])
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
                content["prev_values"] = _by_step(content.get("prev_values"), self._entries[number]["shape"])
                samples = TrajectorySamples.of(SimpleNamespace(**content))
            except SchemaError:
                raise
            except Exception as error:  # of the unpickler and of zip files: of many kinds
                raise CheckpointError(f"{path} holds no trajectory: {error}") from error
            if samples is not None:
                yield samples

    def _path(self, number: int, entry: Mapping[str, Any]) -> Path:
        weights = entry.get("model_weights_id", "")
        if not isinstance(weights, str) or "/" in weights or "\0" in weights:
            raise SchemaError(f"the model_weights_id of trajectory {number} is no part of a file's name: {weights!r}")
        return self.folder / f"trajectory_{number}_{weights}.pt"


def _by_step(values: Any, shape: Sequence[int]) -> Any:
    """Values of T steps and the ends of epochs, of B environments: RLinf's checkpoints have them without these axes."""
    steps, environments = shape[:2]
    if not isinstance(values, torch.Tensor) or tuple(values.shape[1:2]) == (environments,):
        return values
    return values.reshape(-1, environments, *values.shape[1:]) if len(values) > steps * environments else values


def _saved(value: Any) -> Any:
    """An attribute in the form written to files: tensors with memory of their own."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
    if isinstance(value, Mapping):
        return {key: _saved(each) for key, each in value.items()}
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as JSON and replaces an existing file in one step."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


__all__ = ["METADATA", "TrajectoryFiles", "read_json", "write_json"]
