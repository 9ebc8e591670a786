"""Starter that makes geartrain the default torch.distributed backend: `torchrun -m geartrain_autoload train.py`.

In a script that is started so, `init_process_group()`, `init_process_group("gloo")` and
`init_process_group("cpu:gloo")` make a group of the backend "geartrain"
(geartrain/collectives/torch_backend/process_group.py), and `monitored_barrier` takes such groups. Jobs that name NCCL
("nccl", "cpu:gloo,cuda:nccl") choose:

    GEARTRAIN_ALLREDUCE_CUDA    "nccl"                             "cpu:gloo,cuda:nccl"
    not set                     as it is; rank 0 says so           as it is; rank 0 says so
    staged                      geartrain; rank 0 says so          geartrain; rank 0 says so
    nccl                        as it is                           geartrain for CPU tensors, NCCL for CUDA's

where geartrain makes all-reduces of CUDA tensors, staged through pinned memory, and collectives of CPU tensors; all
else of CUDA tensors stays NCCL's. Every other backend is left as it is, which rank 0 says. Each is one line of the
standard error, once a process. GEARTRAIN_ALLREDUCE=0 turns it off, so that one command runs with either. Processes that
the script starts itself call `autoload()`.

It is no entry point of torch ("torch.backends"), although torch would call one at the end of every `import torch`:
where geartrain's metadata is found and its modules are not, as with an editable installation on PYTHONPATH, such an
entry point makes `import torch` fail in programs that have never heard of geartrain, and nothing in its module can
mend that.

The module is outside of the package, and imports nothing at its top but the standard library: a script that turns the
backend off does not load the native library. What keeps the backend from working is an error of the start, or of
`init_process_group`: a rank that silently fell back to Gloo would make the others wait.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

VARIABLE = "GEARTRAIN_ALLREDUCE"
CUDA_VARIABLE = "GEARTRAIN_ALLREDUCE_CUDA"
BACKEND = "geartrain"
REPLACED = ("undefined", "gloo", "cpu:gloo")
WITH_NCCL = ({"cuda:nccl"}, {"cpu:gloo", "cuda:nccl"})


def autoload() -> None:
    """Makes geartrain the default backend of this process where the variable is set, and not to 0. Never raises."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    try:
        wrap_init_process_group()
    except Exception as error:
        warnings.warn(f"{VARIABLE} is set, and has no effect: {type(error).__name__}: {error}", stacklevel=2)


def wrap_init_process_group() -> None:
    """Makes geartrain the default backend of this process.

    Raises:
        RuntimeError: torch has no torch.distributed, or there is no geartrain.
    """
    from importlib.util import find_spec

    if find_spec("geartrain") is None:
        raise RuntimeError("the package geartrain is not installed here")
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed")
    # Without a backend's name torch picks one late and requires the type GLOO, so that a default for the device "cpu"
    # does not suffice: the name has to be given when init_process_group is called.
    if getattr(dist.init_process_group, "_geartrain", False):
        return
    for function, wrapper in (
        ("init_process_group", _init_process_group(dist.init_process_group)),
        ("monitored_barrier", _monitored_barrier(dist.monitored_barrier)),
    ):
        original = getattr(dist, function)
        # distributed_c10d, and modules that imported it from there: device_mesh
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed") and getattr(module, function, None) is original:
                setattr(module, function, wrapper)


def _init_process_group(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        name = (backend or "undefined").lower()
        if name in (*REPLACED, BACKEND) or (_names_nccl(name) and _takes_nccls_part(name)):
            _register()
            backend = BACKEND
        elif not _names_nccl(name):
            _say(
                f"{VARIABLE} is set, and has no effect on init_process_group({backend!r}), another backend: to have "
                f'geartrain\'s all-reduce, name "{BACKEND}" or none; {VARIABLE}=0 goes on without this line'
            )
        original(backend, *args, **kwargs)

    init_process_group._geartrain = True  # type: ignore[attr-defined]
    return init_process_group


def _names_nccl(name: str) -> bool:
    given = {part.strip() for part in name.split(",")}
    return name == "nccl" or given in WITH_NCCL


def _takes_nccls_part(name: str) -> bool:
    """Whether a job that names NCCL gets geartrain's group, as CUDA_VARIABLE says; says so, where it was not asked.

    Raises:
        ValueError: another value.
    """
    chosen = os.environ.get(CUDA_VARIABLE, "")
    if chosen not in ("", "staged", "nccl"):
        raise ValueError(f"{CUDA_VARIABLE} is staged or nccl, found {chosen!r}")
    gloo = "cpu:gloo" in name
    if chosen == "staged":
        _say(
            f"in init_process_group({name!r}) all-reduces of CUDA tensors take part, staged through pinned memory, and "
            f"so do collectives of CPU tensors; all other collectives of CUDA tensors stay NCCL's "
            f"({CUDA_VARIABLE}=staged; without it nothing takes part)"
        )
    elif not chosen:
        stay = "collectives of CUDA tensors stay NCCL's" + (", those of CPU tensors Gloo's" if gloo else "")
        _say(
            f"{VARIABLE} is set, and nothing in init_process_group({name!r}) takes part: {stay}. "
            f"{CUDA_VARIABLE}=staged lets all-reduces of CUDA tensors take part, staged through pinned memory, and "
            f"collectives of CPU tensors; {VARIABLE}=0 goes on without this line"
        )
    return chosen == "staged" or (chosen == "nccl" and gloo)


_said: set[str] = set()


def _say(text: str) -> None:
    """One line of the standard error, once a process and on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0" and text not in _said:
        _said.add(text)
        print(f"geartrain: {text}", file=sys.stderr, flush=True)


def _monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """torch's refuses every backend but the one of the name "gloo"; the groups have it."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        given = dist.group.WORLD if group is None else group
        if not isinstance(given, dist.ProcessGroup) or dist.get_backend(given) != BACKEND:
            original(group, timeout, wait_all_ranks)
            return
        if timeout is not None and not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        limit = {} if timeout is None else {"timeout": timeout}
        given.monitored_barrier(**limit, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]

    return monitored_barrier


def _register() -> None:
    """Registers the backend, by importing it."""
    try:
        import geartrain.collectives.torch_backend.process_group  # noqa: F401
    except Exception as error:
        raise RuntimeError(
            f"{VARIABLE} asks for geartrain's all-reduce, which cannot be imported: {type(error).__name__}: {error} "
            f"({VARIABLE}=0 on all ranks goes on without it)"
        ) from error
