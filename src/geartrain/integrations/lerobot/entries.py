"""Entries of transitions: maps each tensor to a field of the store, with its shape and dtype.

LeRobot stores everything as float32. This buffer stores uint8, int8, bool and float16 as they are, because float32
represents each of their values exactly. Batches are float32 in any case.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.arguments import check_text, check_type, shown
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, IncompatibleStoreError, SchemaError
from geartrain.integrations.transitions.layout import ACTION, INFO, fields_of, observation_field

_KEPT = {
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.bool: np.dtype(np.bool_),
    torch.float16: np.dtype(np.float16),
}
_FLOAT32 = np.dtype(np.float32)
_STATE_PREFIX, _INFO_PREFIX = observation_field(""), f"{INFO}."


class TransitionEntry(NamedTuple):
    """One tensor of a transition: its field, and its shape and dtype there."""

    field: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(field: str, what: str, value: Any) -> TransitionEntry:
        """Of a value; an axis of length 1 in front is that of a batch of one.

        Raises:
            ArgumentError: it is neither a tensor nor a number.
        """
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            return TransitionEntry(field, shape[1:] if shape[:1] == (1,) else shape, _KEPT.get(value.dtype, _FLOAT32))
        if isinstance(value, (int, float)):
            return TransitionEntry(field, (), _FLOAT32)
        raise ArgumentError(f"Unsupported type {type(value)} for {what}: transitions hold tensors and numbers")

    def array(self, what: str, value: Any) -> NDArray[Any]:
        """A transition's value in the field's dtype, without a copy if it has that already.

        Raises:
            ArgumentError: it is neither a tensor nor a number. SchemaError: its shape differs from the field's, or
                its dtype does and the field's does not hold all of its values.
        """
        if isinstance(value, torch.Tensor):
            array: NDArray[Any]
            try:
                array = value.numpy()
            except (RuntimeError, TypeError):  # needs a gradient, is elsewhere, or NumPy lacks its dtype
                plain = value.detach().cpu()
                array = (plain if plain.dtype in _KEPT else plain.float()).numpy()
        elif isinstance(value, (int, float)):
            array = self._number(what, value)
        else:
            raise ArgumentError(f"Unsupported type {type(value)} for {what}: transitions hold tensors and numbers")
        if array.shape != self.shape:
            if array.shape != (1, *self.shape):
                raise SchemaError(
                    f"{what} has shape {array.shape}; the first transition's had {self.shape}, and so has the buffer"
                )
            array = array[0]
        if array.dtype != self.dtype:
            if self.dtype != _FLOAT32:
                raise SchemaError(
                    f"{what} is {array.dtype}; the first transition's was {self.dtype}, and so is the buffer"
                )
            array = array.astype(np.float32)
        return array if array.flags.c_contiguous else array.copy()

    def _number(self, what: str, value: float) -> NDArray[Any]:
        """A number of Python's in the field's dtype, which holds it exactly unless it is float32."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                array = np.array(float(value)).astype(self.dtype)
        except OverflowError:  # no float is so large
            raise ArgumentError(f"{what} is a number that float32 holds, found {shown(value)}") from None
        if self.dtype != _FLOAT32 and float(array) != value and not np.isnan(array):
            raise SchemaError(f"{what} is {value}; the first transition's was {self.dtype}, which does not hold it")
        return array


