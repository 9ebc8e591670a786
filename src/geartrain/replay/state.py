"""Checks the `state_dict` of a replay before it is loaded, and what the state says of the replay's batches.

The state is a few numbers. A replay that loads them continues with the same batches, so it must draw as that one did.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from geartrain.core.arguments import SEED, check_real, check_text, check_type, check_whole, optional
from geartrain.errors import ArgumentError
from geartrain.replay.config import ReplayConfig
from geartrain.replay.windows import as_windows
from geartrain.selection.mixture import Mixture, Selection

#: Numbers of an array that a description lists. Of a longer one it has a checksum.
_MOST_SHOWN = 100


def described(selection: Selection, config: ReplayConfig) -> dict[str, Any]:
    """What the batches of a replay follow from, besides the store and the step, as JSON."""
    view = as_windows(config.window) if config.view is None else config.view
    return {"strategy": describe_strategy(selection), "batch_size": int(config.batch_size), "view": as_text(view)}


def checked_state(
    state: object,
    seed: int | None,
    description: Mapping[str, Any],
    identities: Mapping[str, list[str]],
    stores: int,
) -> dict[str, Any]:
    """A replay's state, for one with this seed and these stores.

    Args:
        description: what `described` says of the replay. Entries that the state lacks are not compared.
        identities: what the stores are known by, in their order, as the state has it under the same names.
        stores: how many there are.

    Raises:
        ArgumentError: this is no state; it was taken with another seed, strategy, batch size or view, with more or
            fewer stores, or with the same ones in another order.
    """
    found: dict[str, Any] = dict(check_type("a replay's state is the dict that `state_dict` returned", state, Mapping))
    if missing := [name for name in ("seed", "step", "state", "exponents") if name not in found]:
        raise ArgumentError(f"this is no state of a replay: it has no {', '.join(missing)}")
    optional(SEED, "the seed of the state", found["seed"])
    check_whole("the state's step", found["step"], 0, 2**63 - 1)
    check_whole("the state's clock", found.get("clock", 0), 0, 2**63 - 1)
    for name in ("state", "exponents", "stores", "names"):
        check_type(f"the state's {name!r} has an entry for each store", found.get(name, []), (list, tuple))
    if len(found["state"]) != len(found["exponents"]):
        raise ArgumentError(f"{len(found['state'])} states came with {len(found['exponents'])} exponents")
    for each in found["state"]:
        check_type("a strategy's state is a dict of numbers", each, Mapping)
        for name, value in each.items():
            least = 0 if isinstance(name, str) and name.partition("/")[0] == "after" else -(2**63)  # a cursor
            check_type("a strategy's state has whole numbers by name", name, str)
            check_whole(f"the state's {name!r}", value, least, 2**64 - 1)
    for alpha in found["exponents"]:
        check_real("an exponent of the state", alpha, above=0)
    for each in [*found.get("stores", []), *found.get("names", [])]:
        check_type("the state's stores and names are texts", each, str)
    if found["seed"] != seed:
        raise ArgumentError(f"the state was taken with seed {found['seed']}, the strategy has {seed}")
    if len(found["state"]) != stores:
        raise ArgumentError(f"the state was taken with {len(found['state'])} stores, there are {stores}")
    for what, mine in description.items():
        its = found.get(what, mine)
        check_whole(f"the state's {what}", its) if isinstance(mine, int) else check_text(f"the state's {what}", its)
        if its != mine:
            raise ArgumentError(
                f"the state was taken with {what}={str(its)[:300]}, this replay has {what}={mine}, so it would draw "
                f"other batches. Make the replay as it was; or, to go on with other batches, remove {what!r} from the "
                "state"
            )
    for what, now in identities.items():  # cursors and alphas are by place
        then = list(found.get(what, now))
        if then != now and sorted(then) == sorted(now):
            raise ArgumentError(f"the state was taken with the same stores in another order: {then}, found {now}")
    return found


def describe_strategy(selection: Selection) -> str:
    """A strategy as text that is equal in all processes with equal settings; functions are named."""
    if isinstance(selection, Mixture):
        shares = ", ".join(str(float(share)) for share in selection.shares)
        return f"Mixture([{shares}], [{', '.join(describe_strategy(each) for each in selection.strategies)}])"
    if not dataclasses.is_dataclass(selection):
        return type(selection).__qualname__
    settings = [f"{field.name}={as_text(getattr(selection, field.name))}" for field in dataclasses.fields(selection)]
    return f"{type(selection).__qualname__}({', '.join(settings)})"


def as_text(value: Any) -> str:
    """A setting as text that is equal in all processes with equal settings; functions are named."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [f"{field.name}={as_text(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if isinstance(value, np.generic | np.ndarray):
        size, value = value.size, value.tolist()  # NumPy's own texts depend on its version
        if size > _MOST_SHOWN:
            return f"{size} numbers with CRC-32 {zlib.crc32(repr(value).encode()):08x}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{as_text(key)}: {as_text(each)}' for key, each in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(as_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(as_text, value))})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))


__all__ = ["as_text", "checked_state", "describe_strategy", "described"]
