"""Slow path of a recorder's step: converts tensors, numbers, dicts and other dtypes for the native call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_unmasked, did_you_mean, shown
from geartrain.core.dtypes import DTYPES, as_dtype, as_raw, plain_tensor, torch_dtype
from geartrain.core.schema import Field, of_field
from geartrain.errors import ArgumentError, FieldError, SchemaError


class StepArguments:
    """Converts what is given to a recorder of `n_envs` environments.

    Args:
        fields: fields of the store. obs, values: names of the fields given by `obs`, and by name.
    """

    def __init__(self, fields: Mapping[str, Field], n_envs: int, obs: Sequence[str], values: Sequence[str]) -> None:
        self._fields, self._n_envs, self._obs, self._values = fields, n_envs, obs, values

    def convert(self, argument: str, field: str | None, given: dict[str, Any]) -> None:
        """Replaces an argument, or its values of one field, by what the native call accepts.

        Raises:
            FieldError, SchemaError, ArgumentError: it cannot be converted; says why.
        """
        if argument in ("terminated", "truncated", "mask"):
            given[argument] = self._flags(argument, given[argument])
        elif argument == "final_obs":
            given[argument] = self._final(given)
        elif argument == "observation":
            flat = self._flat(given[argument])
            given[argument] = flat if field is None else {**flat, field: self._array(field, flat[field])}
        elif not isinstance(given["values"], Mapping):
            raise ArgumentError(f"a step's values are a dict of arrays by field, found {shown(given['values'])}")
        elif field is not None and field in given["values"]:
            given["values"] = {**given["values"], field: self._array(field, given["values"][field])}
        else:
            missing, unknown = set(self._values) - set(given["values"]), set(given["values"]) - set(self._values)
            raise FieldError(
                f"a step needs a value for every field: missing {sorted(missing)}, unknown {sorted(unknown)} (the "
                f"observations are {', '.join(self._obs)}){did_you_mean(unknown, missing)}"
            )

    def contiguous(self, values: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Contiguous arrays of the fields' dtypes. Raises `SchemaError`."""
        arrays = {}
        for name, value in values.items():
            try:
                arrays[name] = np.ascontiguousarray(value, self._fields[name].numpy_dtype)
            except KeyError:
                raise FieldError(
                    f"the store has no field {shown(name)}; it has {', '.join(self._fields)}"
                    f"{did_you_mean(name, self._fields)}"
                ) from None
            except (TypeError, ValueError, OverflowError) as error:
                raise SchemaError(f"{name!r} does not fit the store's fields: {error}") from None
        return arrays

    def _flags(self, name: str, value: Any) -> NDArray[np.bool_]:
        array = _as_array(name, _on_host(name, value))
        if array.dtype != np.bool_ or array.shape not in (
            (self._n_envs,),
            () if self._n_envs == 1 else (self._n_envs,),
        ):
            raise SchemaError(f"`{name}` must be bool ({self._n_envs},), found {array.dtype} {array.shape}")
        return np.ascontiguousarray(array)

    def _array(self, name: str, value: Any) -> Any:
        """A field's values in the form that the native call accepts. Raises `SchemaError` if they do not fit."""
        field = self._fields[name]
        if hasattr(value, "detach"):
            value = _fetched(name, value)
            value = value.numpy() if DTYPES[field.dtype].numpy_name is not None else self._raw(name, value)
        array = _as_array(name, value)
        shape = (self._n_envs, *field.shape)
        if array.shape != shape and not (self._n_envs == 1 and array.shape == field.shape):
            raise SchemaError(
                f"{name!r} of {self._n_envs} environments has shape {array.shape}; the store takes {shape}"
                f"{f' or {field.shape}' if self._n_envs == 1 else ''}"
            )
        if DTYPES[field.dtype].numpy_name is None and (
            array.dtype == f"uint{8 * field.itemsize}" or array.dtype.name == field.dtype
        ):
            return np.ascontiguousarray(array).view(f"uint{8 * field.itemsize}")
        wanted = field.numpy_dtype
        number = not isinstance(value, np.ndarray | np.generic)  # Python numbers take the field's dtype, if they fit
        if array.dtype.kind in "SUOMm":
            raise SchemaError(f"{name!r} holds {field.dtype}, found {array.dtype}, which is no number: {shown(value)}")
        is_complex = array.dtype.kind == "c" and wanted.kind != "c"  # whose imaginary part would be lost
        if is_complex or not (number or np.can_cast(array.dtype, wanted, "same_kind")):
            raise SchemaError(f"{name!r} holds {field.dtype}, found {array.dtype}, which is of another kind")
        made = np.ascontiguousarray(array, wanted)
        if number and not np.array_equal(made, array, equal_nan=array.dtype.kind == "f") and wanted.kind != "f":
            raise SchemaError(f"{name!r} holds {field.dtype}, in which {shown(value)} has no place")
        return made if DTYPES[field.dtype].numpy_name is not None else as_raw(made, DTYPES[field.dtype])

    def _raw(self, name: str, value: Any) -> Any:
        """A tensor of a type that NumPy lacks as integers; other floats are converted to it first."""
        dtype = DTYPES[self._fields[name].dtype]
        try:
            found = as_dtype(value.dtype)
        except SchemaError as error:
            raise of_field(name, error) from None
        if found is not dtype:
            if not value.dtype.is_floating_point or not torch_dtype(dtype).is_floating_point:
                raise SchemaError(f"{name!r} holds {dtype.name}, found {found.name}, which is of another kind")
            value = value.to(torch_dtype(dtype))
        return as_raw(value, dtype).numpy().view(f"uint{8 * dtype.itemsize}")

    def _flat(self, obs: Any) -> dict[str, Any]:
        """An observation by field."""
        if not isinstance(obs, Mapping | tuple):
            if len(self._obs) != 1:
                raise FieldError(
                    f"the observation is {len(self._obs)} fields ({', '.join(self._obs)}): give a "
                    f"dict, found {type(obs).__name__}"
                )
            return {self._obs[0]: obs}
        flat = _leaves(obs)
        found: dict[str, Any] = {}
        for name in self._obs:
            part = name.partition(".")[2] or name
            if name not in flat and part not in flat:
                raise FieldError(f"the observation has no {name!r}; it has {', '.join(flat)}{did_you_mean(name, flat)}")
            found[name] = flat[name] if name in flat else flat[part]
        if len(flat) != len(self._obs):
            raise FieldError(f"the observation has {', '.join(flat)}; of these the store has {', '.join(found)}")
        return found

    def _final(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """The observations that episodes ended with, as arrays of all environments; None where none has ended."""
        ended = self._flags("terminated", given["terminated"]) | self._flags("truncated", given["truncated"])
        if given["mask"] is not None:
            ended = ended & self._flags("mask", given["mask"])
        final = given["final_obs"]
        if not ended.any():
            return None
        several = isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)
        if not several:
            return {name: self._array(name, value) for name, value in self._flat(final).items()}
        fields = self._fields
        made = {name: np.zeros((self._n_envs, *fields[name].shape), fields[name].numpy_dtype) for name in self._obs}
        for number in np.flatnonzero(ended):
            if len(final) != self._n_envs or final[number] is None:
                raise SchemaError(f"the episode of environment {number} has ended, and it has no final observation")
            for name, value in self._flat(final[number]).items():
                one = _as_array(name, _on_host(name, value))
                if one.shape != fields[name].shape:
                    raise SchemaError(
                        f"the final {name!r} of environment {number} has shape {one.shape}; the store takes "
                        f"{fields[name].shape}"
                    )
                made[name][number] = one
        return {name: self._array(name, value) for name, value in made.items()}


def _fetched(name: str, tensor: Any) -> Any:
    """A tensor in host memory. Raises `SchemaError` if it has no values, as on the meta device."""
    try:
        return plain_tensor(tensor).cpu()
    except (RuntimeError, NotImplementedError) as error:
        raise SchemaError(f"{name!r} is a tensor on {tensor.device} that cannot be read: {error}") from None


def _on_host(name: str, value: Any) -> Any:
    """A tensor in host memory, in a type that NumPy has; anything else as it is."""
    if not hasattr(value, "detach"):
        return value
    value = _fetched(name, value)
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value  # which changes no value


def _as_array(name: str, value: Any) -> NDArray[Any]:
    check_unmasked(f"{name!r}", value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of another device, or sparse
        raise SchemaError(f"{name!r} is no array: {error}") from None


def _leaves(obs: Any, prefix: str = "") -> dict[str, Any]:
    """A nested observation by dotted names."""
    if not isinstance(obs, Mapping | tuple):
        return {prefix: obs}
    items = obs.items() if isinstance(obs, Mapping) else enumerate(obs)
    flat: dict[str, Any] = {}
    for name, each in items:
        flat.update(_leaves(each, f"{prefix}.{name}" if prefix else str(name)))
    return flat
