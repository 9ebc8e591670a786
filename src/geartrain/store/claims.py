"""Claims: rows of a task that this process works on, and each of them alone.

A claim is fenced: once a row was put, dropped, released, or taken back because this process was taken for dead or an
older row needed the room, nothing is written through the claim any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import (
    check_flag,
    check_whole,
    leave_out,
    optional,
    shown,
    some_of,
    timeout,
)
from geartrain.core.keys import Keys
from geartrain.core.lifetime import Uncopied
from geartrain.core.tasks import RowPlan
from geartrain.errors import ArgumentError, FieldError, GeartrainError, StaleClaimError, WaitTimeoutError
from geartrain.store.packed import AxisBounds, PackedFields, ReadValues, RowReader
from geartrain.store.rate_limiter import INSERT_TIMEOUT_S
from geartrain.store.span_values import Source, check_names, collect

#: How rows are written, as the native layer has it.
PUT, APPEND, REWRITE = 0, 1, 2
_STALE, _WAITS = 1, 2
_MOST_ITEMS = 2**31 - 1


class Versioned(Protocol):
    """What knows the version of a policy, such as a `weights.Reader`."""

    @property
    def version(self) -> int | None:
        """The version now; None: there is none yet."""
        ...


class ClaimedStore(Protocol):
    """The store of a claim: one of this host, or a peer's."""

    plan: RowPlan | None
    native: _native.Store

    @property
    def id(self) -> int:
        """The store's id, which keys carry."""

    def packed_reader(self, names: Sequence[str], axes: Sequence[str] = (), threads: int = 0) -> RowReader:
        """Reads fields of rows."""

    def one_row_writer(self, task: int, *, append: bool) -> _native.OneRowWriter | None:
        """Writes single rows of a task by one native call; None: there is no such writer."""


#: Who says which version of the policy works on a claim; None: the store's clock.
Version = int | Versioned | Callable[[], int | None] | None


def check_version(version: Version) -> Version:
    """What `version=` was given, if it is one. Raises `ArgumentError`."""
    if version is None or hasattr(version, "version") or callable(version):
        return version
    return check_whole("version", version, 0, 2**63 - 1)


def version_of(version: Version) -> int | None:
    """The version that is said now. Raises `ArgumentError` for what is no whole number."""
    if version is not None and hasattr(version, "version"):
        said: Any = version.version
    else:
        said = version() if callable(version) else version
    return optional(check_whole, "version", said, 0, 2**63 - 1)


def check_durable(native: _native.Store, durable: bool) -> bool:
    """The flag `durable=`. Raises `ArgumentError` if a store without a journal is to be written durably."""
    durable = check_flag("durable", durable)
    if durable and native.journal_state() is None:
        raise ArgumentError(
            "durable=True waits for the store's journal, and it has none: pass journal= to Store.create"
        )
    return durable


def timed_out(native: _native.Store, what: str) -> WaitTimeoutError:
    """The error of a wait for room: what did not happen, and what fills the store."""
    return WaitTimeoutError(
        f"{what}: {native.occupancy()}. Raise capacity= or span_bytes=, start processes for the tasks that lag, "
        "or call replay.saved more often if rows are kept"
    )


class RowWrite(NamedTuple):
    """What a put, an append or a rewrite writes, as the native `write_rows` takes it.

    Attributes:
        how: `PUT`, `APPEND` or `REWRITE`.
        task: number of the task.
        axis, item: of an append: the axis that grows, and the item on it.
        rows, generations, claims: of the rows, and of their claims; no claims for a rewrite.
        sources: values by field.
        lengths: (n, axes) items of each row.
        merges: a put leaves fields that were appended as they are.
        parts: of a put that merges: lengths of the items.
    """

    how: int
    task: int
    axis: int
    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    claims: NDArray[np.uint16] | None
    sources: list[Source]
    lengths: NDArray[np.uint32]
    item: int = 0
    merges: bool = False
    parts: NDArray[np.int32] | None = None


def write_rows(native: _native.Store, write: RowWrite, timeout_s: float, durable: bool) -> NDArray[np.bool_]:
    """Writes rows and returns which were skipped; raises `WaitTimeoutError` if some found no room in time."""
    wrote = native.write_rows(*write, 0, timeout_s, durable)
    if waiting := wrote.tolist().count(_WAITS):
        raise timed_out(native, f"{waiting} of {len(wrote)} rows found no room within {timeout_s:g} s")
    return wrote == _STALE  # type: ignore[no-any-return]


