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

ELSEWHERE = {"scratch_dir", "existsok", "consolidated", "shared_init", "auto_cleanup", "cleanup_memmap"}


class _Dense(ours.SharedStorage):  # type: ignore[misc]
    """What the stock storages are made with, as far as a `SharedStorage` has it. Where memory lies is its affair."""

    def __init__(self, max_size: int, *, device: Any = "cpu", ndim: int = 1, compilable: bool = False, **other: Any):
        substitutions.count += 1
        if ndim != 1 or compilable or set(other) - ELSEWHERE or torch.device(device or "cpu").type != "cpu":
            raise NotImplementedError(f"ndim={ndim}, compilable={compilable}, device={device}, {other}")
        super().__init__(max_size)

    @property
    def _storage(self) -> Any:
        """A copy of all items, for tests that read the stock storages' tensors."""
        return self.get(...) if self.initialized else None


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


def sampler_for(given: Any) -> Any:
    """geartrain's sampler with the arguments of a stock one; any other one as it is."""
    kind = type(given)
    if kind is samplers.RandomSampler:
        return ours.UniformSampler()
    if kind is samplers.PrioritizedSampler:
        return ours.PrioritizedSampler(**priorities_of(given))
    if kind is samplers.PrioritizedSliceSampler and (slices := slices_of(given)) is not None:
        return ours.PrioritizedSliceSampler(**priorities_of(given), **slices)
    return given


def substitute() -> None:
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
        mine = sampler_for(found)
        if mine is not found and hasattr(mine, "draw"):  # tests set priorities at the sampler that they have given
            found.update_priority = functools.partial(mine.update_priority, storage=self._storage)
        return mine

    def writer(self: Any, given: Any) -> Any:
        found = make_writer(self, given)
        stock = (writers.RoundRobinWriter, writers.TensorDictRoundRobinWriter)
        mine = isinstance(self._storage, _Dense) and type(found) in stock and self._consume_after_n_samples is None
        return ours.RoundRobinWriter() if mine and not found._track_generations else found

    def slices(self: Any, storage: Any, batch_size: int) -> Any:
        """Slices are drawn by ours wherever the storage is; tests look at the stock sampler's attributes."""
        if type(self) is not samplers.SliceSampler or not isinstance(storage, _Dense):
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
