"""pytest plug-in: torchrl's dense storages are geartrain's, and over them its samplers and writers too.

`LazyTensorStorage` and `LazyMemmapStorage` are substituted wherever a module of torchrl names them. A buffer made over
one gets geartrain's sampler and writer in the place of the stock ones that it was given, with their arguments. Each
case tells in the report how many storages it has made ("substituted"): one that made none says nothing about ours.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import substitutions
import torch
import torchrl
from torchrl.data.replay_buffers import samplers, storages, writers
from torchrl.data.replay_buffers.replay_buffers import ReplayBuffer

from geartrain.integrations import torchrl as ours

ELSEWHERE = {"consolidated", "shared_init", "cleanup_memmap"}
FILES = {"scratch_dir", "existsok", "auto_cleanup"}


class _Dense(ours.SharedStorage):  # type: ignore[misc]
    """What the stock storages are made with, as far as a `SharedStorage` has it. Where memory lies is its affair."""

    def __init__(self, max_size: int, *, device: Any = "cpu", ndim: int = 1, compilable: bool = False, **other: Any):
        substitutions.count += 1
        on_cpu = device in (None, "auto") or torch.device(device).type == "cpu"
        if compilable or set(other) - ELSEWHERE - FILES or not on_cpu:
            raise NotImplementedError(f"compilable={compilable}, device={device}, {other}")
        super().__init__(max_size, ndim=ndim, **{name: other[name] for name in FILES & set(other)})


class LazyTensorStorage(_Dense):
    pass


class LazyMemmapStorage(_Dense):
    pass


STOCK = {storages.LazyTensorStorage: LazyTensorStorage, storages.LazyMemmapStorage: LazyMemmapStorage}


def slices_of(given: Any) -> dict[str, Any] | None:
    """Arguments of a stock slice sampler; None where ours has not all of them."""
    if given._cache or given.cache_values or given.compile or given.pad_output or given.fragmented:
        return None  # static boundaries, compiled, padded, or in another order than they were written
    names = ("num_slices", "slice_len", "end_keys", "truncated_key", "init_key", "strict_length", "span")
    found = {name: getattr(given, name) for name in names}
    named = not given._traj_key_auto
    found["traj_key"] = given.traj_key if named and given._fetch_traj else None
    found["end_key"] = given.end_key if named and not given._fetch_traj and given.end_keys is None else None
    if not (given._fetch_traj or named):
        found["end_key"] = given.end_key
    return found


def priorities_of(given: Any) -> dict[str, Any]:
    names = {"max_capacity": "_max_capacity", "alpha": "_alpha", "beta": "_beta", "eps": "_eps"}
    return {"reduction": given.reduction, **{ours_: getattr(given, name) for ours_, name in names.items()}}


def sampler_for(given: Any, axes: int) -> Any:
    """geartrain's sampler with the arguments of a stock one; any other one as it is, and slices over several axes."""
    kind = type(given)
    if kind is samplers.RandomSampler:
        return ours.UniformSampler()
    if kind is samplers.PrioritizedSampler:
        return ours.PrioritizedSampler(**priorities_of(given))
    if axes == 1 and kind is samplers.PrioritizedSliceSampler and (slices := slices_of(given)) is not None:
        return ours.PrioritizedSliceSampler(**priorities_of(given), **slices)
    return given


class Priorities:
    """Stored priorities by index, for tests that read the stock sampler's trees."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = torch.as_tensor(index)
        flat = index.reshape(-1).numpy()
        found = torch.zeros(len(flat))
        there = flat < len(self.storage)
        keys = self.storage.keys_at(flat[there])
        found[torch.from_numpy(there)] = torch.as_tensor(self.storage.store.status(keys)["priority"]).float()
        return found.reshape(index.shape)

    def query(self, first: int, end: int) -> float:
        return float(self[torch.arange(first, end)].sum())


def private_names() -> None:
    """What tests read of the stock classes' own, out of what ours tell."""
    trees = property(lambda self: Priorities(self.__dict__["of_storage"]))
    ours.PrioritizedSampler._sum_tree = ours.PrioritizedSampler._min_tree = trees

    def generation(self: Any) -> torch.Tensor:
        return self.generations_of(torch.arange(self._storage.shape_of_all()[0]))

    ours.RoundRobinWriter._generation = property(generation)
    ours.SharedStorage._auto_cleanup = property(lambda self: self.auto_cleanup)
    ours.SharedStorage._scratch_dir_is_temp = property(lambda self: self.scratch_dir is None)
    ours.SharedStorage._cleaned_up = property(lambda self: self.closed)


def substitute() -> None:
    private_names()
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "torchrl"]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in STOCK:
                setattr(module, name, STOCK[value])
    make_sampler, make_writer = ReplayBuffer._maybe_make_sampler, ReplayBuffer._maybe_make_writer
    sample_slices = samplers.SliceSampler.sample

    def sampler(self: Any, given: Any) -> Any:
        found = make_sampler(self, given)
        if not isinstance(self._storage, _Dense) or self._consume_after_n_samples is not None:
            return found
        mine = sampler_for(found, self._storage.ndim)
        mine.__dict__["of_storage"] = self._storage
        if mine is not found and hasattr(mine, "draw"):  # tests set priorities at the sampler that they have given
            found.update_priority = functools.partial(mine.update_priority, storage=self._storage)
        return mine

    def writer(self: Any, given: Any) -> Any:
        found = make_writer(self, given)
        stock = (writers.RoundRobinWriter, writers.TensorDictRoundRobinWriter)
        if not isinstance(self._storage, _Dense) or type(found) not in stock:
            return found
        return ours.RoundRobinWriter(track_generations=found._track_generations)

    def slices(self: Any, storage: Any, batch_size: int) -> Any:
        """Slices are drawn by ours wherever the storage is; tests look at the stock sampler's attributes."""
        if type(self) is not samplers.SliceSampler or not isinstance(storage, _Dense) or storage.ndim > 1:
            return sample_slices(self, storage, batch_size)
        if self._traj_key_auto:
            self._resolve_traj_key(storage)
        if (arguments := slices_of(self)) is None:
            return sample_slices(self, storage, batch_size)
        if arguments["traj_key"] is not None and _name(arguments["traj_key"]) not in storage.names:
            arguments |= {"traj_key": None, "end_key": self.end_key}  # as the stock one falls back to it
        mine = self.__dict__.get("_ours")
        if mine is None:
            mine = self.__dict__["_ours"] = ours.SliceSampler(**arguments)
        mine._rng = self._rng
        return mine.sample(storage, batch_size)

    ReplayBuffer._maybe_make_sampler, ReplayBuffer._maybe_make_writer = sampler, writer
    samplers.SliceSampler.sample = slices


def _name(key: Any) -> str:
    return key if isinstance(key, str) else ".".join(key)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(substitutions.Hooks("storage"))
    substitute()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"substituted: {substitutions.count} storages of geartrain's were made, torchrl from {torchrl.__path__[0]}"
    )
