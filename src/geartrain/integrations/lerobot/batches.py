"""Batches of transitions in LeRobot's format, and their concatenation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.errors import ArgumentError
from geartrain.integrations.lerobot.entries import TransitionEntries
from geartrain.integrations.transitions.layout import ACTION, DONE, FLAGS, REWARD, TIMEOUT

#: States that are augmented with `use_drq`: those whose keys begin so.
IMAGE_PREFIX = "observation.image"
# By flags, whether a transition was terminal, and whether it was the last one before a truncation.
_DONES, _TRUNCATEDS = (np.array([(flags & bit) != 0 for flags in range(256)], np.float32) for bit in (DONE, TIMEOUT))


class BatchTransition(TypedDict):
    """A batch of B transitions: a dict of tensors whose first axis is B; states and infos by key."""

    state: dict[str, torch.Tensor]
    action: torch.Tensor
    reward: torch.Tensor
    next_state: dict[str, torch.Tensor]
    done: torch.Tensor
    truncated: torch.Tensor
    complementary_info: dict[str, torch.Tensor] | None


def batch_of(
    fields: dict[str, NDArray[Any]],
    entries: TransitionEntries,
    device: str | torch.device,
    augmented: Callable[[torch.Tensor], torch.Tensor] | None,
) -> BatchTransition:
    """Internal: a batch of windows of two steps; images go through `augmented`."""
    state, next_state = {}, {}
    for key, entry in entries.states.items():
        both = _tensor(fields[entry.field], device)  # (B, 2, ...)
        if augmented is not None and key.startswith(IMAGE_PREFIX):
            images = augmented(both.flatten(0, 1))
            both = images.reshape(-1, 2, *images.shape[1:])
        state[key], next_state[key] = both[:, 0], both[:, 1]
    flags = fields[FLAGS][:, 1]
    infos = entries.infos
    return BatchTransition(
        state=state,
        action=_tensor(fields[ACTION][:, 1], device),
        reward=_tensor(fields[REWARD][:, 1], device),
        next_state=next_state,
        done=_tensor(_DONES.take(flags), device),
        truncated=_tensor(_TRUNCATEDS.take(flags), device),
        complementary_info=None
        if infos is None
        else {key: _tensor(fields[entry.field][:, 1], device) for key, entry in infos.items()},
    )


def _tensor(array: NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """float32 on `device`; over the batch's memory where it is so already, which is the batch's alone."""
    tensor = torch.from_numpy(array)
    if device != "cpu":
        tensor = tensor.to(device)
    return tensor if tensor.dtype is torch.float32 else tensor.float()


def concatenate_batch_transitions(
    left_batch_transitions: BatchTransition, right_batch_transition: BatchTransition
) -> BatchTransition:
    """Appends one batch to another, which is changed in place and returned. Its tensors are new.

    Infos that only one of the batches has stay as they are.

    Args:
        left_batch_transitions: batch that is extended.
        right_batch_transition: batch that is appended.

    Raises:
        ArgumentError: states of the right batch lack an entry that those of the left one have.
    """
    left, right = left_batch_transitions, right_batch_transition
    left["state"] = _appended("state", left["state"], right["state"])
    left["next_state"] = _appended("next_state", left["next_state"], right["next_state"])
    left["action"] = torch.cat([left["action"], right["action"]])
    left["reward"] = torch.cat([left["reward"], right["reward"]])
    left["done"] = torch.cat([left["done"], right["done"]])
    left["truncated"] = torch.cat([left["truncated"], right["truncated"]])
    infos, added = left.get("complementary_info"), right.get("complementary_info")
    if added is not None:
        if infos is None:
            left["complementary_info"] = added
        else:
            for key, value in added.items():
                infos[key] = torch.cat([infos[key], value]) if key in infos else value
    return left


def _appended(what: str, left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    missing = left.keys() - right.keys()
    if missing:
        raise ArgumentError(f"{what} of the right batch lacks {', '.join(sorted(missing))}")
    return {key: torch.cat([value, right[key]]) for key, value in left.items()}


__all__ = ["IMAGE_PREFIX", "BatchTransition", "batch_of", "concatenate_batch_transitions"]
