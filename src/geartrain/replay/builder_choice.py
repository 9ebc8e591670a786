"""Makes the batch builder of a replay, with the source that its options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from geartrain.errors import ArgumentError
from geartrain.ranks.rank_collectives import run_on_all_ranks
from geartrain.ranks.rank_group import RankGroup, SingleRank
from geartrain.ranks.topology import Mesh, topology_of
from geartrain.ranks.torch_rank_group import as_rank_group
from geartrain.replay.builder import BatchBuilder
from geartrain.replay.config import ReplayConfig, make_samplers
from geartrain.replay.kept_rows import check_keep
from geartrain.replay.local_rows import LocalRows
from geartrain.replay.packed_batch import check_packed, check_room, room_of
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.strategy_checks import check_epochs, check_grouping, check_step_priorities
from geartrain.replay.windows import as_windows
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
) -> tuple[BatchBuilder, Callable[[], object] | None]:
    """The builder, and what releases what it holds besides memory.

    Raises:
        ArgumentError: options that do not go together, or with these stores.
    """
    if config.transform is not None and config.device is not None:
        raise ArgumentError("transforms are of batches in host memory: leave out device")
    check_keep(config.keep, stores, selection, config.batch_size)
    packed = check_packed(stores, selection, config)
    of_job = group is not None or mesh is not None or config.update_lag is not None
    check_epochs(
        stores,
        selection,
        device=config.device is not None and of_job,
        windows=config.view is not None or config.window is not None,
    )
    check_grouping(stores, selection, config.batch_size)
    view = config.view or as_windows(config.window)
    check_step_priorities(stores, selection, windows=view is not None, after=0 if view is None else view.needs[1])

    def make() -> list[StoreSampler]:
        return make_samplers(stores, selection, config)

    def check_reachable(samplers: list[StoreSampler]) -> None:
        for sampler in samplers:
            sampler.check_reachable("batch_size" if config.min_rows is None else "min_rows")

    def local(samplers: list[StoreSampler], lag: int | None, group: RankGroup | None) -> BatchBuilder:
        check_reachable(samplers)
        if packed:
            check_room([room_of(store) for store in stores], config)
        rows = LocalRows(samplers, selection, config.batch_size, lag, config.extra_lag, group)
        return BatchBuilder(rows, config.transform)

    if group is None and mesh is None:
        if config.device is None:
            return local(make(), config.update_lag, None), None
        if config.update_lag is None:
            from geartrain.replay.device.device_rows import DeviceRows

            samplers = make()
            check_reachable(samplers)
            on_device = DeviceRows(samplers, selection, config.batch_size, config.device)
            return BatchBuilder(on_device), on_device.close
        group = SingleRank()  # a group of one, whose updates wait as those of any group
    from geartrain.replay.distributed.lagged_rows import LaggedRows, check_lag
    from geartrain.replay.distributed.members import join_job
    from geartrain.replay.distributed.packed_rank_rows import PackedRankRows
    from geartrain.replay.distributed.rank_rows import RankRows

    topology = topology_of(group, mesh)
    ranks = as_rank_group(group, topology.members, config.timeout_s)
    members = None if ranks is group else topology.members
    alone = ranks.size == 1 and config.device is None

    def make_checked() -> list[StoreSampler]:
        samplers = make()
        if not alone:
            check_lag(samplers, config)
        return samplers

    try:
        samplers = run_on_all_ranks(ranks, make_checked)
        if alone:
            join_job(ranks, topology.position, samplers, selection, config)  # which has its checks
            return local(samplers, config.prefetch + config.extra_lag, ranks), None
        if packed:
            ragged = PackedRankRows(samplers, selection, config, ranks, topology.position)
            return BatchBuilder(ragged, config.transform), None
        source = LaggedRows if config.extra_lag else RankRows
        rows = source(samplers, selection, config, ranks, topology.position, members)
    except BaseException:
        if ranks is not group:
            ranks.close()
        raise
    return BatchBuilder(rows, config.transform), rows.assembler.close
