"""Directory of a job's checkpoints: lists its steps, reads and writes their records, and removes steps.

    DIRECTORY/step-00000042/shard-00000-of-00004/    a checkpoint of one store, incremental
    DIRECTORY/step-00000042/replay.json              the record: all shards and the replay's state; written last

A step is complete on a disk once its record is there. Removing a step deletes the record first. Its shards are deleted
once nobody reads them (checkpoint_directory.py). So a load that has opened a shard can read all of it.

If the step was complete before, its new record is first written as replay.ID.json. It replaces replay.json when it is
complete everywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from geartrain.core.arguments import shown
from geartrain.core.json_values import entry, object_entries, read_object, whole_entry
from geartrain.core.shared_files import listed, naming_errors
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_directory import remove_unheld
from geartrain.store.checkpoint_format import json_checksum, put_json, sync_directory

FORMAT = "geartrain-shards"
VERSION = 1

_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}(\.\d+)?", re.ASCII)


def describe_steps(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The steps in a directory as this disk has them, newest first: as `geartrain inspect` shows them.

    A dict each: step, complete, created, path, state, world, damaged (why a record of it cannot be used, or None), and
    shards: a dict each of directory, rows, capacity, bytes, ranks and here (whether it is on this disk).
    """
    root = Path(directory)
    steps, damaged = scan_steps(root)
    found: list[dict[str, Any]] = []
    for path in step_paths(root):
        number = step_number(path)
        records = [known for (step, _), known in steps.items() if step == number]
        record = max(records, key=lambda known: known.serial).content if records else {}
        shards = [
            {
                **{key: entry[key] for key in ("directory", "rows", "capacity", "bytes", "ranks")},
                "here": (path / entry["directory"] / "manifest.json").is_file(),
            }
            for entry in record.get("shards", [])
        ]
        about = {key: record.get(key) for key in ("created", "state", "world")}
        why = next((text for text in damaged if text.startswith(f"{path}/")), None)
        about |= {"complete": bool(records), "path": str(path), "damaged": why, "shards": shards}
        found.append({"step": number, **about})
    return sorted(found, key=lambda step: -step["step"])


class StepRecord(NamedTuple):
    """A step's record on this disk.

    Attributes:
        serial: number of this save of the step, from 1 on.
        directories: of its shards.
        content: of replay.json.
    """

    serial: int
    directories: list[str]
    content: dict[str, Any]


# Steps that are complete on a disk, by number and id.
Steps = dict[tuple[int, str], StepRecord]


def scan_steps(root: Path, *, newest: bool = False) -> tuple[Steps, list[str]]:
    """The records on this disk, and error texts of the records that cannot be used.

    Args:
        root: directory of the steps.
        newest: the caller takes the newest step. A disk that cannot read a newer one's record must not hide that step.

    Raises:
        CheckpointError: the directory cannot be listed; with `newest`, the disk cannot read a record that is newer than
            all others.
    """
    steps: Steps = {}
    damaged: list[str] = []
    unread = (-1, "")
    for place in step_paths(root):
        for path in _listed(place, "replay*.json"):  # none if the whole step is being removed
            try:
                record = _record(path, step_number(place))
                steps[step_number(place), record.content["id"]] = record
            except FileNotFoundError:
                continue  # it was just removed, or renamed
            except OSError as error:
                damaged.append(f"{path} cannot be read: {error.strerror}")
                unread = max(unread, (step_number(place), damaged[-1]))
            except CheckpointError as error:
                damaged.append(str(error))
    if newest and unread[0] > max((number for number, _ in steps), default=-1):
        raise CheckpointError(f"{unread[1]}. Read it again, or name an older step to load: step=...")
    return steps, damaged


def _record(path: Path, step: int) -> StepRecord:
    """A record, once every entry that a reader uses is there and of its type.

    Raises:
        CheckpointError: it is damaged, or none.
        OSError: it cannot be read.
    """
    try:
        content = read_object(path)
        checksum = content.pop("checksum", None)
        if checksum != json_checksum(content):
            raise ValueError("its checksum does not match")
        if content.get("format") != FORMAT:
            raise ValueError("it is no record of a job's checkpoint")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {shown(content.get('version'))}, this build reads version {VERSION}"
            )
        if whole_entry(content, "step", 0, 10**18) != step:
            raise ValueError(f"it is of step {content['step']}")
        for key in ("id", "created"):
            entry(content, key, str)
        entry(content, "state", dict | None)
        whole_entry(content, "world", 1, 2**32)
        serial = whole_entry(content, "serial", 1, 2**63)
        for shard in object_entries(content, "shards"):
            _check_shard(shard)
        if not content["shards"]:
            raise ValueError("it has no shards")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return StepRecord(serial, [shard["directory"] for shard in content["shards"]], content)


