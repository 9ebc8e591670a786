"""All-reduce and other collectives of host arrays over TCP and shared memory, with or without dedicated reducers.

    group = Group(rank, world_size, store=store)           # every rank; a torch store, or init_method="tcp://..."
    group.all_reduce(array)                                # in place; the same bits on every rank
    work = group.all_reduce_async(gradient, op="avg")      # overlaps with the caller's computation
    work.wait()

An array is divided into shares. Each share has one owner, which sums it in rank order and returns it to all ranks.
Owners are the ranks themselves, dedicated reducers (`geartrain reducer`), or both. The planner chooses the best shares
for the speed of the links. With `hierarchical=True`, the ranks of each host are summed first.

docs/collectives.md is the guide. native/collectives/sharded_allreduce.h documents the protocol.
"""

from pathlib import Path

import geartrain._native as _native
from geartrain.collectives.group import Group
from geartrain.collectives.group_arguments import GroupOptions
from geartrain.collectives.reducer import Reducer
from geartrain.collectives.work import Work
from geartrain.errors import MissingDependencyError

__all__ = ["Group", "GroupOptions", "Reducer", "Work", "include_path", "library_path"]


def library_path() -> Path:
    """Path of the shared library with the C interface.

    Raises:
        MissingDependencyError: this build has none.

    Examples:
        >>> from geartrain import collectives
        >>> collectives.library_path().name
        'libgeartrain_allreduce.so'
    """
    return _shipped("lib/libgeartrain_allreduce.so")


def include_path() -> Path:
    """Directory of geartrain_allreduce.h, the header of the C interface.

    Examples:
        >>> from geartrain import collectives
        >>> (collectives.include_path() / "geartrain_allreduce.h").exists()
        True
    """
    return _shipped("include/geartrain_allreduce.h").parent


def _shipped(name: str) -> Path:
    # Built files are beside the native module, also where an editable install has the Python files elsewhere.
    path = Path(str(_native.__file__)).parent / name
    if path.exists():
        return path
    raise MissingDependencyError(
        f"this build of geartrain has no {name}: install it from a wheel, or build that target"
    )
