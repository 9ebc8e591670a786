"""Batch assembly on one rank: combines the rank's own rows with rows from other ranks. The choice of the assembler.

An assembler provides the memory for this rank's batch, into which rows are read (rank_reader.py). It also provides the
memory for messages to other ranks, unless these are in host memory. When all rows are read, the assembler exchanges the
messages and builds the batch:

| assembler | this rank's own rows | rows of other ranks |
|---|---|---|
| `HostAssembler` | copied by the CPU into the batch | row messages, copied into the batch |
| `StagedAssembler` | copied by the CPU into pinned memory | row messages, copied there too; one copy to the device |
| `GatherAssembler` | gathered by the GPU into the batch | row messages in pinned memory, scattered by the GPU |
| `NcclAssembler` | the same | gathered by their rank's GPU; all-to-all from GPU to GPU as the batch is taken |

The first three exchange the same messages. The messages of a rank do not depend on where it builds its own batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from geartrain.core.arguments import check_keywords, leave_out
from geartrain.core.lifetime import on_error
from geartrain.errors import ArgumentError
from geartrain.replay.device.options import DeviceOptions, Path
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.distributed.assembly_device import DeviceAssembler, GatherAssembler, StagedAssembler
from geartrain.replay.distributed.assembly_nccl import NcclAssembler
from geartrain.replay.fetch_plan import FetchPlan

if TYPE_CHECKING:
    from geartrain.device.device import Device
    from geartrain.device.nccl import DeviceGroup


def check_options(options: DeviceOptions, names: Sequence[str], has_peers: bool) -> None:
    """Raises `ArgumentError` for options that several ranks do not have."""
    check_keywords("convert", options.convert, names)
    if options.path == "copy":
        raise ArgumentError("path='copy' is for one rank: over several ranks use path='gather' or 'staged'")
    if has_peers and (options.path == "gather" or options.exchange == "nccl"):
        asked = "exchange='nccl'" if options.exchange == "nccl" else "path='gather'"
        raise ArgumentError(
            f"{asked} does not work with tensor parallelism, which copies the batch from host memory: use path='staged'"
        )
    if options.exchange == "nccl":
        staged = options.path == "staged" and options.path
        leave_out("exchange='nccl' needs rows that the GPU gathers", path=staged)


def open_assembler(
    options: DeviceOptions,
    plans: list[dict[tuple[str, ...], FetchPlan]],
    fields: tuple[str, ...],
    has_peers: bool,
    make_group: Callable[[Device], DeviceGroup] | None,
    rank: int,
) -> DeviceAssembler:
    """The assembler of batches on a device.

    Args:
        options: as `Replay` was given them, and checked.
        plans: for each store, by the fields that some rank gets.
        fields: that this rank gets.
        has_peers: whether the batch is copied to tensor-parallel peers.
        make_group: for exchange="nccl", makes the group; None without a torch process group.
        rank: this one.

    Raises:
        PinError, ArgumentError: an option that was named explicitly is not viable here.
    """
    session = DeviceSession(options.device)

    def open_targets(names: tuple[str, ...], path: Path) -> list[DeviceTarget]:
        convert = {name: into for name, into in options.convert.items() if name in names}
        # A batch is packed when it is complete; rows of other ranks may be longer or shorter.
        here = dataclasses.replace(options, convert=convert, path=path, packed=options.packed and path == "staged")
        opened = []
        for of in plans:
            opened.append(DeviceTarget(session.device, session.stream, of[names], here, copies=False))
            session.targets.append(opened[-1])
        return opened

    with on_error(session.close):
        if options.exchange == "nccl":
            if make_group is None:
                raise ArgumentError("exchange='nccl' needs a process group of torch.distributed, or a mesh over one")
            others = {names: open_targets(names, "gather") for names in plans[0]}
            return NcclAssembler(session, others.get(fields, []), options, make_group(session.device), others, rank)
        if not fields:
            return GatherAssembler(session, [], options, "this rank reads nothing", rank)
        path: Path = "staged" if has_peers else options.path
        why = "tensor-parallel peers get copies of the batch" if has_peers else ""
        mine = open_targets(fields, path)
        staged = next((one for one in mine if one.path == "staged"), None)
        if staged is None:
            return GatherAssembler(session, mine, options, mine[0].why, rank)
        why = why or staged.why
        for one in mine:
            one.close()
        session.targets.clear()
        return StagedAssembler(session, open_targets(fields, "staged"), options, why, rank)


__all__ = ["check_options", "open_assembler"]
