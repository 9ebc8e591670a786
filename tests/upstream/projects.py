"""Projects whose own tests judge a drop-in: their tests, and the plug-in that substitutes their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Project:
    """Args:
    package: its name in the package index, whose sdist holds the tests.
    folder: of its Python package, in a checkout and in the sdist.
    tests: files (globs) that use what is substituted.
    plugin: module of tests/upstream/plugins.
    installed: the tests run over the installed package, whose version the checkout's may not be exactly.
    extension: sources in the package's folder of the extension module `_FOLDER`, which is compiled for the installed
        torch where the wheel's does not load.
    options: of pytest.
    apart: what differs on purpose: by reason, parts of the ids of cases or of what their failures say. They are counted
        by themselves, and no fault.
    """

    package: str
    folder: str
    tests: tuple[str, ...]
    plugin: str
    installed: bool = False
    extension: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


PROJECTS = {
    "sb3": Project(
        "stable-baselines3",
        "stable_baselines3",
        (
            "tests/test_buffers.py",
            "tests/test_n_step_replay.py",
            "tests/test_her.py",
            "tests/test_save_load.py",
            "tests/test_vec_normalize.py",
        ),
        "sb3_buffers",
    ),
    "torchrl": Project(
        "torchrl",
        "torchrl",
        ("test/rb/test_*.py",),
        "torchrl_buffers",
        installed=True,
        extension=("csrc/pybind.cpp", "csrc/utils.cpp"),
    ),
}

__all__ = ["PROJECTS", "Project"]
