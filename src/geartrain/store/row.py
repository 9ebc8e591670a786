"""Rows: their states, their present keys, and rows being written: views of their blocks, commit and abandon."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.arguments import check_array, check_unmasked, check_whole, shown
from geartrain.core.dtypes import as_dtype, as_raw, numpy_dtype, plain_tensor
from geartrain.core.keys import Keys
from geartrain.core.lifetime import Uncopied
from geartrain.errors import ArgumentError, LockTimeoutError, NoSpaceError, SchemaError, StaleKeyError, StoreClosedError
from geartrain.store.columns import Columns, as_column, check_entry, check_priority

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

#: Named states of a row, as `Store.status` reports them.
ROW_STATES = ("free", "writing", "committed", "exhausted", "open", "under_way", "kept")
OPEN, UNDER_WAY = ROW_STATES.index("open"), ROW_STATES.index("under_way")
_SELECTABLE = (ROW_STATES.index("committed"), OPEN)
#: To native calls: a row that was given no priority.
_NONE = float("nan")


def keys_of_rows(native: _native.Store, rows: ArrayLike, capacity: int, store_id: int) -> Keys:
    """Present keys of rows by their numbers or by a mask; see `Store.keys_of`."""
    try:
        numbers = np.asarray(rows)
    except (TypeError, ValueError):  # lists of several lengths
        numbers = np.zeros((), object)
    if numbers.dtype == bool and numbers.shape == (capacity,):
        numbers = np.flatnonzero(numbers)
    check_array(f"rows are whole numbers (n,) or a mask ({capacity},)", numbers, (-1,), "iu")
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < capacity:
        raise ArgumentError(f"the store has rows 0 to {capacity - 1}, found {numbers.min()} to {numbers.max()}")
    infos = native.infos(np.ascontiguousarray(numbers, np.uint32))
    selectable = (infos["generation"] & 1 == 1) & np.isin(infos["state"], _SELECTABLE)
    if not selectable.all():
        raise ArgumentError(
            f"row {numbers[~selectable][0]} holds no trajectory ({(~selectable).sum()} of {len(numbers)} rows); "
            f"store.keys().row are those that do"
        )
    return Keys.of_rows(np.ascontiguousarray(numbers, np.uint32), infos["generation"], store_id)


class _Uncommitted(
    Uncopied, ABC, elsewhere="its blocks are given back when one of two handles is dropped; copy the arrays"
):
    """Blocks of one writer, until it commits or abandons them. A context manager: commits on a clean exit."""

    __slots__ = ("_columns", "_done", "_zeros")

    _columns: Columns
    _done: bool
    _zeros: Collection[str]
    _what = "this row was"

    @abstractmethod
    def _commit(self) -> None:
        """Makes the written rows selectable. Keys are made on first access."""

    @abstractmethod
    def _release(self, native: _native.Store) -> None:
        """Returns the blocks to the store."""

    def abandon(self) -> None:
        """Returns the blocks without a commit. A published row keeps its published steps and is closed.

        A second call, or a call after the commit, has no effect.
        """
        if not self._done:
            self._done = True
            native = self._columns.native
            if not native.closed:
                with suppress(StaleKeyError):  # a signal came right behind the commit
                    self._release(native)

    def _check_open(self) -> None:
        """Raises unless its blocks may be written: `SchemaError` after the commit, `StoreClosedError` after a close."""
        if self._done:
            raise SchemaError(
                f"{self._what} already committed or abandoned; rows that are committed are changed by the store's "
                f"write(keys, ...) and update_priorities(keys, ...)"
            )
        if self._columns.native.closed:
            self._columns.native.column(0)  # which refuses, and says why

    def _check_written(self, index: int, taken: set[str]) -> None:
        """Zeroes the fields of `zeros` that were not asked for. Raises `SchemaError` where another one was not."""
        columns = self._columns
        left = [name for name in columns.fields if name not in taken]
        forgotten = tuple(name for name in left if name not in self._zeros)
        if forgotten:
            raise SchemaError(
                f"a row cannot be committed without {', '.join(map(repr, forgotten))}: write every field, or open the "
                f"row with zeros={forgotten!r}"
            )
        for name in left:
            columns.take(name, index, taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif not self._done:
            self._commit()

    def __del__(self) -> None:
        # Blocks of a dropped handle must not stay locked for as long as the process lives. In a forked child they
        # belong to the parent, and stay so.
        if not self._done:
            # A close beside this gave them back; or the lock, or a journal's disk, is not to be had.
            with suppress(StaleKeyError, StoreClosedError, NoSpaceError, LockTimeoutError):
                self.abandon()


class Row(_Uncommitted):
    """One row being written: views of its blocks, its length, priority and version.

    `row["obs"]` is a NumPy view of the shared memory, and `row.torch("obs")` a tensor over the same bytes. The first
    access to a field zeroes its block, so steps that you do not write are zeros. `row["obs"] = values` writes the whole
    block instead. Set `length` and write every field before the commit. A field that you never accessed is refused,
    unless it is in `zeros` of `Store.row`.

    To make an episode available while it goes on, `publish` its first steps, `extend` it, and `commit` it at its end.
    Do not change published steps, nor `per_row` fields after the first `publish`. If the writer dies, the row stays
    with its published steps.

    Args:
        columns, index, priority, version: set by `Store.row`; do not call the class itself.
        zeros: as in `Store.row`.
        taken: fields that are not zeroed, because the caller writes every step of them.

    Examples:
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

    __slots__ = ("_generation", "_index", "_key", "_length", "_open", "_priority", "_taken", "_version")

    def __init__(
        self,
        columns: Columns,
        index: int,
        priority: float | None,
        version: int,
        zeros: Collection[str] = (),
        taken: Collection[str] = (),
    ) -> None:
        self._columns = columns
        self._zeros = zeros
        self._taken = {*taken}  # fields that were asked for
        self._done = False
        self._index = index
        self._open = False  # published, and still extended
        self._length: int | None = None
        self._priority = priority
        self._version = version
        self._generation: int | None = None
        self._key: Keys | None = None

    @property
    def key(self) -> Keys | None:
        """Key of the row; None before it is published or committed."""
        if self._key is None and self._generation is not None:
            self._key = Keys.packed((self._index, self._generation), self._columns.store_id)
        return self._key

    @property
    def length(self) -> int | None:
        """Steps in the row, 1 to the store's `max_length`. Set it before the commit; None until then."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        if self._done or self._open:
            self._check_unpublished("length", "extend(length) adds steps to it")
        self._length = length

    @property
    def priority(self) -> float | None:
        """Priority of the row; set it before the commit. None: the store's `new_priority`.

        In an open row it is the priority of steps that are still to come.
        """
        return self._priority

    @priority.setter
    def priority(self, priority: float | None) -> None:
        if self._done:
            self._check_open()
        self._priority = priority

    @property
    def version(self) -> int:
        """Version of the model that acted. Set it before the row is published or committed."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if self._done or self._open:
            self._check_unpublished("version", "it keeps the one that it was published with")
        self._version = version

    def _check_unpublished(self, what: str, instead: str) -> None:
        self._check_open()
        if self._open:
            raise SchemaError(f"the {what} of a row cannot be set any more once it is published: {instead}")

    def __getitem__(self, field: str) -> NDArray[Any]:
        columns = self._columns
        if self._done or columns.native.closed:
            self._check_open()
        try:
            view: NDArray[Any] = columns.arrays[field][self._index, ...]
        except (KeyError, TypeError):
            view = columns.numpy(field)[self._index, ...]
        if field not in self._taken:
            columns.take(field, self._index, self._taken)
        return view

    def __setitem__(self, field: str, value: Any) -> None:
        columns = self._columns
        if self._done or columns.native.closed:
            self._check_open()
        _put(field, columns.numpy(field)[self._index, ...], value)
        self._taken.add(field)

    def torch(self, field: str) -> torch.Tensor:
        """A tensor over the block's memory.

        Args:
            field: name of the field.

        Raises:
            FieldError: the store has no such field.
        """
        self._check_open()
        tensor = self._columns.torch(field)[self._index, ...]
        self._columns.take(field, self._index, self._taken)
        return tensor

    @property
    def index(self) -> int:
        """Row number in the store, known before the commit. The key adds the generation."""
        return self._index

    def commit(self) -> Keys:
        """Makes the row available for sampling, or closes an open row, and returns its key.

        Raises:
            SchemaError: the length is missing or out of range, a field was not written, or the priority is negative or
                not finite. The row is abandoned.
            WaitTimeoutError: the store's rate limiter did not admit the row in time.
            CallCancelledError: the process is stopping.
        """
        self._commit()
        key = self.key
        assert key is not None
        return key

    def _commit(self) -> None:
        native = self._columns.native
        if self._done or native.closed:
            self._check_open()
        if self._open:
            self._done = True
            try:
                native.seal_one(self._index)
            except (NoSpaceError, LockTimeoutError):  # it stays open, as a journal's disk may have room later
                self._done = False
                raise
            return
        self._enter(native.commit_one, self._length)
        self._done = True

    def publish(self, *, length: int) -> Keys:
        """Makes the first `length` steps available for sampling while you write the rest; returns the row's key.

        Access every field before, as for `commit`.

        Args:
            length: steps to publish.

        Raises:
            SchemaError: as for `commit`; or the store has `max_times_sampled`, which removes a row with its last
                sample.
            StoreFullError: all rows that may be kept are being extended.
            WaitTimeoutError: the store's rate limiter did not admit the row in time.
            CallCancelledError: the process is stopping.
        """
        self._check_open()
        if self._open:
            raise SchemaError("this row was already published; add steps with extend()")
        self._enter(self._columns.native.publish_one, length)
        self._open = True
        self._length = length
        key = self.key
        assert key is not None
        return key

    def extend(self, length: int) -> None:
        """Publishes the steps up to `length`. With priorities of steps, the new ones get `priority`.

        Args:
            length: steps of the row from now on.

        Raises:
            SchemaError: the row is not published, or `length` is below the published steps or above `max_length`.

        Cost: about a microsecond.
        """
        self._check_open()
        if not self._open:
            raise SchemaError("this row was not published yet: publish(length=...) comes first")
        priority = self._priority
        plain = priority is None or (priority.__class__ is float and not math.isnan(priority))
        if length.__class__ is not int or not plain or not 0 <= length < 2**32:
            length = check_whole("the row's length", length, 0, 2**32 - 1)
            priority = check_priority(priority)
        admitted, native = 0, self._columns.native
        if native.limited and native.limited_by_steps:
            before = native.counted_steps(self._index, self._length or 0)
            admitted = max(0, native.counted_steps(self._index, length) - before)
            self._columns.limiter.admit_inserts(admitted)
        try:
            native.extend(self._index, length, _NONE if priority is None else priority)
        except BaseException:
            self._columns.limiter.give_back(inserts=admitted)
            raise
        self._length = length

    def _enter(self, call: Callable[[int, int, float, int], int], length: int | None) -> None:
        limiter = self._columns.limiter
        admitted = 0
        try:
            if length is None:
                raise SchemaError(
                    f"the row has no length: set row.length to the number of its steps, at most "
                    f"{self._columns.max_length}, before the commit"
                )
            if length.__class__ is not int:
                length = check_whole("the row's length", length)
            if not 0 < length <= self._columns.max_length:
                raise SchemaError(f"the row's length is {length}, a block holds 1 to {self._columns.max_length} steps")
            if len(self._taken) != len(self._columns.fields):
                self._check_written(self._index, self._taken)
            if self._columns.native.limited:
                native = self._columns.native
                inserts = native.counted_steps(self._index, length) if native.limited_by_steps else 1
                limiter.admit_inserts(inserts)
                admitted = inserts
            priority, version = check_entry(self._priority, self._version)
            self._generation = call(self._index, length, _NONE if priority is None else priority, version)
        except BaseException:
            limiter.give_back(inserts=admitted)
            self.abandon()
            raise

    def _release(self, native: _native.Store) -> None:
        (native.seal_one if self._open else native.abandon_one)(self._index)


