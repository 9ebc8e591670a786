"""Entry point that makes geartrain the default torch.distributed backend: `GEARTRAIN_ALLREDUCE=1 torchrun train.py`.

torch calls `autoload` at the end of `import torch` (entry point group "torch.backends"). Without the variable it reads
the environment and returns. With it, `init_process_group()`, `init_process_group("gloo")` and
`init_process_group("cpu:gloo")` make a group of the backend "geartrain"
(geartrain/collectives/torch_backend/process_group.py); every other backend is left as it is.

This module is outside of the package, and imports nothing at its top but the standard library, because `import
geartrain` would load NumPy and the native library into every program that uses torch. An exception from `autoload`
would make `import torch` fail, so it becomes a warning. Other faults of the installation are errors of
`init_process_group`: a rank that silently fell back to Gloo would make the others wait.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

VARIABLE = "GEARTRAIN_ALLREDUCE"
BACKEND = "geartrain"
REPLACED = ("undefined", "gloo", "cpu:gloo")


def autoload() -> None:
    """Called by `import torch`; has an effect only where the variable is set, and not to 0. Never raises."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    try:
        _wrap_init_process_group()
    except Exception as error:
        warnings.warn(f"{VARIABLE} is set, and has no effect: {type(error).__name__}: {error}", stacklevel=2)


def _wrap_init_process_group() -> None:
    from importlib.util import find_spec

    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed")
    if find_spec("geartrain") is None:
        raise RuntimeError("the package geartrain is not installed here")
    # Without a backend's name torch picks one late and requires the type GLOO, so that a default for the device "cpu"
    # does not suffice: the name has to be given when init_process_group is called.
    original = dist.init_process_group
    if getattr(original, "_geartrain", False):
        return
    wrapper = _wrapper(original)
    for name, module in list(
        sys.modules.items()
    ):  # distributed_c10d, and modules that imported it from there: device_mesh
        if name.startswith("torch.distributed") and getattr(module, "init_process_group", None) is original:
            module.init_process_group = wrapper  # type: ignore[attr-defined]


def _wrapper(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if (backend or "undefined").lower() in (*REPLACED, BACKEND):
            _register()
            backend = BACKEND
        original(backend, *args, **kwargs)

    init_process_group._geartrain = True  # type: ignore[attr-defined]
    return init_process_group


def _register() -> None:
    """Registers the backend, by importing it."""
    try:
        import geartrain.collectives.torch_backend.process_group  # noqa: F401
    except Exception as error:
        raise RuntimeError(
            f"{VARIABLE} asks for geartrain's all-reduce, which cannot be imported: {type(error).__name__}: {error} "
            f"(unset {VARIABLE} on all ranks to go on without it)"
        ) from error
