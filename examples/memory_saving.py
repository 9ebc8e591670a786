"""Saving, crashing and going on, the same in all examples of training engines: what their options say.

A step is saved as one unit: the engine's own checkpoint first, in the step's directory, then the rows, their
priorities and the replay's state, whose record completes the step. A job that is started again goes on from the newest
complete one.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

import geartrain as gt
import memory_task as task
from geartrain.checkpoints.job import Loaded, load_checkpoint, newest_step, save_checkpoint


def add_options(text: argparse.ArgumentParser) -> None:
    text.add_argument("--prioritize", action="store_true", help="weigh rows by the model's errors")
    text.add_argument("--directory", type=Path, help="where to save, and to go on from")
    text.add_argument("--save-every", type=task.count, default=20, help="steps between two saves (20)")
    text.add_argument("--crash-at", type=task.count, help="kill the last rank after this step, in the job's first life")


class Saving:
    """This rank's shard, from memory, disk or new, and what was saved with it.

    Attributes:
        store: the shard. Its segment outlives a crash of all its processes where there is a directory.
        found: the step that the job goes on from; None where it begins.
        state: of the replay, there.
    """

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.found: Loaded | None = None
        self.state: Any = None
        where, keep = chosen.directory, {"persist": chosen.directory is not None}
        if where and newest_step(where, dist.group.WORLD) is not None:
            shard = task.shard_of(chosen.shards)
            self.store, self.state, self.found = load_checkpoint(
                where, f"{chosen.store}-{shard[0]}", dist.group.WORLD, shard=shard, adopt=True, **keep
            )
            if dist.get_rank() == 0:
                found = self.found
                print(f"going on from step {found.step}: {found.adopted} of {found.rows} rows were still in memory")
        else:
            self.store = task.open_shard(chosen.store, chosen.episodes, chosen.shards, **keep)

    def is_due(self, step: int) -> bool:
        """Whether this step is to be saved."""
        return bool(self.chosen.directory) and step % self.chosen.save_every == 0

    def place(self, replay: gt.Replay) -> Path:
        """The directory of the step that the replay is at, for the engine's checkpoint. By all ranks."""
        replay.settle()  # brings the rows' weights to where the replay is
        place: Path = self.chosen.directory / f"step-{replay.step:08d}"
        place.mkdir(parents=True, exist_ok=True)
        return place

    def complete(self, replay: gt.Replay, companion: str) -> None:
        """Saves the rest, once the engine's checkpoint, of that name, is there on all ranks. By all ranks."""
        where, state = self.chosen.directory, replay.state_dict()
        save_checkpoint(self.store, where, dist.group.WORLD, state=state, companions=[companion])

    def crash(self, step: int) -> None:
        """Kills the last rank where the options say so."""
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if step == self.chosen.crash_at and first_life and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Removes the shard, at the end of a job."""
        dist.barrier()
        self.store.unlink()
        self.store.close()
