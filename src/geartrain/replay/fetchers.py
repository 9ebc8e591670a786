"""Cache of native fetchers, one for each kind of fetch from a store.

A kind is a combination of fields, window, padding, output and threads. The cache belongs to the store's handle and is
cleared when the handle is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import geartrain._native as _native
from geartrain.replay.fetch_plan import As, BatchFields, Pad, plan_given
from geartrain.store.store import Store

#: Of a handle; all are made again after that. A program has a few kinds of fetches.
MAX_KEPT = 32


class Fetcher(NamedTuple):
    """A native fetcher, and the fields of its batches."""

    native: _native.RowFetcher
    fields: BatchFields


class _Fetchers(dict[object, Fetcher]):
    """The fetchers of a handle, by the arguments of the fetch. They hold the native store and not the handle."""

    def close(self) -> None:
        """At the end of the handle's own `close`."""
        self.clear()


def fetcher_of(
    store: Store, fields: Sequence[str] | None, window: int | None, pad: Pad, output: As, threads: int | None
) -> Fetcher:
    """The fetcher of whole rows, or of windows up to the rows' last steps; arguments and errors as of `plan_given`.

    Cost: a look into a dict where one of this kind has been made.
    """
    kept: _Fetchers | None = store.kept.get(_Fetchers)
    if kept is None:
        kept = store.kept.setdefault(_Fetchers, _Fetchers())
    # By type as well: True is 1, and is refused where 1 is not.
    asked: tuple[object, ...] | None = (
        None if fields is None else tuple(fields),
        window,
        type(window),
        pad,
        output,
        threads,
        type(threads),
    )
    try:
        hash(asked)
    except TypeError:  # arrays for numbers, or what is refused below
        asked = None
    known = None if asked is None else kept.get(asked)
    if known is None:
        plan = plan_given(store, fields, window, pad, output, threads)
        native = _native.RowFetcher(
            store.native, plan.numbers, plan.window, plan.pad_left, 0 if threads is None else plan.threads
        )
        dtypes = {name: store.fields[name].dtype for name in plan.names}
        known = Fetcher(native, BatchFields(plan.names, dtypes, output))
        if asked is not None:
            if len(kept) >= MAX_KEPT:
                kept.clear()
            kept[asked] = known
    return known


__all__ = ["Fetcher", "fetcher_of"]