class TransitionEntries:
    """Entries of a buffer's transitions: states, action and infos.

    Attributes:
        states: entries of the states, by key.
        action: entry of the action.
        infos: entries of the infos, by key; None if transitions have no infos.
    """

    def __init__(
        self, states: dict[str, TransitionEntry], action: TransitionEntry, infos: dict[str, TransitionEntry] | None
    ) -> None:
        self.states, self.action, self.infos = states, action, infos
        self._told: set[str] = set()  # what is not kept, which was said

    @staticmethod
    def of_transition(state: Any, action: Any, infos: Mapping[str, Any] | None) -> TransitionEntries:
        """Entries of a buffer, from its first transition.

        Raises:
            ArgumentError: a state is no dict or empty, infos are no dict, a key is no text, or there is something else
                than tensors and numbers.
        """
        if not isinstance(state, Mapping) or not state:
            raise ArgumentError(f"a state is a dict of tensors by key, found {state!r}")
        check_type("complementary_info is a dict or None", infos, Mapping | None)
        for what, given in (("state", state), ("complementary_info", infos or {})):
            for key in given:
                check_text(f"a key of {what}", key)
        made = TransitionEntry.of
        states = {key: made(_STATE_PREFIX + key, f"state[{key}]", value) for key, value in state.items()}
        kept = None
        if infos is not None:
            kept = {key: made(_INFO_PREFIX + key, f"complementary_info[{key}]", value) for key, value in infos.items()}
        return TransitionEntries(states, made(ACTION, "action", action), kept)

    @staticmethod
    def of_fields(name: str, fields: Mapping[str, Field]) -> TransitionEntries:
        """Entries of a store that another process has made.

        Raises:
            IncompatibleStoreError: it has other fields than a replay buffer of LeRobot's. One of Stable-Baselines3
                whose observations are dicts has no others where its dtypes are among those that are kept here.
        """
        found = {each: TransitionEntry(each, field.shape, field.numpy_dtype) for each, field in fields.items()}
        states = {each.removeprefix(_STATE_PREFIX): found[each] for each in found if each.startswith(_STATE_PREFIX)}
        infos = {each.removeprefix(_INFO_PREFIX): found[each] for each in found if each.startswith(_INFO_PREFIX)}
        if ACTION not in found or not states:
            raise IncompatibleStoreError(f"the store {name!r} is not of a replay buffer of LeRobot's: {list(fields)}")
        entries = TransitionEntries(states, found[ACTION], infos or None)
        kept = {*_KEPT.values(), _FLOAT32}
        if entries.fields() != dict(fields) or any(found[each].dtype not in kept for each in entries.drawn()):
            raise IncompatibleStoreError(f"the store {name!r} is not of a replay buffer of LeRobot's: {list(fields)}")
        return entries

    def fields(self) -> dict[str, Field]:
        """The fields of the buffer's store."""
        observations = {entry.field: (entry.shape, entry.dtype) for entry in self.states.values()}
        infos = {each.field: Field(each.shape, each.dtype.name) for each in (self.infos or {}).values()}
        return fields_of(observations, (self.action.shape, self.action.dtype), 0) | infos

    def state_arrays(self, what: str, given: Any) -> dict[str, NDArray[Any]]:
        """A state's entries by field.

        Raises:
            ArgumentError: it is no dict. SchemaError: one is missing, or does not fit.
        """
        check_type(f"{what} is a dict of tensors by key", given, Mapping)
        if len(given) > len(self.states):
            self._tell_of(what, given, self.states)
        missing = self.states.keys() - given.keys()
        if missing:
            raise SchemaError(f"{what} lacks {', '.join(sorted(missing))}, which the first transition had")
        return {entry.field: entry.array(key, given[key]) for key, entry in self.states.items()}

    def info_arrays(self, given: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Infos by field; zeros where they lack one.

        Raises:
            ArgumentError: they are no dict. SchemaError: one does not fit.
        """
        check_type("complementary_info is a dict or None", given, Mapping)
        infos = self.infos or {}
        if not given.keys() <= infos.keys():
            self._tell_of("complementary_info", given, infos)
        return {
            entry.field: entry.array(key, given[key]) if key in given else np.zeros(entry.shape, entry.dtype)
            for key, entry in infos.items()
        }

    def _tell_of(self, what: str, given: Mapping[str, Any], kept: Mapping[str, TransitionEntry]) -> None:
        """Warns of entries that are not kept, once."""
        new = {f"{what}[{check_text(f'a key of {what}', key)}]" for key in given if key not in kept} - self._told
        if new:
            self._told |= new
            warnings.warn(
                f"dropped complementary_info that the first transition did not have: {', '.join(sorted(new))}",
                stacklevel=4,
            )

    def drawn(self) -> list[str]:
        """The fields of states, actions and infos."""
        return [each.field for each in (*self.states.values(), self.action, *(self.infos or {}).values())]


def number_of(what: str, value: Any) -> float:
    """A number, or the one that a tensor or array holds.

    Raises:
        ArgumentError: it is none: text, or more than one element.
    """
    if type(value) is float:
        return value
    one = value
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.shape.count(1) == len(value.shape):
        one = value.item()
    if isinstance(one, (int, float, np.number, np.bool_)):
        with contextlib.suppress(OverflowError):
            return float(one)
    raise ArgumentError(f"{what} is a number, or a tensor or array of one, found {shown(value)}")


def flag_of(what: str, value: Any) -> bool:
    """A bool, or a number that is 0 or 1, as `number_of` takes it.

    Raises:
        ArgumentError: it is neither.
    """
    number = number_of(what, value)
    if number not in (0, 1):
        raise ArgumentError(f"{what} is True or False, 0 or 1, found {shown(value)}")
    return bool(number)


__all__ = ["TransitionEntries", "TransitionEntry", "flag_of", "number_of"]