class Partial:
    """What was appended to a claimed row before: items, their lengths, and which of them are done.

    It is false if nothing was appended. `partial["ids"]` is a dict of the values by item.

    Args:
        lengths: what was appended to each item, by its number.
        done: items of which an append said that they are done.
        values: values by field and item.

    Attributes:
        items: numbers of the items that something was appended to, in order.

    Examples:
        >>> from geartrain.store.claims import Partial
        >>> partial = Partial({0: 2}, frozenset({0}), {"ids": {0: [7, 8]}})
        >>> partial.items, partial.lengths, partial["ids"]
        ((0,), {0: 2}, {0: [7, 8]})
    """

    def __init__(
        self, lengths: Mapping[int, int], done: frozenset[int], values: Mapping[str, Mapping[int, Any]]
    ) -> None:
        self.lengths = dict(lengths)
        self.done = done
        self.items = tuple(self.lengths)
        self._values = values

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, field: str) -> dict[int, Any]:
        if field not in self._values:
            raise FieldError(f"{shown(field)} was not appended; these were: {', '.join(self._values) or 'no fields'}")
        return dict(self._values[field])

    def __repr__(self) -> str:
        return f"Partial(lengths={self.lengths}, done={sorted(self.done)})"


class ClaimedRow(Uncopied, elsewhere="a claim belongs to the process that made it; pass on the values that you read"):
    """One row of a claim. Any thread may use it; the process that claimed it alone may write it.

    Args:
        claim, index: set by the claim.

    Examples:
        >>> import geartrain as gt
        >>> tasks = {
        ...     "answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}),
        ...     "train": gt.Task(after="answer"),
        ... }
        >>> store = gt.Store.create({"prompt": gt.Text()}, tasks=tasks, capacity=8, span_bytes=100_000)
        >>> _ = store.insert({"prompt": ["1 + 1 ="]})
        >>> with store.claim("answer") as claim:
        ...     for row in claim:
        ...         row.append(ids=[7, 8])
        ...         row.append(ids=[9])
        ...         row.put()
        >>> store.close()
    """

    __slots__ = ("_claim", "_index")

    def __init__(self, claim: Claim, index: int) -> None:
        self._claim = claim
        self._index = index

    @property
    def key(self) -> Keys:
        """The row's key, one `Keys` of length 1. It stays the row's until the row is freed."""
        return self._claim.keys[self._index]

    def __getitem__(self, name: str) -> Any:
        """The row's value of a field of the tasks before: (m, ...) with an axis, (...) without; strings as they are.

        Args:
            name: the field.

        Raises:
            FieldError: there is no such field, or it may not be there yet.
            StaleClaimError: the row was dropped or taken back before it was read.
        """
        return self._claim._of_row(self._index, name)

    @property
    def stale(self) -> bool:
        """Whether the row is too old, as in `Claim.stale`."""
        return bool(self._claim.stale[self._index])

    def length(self, axis: str) -> int:
        """Items of an axis.

        Args:
            axis: name of an axis whose lengths are known before the task.

        Raises:
            FieldError: they are not.
        """
        return int(self._claim.bounds_of(axis).lengths[self._index])

    @property
    def partial(self) -> Partial:
        """What was appended to the row so far, by this claim and with `keep_partial` by those before.

        Raises:
            StaleClaimError: the row is not claimed by this any more.
        """
        return self._claim._partial(self._index)

    def append(
        self,
        fields: Mapping[str, Any] | None = None,
        /,
        *,
        item: int = 0,
        done: bool = False,
        timeout_s: float = INSERT_TIMEOUT_S,
        **values: Any,
    ) -> None:
        """Appends to the row: more items of the axis that the task sets, or of one of its parts.

        `put` then makes one span of what was appended, item after item. Appends survive this process's death if the
        task has `keep_partial`.

        Args:
            fields: values by field, for names that are no keywords; all fields of the task that have the axis.
            item: number of the part, such as the answer, that the values belong to, if a field divides the axis.
            done: nothing will be appended to this item any more; `partial.done` then has it.
            timeout_s: longest wait for room, in seconds.
            values: values by field: one array (m, ...) each.

        Raises:
            StaleClaimError: the row is not claimed by this any more. Nothing is written.
            SchemaError: the task cannot be appended to, or the values do not fit.
            WaitTimeoutError: no room within `timeout_s`.
            NoSpaceError: there is no room, and nothing is left that could give any back.
        """
        self._claim._append(self._index, {**(fields or {}), **values}, item, done, timeout_s)

    def put(
        self,
        fields: Mapping[str, Any] | None = None,
        /,
        *,
        timeout_s: float = INSERT_TIMEOUT_S,
        durable: bool = False,
        **values: Any,
    ) -> None:
        """Writes the fields of the task: it is done for this row.

        After appends leave out the fields that were appended and the one with `divides`.

        Args:
            fields: values by field, for names that are no keywords.
            timeout_s: longest wait for room, in seconds.
            durable: return once the row is on the disk of the store's journal, as in `Claim.put`.
            values: values by field: one array (m, ...) for a field with an axis, (...) without, and strings.

        Raises:
            StaleClaimError: the row is not claimed by this any more. Nothing is written.
            SchemaError: values do not fit, or an item lies before others and has no append; give its length as 0.
            FieldError: a field of the task is missing, or it has no such field.
            WaitTimeoutError: no room within `timeout_s`. The row stays claimed.
            NoSpaceError: there is no room, and nothing is left that could give any back.
            ArgumentError: `durable` without a journal. Nothing is written.
            LockTimeoutError, NoSpaceError: of a journal, as in `Claim.put`.
        """
        self._claim._put_one(self._index, {**(fields or {}), **values}, timeout_s, durable)

    def drop(self) -> bool:
        """Removes the row from the store; no task sees it any more. Returns False if it was gone already."""
        return self._claim._end("drop_rows", self._index)

    def release(self) -> bool:
        """Gives the row back: it is due again. Returns False if it was not claimed any more."""
        return self._claim._end("release_rows", self._index)

    def __repr__(self) -> str:
        return f"ClaimedRow(task={self._claim.task!r}, row={self.key.row[0]})"


