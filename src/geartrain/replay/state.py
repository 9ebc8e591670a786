"""Checks the `state_dict` of a replay before it is loaded.

The state is a few numbers. A replay that loads them continues with the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain.core.arguments import SEED, check_real, check_type, check_whole, optional
from geartrain.errors import ArgumentError


def checked_state(state: object, seed: int | None, identities: Mapping[str, list[str]], stores: int) -> dict[str, Any]:
    """A replay's state, for one with this seed and these stores.

    Args:
        identities: what the stores are known by, in their order, as the state has it under the same names.
        stores: how many there are.

    Raises:
        ArgumentError: this is no state; it was taken with another seed, with more or fewer stores, or with the same
            ones in another order.
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
    for what, now in identities.items():  # cursors and alphas are by place
        then = list(found.get(what, now))
        if then != now and sorted(then) == sorted(now):
            raise ArgumentError(f"the state was taken with the same stores in another order: {then}, found {now}")
    return found


__all__ = ["checked_state"]
