"""Server side of a store with axes, strings or tasks: what one peer has claimed, and the calls of its connection.

The server claims for its peers under its own client slot of the segment, so it keeps for each connection which rows the
peer has claimed: a peer cannot write another peer's row. When the connection ends, or the peer connects again, its rows
are released. They are due again, and no death is counted against them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.served_writes import CallNumber, InsertedRows, PeerWrites, ServedStore
from geartrain.core.arguments import check_flag, check_whole, default_threads, shown, timeout
from geartrain.core.keys import Keys
from geartrain.core.tasks import RowPlan
from geartrain.errors import (
    ArgumentError,
    MessageError,
    PeerLostError,
    StaleClaimError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.rpc.scheduler import about_to_wait
from geartrain.store.claims import APPEND, PUT, REWRITE, RowWrite, check_durable

#: What a write did to a row, as the native layer has it.
DONE, STALE, WAITS = 0, 1, 2
#: What `claim_again` finds, as the native layer has it.
_CLAIMED, _PUT = 1, 2
#: A number that no claim has: of a row that the peer does not hold.
NO_CLAIM = 0xFFFF
#: Asks for a row that nobody has claimed since it was loaded, and the number of the claim that is then made.
_LOADED, _FIRST = 0, 1
#: An insert that waits for room looks so often whether its client is still there.
_LOOK_EVERY_S = 0.5

#: Values of fields by name, bounds of axes by name; torn, unready, versions of rows.
PackedReply = tuple[dict[str, Any], dict[str, Any], NDArray[Any], NDArray[Any], NDArray[Any]]


class PeerCalls(PeerWrites):
    """What a peer may ask of a store with axes, strings or tasks. Any thread.

    Arguments come from a peer: each is checked here or by the native layer.

    Args:
        served, client, check: as for `PeerWrites`.
    """

    CALLS = PeerWrites.CALLS | frozenset(
        {"claim", "claim_loaded", "give_back", "release", "drop", "say_version", "write", "insert_packed", "read"}
        | {"appended", "stale", "lengths", "ask", "lag"}
    )

    def __init__(self, served: ServedStore, client: int, check: Callable[[], object]) -> None:
        assert served.store.plan is not None
        self._plan: RowPlan = served.store.plan
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[int, int, int]] = {}  # (task, row): generation, claim, request
        self._loaded: dict[tuple[int, int], int] = {}  # the peer claimed it before it was loaded: generation
        self._asking: set[int] = set()  # requests that wait
        self._unwanted: set[int] = set()  # those of them whose client does not wait any more
        if self._plan.tasks:
            served.store.native.claim_for_others()
        super().__init__(served, client, check)

    def end(self) -> None:
        """The connection is lost: its rows are due again, and no death is counted against them."""
        with self._lock:
            self.ended = True
            held, self._held = self._held, {}
        super().end()
        for task in {task for task, _ in held}:
            rows = [(row, *its[:2]) for (of, row), its in held.items() if of == task]
            self._release(task, rows)

    def _release(self, task: int, rows: Sequence[tuple[int, int, int]]) -> None:
        with suppress(StoreClosedError):  # which released them
            self.native.release_rows(task, *_columns(rows))

    # --- claims ---------------------------------------------------------------------------------------------

    def claim(
        self, request: int, task: int, most: int, max_items: int, axis: int, later: bool, fields: Any, wait_s: float
    ) -> Any:
        """Claims rows, at once or later: (found, values of fields, appends of each row, clock, times of inserts)."""
        self.check()
        asked = (task, most, max_items, axis)
        if not all(type(each) is int for each in (request, *asked)):
            raise MessageError("a claim is asked for by whole numbers")
        if not 0 < task < max(1, len(self._plan.tasks)):
            raise ArgumentError(f"no task number {task} has claims")
        names = self._fields(fields)
        for name in names:
            self._plan.check_readable(task, name)
        within_s = timeout(wait_s)
        found = self.native.claim_rows(*asked, 0.0, check_flag("later", later))
        if found is None and within_s > 0:
            with self._lock:
                self._asking.add(request)
            return self._claim_later(request, asked, later, names, within_s)
        return self._claimed(request, task, names, found)

    async def _claim_later(
        self, request: int, asked: tuple[int, int, int, int], later: bool, names: Sequence[str], wait_s: float
    ) -> Any:
        try:
            found = await self.served.wait(asked, wait_s, later)
            return self._claimed(request, asked[0], names, found)
        finally:
            with self._lock:
                self._asking.discard(request)
                self._unwanted.discard(request)

    def _claimed(self, request: int, task: int, names: Sequence[str], found: Any) -> Any:
        if not isinstance(found, tuple):
            return found
        rows, generations, claims, _ = found
        with self._lock:
            unwanted = self.ended or request in self._unwanted
            if not unwanted:
                its = zip(rows.tolist(), generations.tolist(), claims.tolist(), strict=True)
                for row, generation, claim in its:
                    self._held[task, row] = (generation, claim, request)
        if unwanted:
            self.native.release_rows(task, rows, generations, claims)
            return None
        times = self.native.infos(rows)["inserted_at_ns"]
        packed = self._packed(names, (), rows, generations)
        return found, packed, self._parts(task, found), self.native.clock(), times

    def _parts(self, task: int, found: tuple[NDArray[Any], ...]) -> list[int] | None:
        """How many appends each row has already, from earlier claims."""
        if not list(self._plan.tasks.values())[task - 1].keep_partial:
            return None
        return [self._appended(task, *its) for its in zip(*(each.tolist() for each in found[:3]), strict=True)]

    def _appended(self, task: int, row: int, generation: int, claim: int) -> int:
        try:
            return len(self.native.appended_parts(task, row, generation, claim, [])[1])
        except StaleClaimError:
            return 0

    def give_back(self, request: int) -> None:
        """The client does not wait for a claim any more: what it got is released."""
        with self._lock:
            if request in self._asking:
                self._unwanted.add(request)
            found = [key for key, its in self._held.items() if its[2] == request]
            rows = [(key[0], (key[1], *self._held.pop(key)[:2])) for key in found]
        for task in {task for task, _ in rows}:
            self._release(task, [row for of, row in rows if of == task])

    def _held_claims(self, task: int, rows: Any, generations: Any, claims: Any) -> tuple[NDArray[np.uint16], list[int]]:
        """The claims of rows, `NO_CLAIM` of those that the peer has not, and the places of these."""
        own = claims.astype(np.uint16)
        none, its = (0, 0, 0), zip(rows.tolist(), generations.tolist(), claims.tolist(), strict=True)
        with self._lock:
            missing = [i for i, (row, *claim) in enumerate(its) if [*self._held.get((task, row), none)[:2]] != claim]
        own[missing] = NO_CLAIM
        return own, missing

    def _mine(
        self, task: int, rows: Any, generations: Any, claims: Any, versions: Any
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """The claims of rows, `NO_CLAIM` of those that the peer has not, and what `claim_again` said of these.

        A row that the peer has lost with an earlier connection is claimed again if nobody has claimed it since.
        """
        own, missing = self._held_claims(task, rows, generations, claims)
        said = np.zeros(len(own), np.uint8)
        for i in missing:
            one = slice(i, i + 1)
            said[one] = self.native.claim_again(task, rows[one], generations[one], claims[one], int(versions[i]))
            if said[i] != _CLAIMED:
                continue
            with self._lock:
                own[i] = _FIRST if claims[i] == _LOADED else claims[i]
                if not self.ended:
                    self._held[task, int(rows[i])] = (int(generations[i]), int(own[i]), 0)
                    continue
            self.native.release_rows(task, rows[one], generations[one], own[one])
            own[i] = NO_CLAIM
        return own, said

    def claim_loaded(
        self, task: int, rows: Any, generations: Any, claims: Any, versions: Any, times: Any
    ) -> NDArray[np.uint16]:
        """Claims rows that the peer had claimed before this store was loaded from a checkpoint or journal.

        A row is the same one if it was inserted at the same time. It is claimed if nobody has claimed it since.

        Args:
            task, rows, generations, versions: as for `write`.
            claims: 0 where the row is to be claimed; another number says that the peer had claimed it.
            times: when the rows were inserted, in nanoseconds.

        Returns:
            The numbers of the claims, `NO_CLAIM` where there is none.
        """
        self.check()
        rows, generations, claims, versions = _claimed_rows(task, rows, generations, claims, versions)
        if not isinstance(times, np.ndarray) or times.dtype != np.uint64 or times.shape != rows.shape:
            raise MessageError("the times of inserts are sent as a column of uint64")
        there = self.store.status(Keys.of_rows(rows, generations, self.store.id))
        same = (there["generation"] == generations) & (there["inserted_at_ns"] == times)
        asked = np.where(same & (claims == _LOADED), _LOADED, NO_CLAIM).astype(np.uint16)
        own, _ = self._mine(task, rows, generations, asked, versions)
        with self._lock:
            for i in np.flatnonzero(same & (own == NO_CLAIM)).tolist():
                self._loaded[task, int(rows[i])] = int(generations[i])
        return own

    def _forget(self, task: int, rows: Any, generations: Any, own: Any) -> None:
        its = zip(rows.tolist(), generations.tolist(), own.tolist(), strict=True)
        with self._lock:
            for row, *claim in its:
                if [*self._held.get((task, row), (0, 0, 0))[:2]] == claim:
                    del self._held[task, row]

    def release(self, task: int, rows: Any, generations: Any, claims: Any) -> int:
        """As the native `release_rows`, of the peer's rows. Those of an earlier connection are released already."""
        self.check()
        rows, generations, claims = _claimed_rows(task, rows, generations, claims)
        own, _ = self._held_claims(task, rows, generations, claims)
        lost = self.native.release_rows(task, rows, generations, own)
        self._forget(task, rows, generations, own)
        return lost

    def drop(self, call: CallNumber, task: int, rows: Any, generations: Any, claims: Any, versions: Any) -> int:
        """As the native `drop_rows`, of the peer's rows; `call` as for `once`."""
        self.check()
        rows, generations, claims, versions = _claimed_rows(task, rows, generations, claims, versions)
        self._may_wait_for_disk(False)

        def run() -> int:
            own, _ = self._mine(task, rows, generations, claims, versions)
            lost = self.native.drop_rows(task, rows, generations, own)
            self._forget(task, rows, generations, own)
            if lost and self.ended:
                raise PeerLostError("the connection of the client is lost")  # its next one may claim the rows again
            return lost

        return self.once(call, run)

    def say_version(self, task: int, rows: Any, generations: Any, claims: Any, version: int) -> None:
        """As of the native store."""
        self.check()
        rows, generations, claims = _claimed_rows(task, rows, generations, claims)
        versions = np.full(len(rows), check_whole("version", version, 0, 2**63 - 1), np.int64)
        own, _ = self._mine(task, rows, generations, claims, versions)
        self.native.say_version(task, rows, generations, own, version)

    # --- writing --------------------------------------------------------------------------------------------

    def write(
        self,
        call: CallNumber,
        again: bool,
        written: Any,
        versions: Any,
        known: int,
        timeout_s: float,
        durable: bool,
    ) -> NDArray[np.uint8]:
        """As the native `write_rows`, of the peer's rows.

        Args:
            call: as for `once`.
            again: it was sent before, and may have run: its reply was lost.
            written: a `RowWrite`, as a tuple.
            versions: of the claims, for rows that have to be claimed again.
            known: appends of a row that the client knows of.
            timeout_s, durable: as there.
        """
        self.check()
        within_s = timeout(timeout_s)
        write = _row_write(written, versions)
        how, task = write.how, write.task
        if not 0 < task < len(self._plan.tasks) or write.axis != (
            self._plan.appended_axis(task) if how == APPEND else 0
        ):
            raise MessageError(f"no task number {task} is written so")
        divider = self._plan.appendable[task][1]
        marked = self._plan.fields[divider].axis if how == APPEND and divider else None
        self._check_values(
            self._written(how, task, write.merges), write.sources, write.lengths, len(write.rows), marked
        )
        if how != APPEND:
            self._may_wait_for_disk(durable)
        turn = self.outcomes.begin(call, lambda: self.ended)
        try:
            wrote: NDArray[np.uint8] | None = turn.outcome
            if wrote is None or (again and not (wrote == DONE).all()):
                before = wrote
                wrote = self._write(write, versions, known, within_s, again)
                if before is not None:
                    wrote[before == DONE] = DONE
                if not (wrote == WAITS).any():
                    turn.outcome = wrote
        finally:
            self.outcomes.end(turn)
        if how != APPEND:
            self.native.settle_journal("put", durable)
        return wrote

    def _write(self, write: RowWrite, versions: Any, known: int, within_s: float, again: bool) -> NDArray[np.uint8]:
        rows = write.task, write.rows, write.generations
        own = found = None
        if write.how != REWRITE:
            own, found = self._mine(*rows, write.claims, versions)
            if write.how == APPEND or write.merges:
                there = self._appended_before(*rows, own, found)
                if there is not None and there != known:
                    if write.how == APPEND and again and there == known + 1:
                        return np.full(1, DONE, np.uint8)
                    self._give_up(*rows, own)
        write = write._replace(claims=own)
        try:
            wrote = self.native.write_rows(*write, 0, 0.0)
            waits = wrote == WAITS
            if within_s > 0 and waits.any():
                about_to_wait()
                wrote[waits] = self.native.write_rows(*write, 0, within_s)[waits]
        except StaleClaimError:
            wrote = np.full(len(write.rows), STALE, np.uint8)
        if write.how != PUT or own is None:
            return wrote
        if again:
            wrote[found == _PUT] = DONE
            for i in np.flatnonzero((wrote == STALE) & (own == NO_CLAIM)).tolist():
                if self._was_put(write, i):
                    wrote[i] = DONE
        ended = np.flatnonzero(wrote != WAITS)
        self._forget(write.task, write.rows[ended], write.generations[ended], own[ended])
        return wrote

    def _may_wait_for_disk(self, durable: bool) -> None:
        """What follows waits for the store's journal, if it has one. Raises `ArgumentError` as `check_durable`."""
        check_durable(self.native, durable)
        if self.native.journal_state() is not None:
            about_to_wait()

    def _was_put(self, write: RowWrite, i: int) -> bool:
        """Whether a put of a row took effect before the store was loaded: its claim is lost, and it has the values."""
        task, row, generation = write.task, write.rows[i : i + 1], write.generations[i : i + 1]
        with self._lock:
            if self._loaded.get((task, int(row[0]))) != int(generation[0]):
                return False
        names = list(self._plan.fields_of(task))
        found = self.store.packed_reader(names).read(Keys.of_rows(row, generation, self.store.id))
        if not names or found.torn().any() or found.unready().any():
            return False
        fields = list(self._plan.fields)
        sources: Any = write.sources
        for number, values, sizes in sources:
            field, place = self._plan.fields[fields[number]], names.index(fields[number])
            items = np.ones(i + 1, np.int64)
            if field.axis is not None:
                items = write.lengths[: i + 1, self._plan.axis(field.axis) - 1].astype(np.int64)
            first, last = int(items[:i].sum()), int(items.sum())
            if field.kind == "array":
                run, first = (values[i], 0) if isinstance(values, list) else (values, first)
                size = math.prod(field.shape) * field.itemsize
                its = found.field(place).tobytes()
                given = run.tobytes()[first * size : (first + int(items[i])) * size]
            else:
                ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
                strings = (each.encode() if isinstance(each, str) else each for each in found.strings(place))
                its = b"".join(strings)
                given = bytes(values[ends[first] : ends[last]])
            if its != given:
                return False
        return True

    def _appended_before(self, task: int, rows: Any, generations: Any, own: Any, found: Any) -> int | None:
        """How many appends a row has that was claimed again just now; None: it is no such row."""
        if len(rows) != 1 or found[0] != _CLAIMED or own[0] == NO_CLAIM:
            return None
        return self._appended(task, int(rows[0]), int(generations[0]), int(own[0]))

    def _give_up(self, task: int, rows: Any, generations: Any, own: NDArray[np.uint16]) -> None:
        """Releases rows that lack what was appended to them. They are not the peer's any more, as `own` then says."""
        self.native.release_rows(task, rows, generations, own)
        self._forget(task, rows, generations, own)
        own[:] = NO_CLAIM

    def _check_values(self, wanted: Sequence[str], sources: Any, lengths: Any, n: int, marked: str | None) -> None:
        """Raises `MessageError` unless sources have all of these fields, and the items that `lengths` (n, axes) says.

        Args:
            marked: an axis whose length may be 1 though no field has it: an append whose item is done.
        """
        plan = self._plan
        if not isinstance(lengths, np.ndarray) or lengths.dtype != np.uint32 or lengths.shape != (n, len(plan.axes)):
            raise MessageError(f"lengths are sent as ({n}, {len(plan.axes)}) uint32")
        if not isinstance(sources, list) or not all(isinstance(each, tuple) and len(each) == 3 for each in sources):
            raise MessageError("values are sent as a list of field, values and sizes")
        names = list(plan.fields)
        numbers = [each[0] for each in sources]
        if any(type(number) is not int for number in numbers) or sorted(numbers) != sorted(
            plan.field_numbers[name] for name in wanted
        ):
            raise MessageError(f"the fields {', '.join(wanted) or 'none'} are written here, all of them together")
        fields = [plan.fields[names[number]] for number in numbers]
        with_axis = {field.axis for field in fields}
        for number, axis in enumerate(plan.axes):
            most = 1 if axis.name == marked else 0
            if axis.name not in with_axis and lengths[:, number].max(initial=0) > most:
                raise MessageError(f"the axis {axis.name!r} has a length, and no field of it is written")
        for (number, values, sizes), field in zip(sources, fields, strict=True):
            items = np.ones(n, np.int64)
            if field.axis is not None:
                items = lengths[:, plan.axis(field.axis) - 1].astype(np.int64)
            if isinstance(values, list) and (not plan.in_spans(names[number]) or len(values) != n):
                raise MessageError(f"the field {names[number]!r} is sent in one buffer, or one for each row")
            runs = values if isinstance(values, list) else [values]
            counts = items if isinstance(values, list) else items.sum(keepdims=True)
            if field.kind != "array":
                if isinstance(values, list) or not isinstance(sizes, np.ndarray) or sizes.dtype != np.uint32:
                    raise MessageError(f"strings of {names[number]!r} are sent one behind the other, with their sizes")
                if sizes.shape != (int(counts[0]),) or len(values) != int(sizes.sum(dtype=np.int64)):
                    raise MessageError(f"the field {names[number]!r} has other strings than its lengths say")
                if field.kind == "text":
                    _check_text(bytes(values), sizes)
            elif any(
                not isinstance(run, np.ndarray) or run.nbytes != int(count) * math.prod(field.shape) * field.itemsize
                for run, count in zip(runs, counts, strict=True)
            ):
                raise MessageError(f"the field {names[number]!r} has other bytes than its lengths say")

    def _written(self, how: int, task: int, merges: bool) -> Sequence[str]:
        """The fields that a write has."""
        own = list(self._plan.fields_of(task))
        appended, divider = self._plan.appendable[task]
        if how == APPEND:
            return appended
        return [name for name in own if name not in appended and name != divider] if merges else own

    def insert_packed(
        self,
        call: CallNumber,
        n: int,
        sources: Any,
        lengths: Any,
        priorities: Any,
        versions: Any,
        timeout_s: float,
        durable: bool,
    ) -> InsertedRows | int:
        """Inserts rows, all or none: their keys, or how many to insert first. `call` as for `once`."""
        self.check()
        self._may_wait_for_disk(durable)
        within_s = timeout(timeout_s)
        check_whole("n", n, 0, self.store.capacity)
        self._check_values(list(self._plan.fields_of(0)), sources, lengths, n, None)
        until_s = time.monotonic() + within_s

        def run() -> InsertedRows | int:
            wait_s = 0.0
            while True:
                try:
                    found = self.store.insert_together(
                        n, list(sources), lengths, (priorities, versions), default_threads(None), wait_s, durable
                    )
                    return (found.row, found.generation) if isinstance(found, Keys) else found
                except WaitTimeoutError:
                    left_s = until_s - time.monotonic()
                    if self.ended:
                        raise PeerLostError("the connection of the client is lost") from None
                    if left_s <= 0:
                        if self.store.limiter.state().enabled:
                            raise
                        raise self.store.waited_for_room(n, within_s) from None
                    if wait_s == 0:
                        about_to_wait()
                    self.check()
                    wait_s = min(left_s, _LOOK_EVERY_S)

        return self.once(call, run)

    # --- reading --------------------------------------------------------------------------------------------

    def read(self, names: Any, axes: Any, rows: Any, generations: Any) -> PackedReply:
        """Values of fields, and lengths of axes."""
        self.check()
        fields, others = self._fields(names), self._fields(axes)
        rows, generations = _claimed_rows(0, rows, generations)
        return self._packed(fields, others, rows, generations)

    def _fields(self, names: Any) -> list[str]:
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise MessageError("fields and axes are a list of names")
        return list(names)

    def _packed(self, names: Sequence[str], axes: Sequence[str], rows: Any, generations: Any) -> PackedReply:
        reader = self.store.packed_reader(names, axes)
        found = reader.read(Keys.of_rows(rows, generations, self.store.id))
        values: dict[str, Any] = {}
        its: set[str] = set(axes)
        for place, name in enumerate(names):
            field = self._plan.fields[name]
            values[name] = found.field(place) if field.kind == "array" else found.strings(place)
            its |= {field.axis} if field.axis else set()
        its |= {into for axis in its if (into := self._plan.divided_into(axis)) is not None}
        bounds = {axis: tuple(found.axis(self._plan.axis(axis))) for axis in its}
        return values, bounds, found.torn(), found.unready(), found.versions()

    def appended(self, task: int, row: int, generation: int, claim: int, version: int, known: int, fields: Any) -> Any:
        """As the native `appended_parts`, of a row of the peer's.

        Args:
            task, row, generation, claim, fields: as there.
            version, known: as for `write`.
        """
        self.check()
        kinds = ((row, "u4"), (generation, "u4"), (claim, "u2"), (version, "i8"))
        rows, generations, claims, versions = (np.array([each], kind) for each, kind in kinds)
        own, found = self._mine(task, rows, generations, claims, versions)
        there = self._appended_before(task, rows, generations, own, found)
        if there is not None and there < known:
            self._give_up(task, rows, generations, own)
        return self.native.appended_parts(task, row, generation, int(own[0]), list(fields))

    def stale(self, rows: Any, generations: Any) -> NDArray[np.uint8]:
        """As the native `stale_rows`."""
        self.check()
        return self.native.stale_rows(rows, generations)

    def lengths(self, rows: Any, generations: Any) -> Any:
        """As the native `lengths_of_rows`."""
        self.check()
        return self.native.lengths_of_rows(rows, generations)

    def ask(self, what: str, *given: Any) -> Any:
        """Figures of the store: calls of the native store that change nothing but the clock and the end of inserts."""
        self.check()
        if what not in ASKED:
            raise MessageError(f"a store is not asked for {shown(what)}")
        return getattr(self.native, what)(*given)

    def lag(self, task: int) -> str:
        """As `Store.lag_before`."""
        self.check()
        if type(task) is not int or not 0 < task <= len(self._plan.tasks):
            raise ArgumentError(f"no task number {shown(task)}")
        return self.store.lag_before(task)