class Claim(
    Uncopied, PackedFields, elsewhere="it belongs to the process that made it; pass on the values that you read"
):
    """Rows of a task that this process works on, oldest first. Made by `claims`, `claim` and `claim_async` of a store.

    `claim["ids"]` has the values of all rows one behind the other, as a copy; fields of the tasks before can be read.
    Iterating gives each row as a `ClaimedRow`. As a context manager it releases at its end what was neither put nor
    dropped. An empty claim is false. Any thread may put, drop and release; a forked child may not.

    If a row is dropped or taken back before it was read, its values are zeros of the same shapes, and `put` skips it.

    Args:
        store, task, found, output: set by the store.
        read: fields of the rows that were read with the claim, and their values.

    Attributes:
        keys: the rows' keys. They stay valid until the rows are freed.
        task: name of the task.

    Examples:
        >>> import geartrain as gt
        >>> tasks = {"sum": gt.Task({"y": gt.Field((), "int64")}), "train": gt.Task(after="sum")}
        >>> store = gt.Store.create({"x": gt.Field(("n",), "int64")}, tasks=tasks, capacity=8, span_bytes=100_000)
        >>> _ = store.insert({"x": [[1, 2], [3]]})
        >>> with store.claim("sum", 8, output="numpy") as claim:
        ...     skipped = claim.put(y=[int(row["x"].sum()) for row in claim])
        >>> claim["x"].tolist(), claim.lengths("n").tolist(), len(store)
        ([1, 2, 3], [2, 1], 2)
        >>> store.close()
    """

    def __init__(
        self,
        store: ClaimedStore,
        task: int,
        found: tuple[NDArray[Any], ...] | None,
        output: str = "torch",
        read: tuple[Sequence[str], ReadValues] | None = None,
    ) -> None:
        assert store.plan is not None
        self._plan: RowPlan = store.plan
        self._store = store
        self._native = store.native
        self._number = task
        self.task = list(self._plan.tasks)[task - 1]
        if found is None:
            none = np.empty(0, np.uint32)
            found = none, none, none.astype(np.uint16), np.empty((0, len(self._plan.axes)), np.uint32)
        rows, generations = found[:2]
        self._claims: NDArray[np.uint16] = found[2]
        self._lengths: NDArray[np.uint32] = found[3]
        self.keys = Keys.of_rows(rows, generations, store.id)
        self._pid = os.getpid()
        self._ended = not len(rows)
        self._output = output
        self._device = None
        self._shown: dict[str, Any] = {}
        self._bounds: dict[str, AxisBounds] = {}
        self._lost = np.zeros(len(rows), bool)  # rows whose values are zeros
        if read is not None:
            self.show(read[0], read[1], read[0])

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[ClaimedRow]:
        return (ClaimedRow(self, i) for i in range(len(self)))

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Claim({self.task!r}, {len(self)} rows)"

    @property
    def stale(self) -> NDArray[np.bool_]:
        """(n,) whether rows are further behind the store's clock than `limiter.set(max_stale=)` allows, by now.

        A put still takes effect, but the row is removed then, as it is by a release that keeps what was appended. Rows
        that are gone are not stale.
        """
        return self._native.stale_rows(self.keys.row, self.keys.generation).astype(bool)

    def say_version(self, version: int) -> None:
        """Internal: sets the version of the policy that works on the rows."""
        self._native.say_version(self._number, self.keys.row, self.keys.generation, self._claims, version)

    # --- reading ----------------------------------------------------------------------------------------------

    def _read(self, names: Sequence[str]) -> None:
        for name in names:
            self._plan.check_readable(self._number, name)
        self.show(names, self._found(names), names)

    def _read_axis(self, axis: str) -> None:
        number = self._plan.axis(axis) - 1
        if self._plan.axes[number].owner not in self._plan.before(self._number):
            raise FieldError(
                f"the lengths of {axis!r} are not known before {self.task!r}; known are {some_of(self._known_axes())}"
            )
        if self._plan.axes[number].divided_by is None:
            self._bounds[axis] = AxisBounds(*_bounds_of(self._lengths[:, number]), None)
        else:
            self.show_axis(axis, self._found((), (axis,)))

    def _found(self, names: Sequence[str], axes: Sequence[str] = ()) -> Any:
        """What was read of the rows; zeros of those that are gone."""
        if not self._native.closed:
            self._check_process()
        reader = self._store.packed_reader(names, axes)
        found = reader.read(self.keys)
        torn = found.torn().astype(bool)
        if not torn.any():
            return found
        while True:  # of the rows that are there
            there = np.flatnonzero(~torn)
            found = reader.read(self.keys[there])
            gone = there[found.torn() != 0]
            if not len(gone):
                break
            torn[gone] = True
        self._lost |= torn
        return _WithZeros(self._plan, names, found, torn, self._lengths)

    def _known_axes(self) -> list[str]:
        before = self._plan.before(self._number)
        return [axis.name for axis in self._plan.axes if axis.owner in before]

    def _rows(self) -> int:
        return len(self)

    def _of_row(self, i: int, name: str) -> Any:
        values, axis = self[name], self._plan.fields[name].axis
        if self._lost[i]:
            raise self._stale(i)
        if axis is None:
            return values[i]
        bounds = self.bounds_of(axis).bounds
        return values[bounds[i] : bounds[i + 1]]

    # --- ending -----------------------------------------------------------------------------------------------

    def put(
        self,
        fields: Mapping[str, Any] | None = None,
        /,
        *,
        timeout_s: float = INSERT_TIMEOUT_S,
        durable: bool = False,
        **values: Any,
    ) -> Keys:
        """Writes the fields of the task for all rows of the claim: it is done for them.

        Rows that were put, dropped, released or taken back meanwhile are skipped; values for them are given and not
        looked at. Without values it puts rows that were appended to.

        Args:
            fields: values by field, for names that are no keywords.
            timeout_s: longest wait for room, in seconds.
            durable: return once the rows are on the disk of the store's journal. It waits as long as the store's
                `timeout_s` for the disk.
            values: values by field, of all rows one behind the other in the claim's order: (total, ...) for a field
                with an axis, (n, ...) without, lists of strings. A list with one array for each row is taken as well,
                and needed where the task itself sets the length of the axis.

        Returns:
            Keys of the rows that were skipped.

        Raises:
            SchemaError: values do not fit. Nothing is written.
            FieldError: a field of the task is missing, or it has no such field. Nothing is written.
            WaitTimeoutError: no room within `timeout_s`. Rows that were not written stay claimed.
            NoSpaceError: there is no room, and nothing is left that could give any back.
            StaleClaimError: the process that claimed the rows is this one's parent.
            ArgumentError: `durable` in a store without a journal. Nothing is written.
            LockTimeoutError: the journal's disk is behind. With `durable` the rows were put; they are on the disk
                later.
            NoSpaceError: the journal's disk is full; as for `LockTimeoutError`.
        """
        self._check_process()
        durable = check_durable(self._native, durable)
        given = {**(fields or {}), **values}
        if not len(self):
            return self.keys
        if self._leaves_appended(given):
            if given and len(self) > 1:
                raise FieldError(
                    f"put of {self.task!r} leaves out what was appended: put rows with other fields one by one, "
                    f"for row in claim: row.put(...)"
                )
            skipped = np.array([self._put_appended(i, given, timeout_s, durable) for i in range(len(self))], bool)
        else:
            check_names(f"put of {self.task!r}", given, self._plan.fields_of(self._number))
            _, sources, lengths = collect(
                self._plan,
                given,
                given,
                n=len(self),
                known=self._known(given),
                how="pass a list with one array for each row of the claim",
            )
            skipped = self._write(PUT, slice(None), sources, lengths, timeout_s, durable=durable)
        self._ended = True
        return self.keys[skipped]

    def drop(self) -> int:
        """Removes the rows from the store; no task sees them any more. Returns how many were not claimed any more."""
        return self._end_all("drop_rows")

    def release(self) -> int:
        """Gives back the rows that are still claimed: they are due again. Returns how many were not any more.

        Rows are released by themselves at the end of a claim's turn in `claims`, of a `with` block, and when the store
        is closed. With `keep_partial` what was appended stays.
        """
        if self._ended or self._pid != os.getpid() or self._native.closed:
            return 0
        return self._end_all("release_rows")

    def _end_all(self, how: str) -> int:
        self._check_process()
        if not len(self):
            return 0
        ended: int = getattr(self._native, how)(self._number, self.keys.row, self.keys.generation, self._claims)
        self._ended = True
        return ended

    def _end(self, how: str, i: int) -> bool:
        self._check_process()
        one = slice(i, i + 1)
        lost = getattr(self._native, how)(
            self._number, self.keys.row[one], self.keys.generation[one], self._claims[one]
        )
        return not lost

    # --- writing ----------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StaleClaimError(
                f"rows of {self.task!r} were claimed by process {self._pid}, which forked this one: claim in the child"
            )

    def _known(self, given: Mapping[str, Any]) -> dict[str, NDArray[np.uint32]]:
        """Lengths of the axes of fields that are written, but for those that the task sets itself."""
        axes = {self._plan.fields[name].axis for name in given} - {None}
        return {
            axis.name: self._lengths[:, number]
            for number, axis in enumerate(self._plan.axes)
            if axis.name in axes and axis.owner != self._number
        }

    def _appendable(self) -> tuple[list[str], str | None]:
        """Fields that appends to the task write, and the field that divides their axis."""
        return self._plan.appendable[self._number]

    def _leaves_appended(self, given: Mapping[str, Any]) -> bool:
        """Whether a put leaves out all fields that may have been appended."""
        names, _ = self._appendable()
        own = self._plan.fields_of(self._number)  # of another one `check_names` tells what it needs
        return bool(names) and not any(name in given for name in names) and all(name in own for name in given)

    def _write(
        self,
        how: int,
        which: slice,
        sources: list[Source],
        lengths: NDArray[np.uint32],
        timeout_s: float,
        *,
        axis: int = 0,
        durable: bool = False,
        **more: Any,
    ) -> NDArray[np.bool_]:
        columns = self.keys.row[which], self.keys.generation[which], self._claims[which]
        write = RowWrite(how, self._number, axis, *columns, sources, lengths, **more)
        return write_rows(self._native, write, timeout(timeout_s), durable)

    def _stale(self, i: int) -> StaleClaimError:
        return StaleClaimError(
            f"row {self.keys.row[i]} is not claimed for {self.task!r} by this any more: it was put, released, dropped, "
            f"or taken back to make room for an older row. Nothing was written"
        )

    def _wrote(self, i: int, given: dict[str, Any], timeout_s: float, *, append: bool = False, item: int = 0) -> bool:
        """Writes a row by one native call, if all values are NumPy arrays as their fields have them.

        Returns:
            Whether it did; else nothing is written.

        Raises:
            StaleClaimError, WaitTimeoutError: as `put`.
        """
        writer = self._store.one_row_writer(self._number, append=append)
        if writer is None:
            return False
        one = slice(i, i + 1)
        (row,), (generation,), (claim,) = (
            each[one].tolist() for each in (self.keys.row, self.keys.generation, self._claims)
        )
        wrote = writer.write(given, row, generation, claim, self._lengths[i], item, timeout(timeout_s))
        if wrote == _STALE:
            raise self._stale(i)
        if wrote == _WAITS:
            raise timed_out(self._native, f"1 row found no room within {timeout_s:g} s")
        return wrote is not None

    def _put_one(self, i: int, given: dict[str, Any], timeout_s: float, durable: bool) -> None:
        self._check_process()
        if durable is not False:
            durable = check_durable(self._native, durable)
        if durable or not self._wrote(i, given, timeout_s):
            if self._leaves_appended(given):
                skipped = self._put_appended(i, given, timeout_s, durable)
            else:
                check_names(f"put of {self.task!r}", given, self._plan.fields_of(self._number))
                sources, lengths = self._one(i, given)
                skipped = bool(self._write(PUT, slice(i, i + 1), sources, lengths, timeout_s, durable=durable)[0])
            if skipped:
                raise self._stale(i)

    def _one(self, i: int, given: Mapping[str, Any]) -> tuple[list[Source], NDArray[np.uint32]]:
        """Sources and lengths of one row, whose values are not in lists of rows."""
        fields = self._plan.fields
        rows = {}
        for name, value in given.items():
            plain = fields[name].axis is None and fields[name].kind == "array"
            rows[name] = _one_row(value) if plain else [value]
        known = {axis: column[i : i + 1] for axis, column in self._known(given).items()}
        _, sources, lengths = collect(self._plan, rows, rows, n=1, known=known, how="pass a list or an array")
        return sources, lengths

    def _put_appended(self, i: int, given: Mapping[str, Any], timeout_s: float, durable: bool) -> bool:
        """Puts a row with what was appended to it, and returns whether it was skipped."""
        appended, divider = self._appendable()
        own = self._plan.fields_of(self._number)
        needed = [name for name in own if name not in appended and name != divider]
        rest = {name: value for name, value in given.items() if name != divider}
        check_names(f"put of {self.task!r} after appends", rest, needed)
        parts = None
        if divider is not None and divider in given:
            values = {divider: [given[divider]]}
            _, [(_, runs, _)], _ = collect(self._plan, values, values, n=1, known={})
            parts = np.ascontiguousarray(runs[0] if isinstance(runs, list) else runs, np.int32)
        sources, lengths = self._one(i, rest)
        try:
            wrote = self._write(
                PUT, slice(i, i + 1), sources, lengths, timeout_s, merges=True, parts=parts, durable=durable
            )
        except StaleClaimError:
            return True
        return bool(wrote[0])

    def _append(self, i: int, given: dict[str, Any], item: int, done: bool, timeout_s: float) -> None:
        self._check_process()
        names, divider = self._appendable()
        axis = self._plan.appended_axis(self._number)
        if axis == 0:
            raise ArgumentError(
                f"the task {self.task!r} takes no appends: they extend the one axis whose lengths the task sets, or "
                f"the axis that its field with divides= cuts"
            )
        item = check_whole("item", item, 0, _MOST_ITEMS)
        done = check_flag("done", done)
        if divider is None and (item or done):
            leave_out(f"no field of {self.task!r} divides an axis into items", item=item or None, done=done)
        if not done and self._wrote(i, given, timeout_s, append=True, item=item):
            return
        check_names(f"append to {self.task!r}", given, names)
        sources, lengths = self._one(i, given)
        if (
            done and divider is not None
        ):  # an append sets no length of the items' axis, and notes there that one is done
            lengths[:, self._plan.axis(self._plan.fields[divider].axis) - 1] = 1
        if self._write(APPEND, slice(i, i + 1), sources, lengths, timeout_s, axis=axis, item=item)[0]:
            raise self._stale(i)

    def _partial(self, i: int) -> Partial:
        self._check_process()
        names, divider = self._appendable()
        if not names:
            return Partial({}, frozenset(), {})
        places = {name: number for number, name in enumerate(self._plan.fields)}
        _, items, table, copies = self._native.appended_parts(
            self._number,
            int(self.keys.row[i]),
            int(self.keys.generation[i]),
            int(self._claims[i]),
            [places[name] for name in names],
        )
        its = table[:, self._plan.appended_axis(self._number) - 1].astype(np.int64)
        lengths = {int(item): int(its[items == item].sum()) for item in np.unique(items)}
        done: frozenset[int] = frozenset()
        if divider is not None:
            marks = table[:, self._plan.axis(self._plan.fields[divider].axis) - 1]
            done = frozenset(int(item) for item in items[marks != 0])
        values = {name: self._by_item(name, lengths, *copy) for name, copy in zip(names, copies, strict=True)}
        return Partial(lengths, done, values)

    def _by_item(
        self, name: str, lengths: Mapping[int, int], raw: NDArray[np.uint8], sizes: NDArray[np.uint32]
    ) -> dict[int, Any]:
        """A field's appended values, cut into those of each item."""
        field, at = self._plan.fields[name], 0
        found: dict[int, Any] = {}
        if field.kind != "array":
            ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
            text = raw.tobytes()
            strings: list[Any] = [text[ends[k] : ends[k + 1]] for k in range(len(sizes))]
            if field.kind == "text":
                strings = [each.decode() for each in strings]
            for item, count in lengths.items():
                found[item], at = strings[at : at + count], at + count
            return found
        values = self.as_field(
            raw.view(np.dtype(f"V{field.itemsize}") if field.itemsize > 8 else f"u{field.itemsize}").reshape(
                -1, *field.shape
            ),
            field.dtype,
        )
        for item, count in lengths.items():
            found[item], at = values[at : at + count], at + count
        return found


