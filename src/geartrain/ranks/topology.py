"""Position of a rank in a mesh of data, pipeline and tensor parallelism.

A rank has three coordinates:

- `dp`: its replica of the model,
- `pp`: its stage of that replica's pipeline,
- `tp`: its part of that stage.

The first pipeline stage reads the inputs, and the last one the targets. Stages in between read nothing. Tensor-parallel
peers read the same batch (GEAR, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Union

from geartrain.core.arguments import at_most_one
from geartrain.core.extras import require_torch
from geartrain.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Names of mesh dimensions in use. Dimensions that replicate the model and that shard it (FSDP, HSDP) are both data
# parallel as far as batches go.
DATA = ("dp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "ddp", "replicate", "shard", "data")
PIPELINE = ("pp", "pipe", "pipeline", "stage")
TENSOR = ("tp", "tensor", "model", "sp", "cp")


@dataclass(frozen=True)
class MeshPosition:
    """Coordinates of a rank in the mesh, and the mesh's sizes."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank is of the first pipeline stage, which reads the inputs."""
        return self.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank is of the last pipeline stage, which reads the targets."""
        return self.pp == self.pp_size - 1


@dataclass(frozen=True)
class Topology:
    """The global ranks of a replay, in its group's order, and this rank's position in the mesh."""

    members: list[int]
    position: MeshPosition


class ModelParallelUnit(Protocol):
    """The usual mpu methods or functions, as `megatron.core.parallel_state` and DeepSpeed's grid have them; those of
    pp, tp and context parallelism may be missing."""

    def get_data_parallel_rank(self) -> int:
        """This rank's place among its replicas."""
        ...


class ProcessTopology(Protocol):
    """DeepSpeed's topology of processes: coordinates by rank."""

    def get_coord(self, rank: int) -> Any:
        """A rank's coordinates, by axis."""
        ...

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis."""
        ...


Mesh = Union["DeviceMesh", MeshPosition, ModelParallelUnit, ProcessTopology]


def topology_of(group: Any, mesh: Any) -> Topology:
    """The topology of a process group, of a mesh, or of a `RankGroup` with a `MeshPosition` as mesh.

    Raises:
        ArgumentError: both a process group and a mesh, or an object that is no mesh.
    """
    if group is not None and hasattr(group, "exchange"):  # a RankGroup
        position = mesh if isinstance(mesh, MeshPosition) else MeshPosition(dp=group.rank, dp_size=group.size)
        return Topology(list(range(group.size)), position)
    at_most_one(group=group, mesh=mesh)
    return of_group(group) if group is not None else of_mesh(mesh)


def of_group(group: Any) -> Topology:
    """Data parallelism over a `torch.distributed` process group."""
    require_torch("a group or mesh of ranks")
    import torch.distributed as dist

    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "this rank is not a member of the group: `torch.distributed.new_group` returned NON_GROUP_MEMBER here. "
            "Make the call on the group's ranks only"
        )
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"group is a process group of torch.distributed or a RankGroup, found {type(group).__name__}"
        )
    members = dist.get_process_group_ranks(group)
    return Topology(members, MeshPosition(dp=members.index(dist.get_rank()), dp_size=len(members)))


def of_mesh(mesh: Any) -> Topology:
    """From a `DeviceMesh` with named dimensions, a DeepSpeed grid, or an object with the usual mpu methods.

    Raises:
        ArgumentError: none of these, or a dimension of an unknown name.
    """
    if hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_coordinate"):
        return _of_device_mesh(mesh)
    if callable(getattr(mesh, "get_coord", None)) and callable(getattr(mesh, "get_dim", None)):
        return _of_process_topology(mesh)
    if _method(mesh, _DP_RANK) is not None:
        return _of_mpu(mesh)
    raise ArgumentError(
        f"mesh is a torch DeviceMesh with dimensions named among dp, pp and tp, a DeepSpeed grid, or an object with "
        f"get_data_parallel_rank() and the like; found {type(mesh).__name__}"
    )


def _of_device_mesh(mesh: Any) -> Topology:
    names: Sequence[str] | None = mesh.mesh_dim_names
    if not names:
        if mesh.ndim != 1:
            raise ArgumentError(f"a mesh of {mesh.ndim} dimensions must name them, e.g. mesh_dim_names=('pp', 'dp')")
        names = ("dp",)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ArgumentError("this rank is not in the mesh")
    at = {"dp": 0, "pp": 0, "tp": 0}
    sizes = {"dp": 1, "pp": 1, "tp": 1}
    for name, index, size in zip(names, coordinate, mesh.mesh.shape, strict=True):
        for axis, known in (("dp", DATA), ("pp", PIPELINE), ("tp", TENSOR)):
            if name in known:
                at[axis] = at[axis] * size + index
                sizes[axis] *= size
                break
        else:
            raise ArgumentError(
                f"the mesh has a dimension {name!r}, which may be data parallel ({', '.join(DATA)}), pipeline parallel "
                f"({', '.join(PIPELINE)}) or tensor parallel ({', '.join(TENSOR)}); rename it"
            )
    members = sorted(int(rank) for rank in mesh.mesh.flatten().tolist())
    return Topology(members, MeshPosition(at["dp"], at["pp"], at["tp"], sizes["dp"], sizes["pp"], sizes["tp"]))


def _of_process_topology(topology: Any) -> Topology:
    """DeepSpeed's `ProcessTopology`, with axes named pipe, data and model."""
    require_torch("a group or mesh of ranks")
    import torch.distributed as dist

    at = topology.get_coord(rank=dist.get_rank())
    sizes = {axis: max(1, int(topology.get_dim(axis))) for axis in ("data", "pipe", "model")}
    position = MeshPosition(
        getattr(at, "data", 0),
        getattr(at, "pipe", 0),
        getattr(at, "model", 0),
        sizes["data"],
        sizes["pipe"],
        sizes["model"],
    )
    return Topology(list(range(int(topology.world_size()))), position)