#: What peers may ask for.
ASKED = frozenset({"task_figures", "oldest_claim", "clock", "advance", "end_inserts", "occupancy", "check_in_flight"})


def _columns(rows: Sequence[tuple[int, int, int]]) -> tuple[NDArray[Any], ...]:
    return tuple(
        np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), ("u4", "u4", "u2"), strict=True)
    )


def _check_text(text: bytes, sizes: NDArray[np.uint32]) -> None:
    """Raises `MessageError` for strings of another encoding than UTF-8."""
    if text.isascii():
        return
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    try:
        for first, last in zip([0, *ends[:-1]], ends, strict=True):
            text[first:last].decode()
    except UnicodeDecodeError as error:
        raise MessageError(f"text is sent as UTF-8: {error}") from None


def _row_write(given: Any, versions: Any) -> RowWrite:
    """What a peer writes, and to which rows; values are not checked. Raises `MessageError`."""
    if not isinstance(given, tuple) or len(given) != len(RowWrite._fields):
        raise MessageError("a write is a tuple of its arguments")
    write = RowWrite(*given)
    if type(write.how) is not int or write.how not in (PUT, APPEND, REWRITE):
        raise MessageError("rows are put, appended to or rewritten")
    if write.how == REWRITE:
        _claimed_rows(write.task, write.rows, write.generations)
        return write._replace(merges=False)
    _claimed_rows(write.task, write.rows, write.generations, write.claims, versions)
    return write._replace(merges=bool(write.merges))


def _claimed_rows(task: Any, *columns: Any) -> tuple[Any, ...]:
    """Columns of rows from a peer: rows, generations, claims, versions. Raises `MessageError` for others."""
    if type(task) is not int or not 0 <= task < 2**31:
        raise MessageError("tasks have numbers")
    for column, dtype in zip(columns, ("u4", "u4", "u2", "i8"), strict=False):
        its = isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == dtype
        if not its or len(column) != len(columns[0]):
            raise MessageError("rows are sent as columns of rows, generations, claims and versions, of one length")
    return columns


__all__ = ["PeerCalls"]