def _check_shard(shard: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless a shard's entry has what readers use."""
    if not _SHARD.fullmatch(entry(shard, "directory", str)):
        raise ValueError(f"{shown(shard['directory'])} is no shard's directory")
    for key in ("id", "store_id"):
        entry(shard, key, str)
    capacity = whole_entry(shard, "capacity", 1, 2**32)
    whole_entry(shard, "rows", 0, capacity)
    whole_entry(shard, "bytes", 0, 2**63)
    if not all(type(rank) is int and 0 <= rank < 2**32 for rank in entry(shard, "ranks", list)):
        raise ValueError(f"ranks is {shown(shard['ranks'])}")


def step_paths(root: Path) -> list[Path]:
    """The directories of all steps, complete or not. Raises `CheckpointError` if they cannot be listed."""
    return [path for path in _listed(root, "step-*") if _STEP.fullmatch(path.name) and path.is_dir()]


def _listed(directory: Path, *patterns: str) -> list[Path]:
    with naming_errors("cannot read the checkpoints in", directory, CheckpointError):
        return [path for pattern in patterns for path in listed(directory, pattern)]


def step_name(step: int) -> str:
    """The name of a step's directory."""
    return f"step-{step:08d}"


def step_number(path: Path) -> int:
    """The step of a directory of `step_paths`."""
    found = _STEP.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


# --- changes ---------------------------------------------------------------------------------------------------


def free_shard_name(number: int, shards: int, taken: set[str]) -> str:
    """A shard's directory, other than those of earlier saves of this step."""
    name = f"shard-{number:05d}-of-{shards:05d}"
    names = [name, *(f"{name}.{again}" for again in range(2, len(taken) + 3))]
    return next(each for each in names if each not in taken)


def base_checkpoint(root: Path, steps: Steps, store_id: int, origin: str | None) -> Path | None:
    """The base of an incremental checkpoint: the newest one of the same store on this disk, or of its origin."""
    for (step, _), known in sorted(steps.items(), key=lambda each: (each[0][0], each[1].serial), reverse=True):
        for shard in known.content["shards"]:
            if shard["store_id"] == f"{store_id:016x}" or shard["id"] == origin:
                path: Path = root / step_name(step) / shard["directory"]
                if path.is_dir():
                    return path
    return None


def write_record(path: Path, record: dict[str, Any], rank: int) -> None:
    """Writes a record atomically; ranks that share the disk may do so at the same time. Raises as `save_checkpoint`."""
    fresh = path.with_name(f"{path.name}.{rank}.tmp")
    with naming_errors("cannot save the record", path, CheckpointError):
        put_json(path, record, fresh)


def replace_record(record: Path, shards: set[str]) -> None:
    """Makes a step's new record its only one, and removes shards that only the old record named."""
    place = record.parent
    with naming_errors("cannot tidy up the checkpoint", place, CheckpointError):
        if record.name != "replay.json":
            with suppress(FileNotFoundError):  # another rank of this disk was first
                record.replace(place / "replay.json")
            sync_directory(place)
        for left in _listed(place, "shard-*-of-*", ".shard-*", "replay.*.json"):
            if left.name not in shards:
                _remove(left)


def prune_steps(root: Path, kept: set[int], step: int, companions: Sequence[str]) -> None:
    """Removes steps older than those kept, and newer steps that were never completed."""
    steps, _ = scan_steps(root)
    complete = {number for number, _ in steps}
    for path in step_paths(root):
        number = step_number(path)
        # A newer step that is complete here but not on another disk is kept until it is old: its files can be copied.
        if number in kept or (number > step and number in complete):
            continue
        with suppress(OSError):  # other files are in it, or another rank of this disk was first
            records = _listed(path, "replay*.json*", "restored-*.json")
            blocks = _listed(path, "shard-*-of-*", ".shard-*")
            others = [path / companion for companion in companions] if records or blocks else []
            for entry in [*records, *others, *blocks]:  # records first: no shard is named that is gone
                _remove(entry)
            if records or blocks or number < step:
                path.rmdir()


def _remove(path: Path) -> None:
    """Removes a file, or a directory that no one reads; another one stays until the next save."""
    if path.is_dir() and not path.is_symlink():
        remove_unheld(path)
    else:
        path.unlink(missing_ok=True)


__all__ = [
    "FORMAT",
    "VERSION",
    "StepRecord",
    "Steps",
    "base_checkpoint",
    "describe_steps",
    "free_shard_name",
    "prune_steps",
    "replace_record",
    "scan_steps",
    "step_name",
    "step_number",
    "step_paths",
    "write_record",
]
