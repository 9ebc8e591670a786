"""Return values of policies: actions, alone or with extra fields.

All of these return the same: the function that `LocalPolicy` calls, an agent's function that `RemotePolicy` calls, and
a policy of your own. The value is one of

    actions
    (actions, extras)
    {"action": actions, **extras}        # as @rpc.batched(stack=True) takes it

`actions` is an array or a tensor (n, ...) for n environments. For a Dict space it is a dict of such arrays by name.
`extras` are arrays (n, ...) by the names of the store's fields. The extra "version" is not a field but the version of
the model that acted: a whole number, or (n,) of them.

An agent's function that is called for one environment returns values without the axis n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.envs.adapters import Arrays
from geartrain.core.arguments import shown
from geartrain.errors import ArgumentError

_FORMS = "the actions, (actions, extras), or a dict of extras with 'action' among them"
#: Arrays of an answer: "action", or "action.NAME" of a Dict space, and the extras.
Parts = dict[str, NDArray[Any]]


class Answer(NamedTuple):
    """Result of an `act` for n environments.

    Attributes:
        actions: (n, ...), in the form that environments accept.
        extras: by field, (n, ...).
        version: version of the model that acted; None if the policy did not return one.
    """

    actions: Arrays
    extras: Parts
    version: int | None


def read_answer(answer: Any, who: str, n: int) -> Answer:
    """An answer for n environments, as arrays.

    Args:
        answer: in any of its forms.
        who: has returned it, for errors.
        n: environments.

    Raises:
        ArgumentError: it has another form, or holds something else than numbers of n environments.
    """
    return _checked(_parts_of(answer, who, f"{n} environments"), who, n)


def join_answers(answers: Sequence[Any], who: str) -> Answer:
    """The answers for one environment each, as one for all of them. Raises as `read_answer`."""
    every = [_parts_of(answer, who, f"environment {number}") for number, answer in enumerate(answers)]
    shapes = {name: array.shape for name, array in every[0].items()}
    for number, parts in enumerate(every):
        if {name: array.shape for name, array in parts.items()} != shapes:
            raise ArgumentError(
                f"{who} returned {_described(every[0])} for environment 0, and {_described(parts)} for environment "
                f"{number}; expected the same names and shapes for all"
            )
    return _checked({name: np.stack([parts[name] for parts in every]) for name in shapes}, who, len(every))


def _parts_of(answer: Any, who: str, whom: str) -> Parts:
    extras: Mapping[Any, Any] = {}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        answer, extras = answer
    elif isinstance(answer, Mapping):
        if "action" not in answer:
            names = ", ".join(map(str, answer))
            raise ArgumentError(f"{who} returned a dict of {names or 'nothing'} for {whom}; expected {_FORMS}")
        answer, extras = answer["action"], {name: value for name, value in answer.items() if name != "action"}
    if isinstance(answer, Mapping):
        parts = {f"action.{name}": _array_of(value, f"action.{name}", who, whom) for name, value in answer.items()}
    else:
        parts = {"action": _array_of(answer, "action", who, whom)}
    for name, value in extras.items():
        parts[str(name)] = _array_of(value, str(name), who, whom)
    return parts


def _array_of(value: Any, name: str, who: str, whom: str) -> NDArray[Any]:
    try:
        array = _on_host(value) if hasattr(value, "detach") else np.asarray(value)
        if array.dtype.kind not in "OSUMm":
            return array
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths
        pass
    raise ArgumentError(f"{who} returned {name} as {shown(value)} for {whom}; expected numbers. An answer is {_FORMS}")


def _on_host(tensor: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    try:
        array: NDArray[Any] = tensor.numpy()
    except TypeError:  # NumPy lacks its type, whose values float32 has
        array = tensor.float().numpy()
    return array


def _checked(parts: Parts, who: str, n: int) -> Answer:
    version = parts.pop("version", None)
    for array in parts.values():
        if array.shape[:1] != (n,):
            raise ArgumentError(
                f"{who} returned {_described(parts)} for {n} environments; expected ({n}, ...) of each. An answer is "
                f"{_FORMS}"
            )
    if version is not None and (version.dtype.kind not in "iu" or version.shape not in ((), (n,))):
        found = _described({"version": version})
        raise ArgumentError(f"{who} returned {found} for {n} environments; expected a whole number, or ({n},) of them")
    actions: Any = parts.pop("action", None)
    if actions is None:
        names = [name for name in parts if name.partition(".")[0] == "action"]
        actions = {name.partition(".")[2]: parts.pop(name) for name in names}
    return Answer(actions, parts, None if version is None else int(version.min()))


def _described(parts: Parts) -> str:
    return ", ".join(f"{name} {array.dtype} {array.shape}".lstrip() for name, array in parts.items())


__all__ = ["Answer", "join_answers", "read_answer"]
