"""Environment families: one adapter file for each simulator, whose optional package is imported on use.

    environments = make("mujoco/Hopper-v5", n=8)
    store = gt.Store.create("hopper", recorded_fields(environments.fields()), max_length=1000, capacity=1000)
    Actor(environments, policy, store).run(steps=100_000)

`make` returns a `geartrain.actors.VectorEnv`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import Any

from geartrain.actors.envs.adapters import VectorEnv
from geartrain.core.arguments import did_you_mean
from geartrain.errors import ArgumentError, MissingDependencyError

#: Families of environments, which are also extras, with the package that each needs.
FAMILIES = {
    "atari": "ale_py",
    "mujoco": "mujoco",
    "fetch": "gymnasium_robotics",
    "smax": "jaxmarl",
    "vmas": "vmas",
}
#: Files of families that have another name.
_MODULES = {"fetch": "robotics"}


def make(name: str, n: int = 1, **options: Any) -> VectorEnv:
    """n environments of one kind.

    Args:
        name: "family/task", as in "mujoco/Hopper-v5"; the family's file lists the tasks.
        n: how many, stepped together.
        options: of the family, see `make` in its file.

    Raises:
        ArgumentError: no such family or task, or n below 1.
        MissingDependencyError: the family's package is not installed; says how to install it.
    """
    family, _, task = name.partition("/")
    if family not in FAMILIES or not task:
        raise ArgumentError(
            f"an environment is named family/task with a family of {', '.join(FAMILIES)}; found {name!r}"
            f"{did_you_mean(family, FAMILIES)}"
        )
    if n < 1:
        raise ArgumentError(f"n must be at least 1, found {n}")
    need(family)
    made: VectorEnv = importlib.import_module(f"{__name__}.{module_of(family)}").make(task, n, **options)
    return made


def module_of(family: str) -> str:
    """Name of the module here that makes a family's environments."""
    return _MODULES.get(family, family)


def need(family: str) -> None:
    """Raises `MissingDependencyError`, with the line that installs it, when a family's package is not there."""
    package = FAMILIES[family]
    try:
        with quiet():
            importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{family} environments need {package} ({error}): pip install 'geartrain[{family}]'"
        ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses output of packages during their import."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


__all__ = ["FAMILIES", "make", "module_of", "need", "quiet"]
