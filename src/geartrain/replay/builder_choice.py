"""Choice of a replay's builder: on the host, on a device, or together with other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geartrain.errors import ArgumentError
from geartrain.replay.builder import BatchBuilder, HostBatchBuilder
from geartrain.replay.config import ReplayConfig, make_samplers
from geartrain.replay.distributed.lagged_builder import LaggedBuilder, check_lag
from geartrain.replay.distributed.rank_collectives import run_on_all_ranks
from geartrain.replay.distributed.rank_group import RankGroup, SingleRank
from geartrain.replay.distributed.single_rank import SingleRankBuilder, is_single_store
from geartrain.replay.distributed.topology import Mesh, topology_of
from geartrain.replay.distributed.torch_rank_group import as_rank_group
from geartrain.replay.epochs import check_epochs
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.step_priorities import check_step_priorities
from geartrain.selection.mixture import Selection
from geartrain.store.store import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def open_builder(
    stores: list[Store],
    selection: Selection,
    config: ReplayConfig,
    group: ProcessGroup | RankGroup | None,
    mesh: Mesh | None,
) -> tuple[BatchBuilder[Any], Callable[[], object] | None]:
    """The builder, and what releases what it holds besides memory.

    Raises:
        ArgumentError: options that do not go together, or with these stores.
    """
    alone = group is None and mesh is None and config.update_lag is None
    if config.transform is not None and not (alone and config.device is None):
        raise ArgumentError(
            "transforms are of batches of this process's stores, in host memory: leave out group, mesh, device and "
            "update_lag"
        )
    check_epochs(
        stores,
        selection,
        device=config.device is not None and not alone,
        windows=config.view is not None or config.window is not None,
    )
    check_step_priorities(stores, selection, windows=config.view is not None or config.window is not None)

    def make() -> list[StoreSampler]:
        samplers = make_samplers(stores, selection, config)
        check_lag(samplers, config)
        return samplers

    if alone:
        if config.device is None:
            return HostBatchBuilder(make(), selection, config.batch_size, config.transform), None
        from geartrain.replay.device.builder import DeviceBatchBuilder

        on_device = DeviceBatchBuilder(make(), selection, config.batch_size, config.device)
        return on_device, on_device.close
    from geartrain.replay.distributed.builder import DistributedBatchBuilder

    if group is None and mesh is None:
        group = SingleRank()  # a group of one, whose updates wait as those of any group
    topology = topology_of(group, mesh)
    ranks = as_rank_group(group, topology.members, config.timeout_s)
    members = None if ranks is group else topology.members
    try:
        samplers = run_on_all_ranks(ranks, make)
        if ranks.size == 1 and is_single_store(samplers, config):
            return SingleRankBuilder(samplers, selection, config, ranks), None
        builder = DistributedBatchBuilder(samplers, selection, config, ranks, topology.position, members)
        if config.extra_lag:
            return LaggedBuilder(builder, config.extra_lag), builder.assembler.close
    except BaseException:
        if ranks is not group:
            ranks.close()
        raise
    return builder, builder.assembler.close
