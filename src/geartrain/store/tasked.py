"""Stores whose rows pass through tasks: claims, waits for due rows, puts by key, and figures of tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

import geartrain._native as _native
from geartrain.core.arguments import check_choice, check_output, check_texts, check_whole, leave_out, some_of, timeout
from geartrain.core.keys import Keys, check_keys
from geartrain.core.lifetime import on_error
from geartrain.core.tasks import RowPlan
from geartrain.errors import ArgumentError, NoSpaceError, PeerLostError, SchemaError, StoreClosedError, WaitTimeoutError
from geartrain.store.claims import (
    REWRITE,
    Claim,
    RowWrite,
    Version,
    check_durable,
    check_version,
    timed_out,
    version_of,
    write_rows,
)
from geartrain.store.columns import as_column
from geartrain.store.insert import CASTINGS, Casting
from geartrain.store.packed import ReadValues, RowReader
from geartrain.store.rate_limiter import INSERT_TIMEOUT_S, RateLimiter
from geartrain.store.span_values import check_names, collect, lengths_given, part_of
from geartrain.store.waiting_claims import Asked

Output = Literal["torch", "numpy"]
#: What `claim_rows` of the native store returns; fields that were read with the rows, and their values.
Found: TypeAlias = tuple[Any, "tuple[Sequence[str], ReadValues] | None"]
#: An idle loop tells after so many seconds what it waits for, and then at four times the time each.
FIRST_WORD_S = 10.0
#: Rows that are inserted together at most, all or none.
_PIECE = 1024
_FOREVER_S = 1e9


class TaskedRows:
    """Inserts, claims and figures of a store with axes or tasks: the base of `Store` and `RemoteStore`.

    `native` does the work. A peer's store has an object with the same calls in its place.
    """

    native: _native.Store
    plan: RowPlan | None
    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Name of the store."""

        @property
        def id(self) -> int:
            """Its id, which keys carry."""

        @property
        def capacity(self) -> int:
            """Number of rows that fit."""

        def __len__(self) -> int: ...

        def stats(self) -> dict[str, int]:
            """The store's counters."""

        def packed_reader(self, names: Sequence[str], axes: Sequence[str] = (), threads: int = 0) -> RowReader:
            """Internal: reads fields of rows."""

        def one_row_writer(self, task: int, *, append: bool) -> _native.OneRowWriter | None:
            """Internal: writes single rows of a task."""

        def insert_together(
            self, n: int, sources: Any, table: Any, of_rows: Any, threads: int, timeout_s: float, durable: bool
        ) -> Keys | int:
            """Internal: inserts rows, all or none; returns how many to insert first if fewer may be in flight now."""

        def _claim_rows(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Found:
            """Claims rows; `later`: `say_version` follows. `fields`: to be read with them, of another host."""

        async def _claim_rows_async(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Found:
            """The same without blocking the event loop."""

        def lag_before(self, number: int) -> str:
            """Internal: which task keeps rows from becoming due for a task, in words."""

    def insert_spans(
        self,
        plan: RowPlan,
        fields: Any,
        lengths: Any,
        priorities: Any,
        versions: Any,
        threads: int,
        casting: Casting,
        timeout_s: float,
        durable: bool,
    ) -> Keys:
        """Internal: inserts rows of a store with axes or tasks.

        Args:
            plan: of the store.
            fields, lengths, priorities, versions, threads, casting, timeout_s, durable: as for `insert`.
        """
        if casting not in CASTINGS:
            check_choice("casting", casting, CASTINGS)
        given = check_names("insert", fields, plan.fields_of(0))
        known = lengths_given(plan, lengths)
        how = "pass a list with one array for each row, or lengths="
        n, sources, table = collect(plan, given, given, known=known, how=how, casting=casting)
        if n == 0:
            return Keys.empty()
        self.native.check_in_flight(n)
        of_rows = as_column(priorities, n, np.float64, "priorities"), as_column(versions, n, np.int64, "versions")
        most = size = max(1, min(_PIECE, self.capacity // 2))
        if n <= most:
            found = self.insert_together(n, sources, table, of_rows, threads, timeout_s, durable)
            if isinstance(found, Keys):
                return found
            size = found
        ends = {axis: np.concatenate([[0], np.cumsum(column, dtype=np.int64)]) for axis, column in known.items()}
        inserted, at = [], 0
        while at < n:
            rows = slice(at, min(at + size, n))
            part = {
                name: part_of(plan.fields[name], data, rows, ends.get(plan.fields[name].axis or ""))
                for name, data in given.items()
            }
            its = {axis: column[rows] for axis, column in known.items()}
            count, sources, table = collect(plan, part, part, known=its, how=how, casting=casting)
            columns = [None if column is None else column[rows] for column in of_rows]
            try:
                found = self.insert_together(count, sources, table, columns, threads, timeout_s, durable)
            except (WaitTimeoutError, NoSpaceError, PeerLostError) as error:
                raise type(error)(f"{error}. The first {at} of {n} rows are in the store") from None
            if isinstance(found, Keys):
                inserted.append(found)
                at, size = rows.stop, most
            else:
                size = found
        return Keys.join(inserted)

    def finish(self) -> None:
        """Says that no more rows will be inserted.

        The loops of `claims` then end, in every process, when no row can become due for their task any more. An insert
        afterwards is still possible, but loops that have ended do not see its rows.

        Raises:
            ArgumentError: the store has no tasks.
        """
        tasks_plan(self)
        self.native.end_inserts()

    # --- claims ---------------------------------------------------------------------------------------------

    def claims(
        self,
        task: str,
        n: int | None = None,
        *,
        max_items: int | None = None,
        of: str | None = None,
        timeout_s: float | None = None,
        output: Output = "torch",
        version: Version = None,
        fields: Sequence[str] | None = None,
    ) -> Iterator[Claim]:
        """Claims due rows of a task again and again: a loop over claims, oldest rows first.

        A row has one claimer at a time. A claim has at least one row and at most `n`; it never waits for exactly `n`.
        The next turn of the loop, and leaving it, release the rows that were neither put nor dropped: they are due
        again. If the process dies, they are due again, too; after three deaths of its claimers a row is dropped. Where
        all processes die together, no death is counted.

        While no row is due, the loop waits. After 10 s it logs which task lags (logger `geartrain.store.tasked`). It
        ends when the store is closed, or when `finish` was called and no row can become due any more.

        Args:
            task: name of the task; not the last one, whose rows a replay draws.
            n: most rows of a claim; by default one, and with `max_items` any number.
            max_items: most items of the axis `of` in a claim. One row alone may have more.
            of: name of the axis that `max_items` counts; by default the store's only one.
            timeout_s: longest wait for a due row, in seconds; by default there is no limit.
            output: "torch" reads tensors, "numpy" arrays.
            version: version of the policy that this process works with, for staleness: a number, an object with
                `version` such as a `weights.Reader`, or a function. It is asked at each claim. By default, and where it
                is None, `clock`. See `batch.version`.
            fields: fields that a claim of a peer's store brings along; by default all that the task may read. Other
                fields are read when they are asked for, as all are in a store of this host.

        Returns:
            An iterator over claims.

        Raises:
            SchemaError: the store has no such task or axis, or it is the last task.
            FieldError: `fields` has one that the store has not, or that may not be there yet.
            ArgumentError: `n` or `max_items` is not a whole number above zero, or `version` is none.
            WaitTimeoutError: no row was due within `timeout_s`. The message names the task that lags, by how many rows,
                and who holds the oldest claim.

        Examples:
            >>> import geartrain as gt
            >>> tasks = {"square": gt.Task({"y": gt.Field((), "int64")}), "train": gt.Task(after="square")}
            >>> store = gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, capacity=8, span_bytes=100_000)
            >>> _ = store.insert({"x": [2, 3]})
            >>> store.finish()
            >>> for claim in store.claims("square", 4):
            ...     _ = claim.put(y=claim["x"] ** 2)
            >>> len(store)
            2
            >>> store.close()
        """
        number, most, items, axis = self._asked(task, n, max_items, of)
        limit_s = None if timeout_s is None else timeout(timeout_s)
        self.native.task_figures()  # a closed store refuses at once
        brought = self._brought(number, fields)
        return self._claims(
            (number, most, items, axis), limit_s, check_output("output", output), check_version(version), brought
        )

    def _claims(
        self, asked: Asked, timeout_s: float | None, output: str, version: Version, fields: Sequence[str]
    ) -> Iterator[Claim]:
        while True:
            try:
                found = self._wait_for_due(asked, timeout_s, output, version, fields)
            except StoreClosedError:
                return
            if found is None:
                return
            with found as claim:
                yield claim

    def claim(
        self,
        task: str,
        n: int | None = None,
        *,
        max_items: int | None = None,
        of: str | None = None,
        timeout_s: float = 0.0,
        output: Output = "torch",
        version: Version = None,
        fields: Sequence[str] | None = None,
    ) -> Claim:
        """Claims due rows of a task once.

        Release what you do not put or drop, or use the claim as a context manager, which does it at its end.

        Args:
            task, n, max_items, of, output, version, fields: as in `claims`.
            timeout_s: longest wait for a due row, in seconds. 0 does not wait.

        Returns:
            The claim. It is empty, and false, if no row was due within `timeout_s`.

        Raises:
            SchemaError, ArgumentError: as in `claims`.
            StoreClosedError: the store was closed.
        """
        number, most, items, axis = self._asked(task, n, max_items, of)
        output = check_output("output", output)
        later = check_version(version) is not None
        brought = self._brought(number, fields)
        found = self._claim_rows((number, most, items, axis), timeout(timeout_s), later, brought)
        return self._claimed(number, found, output, version)

    async def claim_async(
        self,
        task: str,
        n: int | None = None,
        *,
        max_items: int | None = None,
        of: str | None = None,
        timeout_s: float | None = None,
        output: Output = "torch",
        version: Version = None,
        fields: Sequence[str] | None = None,
    ) -> Claim:
        """Claims due rows of a task once, without blocking the event loop meanwhile.

        All calls of a process share one thread that waits. A call that is cancelled releases what it got.

        Args:
            task, n, max_items, of, output, version, fields: as in `claims`.
            timeout_s: longest wait for a due row, in seconds; by default there is no limit.

        Returns:
            The claim. It is empty, and false, if no row was due within `timeout_s`, or if none can become due any more.

        Raises:
            SchemaError, ArgumentError: as in `claims`.
            StoreClosedError: the store was closed.
        """
        number, most, items, axis = self._asked(task, n, max_items, of)
        limit_s = _FOREVER_S if timeout_s is None else timeout(timeout_s)
        output = check_output("output", output)
        later = check_version(version) is not None
        brought = self._brought(number, fields)
        found = await self._claim_rows_async((number, most, items, axis), limit_s, later, brought)
        return self._claimed(number, found, output, version)

    def _claimed(self, number: int, found: Found, output: str, version: Version) -> Claim:
        """The claim of what was found; empty where nothing was. Says which version works on it."""
        rows, read = found
        claim = Claim(self, number, rows if isinstance(rows, tuple) else None, output, read)
        if version is not None and len(claim):
            with on_error(claim.release):
                said = version_of(version)
                claim.say_version(self.native.clock() if said is None else said)
        return claim

    def put(
        self,
        keys: Keys | ArrayLike,
        task: str,
        fields: Mapping[str, Any],
        *,
        casting: Casting = "no",
        timeout_s: float = INSERT_TIMEOUT_S,
        durable: bool = False,
    ) -> Keys:
        """Replaces the fields of a task that is done, and returns the keys of the rows that were skipped.

        A concurrent reader sees a row's old values or its new ones, never a mixture. The lengths of axes stay.

        Args:
            keys: rows of this store. Rows that are gone, or that the task is not done for, are skipped.
            task: a task with `rewritable=True`.
            fields: all fields of the task: the values of all rows one behind the other, or a list with an array for
                each row.
            casting: as in `insert`.
            timeout_s: longest wait for room, in seconds.
            durable: as in `Claim.put`.

        Raises:
            ArgumentError: keys of another store, or `durable` without a journal. Nothing is written.
            SchemaError: the store has no such task, it is not rewritable, or the values do not fit. Nothing is written.
            WaitTimeoutError: no room within `timeout_s`; rows before are written.
            LockTimeoutError, NoSpaceError: of a journal, as in `Claim.put`.
        """
        plan = tasks_plan(self)
        durable = check_durable(self.native, durable)
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        number = plan.number(task)
        if not plan.tasks[task].rewritable:
            raise SchemaError(f"the task {task!r} is not rewritable: create it with rewritable=True")
        if not len(keys):
            return keys
        table, found = self.native.lengths_of_rows(keys.row, keys.generation)
        given = check_names(f"put of {task!r}", fields, plan.fields_of(number))
        axes = {plan.fields[name].axis for name in given} - {None}
        known = {axis: table[:, plan.axis(axis) - 1] for axis in axes if axis is not None}
        # What came with a row that is gone, or that has no length yet, is not looked at; but its length counts.
        unknown = found == 0
        for column in known.values():
            unknown |= column == 0
        told = None
        if unknown.any():
            with suppress(SchemaError):  # values one behind the other tell no lengths
                _, _, told = collect(plan, given, given, n=len(keys), known={}, casting=casting)
        if told is not None:
            for axis, column in known.items():
                column[unknown] = told[unknown, plan.axis(axis) - 1]
        try:
            _, sources, lengths = collect(plan, given, given, n=len(keys), known=known, casting=casting)
        except SchemaError as error:
            if told is not None or not unknown.any():
                raise
            raise SchemaError(
                f"{error}. {int(unknown.sum())} of {len(keys)} rows are gone or have no lengths yet, so that it is "
                f"unknown which values are theirs: pass a list with one array for each row"
            ) from None
        write = RowWrite(REWRITE, number, 0, keys.row, keys.generation, None, sources, lengths)
        return keys[write_rows(self.native, write, timeout(timeout_s), durable)]

    # --- the clock ------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """Version of the policy that is trained, 0 at first; claims have it as their version by default.

        Raises:
            ArgumentError: the store has no tasks.
        """
        tasks_plan(self)
        return self.native.clock()

    def advance(self, version: int) -> int:
        """Sets the clock to a version, unless it is further already, and returns the clock.

        `Publisher(..., clock=store)` calls it for each version. Rows that are too old then (`limiter.set(max_stale=)`)
        are removed, unless a process holds them.

        Args:
            version: from 0 to 2**63 - 1.

        Raises:
            ArgumentError: the store has no tasks, or the version is out of range.
        """
        tasks_plan(self)
        return self.native.advance(check_whole("version", version, 0, 2**63 - 1))

    def task_stats(self) -> dict[str, dict[str, int]]:
        """Figures of each task by its name, over all processes.

        | name | meaning |
        |---|---|
        | due | rows that may be claimed now |
        | claimed | rows that are claimed now |
        | remaining | rows in the store that the task is not done for |
        | done | how often the task was put |
        | released | how often a row was released |
        | deaths | how often a claimer died |
        | set_back | how often its result was given up to make room for an older row |

        `due` of the last task is the number of rows that a replay can draw, `done` how many were drawn.
        """
        plan = tasks_plan(self)
        figures = self.native.task_figures()["tasks"]
        found = {name: dict(each) for name, each in zip(plan.tasks, figures, strict=True)}
        if found:
            found[list(found)[-1]] |= {"due": len(self), "done": self.stats()["sampled"]}
        return found

    # --- waits ----------------------------------------------------------------------------------------------

    def _wait_for_due(
        self, asked: Asked, timeout_s: float | None, output: str, version: Version, fields: Sequence[str]
    ) -> Claim | None:
        """A claim of rows; None where none can become due any more."""
        number = asked[0]
        task = list(tasks_plan(self).tasks)[number - 1]
        began_s = time.monotonic()
        word_s = FIRST_WORD_S
        while True:
            waited_s = time.monotonic() - began_s
            left_s = _FOREVER_S if timeout_s is None else max(0.0, timeout_s - waited_s)
            wait_s = min(left_s, max(0.0, word_s - waited_s))
            found = self._claim_rows(asked, wait_s, version is not None, fields)
            if isinstance(found[0], tuple):
                return self._claimed(number, found, output, version)
            if found[0] is not None:
                return None
            waited_s = time.monotonic() - began_s
            if timeout_s is not None and waited_s >= timeout_s:
                raise WaitTimeoutError(
                    f"no row of the store {self.name!r} was due for {task!r} within {timeout_s:g} s: "
                    f"{self.lag_before(number)}"
                )
            if waited_s >= word_s:
                import logging

                logging.getLogger(__name__).warning(
                    "no row of the store %r was due for %r for %.0f s: %s",
                    self.name,
                    task,
                    waited_s,
                    self.lag_before(number),
                )
                word_s *= 4

    # --- checks ---------------------------------------------------------------------------------------------

    def _brought(self, number: int, fields: Any) -> Sequence[str]:
        """The fields that a claim brings along."""
        plan = tasks_plan(self)
        known = plan.readable(number)
        if fields is None:
            return known
        names = check_texts("fields", fields)
        for name in names:
            plan.check_readable(number, name)
        return tuple(dict.fromkeys(names))

    def _asked(self, task: Any, n: Any, max_items: Any, of: Any) -> tuple[int, int, int, int]:
        """Number of the task, most rows, most items (0: no limit) and number of their axis."""
        plan = tasks_plan(self)
        number = plan.number(task)
        if number == len(plan.tasks):
            raise SchemaError(f"the last task {task!r} has no claims: draw its rows with Replay, which frees them")
        most = 1 if n is None else check_whole("n", n, 1)
        items = 0 if max_items is None else check_whole("max_items", max_items, 1)
        if max_items is None:
            leave_out("of= is the axis that max_items= counts, which is missing", of=of)
            return number, min(most, self.capacity), 0, 0
        known = [axis.name for axis in plan.axes if axis.owner in plan.before(number)]
        if not known:
            raise ArgumentError(
                f"max_items={items} counts items of an axis whose length is known, and rows that are due for {task!r} "
                "have none yet: leave it out, and bound the claim by rows"
            )
        if of is None:
            if len(known) != 1:
                raise ArgumentError(f"max_items= counts items of one axis: pass of= as one of {some_of(known)}")
            of = known[0]
        axis = plan.axis(of)
        if of not in known:
            raise ArgumentError(f"the length of {of!r} is not known before {task!r}; known are {some_of(known)}")
        return number, self.capacity if n is None else min(most, self.capacity), min(items, 2**63 - 1), axis


def tasks_plan(store: TaskedRows) -> RowPlan:
    """The plan of a store with tasks. Raises `ArgumentError` if it has none."""
    if store.plan is None or not store.plan.tasks:
        raise ArgumentError(f"the store {store.name!r} has no tasks: create it with tasks=")
    return store.plan


def no_room_in_time(
    native: _native.Store, plan: RowPlan, limiter: RateLimiter, n: int, timeout_s: float
) -> WaitTimeoutError:
    """The error of an insert of `n` rows that timed out: which limit it waited for, and by what that is reached."""
    what, state = f"{n} rows could not be inserted within {timeout_s:g} s", limiter.state()
    if state.most_in_flight is None or (state.in_flight or 0) + n <= state.most_in_flight:
        return timed_out(native, what)
    figures = native.task_figures()
    due = [f"{name!r} {its['due'] + its['claimed']}" for name, its in zip(plan.tasks, figures["tasks"], strict=True)]
    return WaitTimeoutError(
        f"{what}: {state.in_flight} rows are in flight, and the limiter lets {state.most_in_flight} be: "
        f"{figures['under_way']} are under way (due and claimed: {', '.join(due[:-1]) or 'none'}), "
        f"{native.committed_count()} wait to be drawn, the others are being inserted or in batches that are not "
        f"finished. Start processes for what lags, or raise limiter.set(in_flight=)"
    )


def lag_in_words(native: _native.Store, plan: RowPlan, limiter: RateLimiter, number: int) -> str:
    """Which task keeps rows from becoming due for the task of a number, and who holds its oldest claim, in words."""
    names = list(plan.tasks)
    figures = native.task_figures()
    waits = {each: figures["tasks"][each - 1] for each in sorted({*plan.before(number), number} - {0, len(names)})}
    if not waits:
        return _full(limiter) or "insert more rows, or call finish() if there are no more"
    lagging = max(waits, key=lambda each: waits[each]["due"] + waits[each]["claimed"])
    rows = waits[lagging]["due"] + waits[lagging]["claimed"]
    if rows == 0:
        if figures["under_way"]:
            return f"none of the {figures['under_way']} rows under way needs it"
        return f"no row is under way; {_full(limiter) or 'insert some, or call finish() if there are no more'}"
    its = waits[lagging]
    text = f"{names[lagging - 1]!r} lags by {rows} rows, {its['due']} due and {its['claimed']} claimed"
    oldest = native.oldest_claim(lagging)
    if oldest is None:
        return f"{text}: start a process that claims it"
    row, pid, inserted_at_ns = oldest
    age_s = max(0.0, time.time() - inserted_at_ns / 1e9)
    return f"{text}; process {pid} has claimed the oldest one, row {row}, inserted {age_s:.1f} s ago"


def _full(limiter: RateLimiter) -> str:
    """That no row may be inserted now, as so many are in flight; empty if some may."""
    state = limiter.state()
    if state.most_in_flight is None or (state.in_flight or 0) < state.most_in_flight:
        return ""
    return (
        f"{state.in_flight} rows are in flight, and the limiter lets {state.most_in_flight} be: the next may be "
        "inserted when the training loop asks for its next batch. Raise limiter.set(in_flight=) if a batch has more"
    )


__all__ = ["TaskedRows", "lag_in_words", "no_room_in_time", "tasks_plan"]
