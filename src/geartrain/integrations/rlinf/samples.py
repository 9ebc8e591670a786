"""Samples of a trajectory: the tensors (T, B, ...) of T steps of B environments that a replay buffer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.arguments import check_text
from geartrain.core.dtypes import DTYPES
from geartrain.errors import ArgumentError, SchemaError

#: Attributes of a trajectory that are dicts of tensors.
GROUPS = ("curr_obs", "next_obs", "forward_inputs")
#: What else has one more entry an epoch: flags one before its first step, values one after its last.
_FLAGS = ("dones", "terminations", "truncations")
_WITH_MORE = (*_FLAGS, "prev_values")
#: Torch dtypes that NumPy lacks are stored as integers of their size.
STORED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_HELD = {getattr(torch, name) for name, known in DTYPES.items() if known.numpy_name and hasattr(torch, name)} | {
    *STORED_AS
}
# The largest words that so many bytes behind a multiple of 8 are made of.
_WORDS = ["u8", "u1", "u2", "u1", "u4", "u1", "u2", "u1"]
# Steps are compared in pieces of so many bytes.
_COMPARED_BYTES = 1 << 18

#: Where a tensor is: the name of an attribute, or of a dict and a key.
Place = tuple[str, ...]


class TrajectorySamples(NamedTuple):
    """Tensors (T, B, ...) of one trajectory by place, as NumPy arrays, with their torch dtypes."""

    steps: int
    environments: int
    arrays: dict[Place, NDArray[Any]]
    dtypes: dict[Place, torch.dtype]

    @property
    def total(self) -> int:
        """Samples: steps of all environments."""
        return self.steps * self.environments

    @staticmethod
    def of(trajectory: Any) -> TrajectorySamples | None:
        """Those of a trajectory: what its attributes have; None for an empty one, without rewards or log-probabilities.

        Attributes that are None or no tensors, tensors of fewer than two axes, and entries of dicts that are no tensors
        are left out.

        Raises:
            ArgumentError: it has no attributes. SchemaError: tensors that are not (T, B, ...).
        """
        try:
            given = vars(trajectory)
        except TypeError:
            raise ArgumentError(
                f"a trajectory has tensors as attributes, as RLinf's have; found {type(trajectory).__name__}"
            ) from None
        first = given.get("prev_logprobs")
        if first is None:
            first = given.get("rewards")
        if first is None:
            return None
        if not isinstance(first, torch.Tensor) or first.ndim < 2:
            raise SchemaError(
                "rewards and prev_logprobs of a trajectory are tensors (T, B, ...), found "
                f"{tuple(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__}"
            )
        steps, environments = first.shape[:2]
        if not steps or not environments:
            return None
        arrays: dict[Place, NDArray[Any]] = {}
        dtypes: dict[Place, torch.dtype] = {}

        def take(place: Place, tensor: torch.Tensor) -> None:
            dtype = tensor.dtype
            array = array_of(place, tensor, dtype)
            shape = array.shape
            if shape[0] > steps and place[0] in _WITH_MORE and len(place) == 1:
                array = _of_steps(place[0], array, steps)
                shape = array.shape
            if shape[0] != steps or shape[1] != environments:
                raise SchemaError(
                    f"{'.'.join(place)} of a trajectory of {steps} steps of {environments} environments has shape "
                    f"{shape}"
                )
            arrays[place], dtypes[place] = array, dtype

        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.ndim >= 2:
                take((name,), value)
        for group in GROUPS:
            entries = given.get(group)
            if entries is None:
                continue
            if not isinstance(entries, Mapping):
                raise SchemaError(f"{group} of a trajectory is a dict of tensors, found {type(entries).__name__}")
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.ndim >= 2:
                    take((group, check_text(f"a key of {group}", key)), value)
        return TrajectorySamples(steps, environments, arrays, dtypes)

    def begins(self, observations: list[str]) -> NDArray[np.bool_]:
        """Which steps do not continue the one before, (B, T): it led to other observations."""
        begins = np.zeros((self.steps, self.environments), np.bool_)
        begins[0] = True
        for key in observations:
            here, led_to = (_bytes_of(self.arrays[group, key]) for group in ("curr_obs", "next_obs"))
            words = here.shape[2]
            at_once = max(1, _COMPARED_BYTES // max(1, here[0].nbytes))
            for at in range(1, self.steps, at_once):
                end = min(self.steps, at + at_once)
                differ = here[at:end] != led_to[at - 1 : end - 1]
                # Few words differ, and a reduction of each step's would cost more than the comparison.
                if differ.any():
                    begins[at:end].reshape(-1)[differ.reshape(-1).nonzero()[0] // words] = True
        found: NDArray[np.bool_] = begins.T
        return found


def _of_steps(name: str, array: NDArray[Any], steps: int) -> NDArray[Any]:
    """Entries of the T steps, where an array has one more for each epoch."""
    epochs = len(array) - steps
    if steps % epochs:
        raise SchemaError(f"{name} of a trajectory of {steps} steps has {len(array)} entries")
    if epochs == 1:
        return array[1:] if name in _FLAGS else array[:-1]
    by_epoch = array.reshape(epochs, steps // epochs + 1, *array.shape[1:])
    kept = by_epoch[:, 1:] if name in _FLAGS else by_epoch[:, :-1]
    return kept.reshape(steps, *array.shape[1:])


def array_of(place: Place, tensor: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """A tensor's values as an array; not a copy where it is in host memory.

    Raises:
        SchemaError: stores have no such dtype.
    """
    array: NDArray[Any]
    if dtype not in _HELD:
        raise SchemaError(f"{'.'.join(place)} is {dtype}, which a store does not hold")
    if dtype in STORED_AS:
        tensor = tensor.detach().view(STORED_AS[dtype])
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # needs a gradient, or is elsewhere
        array = tensor.detach().cpu().numpy()
    return array


def tensor_of(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of an array of `array_of`, over its memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype in STORED_AS else tensor


def _bytes_of(array: NDArray[Any]) -> NDArray[Any]:
    """(T, B, words) of the largest words that a step is made of."""
    plain = np.ascontiguousarray(array).reshape(*array.shape[:2], -1)
    nbytes = plain.shape[2] * plain.itemsize
    return plain.view(_WORDS[nbytes % 8])


__all__ = ["GROUPS", "STORED_AS", "Place", "TrajectorySamples", "array_of", "tensor_of"]
