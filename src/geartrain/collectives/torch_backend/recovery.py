"""Recovery from a lost reducer: reopens the group without it, and brings all ranks to the latest completed step.

    while step < STEPS:
        try:
            loss_of(model(batch(step))).backward()
        except RuntimeError as error:               # names the reducer
            step = reform(step, [net, optimizer])   # raises instead where a rank was lost
            model = DistributedDataParallel(net)    # an interrupted backward leaves DDP unusable
            continue
        optimizer.step()
        step += 1

If a reducer dies in the middle of a step, some ranks may already have its answer. These ranks complete the step, and
the others do not. A rank that completed the step has the sum of all gradients, so training continues from its state. No
step is lost or done twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from geartrain.collectives.probe import unreachable
from geartrain.collectives.torch_backend.polled_store import PolledStore
from geartrain.collectives.torch_backend.process_group import ProcessGroup
from geartrain.errors import PeerLostError


def reform(step: int = 0, state: Sequence[Any] = (), *, group: Any = None, timeout_s: float = 60.0) -> int:
    """Reopens a group with the reducers that every rank still reaches, and brings all ranks to one step.

    All ranks of the group call it, after an all-reduce failed. It costs a probe of every reducer and one all-gather
    over the group's store. If the ranks completed different steps, `state` is broadcast as well.

    Args:
        step: number of steps that this rank completed, its optimizer's included.
        state: training state: modules, optimizers, anything with `state_dict` and `load_state_dict`. Ranks that are
            behind receive it from one that completed most steps.
        group: a process group of the backend "geartrain"; by default the whole job.
        timeout_s: longest wait for the other ranks, in seconds.

    Returns:
        The step to continue from, the same on all ranks.

    Raises:
        PeerLostError: a rank did not join in time. The message names it. Restart the job (torchrun), or make a group of
            the remaining ranks.
        ValueError: the group has another backend.

    Examples:
        >>> import torch
        >>> from geartrain.errors import PeerError
        >>> def all_reduced(gradient, step, state):  # in the training loop of every rank
        ...     try:
        ...         torch.distributed.all_reduce(gradient)
        ...     except PeerError:
        ...         step = reform(step, state)  # and repeat from that step
        ...     return step
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"only a group of the backend 'geartrain' can be re-formed, found {type(group).__name__}")
    options = group.options
    blamed = group.blamed()  # a stopped process still accepts connections
    blamed |= unreachable(options.reducers)
    reached = [address for address in options.reducers if address not in blamed]
    states = _all_gather(group, {"step": step, "reached": reached}, timeout_s)
    lost = [address for address in options.reducers if any(address not in one["reached"] for one in states)]
    group.reopen(options.without_reducers(lost))
    steps = [one["step"] for one in states]
    furthest = max(range(len(steps)), key=lambda rank: (steps[rank], -rank))
    if min(steps) != max(steps):
        _broadcast_state(state, furthest, group)
    return int(max(steps))


def _all_gather(group: ProcessGroup, mine: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """One value of each rank, over the group's store."""
    store = PolledStore(f"reform/{group.options.epoch}/", group.get_group_store())
    store.set(str(group.rank()), json.dumps(mine))
    until_s = time.monotonic() + timeout_s
    missing = list(range(group.size()))
    while missing:
        missing = [rank for rank in missing if not store.check([str(rank)])]
        if missing and time.monotonic() > until_s:
            raise PeerLostError(
                f"rank(s) {', '.join(map(str, missing))} did not join to re-form the group in {timeout_s} s"
            )
        with suppress(RuntimeError):
            store.wait([str(rank) for rank in missing], timedelta(seconds=0.1))
    return [json.loads(store.get(str(rank))) for rank in range(group.size())]


def _broadcast_state(state: Sequence[Any], source: int, group: ProcessGroup) -> None:
    """One rank's state to all others, over Gloo or NCCL."""
    states = [one.state_dict() for one in state] if group.rank() == source else [None] * len(state)
    dist.broadcast_object_list(states, group_src=source, group=group, device=torch.device("cpu"))
    if group.rank() != source:
        for one, given in zip(state, states, strict=True):
            one.load_state_dict(given)