_DP_RANK = ("get_data_parallel_rank", "data_parallel_rank")
_DP_SIZE = ("get_data_parallel_world_size", "data_parallel_world_size")
_PP_RANK = ("get_pipe_parallel_rank", "get_pipeline_model_parallel_rank", "get_pipeline_parallel_rank", "get_stage_id")
_PP_SIZE = (
    "get_pipe_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipeline_parallel_world_size",
)
_TP_RANK = ("get_slice_parallel_rank", "get_tensor_model_parallel_rank", "get_model_parallel_rank")
_TP_SIZE = (
    "get_slice_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_model_parallel_world_size",
)
# Ranks that have parts of the same sequences: they read the same batch, as tensor-parallel ranks do.
_CP_RANK = ("get_context_parallel_rank",)
_CP_SIZE = ("get_context_parallel_world_size",)


def _method(mpu: Any, names: Sequence[str]) -> Any:
    return next((getattr(mpu, name) for name in names if callable(getattr(mpu, name, None))), None)


def _of_mpu(mpu: Any) -> Topology:
    require_torch("a group or mesh of ranks")
    import torch.distributed as dist

    def ask(names: Sequence[str], default: int) -> int:
        method = _method(mpu, names)
        return default if method is None else int(method())

    context, contexts = ask(_CP_RANK, 0), ask(_CP_SIZE, 1)
    position = MeshPosition(
        ask(_DP_RANK, 0),
        ask(_PP_RANK, 0),
        ask(_TP_RANK, 0) * contexts + context,
        ask(_DP_SIZE, 1),
        ask(_PP_SIZE, 1),
        ask(_TP_SIZE, 1) * contexts,
    )
    world = dist.get_world_size()
    if position.dp_size * position.pp_size * position.tp_size != world:
        raise ArgumentError(
            f"{position.dp_size} data x {position.pp_size} pipeline x {position.tp_size} tensor parallel ranks do not "
            f"make the {world} ranks of this job"
        )
    return Topology(list(range(world)), position)


__all__ = ["MeshPosition", "Topology", "of_group", "of_mesh", "topology_of"]