def _bounds_of(lengths: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lengths as int32, and where each row begins and the last one ends."""
    return lengths.astype(np.int32), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


class _WithZeros:
    """Packed arrays with zeros and empty strings for rows that are gone, as long as they were."""

    def __init__(
        self,
        plan: RowPlan,
        names: Sequence[str],
        found: ReadValues,
        torn: NDArray[np.bool_],
        lengths: NDArray[np.uint32],
    ) -> None:
        self._plan, self._names, self._found, self._torn, self._lengths = plan, names, found, torn, lengths

    def _items(self, axis: str | None) -> NDArray[np.int64]:
        if axis is None:
            return np.ones(len(self._torn), np.int64)
        return self._lengths[:, self._plan.axis(axis) - 1].astype(np.int64)

    def _there(self, axis: str | None) -> NDArray[np.bool_]:
        return np.repeat(~self._torn, self._items(axis))

    def field(self, place: int) -> NDArray[Any]:
        there = self._there(self._plan.fields[self._names[place]].axis)
        values = self._found.field(place)
        out = np.zeros((len(there), *values.shape[1:]), values.dtype)
        out[there] = values
        return out

    def strings(self, place: int) -> list[Any]:
        field = self._plan.fields[self._names[place]]
        values, none = iter(self._found.strings(place)), "" if field.kind == "text" else b""
        return [next(values) if there else none for there in self._there(field.axis)]

    def axis(self, number: int) -> tuple[Any, Any, Any]:
        axis = self._plan.axes[number - 1]
        lengths, bounds = _bounds_of(self._lengths[:, number - 1])
        if axis.divided_by is None:
            return lengths, bounds, None
        by = self._plan.fields[axis.divided_by].axis
        counts = self._items(by)
        parts = np.zeros(int(counts.sum()), np.int64)
        read = self._found.axis(number)[2]
        assert read is not None  # of an axis that is divided
        parts[self._there(by)] = np.diff(read)
        first = np.cumsum(counts) - counts
        gone = self._torn & (counts > 0)
        parts[first[gone]] = lengths[gone]  # all in one of them, so that they add up
        return lengths, bounds, _bounds_of(parts)[1]


def _one_row(value: Any) -> Any:
    """A value of one row as that of a list of one row; a tensor stays one."""
    if hasattr(value, "detach"):
        return value[None]
    try:
        return np.asarray(value)[None] if hasattr(value, "dtype") or hasattr(value, "__array__") else [value]
    except GeartrainError:
        raise
    except (TypeError, ValueError):
        return [value]


__all__ = [
    "APPEND",
    "PUT",
    "REWRITE",
    "Claim",
    "ClaimedRow",
    "Partial",
    "Version",
    "check_durable",
    "check_version",
    "timed_out",
    "version_of",
    "RowWrite",
    "write_rows",
]
