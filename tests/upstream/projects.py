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
    sources: folder of a checkout that holds the package's; "": the checkout itself.
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
    sources: str = ""
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
        # Cases that use torch.compile take minutes each; those of a distributed service make a storage of their own.
        options=("-k", "not compil and not distributed"),
        apart={
            "storages on other devices": ("device=meta,", "device=cuda,"),
            "storages that are shared before their first item, which torchrl refuses": ("test_error_noninit",),
            "torchrl's list of storages whose files are removed": ("test_cleanup_registry",),
            "what is kept is what the first item has: no further entries, none less": ("SchemaError: items have [",),
            "rows of different shapes, and how lazy stacks are written": (
                "_nontensor",
                "test_extend_lazystack[",
                "test_extend_lazystack_direct_write",
            ),
            "private attributes of the stock classes": (
                "has no attribute '_",
                "test_prb_update_max_priority",
                "test_prb_alpha_change_retransforms_trees",
            ),
            "a buffer that is made over items leaves their priorities as they are": (
                "test_prb_new_sampler_with_loaded_storage",
            ),
            "state dicts and files of the stock classes": ("legacy", "test_storage_dumps_loads"),
        },
    ),
    "flashbax": Project(
        "flashbax",
        "flashbax",
        (
            "flashbax/buffers/flat_buffer_test.py",
            "flashbax/buffers/prioritised_flat_buffer_test.py",
            "flashbax/buffers/trajectory_buffer_test.py",
        ),
        "flashbax_buffers",
        apart={
            "a buffer for each device (pmap): calls of a store are ordered": ("_does_not_smoke",),
            "init inside of jit": ("call it outside of jit",),
            "samples before can_sample is true": ("NotEnoughRowsError", "EmptyStoreError"),
            "trajectories that begin at multiples of a period": ("period is 1",),
        },
    ),
    "lerobot": Project(
        "lerobot",
        "lerobot",
        ("tests/utils/test_replay_buffer.py", "tests/rl/test_data_mixer.py"),
        "lerobot_buffers",
        sources="src",
        apart={
            "memory that optimize_memory saves: next states are stored once without it too": (
                "test_memory_optimization",
            ),
        },
    ),
}

__all__ = ["PROJECTS", "Project"]