class Rows(_Uncommitted):
    """Several rows being written, which are committed together. `rows[i]["obs"]` is the block of row i.

    Set `lengths` before the commit, and `priorities` and `versions` if rows differ in them. Each is one number or an
    array (n,). Write every field of every row, as for a `Row`.

    Args:
        columns, index, priority, version, zeros: set by `Store.rows`; do not call the class itself.

    Examples:
        >>> import geartrain as gt
        >>> store = gt.Store.create({"obs": gt.Field((3,), "float32")}, max_length=10, capacity=4)
        >>> rows = store.rows(2)  # Rows
        >>> for i in range(2):
        ...     rows[i]["obs"][:5] = i
        >>> rows.lengths = 5
        >>> len(rows.commit())
        2
        >>> store.close()
    """

    __slots__ = ("_index", "_keys", "_lengths", "_priorities", "_taken", "_versions")
    _what = "these rows were"

    def __init__(
        self,
        columns: Columns,
        index: NDArray[np.uint32],
        priority: float | None,
        version: int,
        zeros: Collection[str] = (),
    ) -> None:
        self._columns = columns
        self._zeros = zeros
        self._taken: dict[int, set[str]] = {}  # fields that were asked for, by the row's index
        self._done = False
        self._index = index
        n = len(index)
        self._lengths: ArrayLike | None = None
        self._priorities: ArrayLike | None = None if priority is None else np.full(n, priority, np.float64)
        self._versions: ArrayLike = np.full(n, version, np.int64)
        self._keys: Keys | None = None

    @property
    def keys(self) -> Keys | None:
        """Keys of the rows; None before the commit."""
        return self._keys

    @property
    def lengths(self) -> ArrayLike | None:
        """Steps of each row: an array (n,), or one number for all. Set it before the commit; None until then."""
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: ArrayLike) -> None:
        self._check_open()
        self._lengths = lengths

    @property
    def priorities(self) -> ArrayLike | None:
        """Priorities of the rows: an array (n,), or one number for all. Set them before the commit.

        None: the store's `new_priority`.
        """
        return self._priorities

    @priorities.setter
    def priorities(self, priorities: ArrayLike | None) -> None:
        self._check_open()
        self._priorities = priorities

    @property
    def versions(self) -> ArrayLike:
        """Versions of the model that acted: an array (n,), or one number for all. Set them before the commit."""
        return self._versions

    @versions.setter
    def versions(self, versions: ArrayLike) -> None:
        self._check_open()
        self._versions = versions

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> RowView:
        """Row i, for writing. Raises `IndexError` if there is none.

        Args:
            i: place among these rows.
        """
        self._check_open()
        try:
            index = int(self._index[i])
        except (IndexError, TypeError, OverflowError):
            raise IndexError(f"these are {len(self)} rows, found {shown(i)}") from None
        return RowView(self, index, self._taken.setdefault(index, set()))

    def __iter__(self) -> Iterator[RowView]:
        return (self[i] for i in range(len(self)))

    def commit(self) -> Keys:
        """Makes all rows available for sampling and returns their keys. After an error all are abandoned.

        Raises:
            SchemaError: lengths are missing or out of range, or a field of a row was not written.
            WaitTimeoutError, CallCancelledError: as for `Row.commit`.
        """
        self._commit()
        assert self._keys is not None
        return self._keys

    def _commit(self) -> None:
        self._check_open()
        n = len(self._index)
        limiter = self._columns.limiter
        admitted = 0
        try:
            if self._lengths is None:
                raise SchemaError(
                    f"the rows have no lengths: set rows.lengths to the steps of each of them, at most "
                    f"{self._columns.max_length}, before the commit"
                )
            lengths = as_column(self._lengths, n, np.uint32, "lengths")
            priorities = as_column(self._priorities, n, np.float64, "priorities")
            versions = as_column(self._versions, n, np.int64, "versions")
            for index in self._index.tolist():
                self._check_written(index, self._taken.setdefault(index, set()))
            native, inserts = self._columns.native, n
            if native.limited and native.limited_by_steps:
                each = [self._columns.max_length] * n if lengths is None else lengths.tolist()
                inserts = sum(map(native.counted_steps, self._index.tolist(), each))
            limiter.admit_inserts(inserts)
            admitted = inserts
            generations = self._columns.native.commit(self._index, lengths, priorities, versions)
        except BaseException:
            limiter.give_back(inserts=admitted)
            self.abandon()
            raise
        self._done = True
        self._keys = Keys.of_rows(self._index, generations, self._columns.store_id)

    def _release(self, native: _native.Store) -> None:
        native.abandon(self._index)


