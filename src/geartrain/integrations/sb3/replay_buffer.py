"""Stable-Baselines3's replay buffers with their transitions in a store: `ReplayBuffer` and `DictReplayBuffer`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common import buffers as stock
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples

from geartrain._native import forks
from geartrain.core.arguments import check_type, check_whole
from geartrain.core.global_generators import drawing
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, IncompatibleStoreError, NotEnoughRowsError, SchemaError
from geartrain.integrations.sb3.contents import Contents, FlagArray, Positions
from geartrain.integrations.sb3.joined import joined
from geartrain.integrations.transitions.draws import DrawnWindows, TransitionDraws
from geartrain.integrations.transitions.index import TransitionIndex
from geartrain.integrations.transitions.layout import (
    ACTION,
    DONE,
    FLAGS,
    INFO,
    REWARD,
    TIMEOUT,
    TRANSITION,
    check_capacity,
    fields_of,
    numbers,
    observation_field,
    row_steps,
    rows_needed,
)
from geartrain.integrations.transitions.writer import TransitionWriter, packed_infos
from geartrain.store.segment import PriorityPer
from geartrain.store.store import Store

# By flags: whether the episode is over by the rules of the environment.
_DONES = np.array([(flags & (DONE | TIMEOUT)) == DONE for flags in range(256)], np.float32)


class ReplayBuffer(stock.ReplayBuffer):
    """`stable_baselines3.common.buffers.ReplayBuffer` over a store in shared memory.

    Pass it as `replay_buffer_class=`. Observations are stored once, with or without `optimize_memory_usage`. The last
    observation of an episode is never taken for the first of the next one. Every transition is equally likely. The
    generator of the draws is seeded from NumPy's global generator with the first batch.

    Args:
        buffer_size, observation_space, action_space, device, n_envs, optimize_memory_usage,
            handle_timeout_termination: as in Stable-Baselines3. `optimize_memory_usage` changes nothing, and may be
            combined with the others.
        store: name of a store that several processes share; the first of them creates it. Or an open `geartrain.Store`
            of another buffer (`buffer.store`). By default the buffer has its own store.
        writers: number of processes that may add to it.
        info_bytes: bytes to store each transition's pickled info; 0 does not keep infos.
        reserve: allocate the memory now, so that a shortage raises here. With False it is allocated at the first write
            to it, and the process dies of SIGBUS once /dev/shm is full.

    Attributes:
        pos, full: of what this process has added, as in Stable-Baselines3.
        store: the store. Its fields are those of `geartrain.integrations.transitions.layout`.
        observations, next_observations, actions, rewards: transitions that this process added, by position and
            environment. Each access copies the whole buffer.
        dones, timeouts: likewise, but they can be set, `buffer.dones[position] = True`, which rewrites rows.

    Raises:
        NoSpaceError: /dev/shm is too small. IncompatibleStoreError: the store of that name has other fields,
            or is of a buffer of another size, or of the other kind, with or without priorities.
    """

    pos: int
    full: bool
    #: Steps behind the first that a batch needs.
    reach = 1
    #: What the store keeps priorities of.
    priority_per: PriorityPer = "row"

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        store: str | Store | None = None,
        writers: int = 1,
        info_bytes: int = 0,
        reserve: bool = True,
    ) -> None:
        stock.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        for what, value, least in (
            ("buffer_size", buffer_size, 1),
            ("writers", writers, 1),
            ("info_bytes", info_bytes, 0),
        ):
            check_whole(what, value, least)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._writers, self._info_bytes, self._reserve = writers, info_bytes, reserve
        numbers(0, n_envs, 0)  # raises where there are too many environments
        self._describe()
        self._open(store)

    def _describe(self) -> None:
        """Shapes and dtypes of observations and actions."""
        space = self.observation_space
        self._is_dict = isinstance(space, spaces.Dict)
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else [(None, space)]
        for key, each in entries:
            if isinstance(each, spaces.Dict):
                raise SchemaError(
                    f"the observation {key!r} is a Dict space within the Dict space: Stable-Baselines3's buffers take "
                    f"one level. Give its entries keys of the outer one, such as {f'{key}.{next(iter(each), 0)}'!r}"
                )
        self._shapes = {observation_field(key): (get_obs_shape(each), np.dtype(each.dtype)) for key, each in entries}
        #: Key of an observation, or None, to its field, shape and dtype, of all environments.
        self.observation_fields = {
            key: (name, (self.n_envs, *self._shapes[name][0]), self._shapes[name][1])
            for key, name in ((key, observation_field(key)) for key, _ in entries)
        }
        self._alone = None if self._is_dict else self.observation_fields[None]
        self._action_dtype = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        self._action_shape = (self.n_envs, self.action_dim)

    def _open(self, store: str | Store | None) -> None:
        """Opens or makes the store, with its writer, index and draws."""
        fields = fields_of(self._shapes, ((self.action_dim,), self._action_dtype), self._info_bytes)
        overlap = self.reach
        steps = row_steps(self.buffer_size, overlap)
        rows = rows_needed(self.buffer_size, self.n_envs, steps, overlap, self._writers)
        if isinstance(store, Store):
            if store.fields != fields:
                raise ArgumentError(f"the store {store.name!r} has other fields than this buffer: {list(store.fields)}")
            check_capacity(store, self.buffer_size, self.n_envs, overlap, self._writers)
            self.store = store
        else:
            options: dict[str, Any] = {"capacity": rows, "reserve": self._reserve, "priority_per": self.priority_per}
            options["new_priority"] = "one" if self.priority_per == "row" else "max"
            if store is None:
                self.store = Store.create(fields, max_length=steps, **options)
            else:
                self.store = Store.open(store, fields, max_length=steps, create="missing", **options)
        self._owned = not isinstance(store, Store)
        if self._owned:
            weakref.finalize(self, self.store.close).atexit = False
        if self.store.per_step != (self.priority_per == "step"):
            self.close()
            raise IncompatibleStoreError(
                f"the store {self.store.name!r} is of a buffer {'with' if self.store.per_step else 'without'} "
                f"priorities of transitions, and this one is a {type(self).__name__}"
            )
        if self._owned:
            try:
                check_capacity(self.store, self.buffer_size, self.n_envs, overlap, self._writers)
            except IncompatibleStoreError:
                self.close()
                raise
        self._attach(None, 0)

    def _attach(self, writer: int | None, count: int) -> None:
        self._forks = forks()
        self.writer = TransitionWriter(
            self.store, list(self._shapes), self.n_envs, self.reach, writer=writer, count=count
        )
        self._draws = self._make_draws()
        self.index = TransitionIndex(self.store)
        self.positions = Positions(self.store, self.index, self.writer, self.n_envs, self.buffer_size)
        self._no_flags = np.full(self.n_envs, TRANSITION, np.uint8)

    def _make_draws(self) -> TransitionDraws:
        return TransitionDraws(self.store, self.drawn_fields(), self.reach)

    def drawn_fields(self) -> list[str]:
        """Fields that a batch is made of."""
        return [*self._shapes, ACTION, REWARD, FLAGS]

    # --- adding -----------------------------------------------------------------------------------------------

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: Sequence[Mapping[str, Any]],
    ) -> None:
        """Appends one transition of every environment; `next_obs` is what its action led to, also at an end.

        Raises:
            ArgumentError: an info takes more than `info_bytes`. SchemaError: shapes that do not fit the spaces.
        """
        if self._forks != forks():
            self._join_after_fork()
        step = self._arrays(next_obs)
        action = np.asarray(action, self._action_dtype)
        step[ACTION] = action if action.shape == self._action_shape else _shaped(ACTION, action, self._action_shape)
        reward = np.asarray(reward, np.float32)
        step[REWARD] = reward if reward.ndim == 1 else _shaped(REWARD, reward, (self.n_envs,))
        step[FLAGS] = self._flags(done, infos)
        if self._info_bytes:
            step[INFO] = packed_infos(infos, self._info_bytes)
        self.writer.add(self._arrays(obs), step)
        pos = self.pos + 1
        if pos == self.buffer_size:
            self.full, pos = True, 0
        self.pos = pos

    def _arrays(self, observation: Any) -> dict[str, NDArray[Any]]:
        """An observation of all environments, by field, of the spaces' dtypes and shapes."""
        if self._alone is not None:
            field, shape, dtype = self._alone
            array = np.asarray(observation, dtype)
            return {field: array if array.shape == shape else _shaped(field, array, shape)}
        found = {}
        for key, (field, shape, dtype) in self.observation_fields.items():
            array = np.asarray(observation[key], dtype)
            found[field] = array if array.shape == shape else _shaped(field, array, shape)
        return found

    def _flags(self, done: NDArray[Any], infos: Sequence[Mapping[str, Any]]) -> NDArray[np.uint8]:
        done = np.asarray(done)
        if done.ndim != 1 or len(done) != self.n_envs:
            done = _shaped("done", done, (self.n_envs,))
        cut = False
        if self.handle_timeout_termination and any(infos):  # most are empty
            for info in infos:
                if info.get("TimeLimit.truncated", False):
                    cut = True
                    break
        if not cut and not any(done.tolist()):
            return self._no_flags
        flags = self._no_flags | np.where(done != 0, DONE, 0).astype(np.uint8)
        if cut:
            late = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
            flags |= np.where(late, TIMEOUT, 0).astype(np.uint8)
        return flags

    def _join_after_fork(self) -> None:
        """In a forked child: what it adds is its own, and positions are of that."""
        self._attach(None, 0)
        self.pos, self.full = 0, False

    def reset(self) -> None:
        """Removes everything, also what other processes have added."""
        self.pos, self.full = 0, False
        self.writer.cut()
        self.store.delete(self.store.keys())
        self._attach(None, 0)

    # --- sampling ---------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        """A batch of transitions drawn uniformly, as tensors on `device`.

        Args:
            batch_size: transitions.
            env: the `VecNormalize` by which observations and rewards are normalized.

        Raises:
            NotEnoughRowsError: there are none. (Where `full` was set all the same, they are zeros.)
        """
        check_whole("batch_size", batch_size, 1)
        if self._forks != forks():
            self._join_after_fork()
        windows = self._draws.sample(batch_size)
        if windows is None:  # few transitions, or none
            windows = self._drawn_by_number(batch_size)
        return self.samples_of(windows, env)

    def _drawn_by_number(self, batch_size: int) -> DrawnWindows:
        """A batch where there may be too few transitions to draw whole windows."""
        self.index.refresh()
        count = self.index.count()
        if not count:
            if self.full:
                return DrawnWindows.zeros(self.store, self.drawn_fields(), batch_size, self.reach)
            raise NotEnoughRowsError("the replay buffer is empty: nothing was added yet")
        with drawing:
            chosen = np.random.randint(0, count, size=batch_size)
        return self.windows_of(self.index.at(chosen))

    def _get_samples(self, batch_inds: NDArray[Any], env: Any = None) -> ReplayBufferSamples:
        """The transitions at positions of this process, each of an environment drawn for it."""
        self.index.refresh()
        with drawing:
            environments = np.random.randint(0, self.n_envs, size=len(batch_inds))
        return self.samples_of(self.windows_of(self.positions.numbers_at(np.asarray(batch_inds), environments)), env)

    def windows_of(self, number: NDArray[np.int64]) -> DrawnWindows:
        """The windows of transitions by number."""
        keys, step = self.index.find(number)
        return self.windows_at(keys, step, self.drawn_fields())

    def windows_at(self, keys: Keys, step: NDArray[np.int64], fields: Sequence[str]) -> DrawnWindows:
        """Some fields of the windows whose transitions are at these steps of rows."""
        return DrawnWindows.at(self.store, keys, step, fields, self.reach)

    def samples_of(self, windows: DrawnWindows, env: Any) -> ReplayBufferSamples:
        """What Stable-Baselines3 trains on."""
        fields = windows.fields
        return self.as_samples(
            windows,
            self.observed(windows, 0, env),
            self.observed(windows, 1, env),
            fields[FLAGS][:, 1],
            self._normalize_reward(fields[REWARD][:, 1:2], env),
        )

    def observed(self, windows: DrawnWindows, step: int | NDArray[Any], env: Any) -> Any:
        """The observations at a step of each window, normalized."""
        every: Any = slice(None) if isinstance(step, int) else np.arange(len(step))
        found = {key: windows.fields[field][every, step] for key, (field, _, _) in self.observation_fields.items()}
        return self._normalize_obs(found if self._is_dict else found[None], env)

    def as_samples(
        self,
        windows: DrawnWindows,
        obs: Any,
        next_obs: Any,
        flags: NDArray[np.uint8],
        reward: NDArray[Any],
        discounts: NDArray[Any] | None = None,
    ) -> ReplayBufferSamples:
        """A batch as Stable-Baselines3 has it: tensors of these arrays and of the windows' actions.

        Args:
            flags: (B,), of the steps that may have ended episodes.
        """
        made = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        return made(
            observations=self._tensors(obs),
            actions=self.tensor_of(windows.fields[ACTION][:, 1]),
            next_observations=self._tensors(next_obs),
            dones=self.tensor_of(_DONES.take(flags).reshape(-1, 1)),
            rewards=self.tensor_of(reward),
            discounts=None if discounts is None else self.tensor_of(discounts),
        )

    def _tensors(self, observation: Any) -> Any:
        if isinstance(observation, dict):
            return {key: self.tensor_of(each) for key, each in observation.items()}
        return self.tensor_of(observation)

    def tensor_of(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor over a batch's memory, which is the batch's alone; a copy on other devices."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def close(self) -> None:
        """Closes the buffer's store, unless it was given an open one; what is called then raises `StoreClosedError`."""
        if self._owned:
            self.store.close()

    # --- by position, for inspection --------------------------------------------------------------------------

    @property
    def observations(self) -> Any:
        """Observations by position and environment, (buffer_size, n_envs, ...), or a dict of them: copies."""
        return self._observed_arrays(-1)

    @property
    def next_observations(self) -> Any:
        """What the actions led to, as `observations`."""
        return self._observed_arrays(0)

    def _observed_arrays(self, step: int) -> Any:
        found = {key: self.positions.read(field, step) for key, (field, _, _) in self.observation_fields.items()}
        return found if self._is_dict else found[None]

    @property
    def actions(self) -> NDArray[Any]:
        """Actions, (buffer_size, n_envs, action_dim): a copy."""
        return self.positions.read(ACTION)

    @property
    def rewards(self) -> NDArray[Any]:
        """Rewards, (buffer_size, n_envs): a copy."""
        return self.positions.read(REWARD)

    @property
    def dones(self) -> FlagArray:
        """Whether episodes ended, float32 (buffer_size, n_envs); can be set."""
        return FlagArray(self.positions, DONE)

    @property
    def timeouts(self) -> FlagArray:
        """Whether they were truncated, as `dones`."""
        return FlagArray(self.positions, TIMEOUT)

    # --- pickling ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything in the store, as `model.save_replay_buffer` writes it: a copy, of which each frame is once."""
        left = ("store", "writer", "_draws", "index", "positions", "_forks")
        state = {name: value for name, value in self.__dict__.items() if name not in left}
        state["_contents"] = Contents.of(self.store)
        state["_written"] = (self.writer.writer, self.writer.count)
        state["_max_stored"] = self.store.native.max_priority
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a buffer with a store of its own, which holds the saved contents."""
        state = dict(state)
        contents, written, largest = (state.pop(name) for name in ("_contents", "_written", "_max_stored"))
        self.__dict__.update(state)
        self._open(None)
        self.store.native.restore_max_priority(largest)
        for part in joined(contents, self.reach, list(self._shapes), self.store.new_priority):
            part.put(self.store)
        self.store.native.restore_max_priority(largest)  # also where transitions that were never drawn had more
        self._attach(*written)


def _shaped(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The array in the shape that a transition of all environments has."""
    if array.shape == shape:
        return array
    try:
        return array.reshape(shape)
    except ValueError:
        raise SchemaError(f"{name!r} of a step has shape {array.shape}; this buffer takes {shape}") from None


class DictReplayBuffer(ReplayBuffer, stock.DictReplayBuffer):
    """`stable_baselines3.common.buffers.DictReplayBuffer` over a store; see `ReplayBuffer`."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        **options: Any,
    ) -> None:
        check_type("DictReplayBuffer must be used with Dict obs space only", observation_space, spaces.Dict)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )


__all__ = ["DictReplayBuffer", "ReplayBuffer"]
