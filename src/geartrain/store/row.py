"""Rows being written: views of their blocks, and the commit that makes them selectable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.core.schema import DTYPES, Field, as_tensor, numpy_dtype
from geartrain.errors import FieldError, SchemaError, StaleKeyError
from geartrain.store.rate_limiter import RateLimiter

if TYPE_CHECKING:
    import torch


class Columns:
    """Views of a store's columns, made once each: every block of a field as one array of all its blocks."""

    def __init__(self, native: _native.Store, fields: Mapping[str, Field], max_length: int) -> None:
        self.native = native
        self.fields = fields
        self.limiter = RateLimiter(native)
        self.max_length = max_length
        self._numbers = {name: number for number, name in enumerate(fields)}
        self._raw: dict[str, NDArray[Any]] = {}
        self._numpy: dict[str, NDArray[Any]] = {}
        self._torch: dict[str, torch.Tensor] = {}

    def number(self, name: str) -> int:
        """A field's place among the fields. Raises `FieldError` for an unknown one."""
        if name not in self._numbers:
            raise FieldError(f"the store has no field {name!r}; it has {', '.join(self._numbers)}")
        return self._numbers[name]

    def raw(self, name: str) -> NDArray[Any]:
        """The column, in unsigned integers for the types that NumPy lacks."""
        if name not in self._raw:
            self._raw[name] = self.native.column(self.number(name))
        return self._raw[name]

    def numpy(self, name: str) -> NDArray[Any]:
        """The column in its own dtype; raises `FieldError` where NumPy has none."""
        if name not in self._numpy:
            raw = self.raw(name)
            self._numpy[name] = raw.view(numpy_dtype(DTYPES[self.fields[name].dtype]))
        return self._numpy[name]

    def torch(self, name: str) -> torch.Tensor:
        """The column as a tensor over the same memory."""
        if name not in self._torch:
            self._torch[name] = as_tensor(self.raw(name), DTYPES[self.fields[name].dtype])
        return self._torch[name]


class Row:
    """A row being written: views of its blocks, its length, priority and version.

    `row["obs"]` is a NumPy view of the shared memory, `row.torch("obs")` a tensor over the same bytes. Set
    `length` when the row is shorter than the block.

    An episode can be selected while it goes on: `publish` it once its first steps are there, tell of more with
    `extend`, and `commit` it at its end. Steps that were told of must not be changed any more, nor fields without
    time. When its writer dies, the row stays with the steps that were told of.

    Example:
        >>> import geartrain as gt
        >>> store = gt.Store.create("doc-row", {"obs": gt.Field((3,), "float32")}, max_length=1000, capacity=4)
        >>> row = store.row()
        >>> for step in range(300):
        ...     row["obs"][step] = step
        ...     if step == 9:
        ...         _ = row.publish(length=10)
        ...     elif step % 10 == 9:
        ...         row.extend(step + 1)
        >>> _ = row.commit()
        >>> int(store.status()["length"][0])
        300
        >>> store.close()
    """

    __slots__ = ("_columns", "_done", "_growing", "_index", "key", "length", "version", "priority")

    def __init__(self, columns: Columns, index: int, priority: float, version: int) -> None:
        self._columns = columns
        self._index = index
        self._done = False
        self._growing = False
        self.length: int = columns.max_length
        self.priority = priority
        self.version = version
        self.key: Keys | None = None

    def __getitem__(self, field: str) -> NDArray[Any]:
        self._check_open()
        view: NDArray[Any] = self._columns.numpy(field)[self._index, ...]
        return view

    def __setitem__(self, field: str, value: Any) -> None:
        self[field][...] = value

    def torch(self, field: str) -> torch.Tensor:
        """A tensor over the block's memory."""
        self._check_open()
        return self._columns.torch(field)[self._index, ...]

    @property
    def index(self) -> int:
        """The row's place in the store, known before the commit; its key adds the generation."""
        return self._index

    def commit(self) -> Keys:
        """Makes the row selectable, or ends its growth, and returns its key.

        Raises:
            SchemaError: a length that the block does not have, or a priority that is no priority.
            WaitTimeoutError: the store's rate limiter did not let it in. CallCancelledError: it was told to stop.
        """
        self._check_open()
        native = self._columns.native
        if self._growing:
            self._done = True
            native.seal_one(self._index)
            assert self.key is not None
            return self.key
        key = self._enter(native.commit_one, self.length)
        self._done = True
        return key

    def publish(self, *, length: int) -> Keys:
        """Makes the first `length` steps selectable while the row is still being written; returns its key.

        Raises:
            SchemaError: as for `commit`; or the store has `max_times_sampled`, and gives rows away with their last
                sample.
            StoreFullError: all rows that may be kept are being extended.
            WaitTimeoutError: the store's rate limiter did not let it in. CallCancelledError: it was told to stop.
        """
        self._check_open()
        if self._growing:
            raise SchemaError("this row was already published; tell of more steps with extend()")
        key = self._enter(self._columns.native.publish_one, length)
        self._growing = True
        self.length = length
        return key

    def extend(self, length: int) -> None:
        """The row has that many steps by now. Cost: about a microsecond."""
        self._check_open()
        if not self._growing:
            raise SchemaError("this row was not published yet: publish(length=...) comes first")
        self._columns.native.extend(self._index, length)
        self.length = length

    def _enter(self, call: Callable[[int, int, float, int], int], length: int) -> Keys:
        limiter = self._columns.limiter
        admitted = False
        try:
            length = int(length)
            if not 0 < length <= self._columns.max_length:
                raise SchemaError(f"the row's length is {length}, a block holds 1 to {self._columns.max_length} steps")
            limiter.admit_inserts(1)
            admitted = True
            generation = call(self._index, length, float(self.priority), int(self.version))
        except BaseException:
            if admitted:
                limiter.give_back(inserts=1)
            self.abandon()
            raise
        self.key = Keys(np.array([self._index], np.uint32), np.array([generation], np.uint32))
        return self.key

    def abandon(self) -> None:
        """Gives the block back unwritten; of a published row, ends its growth: what is selectable stays.

        Harmless when the row is already committed or given back.
        """
        if not self._done:
            self._done = True
            native = self._columns.native
            if not native.closed:
                (native.seal_one if self._growing else native.abandon_one)(self._index)

    def _check_open(self) -> None:
        if self._done:
            raise SchemaError("this row was already committed or given back")

    def __enter__(self) -> Row:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif not self._done:
            self.commit()

    def __del__(self) -> None:
        # A row that was forgotten must not stay locked for as long as the process lives. In a forked child it is
        # the parent's, and stays so.
        if not self._done:
            with suppress(StaleKeyError):
                self.abandon()


