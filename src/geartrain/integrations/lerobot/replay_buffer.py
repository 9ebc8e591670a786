"""LeRobot's replay buffer with its transitions in a store: `LeRobotReplayBuffer`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from geartrain._native import forks
from geartrain.core.arguments import check_function, check_texts, check_whole
from geartrain.core.global_generators import drawing
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.threads import refuse_within
from geartrain.errors import (
    ArgumentError,
    EmptyBufferError,
    IncompatibleStoreError,
    StoreMissingError,
)
from geartrain.integrations.lerobot.augmentation import random_shift
from geartrain.integrations.lerobot.batches import BatchTransition, batch_of
from geartrain.integrations.lerobot.datasets import StoredRuns, capacity_for, transitions_of, written
from geartrain.integrations.lerobot.entries import TransitionEntries, TransitionEntry, flag_of, number_of
from geartrain.integrations.lerobot.positions import PositionColumn
from geartrain.integrations.lerobot.prefetch import BatchPrefetch
from geartrain.integrations.transitions.draws import DrawnWindows, TransitionDraws
from geartrain.integrations.transitions.index import TransitionIndex
from geartrain.integrations.transitions.layout import (
    ACTION,
    DONE,
    FLAGS,
    REWARD,
    TIMEOUT,
    TRANSITION,
    check_capacity,
    row_steps,
    rows_needed,
    store_or_name,
)
from geartrain.integrations.transitions.writer import TransitionWriter
from geartrain.store.store import Store

_REACH = 1


class LeRobotReplayBuffer(
    Lifetime, inherited=True, elsewhere="share it by the name of its store, or write it with to_lerobot_dataset"
):
    """`lerobot.rl.buffer.ReplayBuffer` over a store in shared memory.

    Each observation is stored once. The next state of a transition is the one that was added, even if the episode was
    cut off there. Batches are float32 tensors; every transition is equally likely, and the seed comes from torch's
    global generator. Several threads may call any method.

    The first transition makes the store. All others must have its entries, shapes and dtypes. Values are kept as
    float32; uint8, int8, bool and float16 are kept as they are.

    Args:
        capacity: number of transitions.
        device: device of the batches.
        state_keys: states that `from_lerobot_dataset` reads. `add` takes all that a state has.
        image_augmentation_function: takes images (N, C, H, W) and returns as many; `random_shift` by default. It is
            called once for each image of a state, with states and next states.
        use_drq: augment sampled states whose keys begin with "observation.image".
        storage_device: must be "cpu", where shared memory is.
        optimize_memory: has no effect.
        store: name of a store that several processes share; the first of them that adds creates it. Or an open
            `geartrain.Store` of another buffer (`buffer.store`). By default the buffer has its own store.
        writers: number of processes that add to it; the same in all of them.
        reserve: allocate the memory with the first transition, so that a shortage raises there. With False it is
            allocated at the first write to it, and the process dies of SIGBUS once /dev/shm is full.

    Raises:
        ArgumentError: an argument is out of range.
        NoSpaceError: from the first `add`: /dev/shm is too small.
        IncompatibleStoreError: from the first use of the store: it is of another kind of buffer, of another capacity,
            or for fewer writers. A `DictReplayBuffer` of Stable-Baselines3 of this capacity is not recognised as such
            if its dtypes are among those above: its transitions are read.

    Examples:
        >>> import torch
        >>> buffer = LeRobotReplayBuffer(capacity=100, device="cpu")
        >>> state = {"observation.state": torch.zeros(3)}
        >>> buffer.add(state, torch.zeros(2), 1.0, state, done=False, truncated=False)
        >>> batch = buffer.sample(4)  # a BatchTransition; of one transition, as there are no more
        >>> tuple(batch["action"].shape)
        (1, 2)
        >>> buffer.close()
    """

    def __init__(
        self,
        capacity: int,
        device: str | torch.device = "cuda:0",
        state_keys: Sequence[str] | None = None,
        image_augmentation_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        use_drq: bool = True,
        storage_device: str | torch.device = "cpu",
        optimize_memory: bool = False,
        *,
        store: str | os.PathLike[str] | Store | None = None,
        writers: int = 1,
        reserve: bool = True,
    ) -> None:
        check_whole("capacity", capacity, 1)
        check_whole("writers", writers, 1)
        if torch.device(storage_device).type != "cpu":
            raise ArgumentError(f"transitions lie in shared memory: storage_device is 'cpu', found {storage_device!r}")
        super().__init__("the replay buffer")
        self.capacity = capacity
        self.device = device
        self.storage_device = storage_device
        self.optimize_memory = optimize_memory
        self.state_keys = [] if state_keys is None else check_texts("state_keys", state_keys)
        if image_augmentation_function is not None:
            check_function("image_augmentation_function", image_augmentation_function)
        self.image_augmentation_function = image_augmentation_function or random_shift
        self.use_drq = use_drq
        self._given, self._writers, self._reserve = store_or_name(store), writers, reserve
        self._lock = threading.RLock()
        self._store: Store | None = None
        self._entries: TransitionEntries
        self._enough = 0  # transitions that are there at least
        if isinstance(store, Store):
            self._use(store, TransitionEntries.of_fields(store.name, store.fields))

    # --- the store --------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """The store; None before the first transition."""
        return self._store

    @property
    def initialized(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def _create(self, entries: TransitionEntries) -> Store:
        """Makes the store, or joins the one of that name."""
        steps = row_steps(self.capacity, _REACH)
        rows = rows_needed(self.capacity, 1, steps, _REACH, self._writers)
        fields, reserve = entries.fields(), self._reserve
        if self._given is None:
            return Store.create(fields, max_length=steps, capacity=rows, reserve=reserve)
        assert isinstance(self._given, str)
        return Store.open(self._given, fields, max_length=steps, create="missing", capacity=rows, reserve=reserve)

    def _use(self, store: Store, entries: TransitionEntries) -> None:
        if store.per_step:
            raise IncompatibleStoreError(f"the store {store.name!r} is of a buffer with priorities of transitions")
        check_capacity(store, self.capacity, 1, _REACH, self._writers)
        if store is not self._given:
            weakref.finalize(self, store.close).atexit = False
        self._entries = entries
        self._attach(store)
        self._store = store

    def _attach(self, store: Store) -> None:
        fields = [*self._entries.drawn(), REWARD, FLAGS]
        observations = [entry.field for entry in self._entries.states.values()]
        self._writer = TransitionWriter(store, observations, 1, _REACH)
        self._draws = TransitionDraws(store, fields, _REACH, _seed)
        self._index = TransitionIndex(store)

    def _join(self) -> Store | None:
        """The store, also if another process has made it meanwhile; None where there is none yet.

        Raises:
            StoreClosedError: the buffer was closed.
        """
        self._check_open()
        if self._store is None and isinstance(self._given, str):
            try:
                store = Store.open(self._given)
            except StoreMissingError:
                return None
            try:
                self._use(store, TransitionEntries.of_fields(store.name, store.fields))
            except IncompatibleStoreError:
                store.close()
                raise
        return self._store

    def _locked(self) -> Any:
        """The lock; a forked child makes its own, and what it adds is its own too."""
        if self._forked:
            self._lock, self._forks = threading.RLock(), forks()
            if self._store is not None:
                self._attach(self._store)
        self._refuse_within()
        return self._lock

    def _refuse_within(self) -> None:
        refuse_within(self._lock, "a call of this replay buffer")

    def close(self) -> None:
        """Closes the buffer's store, unless it was passed in open. Later calls raise `StoreClosedError`."""
        self._end()
        if self._store is not None and self._store is not self._given:
            self._store.close()

    # --- adding -----------------------------------------------------------------------------------------------

    def add(
        self,
        state: Mapping[str, torch.Tensor],
        action: torch.Tensor,
        reward: float | torch.Tensor,
        next_state: Mapping[str, torch.Tensor] | None,
        done: bool | torch.Tensor,
        truncated: bool | torch.Tensor,
        complementary_info: Mapping[str, torch.Tensor | float] | None = None,
    ) -> None:
        """Appends one transition. Tensors may have an axis of length 1 in front.

        Args:
            state: tensors by key.
            action: a tensor.
            reward: a number, or a tensor or array of one.
            next_state: tensors by key; None with `done` stands for the state.
            done: whether the transition was terminal: a bool, 0 or 1, or a tensor or array of one.
            truncated: whether the episode was cut off after it.
            complementary_info: tensors and numbers by key. Missing entries are zeros. Entries that the first transition
                did not have are dropped, with one warning.

        Raises:
            ArgumentError: an entry is neither a tensor nor a number, a key is not text, or there is no next state.
            SchemaError: an entry is missing, has another shape or dtype than in the first transition, or does not fit
                its dtype. Nothing is added.
        """
        with self._locked():
            store = self._join()
            entries = self._entries if store else TransitionEntries.of_transition(state, action, complementary_info)
            reward, over, late = number_of("reward", reward), flag_of("done", done), flag_of("truncated", truncated)
            if next_state is None:
                if not over:
                    raise ArgumentError("next_state may be None only where done is set: what it was is not known")
                next_state = state
            states = entries.state_arrays("state", state)
            step: dict[str, Any] = entries.state_arrays("next_state", next_state)
            step[ACTION] = entries.action.array("action", action)
            step[REWARD] = reward
            step[FLAGS] = TRANSITION | (DONE if over else 0) | (TIMEOUT if late else 0)
            step.update(entries.info_arrays({} if complementary_info is None else complementary_info))
            if store is None:
                made = self._create(entries)
                with on_error(made.close):
                    self._use(made, entries)
                    self._join()  # raises where the buffer was closed meanwhile
            self._writer.add(states, step)
            self._enough = max(self._enough, min(self._writer.count, self.capacity))

    # --- sampling ---------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> BatchTransition:
        """Draws transitions uniformly, with replacement. States and next states are views of one tensor.

        Args:
            batch_size: transitions; fewer if the buffer has fewer.

        Raises:
            ArgumentError: `batch_size` is not a whole number above zero.
            EmptyBufferError: nothing was added yet; also a `RuntimeError`.
        """
        check_whole("batch_size", batch_size, 1)
        with self._locked():
            if self._join() is None:
                raise EmptyBufferError("Cannot sample from an empty buffer. Add transitions first.")
            if batch_size > self._enough:
                self._enough = self._count()
            count = min(batch_size, self._enough)
            # Batches of every smaller size come while a buffer fills: drawing them by number keeps nothing for each.
            windows = self._draws.sample(count) if count == batch_size else None
            if windows is None:
                windows = self._drawn_by_number(count)
            entries = self._entries
        augmented = self.image_augmentation_function if self.use_drq else None
        return batch_of(windows.fields, entries, self.device, augmented)

    def _drawn_by_number(self, count: int) -> DrawnWindows:
        """A batch where there may be too few transitions to draw whole windows."""
        there = self._count()
        if not there:
            raise EmptyBufferError("Cannot sample from an empty buffer. Add transitions first.")
        with drawing:
            chosen = torch.randint(self._index.count(), (count,))
        number = self._index.at(chosen.numpy())
        keys, step = self._index.find(number)
        assert self._store is not None
        return DrawnWindows.at(self._store, keys, step, [*self._entries.drawn(), REWARD, FLAGS], _REACH)

    def get_iterator(
        self, batch_size: int, async_prefetch: bool = True, queue_size: int = 2
    ) -> Iterator[BatchTransition]:
        """An endless iterator over batches.

        Args:
            batch_size: transitions of each batch.
            async_prefetch: sample ahead on a thread, which ends when the iterator is closed or dropped. False samples
                each batch on demand.
            queue_size: batches that the thread keeps ready.

        Raises:
            EmptyBufferError: at the first batch: nothing was added yet.
        """
        if async_prefetch:
            return BatchPrefetch(lambda: self.sample(batch_size), queue_size, self._refuse_within)
        return self._sampled(batch_size)

    def _sampled(self, batch_size: int) -> Generator[BatchTransition, None, None]:
        while True:
            yield self.sample(batch_size)

    # --- contents ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of transitions, added by all processes; `capacity` at most."""
        with self._locked():
            return 0 if self._join() is None else self._count()

    def _count(self) -> int:
        self._index.refresh()
        return min(self._index.count(), self.capacity)

    @property
    def size(self) -> int:
        """Number of transitions, as `len(buffer)`."""
        return len(self)

    @property
    def position(self) -> int:
        """Position that this process's next transition gets."""
        with self._locked():
            return 0 if self._store is None else self._writer.count % self.capacity

    @property
    def states(self) -> dict[str, PositionColumn]:
        """States that this process added, by key and position. They are read when you index them."""
        return self._columns(0)

    @property
    def next_states(self) -> dict[str, PositionColumn]:
        """Next states that this process added, by key and position."""
        return self._columns(1)

    @property
    def actions(self) -> PositionColumn:
        """Actions that this process added, by position."""
        return self._column(ACTION)

    @property
    def rewards(self) -> PositionColumn:
        """Rewards that this process added, by position."""
        return self._column(REWARD)

    @property
    def dones(self) -> PositionColumn:
        """Whether each transition was terminal, bool by position."""
        return self._column(FLAGS, as_tensor=lambda flags: torch.from_numpy((flags & DONE) != 0))

    @property
    def truncateds(self) -> PositionColumn:
        """Whether each episode was cut off after the transition, bool by position."""
        return self._column(FLAGS, as_tensor=lambda flags: torch.from_numpy((flags & TIMEOUT) != 0))

    @property
    def has_complementary_info(self) -> bool:
        """Whether transitions have infos."""
        entries = self._known()
        return entries is not None and entries.infos is not None

    @property
    def complementary_info_keys(self) -> list[str]:
        """Keys of the infos."""
        return list(self._infos())

    @property
    def complementary_info(self) -> dict[str, PositionColumn]:
        """Infos that this process added, by key and position."""
        return {key: self._column(entry.field) for key, entry in self._infos().items()}

    def _known(self) -> TransitionEntries | None:
        """Entries of transitions; None where no process has added any."""
        with self._locked():
            return None if self._join() is None else self._entries

    def _infos(self) -> dict[str, TransitionEntry]:
        entries = self._known()
        return {} if entries is None or entries.infos is None else entries.infos

    def _columns(self, step: int) -> dict[str, PositionColumn]:
        entries = self._known()
        states = {} if entries is None else entries.states
        return {key: self._column(entry.field, step) for key, entry in states.items()}

    def _column(
        self, field: str, step: int = 1, as_tensor: Callable[[NDArray[Any]], torch.Tensor] | None = None
    ) -> PositionColumn:
        with self._locked():
            store = self._join()
            if store is None:
                raise EmptyBufferError("nothing was added to the replay buffer yet")
            index, writer = self._index, self._writer
        return PositionColumn(store, index, writer, self._locked, field, step, self.capacity, as_tensor or _float)

    # --- datasets ---------------------------------------------------------------------------------------------

    @classmethod
    def from_lerobot_dataset(
        cls,
        lerobot_dataset: Any,
        device: str | torch.device = "cuda:0",
        state_keys: Sequence[str] | None = None,
        capacity: int | None = None,
        image_augmentation_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        use_drq: bool = True,
        storage_device: str | torch.device = "cpu",
        optimize_memory: bool = False,
        **options: Any,
    ) -> LeRobotReplayBuffer:
        """A buffer with the transitions of a `LeRobotDataset`. Each frame is read once.

        The next state of an episode's last frame is its own state. If the dataset has "next.done" and the last frame is
        not done, its transition is truncated. Without "next.done" the last frame is done.

        Args:
            lerobot_dataset: dataset with "action", "next.reward", "episode_index" and the states in each frame.
            device, image_augmentation_function, use_drq, storage_device, optimize_memory: as for the class.
            state_keys: entries of frames that are states.
            capacity: at least the dataset's length, which is the default.
            options: `store`, `writers` and `reserve` of the class.

        Raises:
            ArgumentError: there are no `state_keys`, the capacity is smaller than the dataset, or the dataset is empty
                and there is no capacity.
            SchemaError: a frame lacks an entry.
        """
        if state_keys is None:
            raise ArgumentError("State keys must be provided when converting LeRobotDataset to Transitions.")
        capacity = capacity_for(lerobot_dataset, capacity)
        buffer = cls(
            capacity,
            device,
            state_keys,
            image_augmentation_function,
            use_drq,
            storage_device,
            optimize_memory,
            **options,
        )
        with on_error(buffer.close):
            for transition in transitions_of(lerobot_dataset, buffer.state_keys):
                buffer.add(**transition)
        return buffer

    def to_lerobot_dataset(
        self, repo_id: str, fps: int = 1, root: Any = None, task_name: str = "from_replay_buffer"
    ) -> Any:
        """Writes the newest `capacity` transitions of all processes as a `LeRobotDataset`, process by process.

        An episode ends at a transition that is done or truncated, and at the end of a process's transitions.
        Transitions that are evicted during the call are left out, with a warning.

        Args:
            repo_id, fps, root: as for `LeRobotDataset.create`.
            task_name: name of the task of all episodes.

        Raises:
            EmptyBufferError: nothing was added yet; also a `ValueError`.
            MissingDependencyError: LeRobot is not installed.
        """
        with self._locked():
            store = self._join()
            if store is None or not self._count():
                raise EmptyBufferError("The replay buffer is empty. Cannot convert to a dataset.")
            runs = StoredRuns.newest(store, self._index, self.capacity)
            entries = self._entries
        return written(runs, store, entries, repo_id=repo_id, fps=fps, root=root, task_name=task_name)


def _seed() -> int:
    with drawing:
        return int(torch.randint(2**31 - 1, ()))


def _float(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).float()


__all__ = ["LeRobotReplayBuffer"]
