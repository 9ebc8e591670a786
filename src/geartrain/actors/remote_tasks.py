"""Client side of a peer's store with axes, strings or tasks: the calls of a native store that claims use, over RPC.

Calls are sent again after a lost connection (`remote_calls.py`). The peer has released the claims of that connection. A
row that nobody has claimed since is claimed again by the next write, so a put takes effect after a restart of the peer.

The peer may come back with a store that it loaded from a checkpoint or journal. It has another id, so old keys are
refused. Rows that this process has claimed are claimed there at once, if nobody has claimed them since.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.remote_calls import RemoteCalls, Sendings
from geartrain.actors.served_tasks import ASKED, DONE, NO_CLAIM, PackedReply
from geartrain.core.keys import Keys
from geartrain.core.tasks import RowPlan
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError
from geartrain.rpc.node import Node
from geartrain.rpc.remote_objects import METHOD, Remote
from geartrain.store.claims import APPEND, PUT, RowWrite
from geartrain.store.waiting_claims import Asked

#: A claim asks so long at a time for due rows.
_ASK_S = 3600.0
_Row = tuple[int, int, int, int]  # task, row, generation, claim


@dataclass
class _Held:
    """What is known of a row that this process has claimed."""

    version: int
    appends: int
    inserted_at_ns: int  # its row: tells it from another that has its key in a store that was loaded
    claim: int  # its number at the peer


def _ask_s(until_s: float) -> float:
    """How long the peer may wait for due rows now, in seconds."""
    return max(0.0, min(until_s - time.monotonic(), _ASK_S))


class RemoteValues:
    """Values of rows as the peer has packed them."""

    def __init__(self, plan: RowPlan, names: Sequence[str], reply: PackedReply) -> None:
        self._plan, self._names = plan, names
        self._values, self._bounds, self._torn, self._unready, self._versions = reply

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        return sum(
            sum(map(len, each)) if isinstance(each, list) else int(each.nbytes) for each in self._values.values()
        )

    def field(self, place: int, /) -> NDArray[Any]:
        """As of `PackedValues`."""
        found: NDArray[Any] = self._values[self._names[place]]
        return found

    def strings(self, place: int, /) -> list[Any]:
        """As of `PackedValues`."""
        return list(self._values[self._names[place]])

    def axis(self, number: int, /) -> tuple[Any, Any, Any]:
        """As of `PackedValues`."""
        lengths, bounds, parts = self._bounds[self._plan.axes[number - 1].name]
        return lengths, bounds, parts

    def torn(self) -> NDArray[np.uint8]:
        """As of `ReadValues`."""
        return self._torn

    def unready(self) -> NDArray[np.uint8]:
        """As of `ReadValues`."""
        return self._unready

    def versions(self) -> NDArray[np.int64]:
        """As of `ReadValues`."""
        return self._versions


class RemoteReader:
    """Reads fields of rows of a peer's store, as `PackedReader` does of one of this host."""

    def __init__(self, rows: RemoteRows, plan: RowPlan, names: Sequence[str], axes: Sequence[str]) -> None:
        self._rows, self.plan, self.names, self._axes = rows, plan, tuple(names), tuple(axes)

    def read(self, keys: Keys) -> RemoteValues:
        """The fields of rows."""
        reply = self._rows.ask("read", lambda: (self.names, self._axes, *self._rows.columns_of(keys)))
        return RemoteValues(self.plan, self.names, reply)