class RowView:
    """One of several rows being written: its blocks as NumPy views, or as tensors with `torch`, until the commit."""

    __slots__ = ("_index", "_rows", "_taken")

    def __init__(self, rows: Rows, index: int, taken: set[str]) -> None:
        self._rows = rows  # which would give the blocks back if it were dropped
        self._index = index
        self._taken = taken

    def __getitem__(self, field: str) -> NDArray[Any]:
        self._rows._check_open()
        view: NDArray[Any] = self._rows._columns.numpy(field)[self._index, ...]
        self._rows._columns.take(field, self._index, self._taken)
        return view

    def __setitem__(self, field: str, value: Any) -> None:
        self._rows._check_open()
        _put(field, self._rows._columns.numpy(field)[self._index, ...], value)
        self._taken.add(field)

    def torch(self, field: str) -> torch.Tensor:
        """A tensor over the block's memory."""
        self._rows._check_open()
        tensor = self._rows._columns.torch(field)[self._index, ...]
        self._rows._columns.take(field, self._index, self._taken)
        return tensor


def _put(field: str, block: NDArray[Any], value: Any) -> None:
    """Writes a value into a block as NumPy does, but for what would lose something: text, times, masks, fractions."""
    try:
        if value.__class__ is np.ndarray:
            if value.dtype is not block.dtype and (value.dtype.kind not in "biu" or block.dtype.kind not in "biuf"):
                value = _numbers(value, block.dtype)
        elif value.__class__ is not int:
            value = _numbers(value, block.dtype)
        block[...] = value
    except (
        SchemaError,
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # the last: of a tensor that has no array
        # torch's own text of a tensor without memory ends the process.
        found = f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "detach") else shown(value)
        raise SchemaError(f"field {field!r} takes {block.dtype} {block.shape}, found {found}: {error}") from None