class Rows:
    """Several rows being written, committed together. `rows[i]["obs"]` is row i's block.

    Set `lengths`, `priorities` and `versions` (arrays (n,)) before the commit.
    """

    def __init__(self, columns: Columns, index: NDArray[np.uint32], priority: float, version: int) -> None:
        self._columns = columns
        self._index = index
        self._done = False
        n = len(index)
        self.lengths: ArrayLike = np.full(n, columns.max_length, np.uint32)
        self.priorities: ArrayLike = np.full(n, priority, np.float64)
        self.versions: ArrayLike = np.full(n, version, np.int64)
        self.keys: Keys | None = None

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> RowView:
        if self._done:
            raise SchemaError("these rows were already committed or given back")
        return RowView(self._columns, int(self._index[i]))

    def __iter__(self) -> Iterator[RowView]:
        return (self[i] for i in range(len(self)))

    def commit(self) -> Keys:
        """Makes all the rows selectable and returns their keys. On an error all are given back."""
        if self._done:
            raise SchemaError("these rows were already committed or given back")
        n = len(self._index)
        limiter = self._columns.limiter
        admitted = 0
        try:
            lengths = as_column(self.lengths, n, np.uint32, "lengths")
            priorities = as_column(self.priorities, n, np.float64, "priorities")
            versions = as_column(self.versions, n, np.int64, "versions")
            limiter.admit_inserts(n)
            admitted = n
            generations = self._columns.native.commit(self._index, lengths, priorities, versions)
        except BaseException:
            limiter.give_back(inserts=admitted)
            self.abandon()
            raise
        self._done = True
        self.keys = Keys(self._index, generations)
        return self.keys

    def abandon(self) -> None:
        """Gives all the blocks back. Harmless after a commit."""
        if not self._done:
            self._done = True
            if not self._columns.native.closed:
                self._columns.native.abandon(self._index)

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif not self._done:
            self.commit()

    def __del__(self) -> None:
        if not self._done:
            with suppress(StaleKeyError):
                self.abandon()


class RowView:
    """One of several rows being written: its blocks as NumPy views, or as tensors with `torch`."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Columns, index: int) -> None:
        self._columns = columns
        self._index = index

    def __getitem__(self, field: str) -> NDArray[Any]:
        view: NDArray[Any] = self._columns.numpy(field)[self._index, ...]
        return view

    def __setitem__(self, field: str, value: Any) -> None:
        self[field][...] = value

    def torch(self, field: str) -> torch.Tensor:
        """A tensor over the block's memory."""
        return self._columns.torch(field)[self._index, ...]


def as_column(values: Any, n: int, dtype: Any, what: str) -> NDArray[Any] | None:
    """Per-row values as a contiguous array (n,), or None. A single number stands for all rows."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.ndim == 0:
        array = np.broadcast_to(array, (n,))
    if array.shape != (n,):
        raise SchemaError(f"`{what}` must be one number or have shape ({n},), found {array.shape}")
    if dtype == np.uint32:
        if (
            array.dtype.kind not in "iu"
            or (array.size and int(array.min()) < 0)
            or (array.size and int(array.max()) > 0xFFFFFFFF)
        ):
            raise SchemaError(f"`{what}` must be whole numbers >= 0, found {array.dtype} from {array.min()}")
    elif dtype == np.int64 and array.dtype.kind not in "iu":
        raise SchemaError(f"`{what}` must be whole numbers, found {array.dtype}")
    return np.ascontiguousarray(array, dtype=dtype)