class RemoteRows(RemoteCalls):
    """The calls of a native store that `Claim` and `TaskedRows` use, done by a peer. Any thread.

    Args:
        node, peer, name, timeout_s, about: as for `RemoteCalls`.
        plan: fields, axes and tasks of the store.
    """

    closed = False

    def __init__(
        self, node: Node, peer: str, name: str, timeout_s: float, about: dict[str, Any], plan: RowPlan
    ) -> None:
        super().__init__(node, peer, name, timeout_s, about)
        self._plan = plan
        self._requests = itertools.count(1)
        self._held: dict[_Row, _Held] = {}
        self.opened(timeout_s)

    def move(self, remote: Remote, store_id: int, within_s: float) -> None:
        """Claims this client's rows in the other store, and forgets those that it has not."""
        super().move(remote, store_id, within_s)
        with self.lock:
            held = dict(self._held)
        for task in {each[0] for each in held}:
            its = [each for each in held if each[0] == task]
            known = [held[each] for each in its]
            claims = remote.call(
                "claim_loaded",
                task,
                np.array([row for _, row, _, _ in its], np.uint32),
                np.array([generation for _, _, generation, _ in its], np.uint32),
                # What was appended is not in the store that was loaded.
                np.array([NO_CLAIM if each.appends else 0 for each in known], np.uint16),
                np.array([each.version for each in known], np.int64),
                np.array([each.inserted_at_ns for each in known], np.uint64),
                timeout_s=within_s,
            )
            for each, claim in zip(known, claims.tolist(), strict=True):
                each.claim = claim
            self._forget([row for row, each in zip(its, known, strict=True) if each.claim == NO_CLAIM])

    def columns_of(self, keys: Keys) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Rows and generations; those of an earlier store name no row, but for rows that were claimed again."""
        if keys.store is None or (isinstance(keys.store, int) and keys.store == self.store_id):
            return keys.row, keys.generation
        with self.lock:
            held = {each[1:3] for each in self._held}
        here = np.broadcast_to(np.asarray(keys.store) == np.uint64(self.store_id), len(keys)).copy()
        here |= [each in held for each in zip(keys.row.tolist(), keys.generation.tolist(), strict=True)]
        return keys.row, np.where(here, keys.generation, 0).astype(np.uint32)

    def journal_state(self) -> dict[str, Any] | None:
        """None: the peer's store has no journal, as of the last connection."""
        return {} if self.journaled else None

    def _ask(self, what: str, *args: Any) -> Any:
        return self.ask(what, lambda: args)

    async def _ask_async(self, what: str, given: Callable[[], tuple[Any, ...]], wait_s: float) -> Any:
        sendings = Sendings(self, wait_s)
        while True:
            remote = self.remote
            try:
                if remote is None:
                    remote = (await asyncio.to_thread(self.opened, sendings.connect_s))[0]
                return await remote.call_async(what, *given(), timeout_s=min(wait_s + self.timeout_s, 1e9))
            except (PeerLostError, LookupError) as error:
                if not sendings.reopened and await asyncio.to_thread(self.is_stale, error, remote):
                    sendings.reopened = True
                    continue
                pause_s = sendings.again_in(error, remote)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    # --- claims ---------------------------------------------------------------------------------------------

    def claim(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Any:
        """As `claim_rows` of the native store, with the values of fields: (found, (fields, values) or None)."""
        until_s = time.monotonic() + timeout_s

        def given(request: int) -> tuple[Any, ...]:
            return request, *asked, later, list(fields), _ask_s(until_s)

        while True:
            request, wait_s = next(self._requests), _ask_s(until_s)
            try:
                reply = self.ask("claim", partial(given, request), wait_s=wait_s)
            except BaseException:
                self._give_back(request)
                raise
            if reply is not None or time.monotonic() >= until_s:
                return self._claimed(asked[0], fields, reply)

    async def claim_async(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Any:
        """The same without blocking the event loop."""
        until_s = time.monotonic() + timeout_s

        def given(request: int) -> tuple[Any, ...]:
            return request, *asked, later, list(fields), _ask_s(until_s)

        while True:
            request, wait_s = next(self._requests), _ask_s(until_s)
            try:
                reply = await self._ask_async("claim", partial(given, request), wait_s=wait_s)
            except BaseException:
                self._give_back(request)
                raise
            if reply is not None or time.monotonic() >= until_s:
                return self._claimed(asked[0], fields, reply)

    def _give_back(self, request: int) -> None:
        """Tells the peer that nobody waits for a claim any more."""
        remote = self.remote
        if remote is not None:
            with suppress(GeartrainError):
                remote.tell(METHOD, "give_back", (request,), {})

    def _claimed(self, task: int, fields: Sequence[str], reply: Any) -> Any:
        if not isinstance(reply, tuple):
            return reply, None
        found, packed, appends, clock, times = reply
        rows = zip(*(each.tolist() for each in (*found[:3], times)), strict=True)
        with self.lock:
            for i, (row, generation, claim, inserted_at_ns) in enumerate(rows):
                its = _Held(clock, appends[i] if appends else 0, inserted_at_ns, claim)
                self._held[task, row, generation, claim] = its
        values = RemoteValues(self._plan, fields, packed)
        return found, None if values.torn().any() else (fields, values)

    def _known(
        self, task: int, rows: Any, generations: Any, claims: Any
    ) -> tuple[list[_Row], NDArray[np.uint16], NDArray[np.int64]]:
        """The rows; their claims, `NO_CLAIM` of those that were put, dropped or released; versions of the claims."""
        its = [(task, *each) for each in zip(rows.tolist(), generations.tolist(), claims.tolist(), strict=True)]
        with self.lock:
            held = [self._held.get(each) for each in its]
        own = np.array([NO_CLAIM if known is None else known.claim for known in held], np.uint16)
        return its, own, np.array([0 if known is None else known.version for known in held], np.int64)

    def _forget(self, rows: Sequence[_Row]) -> None:
        with self.lock:
            for each in rows:
                self._held.pop(each, None)

    def say_version(self, task: int, rows: Any, generations: Any, claims: Any, version: int) -> None:
        """As of the native store."""
        self.ask(
            "say_version",
            lambda: (task, rows, generations, self._known(task, rows, generations, claims)[1], version),
        )
        with self.lock:
            for each in self._known(task, rows, generations, claims)[0]:
                if each in self._held:
                    self._held[each].version = version

    def release_rows(self, task: int, rows: Any, generations: Any, claims: Any) -> int:
        """As of the native store. The rows of a lost connection are released already."""
        its, own, _ = self._known(task, rows, generations, claims)
        held = np.flatnonzero(own != NO_CLAIM)
        if not len(held):
            return len(its)
        self._forget(its)
        try:
            remote = self.remote
            if remote is None:
                return len(its) - len(held)
            columns = rows[held], generations[held], own[held]
            lost: int = remote.call("release", task, *columns, timeout_s=self.timeout_s)
        except PeerLostError:
            return len(its) - len(held)
        return len(its) - len(held) + lost

    def drop_rows(self, task: int, rows: Any, generations: Any, claims: Any) -> int:
        """As of the native store."""
        lost: int = self.write(
            "drop",
            lambda again: (task, rows, generations, *self._known(task, rows, generations, claims)[1:]),
            elsewhere=True,
        )
        self._forget(self._known(task, rows, generations, claims)[0])
        return lost

    # --- writing --------------------------------------------------------------------------------------------

    def write_rows(self, *given: Any) -> NDArray[np.uint8]:
        """As of the native store. A write that was sent again takes effect once."""
        *written, _threads, timeout_s, durable = given
        write, store_id, until_s = RowWrite(*written), self.store_id, time.monotonic() + timeout_s
        rows = write.task, write.rows, write.generations
        its = [] if write.claims is None else self._known(*rows, write.claims)[0]

        def given_now(again: bool) -> tuple[Any, ...]:
            own, versions, known = None, None, 0
            if write.claims is not None:
                _, own, versions = self._known(*rows, write.claims)
            elif store_id != self.store_id:
                raise ArgumentError(
                    f"{self.peer!r} serves the store {self.name!r} under a new id, as it was loaded again: keys from "
                    f"before name no rows there"
                )
            if len(its) == 1:
                with self.lock:
                    held = self._held.get(its[0])
                known = 0 if held is None else held.appends
            left_s = max(0.0, until_s - time.monotonic()) if again else timeout_s
            return again, tuple(write._replace(claims=own)), versions, known, left_s, durable

        reply = self.write("write", given_now, wait_s=timeout_s, elsewhere=True)
        wrote: NDArray[np.uint8] = np.array(reply)
        if write.how == PUT:
            self._forget([each for each, what in zip(its, wrote.tolist(), strict=True) if what == DONE])
        elif write.how == APPEND and wrote[0] == DONE:
            with self.lock:
                if its[0] in self._held:
                    self._held[its[0]].appends += 1
        return wrote

    # --- reading --------------------------------------------------------------------------------------------

    def appended_parts(self, task: int, row: int, generation: int, claim: int, fields: Sequence[int]) -> Any:
        """As of the native store."""

        def given() -> tuple[Any, ...]:
            with self.lock:
                held = self._held.get((task, row, generation, claim))
            own, version, known = (NO_CLAIM, 0, 0) if held is None else (held.claim, held.version, held.appends)
            return task, row, generation, own, version, known, list(fields)

        reply = self.ask("appended", given)
        with self.lock:
            if (held := self._held.get((task, row, generation, claim))) is not None:
                held.appends = len(reply[1])
        return reply

    def stale_rows(self, rows: Any, generations: Any) -> Any:
        """As of the native store."""
        return self._ask("stale", rows, generations)

    def lengths_of_rows(self, rows: Any, generations: Any) -> Any:
        """As of the native store. Copies, as callers change them."""
        lengths, found = self._ask("lengths", rows, generations)
        return np.array(lengths), found

    def lag(self, task: int) -> str:
        """As `Store.lag_before`."""
        return str(self._ask("lag", task))

    def __getattr__(self, name: str) -> Any:
        """Figures, the clock and the end of inserts, as of the native store."""
        if name not in ASKED:
            raise AttributeError(f"a peer's store has no {name!r}")
        return partial(self._ask, "ask", name)


__all__ = ["RemoteReader", "RemoteRows", "RemoteValues"]
