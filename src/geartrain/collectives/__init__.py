"""Arrays of many processes added up: all-reduce over TCP and shared memory, with or without reducers.

    group = Group(rank, world_size, store=store)           # every rank; torch's stores, or init_method="tcp://..."
    group.all_reduce(array)                                # in place; the same bits on every rank
    work = group.all_reduce_async(gradient, op="avg")      # goes on while the caller computes
    work.wait()

Every share of an array has one owner, who adds it up in the order of the ranks and returns it to all. Owners are the
ranks themselves, dedicated reducers (`geartrain reducer`), or any mixture: the vector of shares decides, and the
planner picks the best one from the links' rates. native/collectives/sharded_allreduce.h is the manual,
docs/collectives.md the guide.
"""

from pathlib import Path

import geartrain._native as _native
from geartrain.collectives.group import Group, Work
from geartrain.collectives.reducer import Reducer
from geartrain.errors import MissingDependencyError

__all__ = ["Group", "Reducer", "Work", "include_path", "library_path"]


def library_path() -> Path:
    """The shared library with the C interface, for programs that are not in Python.

    Raises `MissingDependencyError` in a build that has none.
    """
    return _shipped("lib/libgeartrain_allreduce.so")


def include_path() -> Path:
    """The directory of geartrain_allreduce.h."""
    return _shipped("include/geartrain_allreduce.h").parent


def _shipped(name: str) -> Path:
    # What was built stands beside the native module, also where an editable install has the Python files elsewhere.
    path = Path(str(_native.__file__)).parent / name
    if path.exists():
        return path
    raise MissingDependencyError(
        f"this build of geartrain has no {name}: install it from a wheel, or build that target"
    )
