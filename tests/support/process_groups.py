"""Ranks that are threads, each with a process group of the backend "geartrain"."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deadlines import patience

from geartrain.collectives.torch_backend.options import BackendOptions
from geartrain.collectives.torch_backend.process_group import ProcessGroup


def ranks(
    size: int,
    body: Callable[[ProcessGroup, int], Any],
    options: BackendOptions | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Runs `body(group, rank)` on each rank; returns what each returned or raised."""
    store = dist.HashStore()
    timeout = timedelta(seconds=patience(20) if timeout_s is None else timeout_s)

    def run(rank: int) -> Any:
        group = ProcessGroup(store, rank, size, timeout, name="test", options=options)
        try:
            return body(group, rank)
        except Exception as error:
            return error
        finally:
            group.shutdown()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def right(found: list[Any]) -> list[Any]:
    """What the ranks returned; raises what one of them has raised."""
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found
