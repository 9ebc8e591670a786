"""Simulators that actors step, each family in one file with one optional package, imported on use.

    environments = make("mujoco/Hopper-v5", n=8)
    store = gt.Store.create("hopper", recorded_fields(environments.fields()), max_length=1000, capacity=1000)
    Actor(environments, policy, store).run(steps=100_000)

What `make` returns has the face of `geartrain.actors.Environments`, and episodes go into a store as any others do.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import Any

from geartrain.actors.envs.adapters import Environments
from geartrain.errors import ArgumentError, MissingDependencyError

#: The families, each a file here and an extra of the same name, and the package that must be there.
FAMILIES = {
    "atari": "ale_py",
    "mujoco": "mujoco",
    "fetch": "gymnasium_robotics",
    "smax": "jaxmarl",
    "vmas": "vmas",
}


def make(name: str, n: int = 1, **options: Any) -> Environments:
    """n environments of one kind.

    Args:
        name: "family/task", as in "mujoco/Hopper-v5"; what tasks there are stands in the family's file.
        n: how many, stepped together.
        options: the family's own, see `make` in its file.

    Raises:
        ArgumentError: no such family or task, or n below 1.
        MissingDependencyError: the family's package is not installed; says how to install it.
    """
    family, _, task = name.partition("/")
    if family not in FAMILIES or not task:
        raise ArgumentError(
            f"an environment is named family/task with a family of {', '.join(FAMILIES)}; found {name!r}"
        )
    if n < 1:
        raise ArgumentError(f"n must be at least 1, found {n}")
    need(family)
    made: Environments = importlib.import_module(f"{__name__}.{family}").make(task, n, **options)
    return made


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
    """Keeps what packages print when they are imported (greetings, what they lack) from the user's screen."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


__all__ = ["FAMILIES", "make", "need", "quiet"]