def _numbers(value: Any, dtype: np.dtype[Any]) -> Any:
    """The value, once it holds nothing but numbers that a block of the dtype may take. Raises `TypeError`."""
    check_unmasked("it", value)
    array = _of_tensor(value) if hasattr(value, "detach") else np.asarray(value)
    kind = array.dtype.kind
    if kind == "f" and dtype.kind in "biu" and not (np.isfinite(array) & (array == np.rint(array))).all():
        raise TypeError("its fractions would be lost: convert it first")
    if kind in "biuf":
        return array
    if kind in "SUMm" or (kind == "O" and not _are_numbers(array)):
        raise TypeError(f"{array.dtype} is no number")
    if kind == "c" and dtype.kind != "c":
        raise TypeError("its imaginary part would be lost")
    return array


def _of_tensor(tensor: Any) -> NDArray[Any]:
    """A tensor's values as `insert` takes them: without a gradient or lazy negative, of any dtype of a store's."""
    if tensor.device.type != "cpu":
        raise TypeError(f"it is on {tensor.device}; the store takes host memory")
    if "strided" not in str(tensor.layout):
        raise TypeError(f"it is a tensor of the layout {tensor.layout}: give its to_dense()")
    tensor, dtype = plain_tensor(tensor).contiguous(), as_dtype(tensor.dtype)
    if dtype.numpy_name is not None:
        return np.asarray(tensor)
    array: NDArray[Any] = as_raw(tensor, dtype).numpy().view(numpy_dtype(dtype))
    return array


def _are_numbers(objects: NDArray[Any]) -> bool:
    from decimal import Decimal  # here: importing it takes longer than most of this package's modules

    return all(isinstance(each, (Real, Decimal, np.bool_)) for each in objects.flat)
