"""A job's stores as one: fetches, updates and removes rows by key, on this host or on others.

stores = context.stores()                                      # under `geartrain launch`, with Job.serve_stores
batch = gt.fetch(stores, keys, window=20)                      # keys of several hosts' stores, in one batch
stores.update_priorities(keys, priorities)
stores["store-1"].insert(fields)                               # by name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.actors.remote_store import RemoteStore
from geartrain.core.arguments import check_array, check_type
from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError, SchemaError
from geartrain.replay.batch import Batch
from geartrain.replay.fetch import ServedRows, fetch
from geartrain.store.store import Store


class JobStores(ServedRows, Mapping[str, "Store | RemoteStore"]):
    """Several stores, local and remote, behind one interface: each key finds its store.

    It does not own the stores. Any thread may use it.

    Args:
        stores: stores of the same fields, by names of your choice.

    Raises:
        ArgumentError: there are no stores, their fields differ, or one store is there twice.

    Examples:
        >>> import geartrain as gt
        >>> from geartrain.actors import JobStores
        >>> fields = {"x": gt.Field((), "float32")}
        >>> mine, other = (gt.Store.create(fields, max_length=1, capacity=8) for _ in range(2))
        >>> stores = JobStores({"mine": mine, "other": other})
        >>> ones = stores["other"].insert({"x": np.ones((2, 1), np.float32)})
        >>> zeros = stores["mine"].insert({"x": np.zeros((2, 1), np.float32)})
        >>> keys = gt.Keys.join([ones, zeros])[[0, 2, 1]]
        >>> gt.fetch(stores, keys, output="numpy")["x"][:, 0].tolist()
        [1.0, 0.0, 1.0]
        >>> mine.close(); other.close()
    """

    def __init__(self, stores: Mapping[str, Store | RemoteStore]) -> None:
        rule = "JobStores takes stores by name, at least one, of this host (Store) or others (RemoteStore)"
        for each in check_type(rule, stores, Mapping).values():
            check_type(rule, each, Store | RemoteStore)
        if not stores:
            raise ArgumentError(f"{rule}, found none")
        self._stores = dict(stores)
        self._ids = np.array([each.id for each in stores.values()], np.uint64)
        if len(np.unique(self._ids)) < len(self._ids):
            raise ArgumentError(f"one store has several of the names {', '.join(map(repr, stores))}")
        names = list(stores)
        first = self._stores[names[0]]
        for name, store in self._stores.items():
            if dict(store.fields) != dict(first.fields) or store.per_step != first.per_step:
                raise ArgumentError(f"the stores {names[0]!r} and {name!r} differ in their fields, or in priority_per")

    def __getitem__(self, name: str) -> Store | RemoteStore:
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def fetch(
        self,
        keys: Keys,
        *,
        fields: Sequence[str] | None = None,
        window: int | None = None,
        ends: ArrayLike | None = None,
        pad: Literal["left", "right"] = "left",
        output: Literal["torch", "numpy"] = "torch",
        on_stale: Literal["raise", "drop"] = "raise",
    ) -> Batch:
        """Reads rows by key, as one batch in the order of the keys.

        Args:
            keys, fields, window, ends, pad, output, on_stale: as for `geartrain.fetch`.

        Raises:
            ArgumentError: a key is of none of these stores, or an argument does not fit them.
            StaleKeyError: rows were overwritten or removed since the keys were made, or during the copy.
            PeerLostError: a store's server is lost.

        Cost: one request to each other host, all at the same time, while this host's rows are copied. Rows of several
        stores are copied once more.
        """
        keys = check_keys(keys)
        places = self._places(keys)
        rule = f"ends are whole numbers, one for each of {len(keys)} keys"
        told = None if ends is None else check_array(rule, np.asarray(ends), (len(keys),), "iu")
        common: dict[str, Any] = {
            "fields": fields,
            "window": window,
            "pad": pad,
            "output": output,
            "on_stale": on_stale,
        }
        numbers = np.unique(places).tolist() or [0]
        stores = list(self._stores.values())
        if window is None and len({stores[number].max_length for number in numbers}) > 1:
            raise ArgumentError(
                "these stores differ in max_length, so whole rows do not fit into one batch: give window="
            )
        mine = {number: np.flatnonzero(places == number) for number in numbers}
        options = {at: common | ({} if told is None else {"ends": told[where]}) for at, where in mine.items()}
        begun = {
            number: store.begin_fetch(keys[mine[number]], **options[number])
            for number in numbers
            if isinstance(store := stores[number], RemoteStore)
        }
        parts: list[Batch] = []
        for number in numbers:
            store = stores[number]
            if isinstance(store, Store):
                parts.append(fetch(store, keys[mine[number]], **options[number]))
            else:
                parts.append(begun[number]())
        if len(parts) == 1:
            return parts[0]
        kept = [_kept(where, keys, part) for where, part in zip(mine.values(), parts, strict=True)]
        return _merged(parts, kept, keys)

    def update_priorities(self, keys: Keys | ArrayLike, priorities: ArrayLike) -> int:
        """Sets priorities of rows or steps, each in its own store; returns how many keys were stale.

        Args:
            keys: keys of rows or steps.
            priorities: (n,) finite and >= 0.

        Raises:
            ArgumentError: a key is of none of these stores, or there are not as many priorities as keys. Nothing is
                changed.
            SchemaError: a priority is negative or not finite. Nothing is changed.
            PeerLostError: a store's server is lost. Other stores may have been updated.
        """
        keys = check_keys(keys)
        places = self._places(keys)
        rule = f"priorities are numbers, one for each of {len(keys)} keys"
        values = check_array(rule, np.asarray(priorities), (len(keys),))
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if wrong.size:  # no store is to be changed where another one would refuse
            at = int(wrong[0])
            raise SchemaError(f"a priority is a finite number >= 0, priority {at} of {len(keys)} is {values[at]}")
        stale = 0
        for number, store in enumerate(self._stores.values()):
            if (mine := np.flatnonzero(places == number)).size:
                stale += store.update_priorities(keys[mine], values[mine])
        return stale

    def delete(self, keys: Keys | ArrayLike) -> int:
        """Removes rows, each from its own store; returns how many keys were stale.

        Args:
            keys: keys of the rows.
        """
        keys = check_keys(keys)
        places = self._places(keys)
        wanted = [(store, np.flatnonzero(places == number)) for number, store in enumerate(self._stores.values())]
        return sum(store.delete(keys[mine]) for store, mine in wanted if mine.size)

    def _places(self, keys: Keys) -> NDArray[np.int64]:
        if keys.store is None and len(self._stores) > 1 and len(keys):
            raise ArgumentError(
                "keys without a store cannot be used with several stores: pass them to one of them, by its name"
            )
        return keys.places_among(self._ids) if len(keys) else np.zeros(0, np.int64)

    def __repr__(self) -> str:
        return f"<JobStores {', '.join(f'{name}: {store!r}' for name, store in self._stores.items())}>"


def _kept(where: NDArray[np.int64], keys: Keys, part: Batch) -> NDArray[np.int64]:
    """Which of the keys a part has: all of `where`, or only keys of rows that were not dropped, in the same order."""
    if len(part.keys) == len(where):
        return where
    found, at = [], 0
    for number in where.tolist():
        if at < len(part.keys) and (keys.row[number], keys.generation[number]) == (
            part.keys.row[at],
            part.keys.generation[at],
        ):
            found.append(number)
            at += 1
    return np.array(found, np.int64)


def _merged(parts: list[Batch], kept: list[NDArray[np.int64]], keys: Keys) -> Batch:
    """One batch of the parts, in the order of the keys."""
    order = np.argsort(np.concatenate(kept), kind="stable")

    def merge(arrays: list[Any]) -> Any:
        if isinstance(arrays[0], np.ndarray):
            return np.concatenate(arrays)[order]
        import torch

        return torch.cat(arrays)[torch.from_numpy(order)]

    fields = {name: merge([part.fields[name] for part in parts]) for name in parts[0].fields}
    mask = None if parts[0].mask is None else merge([part.mask for part in parts])
    rest = [merge([getattr(part, name) for part in parts]) for name in ("start", "length", "version")]
    return Batch(fields, keys[np.sort(np.concatenate(kept))], mask, *rest)


__all__ = ["JobStores"]
