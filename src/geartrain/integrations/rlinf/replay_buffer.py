"""RLinf's replay buffer with its trajectories in a store: `TrajectoryReplayBuffer`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from geartrain._native import forks
from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_path,
    check_whole,
    timeout,
)
from geartrain.core.global_generators import drawing
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.threads import refuse_within
from geartrain.errors import (
    ArgumentError,
    EmptyBufferError,
    EmptyStoreError,
    StoreExistsError,
    StoreMissingError,
)
from geartrain.integrations.rlinf.checkpoints import CheckpointPart, SavedTrajectories
from geartrain.integrations.rlinf.datasets import check_observations, episode_lengths, trajectories_of
from geartrain.integrations.rlinf.files import METADATA, TrajectoryFiles, read_json, write_json
from geartrain.integrations.rlinf.layout import SampleLayout
from geartrain.integrations.rlinf.rows import TrajectoryRows, rows_of
from geartrain.integrations.rlinf.samples import TrajectorySamples
from geartrain.integrations.transitions.draws import TransitionDraws
from geartrain.integrations.transitions.layout import store_or_name
from geartrain.integrations.transitions.writer_lock import WriterLock
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.store import Store

_FORMAT, _VERSION, _CHECKPOINT = "geartrain trajectories", 1, "trajectories"
_MOST = 2**31
# A first trajectory may be shorter than others are, such as what a human did within a longer one.
_LEAST_SAMPLES = 64


class TrajectoryReplayBuffer(Lifetime, inherited=True, elsewhere="share it by the name of its store"):
    """RLinf's `TrajectoryReplayBuffer` over a store in shared memory.

    It keeps the newest trajectories, and draws batches of samples from them. A sample is a step of one environment, and
    all are equally likely. Each observation is stored once. All processes of the host that name the same store share
    their trajectories. Several threads may call any method.

    A trajectory is an object with tensors (T, B, ...) as attributes, and the dicts of tensors `curr_obs`, `next_obs`
    and `forward_inputs`, such as RLinf's `Trajectory`. T and B are those of `prev_logprobs`, or of `rewards`. `dones`,
    `terminations`, `truncations` and `prev_values` may have one more step for each epoch, which is ignored. The first
    trajectory makes the store. All others must have its tensors, dtypes and shapes.

    Args:
        seed: seed of the draws; None takes one from torch's global generator.
        enable_cache, cache_size: have no effect: all trajectories are in memory.
        sample_window_size: number of newest trajectories to keep and sample from; 0 keeps `capacity`.
        auto_save: also write each trajectory to a file in RLinf's format, before `add_trajectories` returns.
        auto_save_path: folder of these files. Numbers continue after those of existing files.
        trajectory_format: "pt". "pkl" is accepted if no files are written.
        store: name of a store that several processes share, or a path of one on a disk; the first of them that adds
            creates it. Or an open `geartrain.Store` of another buffer (`buffer.store`). By default the buffer has its
            own store.
        capacity: number of trajectories to keep if `sample_window_size` is 0.
        max_samples: samples (T times B) of a row; by default those of the first trajectory, and at least 64. Longer
            trajectories take several rows.
        reserve: allocate the memory with the first trajectory, so that a shortage raises there. With False it is
            allocated at the first write to it, and the process dies of SIGBUS once /dev/shm is full.
        timeout_s: longest wait for another process that adds, in seconds.

    Raises:
        ArgumentError: an argument is out of range.
        NoSpaceError: from the first `add_trajectories`: /dev/shm is too small.
        IncompatibleStoreError: from the first `add_trajectories`: the store of that name is not such a buffer, or has
            another window.

    Examples:
        >>> import torch, types
        >>> buffer = TrajectoryReplayBuffer(sample_window_size=10)
        >>> obs = {"states": torch.zeros(5, 2, 3)}  # T = 5 steps of B = 2 environments
        >>> ones = torch.ones(5, 2, 1)
        >>> buffer.add_trajectories([types.SimpleNamespace(rewards=ones, actions=ones, curr_obs=obs, next_obs=obs)])
        >>> tuple(buffer.sample(4)["curr_obs"]["states"].shape), buffer.total_samples
        ((4, 3), 10)
        >>> buffer.close()
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | os.PathLike[str] = "",
        trajectory_format: str = "pt",
        *,
        store: str | os.PathLike[str] | Store | None = None,
        capacity: int | None = None,
        max_samples: int | None = None,
        reserve: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        check_flag("enable_cache", enable_cache)
        check_whole("cache_size", cache_size)
        self.sample_window_size = check_whole("sample_window_size", sample_window_size, 0, _MOST)
        if self.sample_window_size == 0 and capacity is None:
            raise ArgumentError("with sample_window_size=0 give capacity=, the number of trajectories to keep")
        if self.sample_window_size and capacity is not None:
            raise ArgumentError("capacity has no effect unless sample_window_size=0")
        self._kept = self.sample_window_size or check_whole("capacity", capacity, 0, _MOST)
        if not self._kept:
            raise ArgumentError("capacity must be at least 1, found 0")
        self._most_samples = None if max_samples is None else max(1, check_whole("max_samples", max_samples, 0, _MOST))
        self.trajectory_format = check_choice("trajectory_format", trajectory_format, ("pt", "pkl"))
        self.auto_save = check_flag("auto_save", auto_save)
        self._files: TrajectoryFiles | None = None
        if self.auto_save:
            if trajectory_format != "pt":
                raise ArgumentError("trajectories are written with trajectory_format='pt', found 'pkl'")
            folder = check_path("auto_save_path", auto_save_path)
            folder.mkdir(parents=True, exist_ok=True)
            self._files = TrajectoryFiles(folder)
        self.seed = seed if seed is None else check_whole("seed", seed, 0, 2**63 - 1)
        self._generator = torch.Generator()
        with drawing:
            self._generator.manual_seed(int(torch.randint(_MOST, ())) if self.seed is None else self.seed)
        self._given = store_or_name(store)
        self._reserve = check_flag("reserve", reserve)
        self._timeout_s = timeout(timeout_s)
        self._adding = WriterLock(self._timeout_s)
        self._drawing = threading.RLock()
        super().__init__("the replay buffer")
        self._store: Store | None = None
        self._rows: TrajectoryRows
        self._draws: TransitionDraws
        if isinstance(store, Store):
            self._use(store)

    # --- the store --------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """The store; None before the first trajectory."""
        return self._store

    def _create(self, layout: SampleLayout, steps: int) -> Store:
        """Makes the store, or joins the one of that name."""
        fields, rows = layout.fields(), rows_of(self._kept)
        if self._given is None:
            return Store.create(fields, max_length=steps, capacity=rows, reserve=self._reserve)
        assert isinstance(self._given, str)
        try:
            return Store.create(self._given, fields, max_length=steps, capacity=rows, reserve=self._reserve)
        except StoreExistsError:
            return Store.open(self._given)

    def _use(self, store: Store) -> None:
        rows = TrajectoryRows(store, self._kept)
        if store is not self._given:
            weakref.finalize(self, store.close).atexit = False
        self._rows = rows
        self._draws = self._draws_of(store, rows.layout)
        self._store = store

    def _join(self) -> Store | None:
        """The store, also if another process has made it meanwhile; None where there is none yet.

        Raises:
            StoreClosedError: the buffer was closed.
        """
        self._own()
        self._check_open()
        if self._store is None and isinstance(self._given, str):
            with self._adding.thread():
                if self._store is None:
                    with suppress(StoreMissingError):
                        self._use_or_close(Store.open(self._given))
        return self._store

    def _use_or_close(self, store: Store) -> None:
        with on_error(store.close):
            self._use(store)
            self._check_open()

    def _own(self) -> None:
        """Gives a forked child locks of its own, and draws that are not its parent's."""
        if self._forked:
            self._forks, self._drawing, self._adding = forks(), threading.RLock(), WriterLock(self._timeout_s)
            self._generator = torch.Generator()  # the parent's may be locked, by a thread that draws from it
            self._begin_draws(int.from_bytes(os.urandom(4), "little"))

    def _begin_draws(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        if self._store is not None:
            self._draws = self._draws_of(self._store, self._rows.layout)

    def _draws_of(self, store: Store, layout: SampleLayout) -> TransitionDraws:
        return TransitionDraws(store, layout.drawn(), layout.window - 1, self._next_seed)

    def _next_seed(self) -> int:
        return int(torch.randint(_MOST - 1, (), generator=self._generator))

    def close(self, wait: bool = True) -> None:
        """Closes the buffer's store, unless it was passed in open. Later calls raise `StoreClosedError`.

        Args:
            wait: has no effect: what was added is written.
        """
        self._end()
        if self._store is not None and self._store is not self._given:
            self._store.close()
        self._adding.close()

    # --- adding -----------------------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Sequence[Any]) -> None:
        """Adds trajectories. The oldest leave if there are more than `sample_window_size`.

        Trajectories without steps, or without both rewards and log-probabilities, are left out, as RLinf does.

        Args:
            trajectories: the trajectories.

        Raises:
            SchemaError: tensors are not (T, B, ...), or differ from the first trajectory's. Nothing is added.
            WaitTimeoutError: another process that adds took longer than `timeout_s`.
        """
        found = [(each, samples) for each in trajectories if (samples := TrajectorySamples.of(each)) is not None]
        self._own()
        with self._adding.thread():
            store = self._join()
            if not found:
                return
            if store is None:
                store = self._made(found[0][1], self._most_samples)
            rows = self._rows
            for _, samples in found:
                rows.layout.check(samples)
            try:
                with self._adding.locked(store):
                    before = rows.now()
                    number, total = before.newest, before.total
                    for trajectory, samples in found:
                        if self._files is not None:
                            self._files.add(trajectory, samples)
                        number, total = number + 1, total + samples.total
                        rows.insert(samples, number, total)
                    rows.trim(before, number)
            finally:
                if self._files is not None:
                    self._files.flush(self.seed)

    def _made(self, first: TrajectorySamples, most: int | None) -> Store:
        layout = SampleLayout.of_samples(first)
        steps = layout.steps_for(first, max(first.total, _LEAST_SAMPLES) if most is None else most)
        self._use_or_close(self._create(layout, max(2, steps)))
        assert self._store is not None
        return self._store

    # --- sampling ---------------------------------------------------------------------------------------------

    def sample(self, num_chunks: int = 0) -> dict[str, Any]:
        """Draws samples uniformly, with replacement. Current and next observations are views of one tensor.

        Args:
            num_chunks: number of samples; fewer if the buffer has fewer.

        Returns:
            Tensors (num_chunks, ...) by name, and dicts of them for observations and `forward_inputs`.

        Raises:
            ArgumentError: `num_chunks` is not a whole number above zero.
            EmptyBufferError: there are no trajectories; also a `RuntimeError`.
        """
        check_whole("num_chunks", num_chunks, 1)
        store = self._join()
        refuse_within(self._drawing, "a sample of this replay buffer")
        with self._drawing:
            if store is not None:
                if num_chunks > len(store):
                    num_chunks = min(num_chunks, self._rows.samples()) or num_chunks
                with suppress(EmptyStoreError):
                    windows = self._draws.sample(num_chunks)
                    if windows is not None:
                        return self._rows.layout.batch(windows.fields)
        raise EmptyBufferError("Cannot sample from an empty buffer.")

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """Draws samples; the same as `sample`.

        Args:
            num_chunks: number of samples.
        """
        return self.sample(num_chunks)

    # --- contents ---------------------------------------------------------------------------------------------

    def _counted(self) -> tuple[int, int]:
        return (0, 0) if self._join() is None else self._rows.counted()

    def __len__(self) -> int:
        """Number of trajectories that all processes added since the buffer was made or cleared."""
        return self._counted()[0]

    @property
    def size(self) -> int:
        """Number of trajectories, as `len(buffer)`."""
        return len(self)

    @property
    def total_samples(self) -> int:
        """Number of samples of all trajectories that were added."""
        return self._counted()[1]

    def is_ready(self, min_size: int) -> bool:
        """Whether enough trajectories were added.

        Args:
            min_size: number of trajectories.
        """
        return len(self) >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Whether enough trajectories were added; the same as `is_ready`.

        Args:
            min_size: number of trajectories.
        """
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """Numbers of trajectories and samples that were added, and of trajectories that are there (`cache_size`)."""
        number, total = self._counted()
        there = 0 if self._store is None else self._rows.there()
        return {"num_trajectories": number, "total_samples": total, "cache_size": there}

    def clear(self) -> None:
        """Removes all trajectories, for all processes. Files stay."""
        self._own()
        with self._adding.thread():
            store = self._join()
            if store is not None:
                with self._adding.locked(store):
                    self._rows.clear()

    def clear_cache(self) -> None:
        """Has no effect: there is no cache besides the trajectories."""
        self._join()

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint (`Store.save`) of the present trajectories, and replaces an older one.

        Args:
            save_path: folder of the checkpoint.

        Raises:
            CheckpointError: something else is there.
            NoSpaceError: the disk is full.
        """
        folder = check_path("save_path", save_path)
        store = self._join()
        folder.mkdir(parents=True, exist_ok=True)
        if store is not None:
            store.save(folder / _CHECKPOINT)
        saved = {"format": _FORMAT, "version": _VERSION, "seed": self.seed, "empty": store is None}
        write_json(folder / METADATA, saved)

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Replaces the trajectories by those of a checkpoint, or of RLinf's files. Draws begin anew, from its seed.

        Args:
            load_path: folder that was given to `save_checkpoint` or as `auto_save_path`, of this class or of RLinf's.
            is_distributed: load only the part of rank `local_rank`.
            local_rank: number of this rank.
            world_size: number of parts.

        Raises:
            StoreMissingError: there is no checkpoint; also a `FileNotFoundError`.
            CheckpointError: the checkpoint is damaged, or made of pickles.
            SchemaError: its trajectories have other tensors than the store that this buffer joined.
        """
        folder = check_path("load_path", load_path)
        part = CheckpointPart.of(is_distributed, local_rank, world_size)
        if not (folder / METADATA).exists():
            raise StoreMissingError(f"no checkpoint: Metadata not found at {folder / METADATA}")
        metadata = read_json(folder / METADATA)
        self._own()
        with self._adding.thread():
            self._join()
            if metadata.get("format") != _FORMAT:
                self._restore(SavedTrajectories.of_files(TrajectoryFiles(folder), part, self._kept))
            elif metadata.get("empty"):
                self.clear()
            else:
                self._load_store(folder / _CHECKPOINT, part)
            if isinstance(metadata.get("seed"), int):
                self.seed = metadata["seed"]
                with self._drawing:
                    self._begin_draws(metadata["seed"])

    def _load_store(self, directory: Path, part: CheckpointPart) -> None:
        with Checkpoint(directory) as found:
            SampleLayout.of_fields(str(directory), found.fields)
            if self._store is None and part.ranks == 1 and found.options["capacity"] == rows_of(self._kept):
                with suppress(StoreExistsError):
                    name = self._given if isinstance(self._given, str) else None
                    self._use_or_close(Store.load(found, name, reserve=self._reserve))
                    return
            held = Store.load(found)
        with held:
            self._join()
            self._restore(SavedTrajectories.of_store(held, part, self._kept))

    def _restore(self, saved: SavedTrajectories) -> None:
        """Replaces the present trajectories by these."""
        self.clear()
        number, total = saved.number - len(saved.sizes), saved.total - sum(saved.sizes)
        for samples in saved.each:
            number, total = number + 1, total + samples.total
            store = self._store
            if store is None:
                store = self._made(samples, max(*saved.sizes, self._most_samples or 1, 1))
            self._rows.layout.check(samples)
            with self._adding.locked(store):
                self._rows.insert(samples, number, total)

    # --- datasets ---------------------------------------------------------------------------------------------

    @classmethod
    def from_lerobot_dataset(
        cls,
        dataset: Any,
        observations: Mapping[str, str],
        *,
        success_reward: float | None = None,
        seed: int | None = 1234,
        sample_window_size: int = 0,
        **options: Any,
    ) -> TrajectoryReplayBuffer:
        """A buffer with the episodes of a `LeRobotDataset`, such as demonstrations, as trajectories of one environment.

        Each frame is read once, in order, with one episode in memory. A dataset without `hf_dataset`, which has the
        episodes' lengths, is read twice. The next observation of an episode's last frame is its own. `actions` are
        those of single frames. Rewards and flags have the shape (T, 1, 1), as in RLinf with one action a step.

        Args:
            dataset: frames by number, with "action", "episode_index" and the observations in each.
            observations: names of observations in trajectories, and the dataset's entries for them: `{"states":
                "observation.state", "main_images": "observation.images.front"}`.
            success_reward: reward of each episode's last step, which is then terminal; other steps get 0. By default
                frames have "next.reward", and "next.done", if there is one, says which steps are terminal.
            seed: as for the class.
            sample_window_size: as for the class; all episodes are kept by default.
            options: other arguments of the class.

        Raises:
            ArgumentError: there are no observations, or `dataset` is not a dataset.
            SchemaError: a frame lacks an entry.
        """
        named = check_observations(observations)
        lengths = episode_lengths(dataset)
        if sample_window_size == 0 and "capacity" not in options:
            options["capacity"] = max(1, len(lengths))
        options.setdefault("max_samples", int(lengths.max(initial=1)))
        buffer = cls(seed, sample_window_size=sample_window_size, **options)
        with on_error(buffer.close):
            for trajectory in trajectories_of(dataset, named, success_reward):
                buffer.add_trajectories([trajectory])
        return buffer


__all__ = ["TrajectoryReplayBuffer"]
