"""Projects whose own tests judge a drop-in: their tests, and the plug-in that substitutes their classes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Project:
    """Args:
    package: its name in the package index, whose sdist holds the tests.
    folder: of its Python package, in a checkout and in the sdist.
    tests: files (globs) that use what is substituted.
    plugin: module of tests/upstream/plugins.
    """

    package: str
    folder: str
    tests: tuple[str, ...]
    plugin: str


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
}

__all__ = ["PROJECTS", "Project"]
