"""Batches of transitions as LeRobot has them, and their concatenation."""

from __future__ import annotations

from typing import TypedDict

import torch

from geartrain.errors import ArgumentError


class BatchTransition(TypedDict):
    """A batch of B transitions: tensors whose first axis is B; entries of states and infos by key."""

    state: dict[str, torch.Tensor]
    action: torch.Tensor
    reward: torch.Tensor
    next_state: dict[str, torch.Tensor]
    done: torch.Tensor
    truncated: torch.Tensor
    complementary_info: dict[str, torch.Tensor] | None


def concatenate_batch_transitions(
    left_batch_transitions: BatchTransition, right_batch_transition: BatchTransition
) -> BatchTransition:
    """Appends one batch to another, which is changed in place and returned; tensors are new.

    Infos that only one of the batches has are left as they are.

    Raises:
        ArgumentError: the states of the right batch lack an entry that those of the left one have.
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


__all__ = ["BatchTransition", "concatenate_batch_transitions"]
