"""RLinf's replay buffer and what it needs, imported from a wheel or checkout without the rest of RLinf.

RLinf's packages import Ray, Hydra and its workers when they are imported. Here they are empty packages over the folders
of the source, whose modules are loaded as they are; `rlinf.utils.logging` is a logger of Python's.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "0.3.0"
#: Modules of version 0.3.0, and those of later ones.
_BUFFER = ("rlinf.data.replay_buffer", "rlinf.data.storage.replay.buffer")
_TYPES = ("rlinf.data.embodied_io_struct", "rlinf.data.schema.embodied_types")
_BUILDER = ("rlinf.data.embodied_io_struct", "rlinf.data.schema.embodied_trajectory_builder")
_DATASET = ("rlinf.data.embodied_buffer_dataset", "rlinf.data.storage.replay.dataset")
_PACKAGES = (
    "rlinf",
    "rlinf.data",
    "rlinf.data.schema",
    "rlinf.data.storage",
    "rlinf.data.storage.replay",
    "rlinf.utils",
)


class RLinf(NamedTuple):
    """Classes of RLinf's, and what they were loaded from."""

    revision: str
    files: dict[str, str]
    buffer: type
    trajectory: type
    builder: type
    step_result: type
    dataset: type
    preload_dataset: type


def downloaded(folder: Path) -> Path:
    """The wheel of the version that this was written for."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"rlinf=={VERSION}"]
    subprocess.run(command, check=True, timeout=600)
    return next(folder.glob("*.whl"))


def loaded(source: Path, folder: Path) -> RLinf:
    """RLinf's classes from a wheel, which is unpacked to `folder`, or from a checkout."""
    tree, revision = source, ""
    if source.is_file():
        with zipfile.ZipFile(source) as archive:
            archive.extractall(folder)
        tree, revision = folder, f"{source.name}, sha256 {_digest(source)}"
    else:
        command = ["git", "-C", str(source), "rev-parse", "HEAD"]
        revision = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or str(source)
    if not (tree / "rlinf" / "data").is_dir():
        sys.exit(f"{source} holds no package rlinf.data")
    for name in _PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(tree.joinpath(*name.split(".")))]
        sys.modules[name] = package
    logs = types.ModuleType("rlinf.utils.logging")
    vars(logs)["get_logger"] = lambda: logging.getLogger("rlinf")
    sys.modules[logs.__name__] = logs
    logging.getLogger("rlinf").setLevel(logging.ERROR)
    found = [_first(names, tree) for names in (_BUFFER, _TYPES, _BUILDER, _DATASET)]
    buffer, kinds, builders, datasets = found
    builder = getattr(builders, "EmbodiedTrajectoryBuilder", None) or builders.EmbodiedRolloutResult
    return RLinf(
        revision,
        {str(Path(each.__file__).relative_to(tree)): _digest(Path(each.__file__)) for each in found},
        buffer.TrajectoryReplayBuffer,
        kinds.Trajectory,
        builder,
        kinds.ChunkStepResult,
        datasets.ReplayBufferDataset,
        datasets.PreloadReplayBufferDataset,
    )


def _first(names: tuple[str, ...], tree: Path) -> Any:
    """The first of these modules that the source has."""
    for name in names:
        if tree.joinpath(*name.split(".")).with_suffix(".py").exists():
            return importlib.import_module(name)
    sys.exit(f"the source has none of {', '.join(names)}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


__all__ = ["VERSION", "RLinf", "downloaded", "loaded"]
