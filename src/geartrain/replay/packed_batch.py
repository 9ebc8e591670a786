"""Batches of stores with axes or tasks: rows of their own lengths, packed one behind the other.

They are drawn, counted, redrawn and released as all batches are (sampler.py). A native transfer copies their rows, in
the place of the fields of padded batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_names_of, leave_out, some_of
from geartrain.core.keys import Keys
from geartrain.core.tasks import RowPlan
from geartrain.errors import ArgumentError, FieldError, StaleKeyError
from geartrain.replay.batch import METADATA, Array, Batch, unknown_field
from geartrain.replay.batch_lengths import BatchLengths, lengths_of_one
from geartrain.replay.mini_batches import MiniBatch, mini_batches
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.selection.strategy import ORDERS, traits_of
from geartrain.store.packed import AxisBounds, PackedFields, PackedValues, RowReader, check_ready
from geartrain.store.store import Store

if TYPE_CHECKING:
    import torch

    from geartrain.replay.config import ReplayConfig


class PackedBatch(PackedFields, Batch):
    """A batch of rows with lengths of their own, as a `Batch` and as `PackedFields`. Made by replays and `fetch`.

    `start` is 0 and `length` is 1 for each row, and there is no mask: such rows have no steps.
    """

    __slots__ = ("_bounds", "_device", "_found", "_lengths", "_names", "_output", "_plan", "_shown")
    _found: PackedValues | None  # None: all values are in `_shown`
    _lengths: BatchLengths | None  # of the global batch; None where this is all of it, and nobody has asked
    _names: Sequence[str]
    _plan: RowPlan
    _output: str
    _shown: dict[str, Any]
    _bounds: dict[str, AxisBounds]
    _device: Any

    def __new__(cls, **values: Any) -> Any:
        """Made of a batch's own attributes, as `dataclasses.replace` does, it is a plain batch."""
        return Batch(**values)

    def mini_batches(self, n: int, epochs: int = 1, seed: int = 0) -> Iterator[MiniBatch]:
        """Cuts the global batch into mini-batches of n rows, in a new random order for each epoch.

        The rows of a mini-batch are the same on any number of ranks: they follow from `seed`, `step` and the epoch.
        Each rank has those that its batch has. The batch may be cut as often as you like.

        Args:
            n: rows of a mini-batch over all ranks. It divides the rows of the global batch.
            epochs: how often each row is trained.
            seed: of the orders, 0 to 2**64 - 1; the same on all ranks.

        Returns:
            An iterator over mini-batches, all of the first epoch first.

        Raises:
            ArgumentError: `n` does not divide the number of rows, or a number is out of range.
        """
        if self._lengths is None:
            found = lengths_of_one(self, self._plan, self._names, self._known_axes(), len(self))
            object.__setattr__(self, "_lengths", found)
        assert self._lengths is not None
        return mini_batches(self, self._lengths, self.step or 0, n, epochs, seed)

    def _read(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._names:
                raise unknown_field(name, self._names)
        assert self._found is not None
        self.show(self._names, self._found, names)

    def _read_axis(self, axis: str) -> None:
        if axis not in self._known_axes() or self._found is None:
            raise FieldError(f"the batch has no field of the axis {axis!r}; it has {some_of(self._names)}")
        self.show_axis(axis, self._found)

    def _known_axes(self) -> list[str]:
        return axes_of(self._plan, self._names)

    def _rows(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Any:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def fields(self) -> dict[str, Array]:  # type: ignore[override]
        """Values by name. `for name in batch`, `batch.items()` and `batch.values()` work as for a dict."""
        return {name: self[name] for name in self._names}

    @property
    def nbytes(self) -> int:
        if self._found is not None:
            return self._found.nbytes
        return sum(sum(map(len, value)) if isinstance(value, list) else int(value.nbytes) for value in self.values())

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> PackedBatch:
        plain = Batch({}, self.keys, mask=None, **_metadata_of(self))
        moved = plain.to(device, non_blocking=non_blocking)
        return self._with(moved, lambda value: value.to(moved.start.device, non_blocking=non_blocking))

    def clone(self) -> PackedBatch:
        return self._with(self, lambda value: value.clone())

    def copy_(self, other: Batch) -> Batch:
        raise ArgumentError("packed batches differ in shape, so that none is copied over another: use the new one")

    def _with(self, metadata: Batch, change: Callable[[Any], Any]) -> PackedBatch:
        """The same with values that are changed one by one."""
        shown = {name: value if isinstance(value, list) else change(value) for name, value in self.fields.items()}
        bounds = {axis: self.bounds_of(axis) for axis in self._known_axes()}
        described = {name: None if value is None else change(value) for name, value in _metadata_of(metadata).items()}
        return _made(
            self._plan, self._output, self._names, shown, bounds, self.keys, described, self.step, lengths=self._lengths
        )

    def __reduce__(self) -> tuple[Any, ...]:
        bounds = {axis: self.bounds_of(axis) for axis in self._known_axes()}
        described = _metadata_of(self)
        about = (self.keys, described, self.step, None, self._lengths)
        return _made, (self._plan, self._output, self._names, self.fields, bounds, *about)

    def __repr__(self) -> str:
        return f"PackedBatch({len(self)} rows: {some_of(self._names)})"


def _metadata_of(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in METADATA if name not in ("mask", "cu_seqlens")}


def axes_of(plan: RowPlan, names: Sequence[str]) -> list[str]:
    """The axes of fields, and those by which they are divided."""
    found: dict[str, None] = {}
    for name in names:
        axis = plan.fields[name].axis
        while axis is not None:
            found[axis] = None
            axis = plan.divided_into(axis)
    return list(found)


def _made(
    plan: RowPlan,
    output: str,
    names: Sequence[str],
    shown: dict[str, Any],
    bounds: dict[str, AxisBounds],
    keys: Keys,
    metadata: Mapping[str, Any],
    step: int | None,
    found: PackedValues | None = None,
    lengths: BatchLengths | None = None,
) -> PackedBatch:
    made: PackedBatch = object.__new__(PackedBatch)
    device = getattr(metadata["start"], "device", None)
    values = {
        "_plan": plan,
        "_output": output,
        "_names": names,
        "_shown": shown,
        "_bounds": bounds,
        "_found": found,
        "_device": device,
        "_lengths": lengths,
        "keys": keys,
        "mask": None,
        "step": step,
        **metadata,
    }
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def packed_batch(
    reader: RowReader,
    output: str,
    found: PackedValues,
    keys: Keys,
    version: NDArray[np.int64],
    *,
    probability: NDArray[np.float64] | None = None,
    importance_weights: NDArray[np.float64] | None = None,
    step: int | None = None,
    lengths: BatchLengths | None = None,
) -> PackedBatch:
    """A batch of rows that were read.

    Args:
        reader: what was read.
        output: "torch" or "numpy".
        found: the values.
        keys: keys of the rows; of a global batch they have draw numbers.
        version, probability, importance_weights: (n,) of the rows; None where there are none.
        step: number of the batch.
        lengths: of the global batch, where this is a part of one.
    """
    n = len(keys)
    metadata: dict[str, Any] = {
        "start": np.zeros(n, np.int32),
        "length": np.ones(n, np.int32),
        "version": version,
        "probability": probability,
        "importance_weights": importance_weights,
        "draw": None if keys.draw is None else np.array(keys.draw),
    }
    if output == "torch":
        import torch

        metadata = {name: None if value is None else torch.from_numpy(value) for name, value in metadata.items()}
    return _made(reader.plan, output, reader.names, {}, {}, keys, metadata, step, found, lengths)


def repeated_probability(form: str) -> float:
    """The probability of rows that are drawn again, by the form of the strategy: 1 in an order, else not known, NaN."""
    return 1.0 if form in ORDERS else np.nan


def numbered(keys: Keys, store_id: int) -> Keys:
    """Keys of a global batch of one rank, with draw numbers."""
    n = len(keys)
    shard, draw = np.zeros(n, np.uint16), np.arange(n)
    return Keys.of_rows(keys.row, keys.generation, store_id, shard=shard, draw=draw)


def fetch_packed(
    reader_of: Callable[[Sequence[str]], RowReader],
    plan: RowPlan,
    keys: Keys,
    fields: Sequence[str] | None,
    output: str,
    on_stale: Literal["raise", "drop"],
) -> PackedBatch:
    """`geartrain.fetch` of a store with axes or tasks; see there.

    Args:
        reader_of: makes the reader of fields, by their names.
        plan, keys, fields, output, on_stale: of the store, and as for `geartrain.fetch`.

    Raises:
        FieldError: a task that writes one of the fields is not done for some of the rows.
    """
    names = list(plan.fields if fields is None else check_names_of("fields", fields))
    reader = reader_of(names)
    while True:
        found = reader.read(keys)
        torn = found.torn()
        if not torn.any():
            return packed_batch(reader, output, found, keys, found.versions())
        check_ready(reader, keys, found)
        if on_stale == "raise":
            raise StaleKeyError(
                f"{int(torn.sum())} of {len(keys)} keys are stale: their rows were dropped or freed "
                f"(first: row {keys.row[np.flatnonzero(torn)[0]]})"
            )
        keys = keys[np.flatnonzero(torn == 0)]


def check_packed(stores: Sequence[Store], selection: Selection, config: ReplayConfig) -> bool:
    """Whether the batches of a replay are packed ones. Raises `ArgumentError` for what such stores do not have."""
    if all(store.plan is None for store in stores):
        balance = config.balance is not None
        leave_out(f"rows of {stores[0].name!r} have no lengths of different axes", balance=balance)
        return False
    what = f"the store {next(store for store in stores if store.plan is not None).name!r} has axes, strings or tasks"
    refused = {
        "several stores (Mixture)": len(stores) > 1,
        "update_lag": config.update_lag is not None,
        "device": config.device is not None,
        "inputs or targets": config.inputs is not None or config.targets is not None,
        "window": config.window is not None,
        "view": config.view is not None,
    }
    given = [name for name, is_given in refused.items() if is_given]
    if given:
        advice = {
            "device": "; move batches with batch.to(device)",
            "window": "; a batch has all items of its rows",
            "view": "; a batch has all items of its rows",
        }.get(given[0], "; its batches are drawn from one store, by ranks that all read all fields")
        raise ArgumentError(f"{what}, and a replay of it takes no {', '.join(given)}{advice}")
    if config.cost is not None and (plan := stores[0].plan) is not None:
        plan.axis(config.cost.axis)  # which refuses what is none
    over_steps = isinstance(selection, Epochs) and selection.over == "steps"
    if over_steps or any(traits_of(each).over_steps for each in strategies_of(selection)):
        raise ArgumentError(f"{what}: its rows have no steps, so that rows must be drawn; found {selection!r}")
    return True


def room_of(store: Store) -> tuple[int, int]:
    """Most rows in flight, and most rows to draw from, of a store or shard; 0 for no limit."""
    tasks = store.plan is not None and bool(store.plan.tasks)
    drawn_once = tasks and store.options["max_times_sampled"] is not None
    return store.limiter.state().most_in_flight or 0, store.capacity if drawn_once else 0


def check_room(rooms: Sequence[tuple[int, int]], config: ReplayConfig) -> None:
    """Raises `ArgumentError` where the stores can never have as many rows as a batch needs.

    Args:
        rooms: `room_of` each store or shard.
    """
    rows = max(config.batch_size, config.min_rows or 0)
    in_flight, capacities = zip(*rooms, strict=True)
    for limits, what, remedy in (
        (capacities, "the store has room for {} rows", "create the store with a larger capacity="),
        (in_flight, "the store's limiter lets {} rows be in flight", "raise limiter.set(in_flight=)"),
    ):
        if min(limits) > 0 and sum(limits) < rows:
            raise ArgumentError(
                f"{what.format(sum(limits))}, and a batch that needs {rows} would never be drawn: {remedy}"
            )


__all__ = [
    "PackedBatch",
    "axes_of",
    "check_packed",
    "check_room",
    "fetch_packed",
    "numbered",
    "packed_batch",
    "repeated_probability",
]
