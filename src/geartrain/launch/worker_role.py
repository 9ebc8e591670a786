"""The role "workers" of a job: a process that claims rows of a task and calls a function with each claim.

    def reward(claim):                     # launch.workers("reward", "module:reward", rows=32)
        return {"reward": score(claim)}    # the fields to put

A plain function runs on the main thread, one claim after the other. An `async` function runs with many claims at a time
in one event loop; each claim belongs to one of the event loop's lanes. Puts run on threads, because they may wait for
room.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from geartrain.core.arguments import shown
from geartrain.errors import ArgumentError, SchemaError, StaleClaimError, StoreClosedError, WaitTimeoutError
from geartrain.launch.context import Context
from geartrain.launch.job import exit_unusable, find_or_exit
from geartrain.store.claims import Claim
from geartrain.store.store import Store

#: Claims at a time of an `async` function.
CONCURRENCY = 64
#: A process fails at so many errors one after the other, and drops a row at so many errors of the row alone.
ERRORS_IN_SEQUENCE, ERRORS_OF_A_ROW = 10, 3
#: Pause after an error. It doubles with each further one.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
#: Period of heartbeats and of looks at `Context.stopping`.
_BEAT_S = 0.5
#: A process that waits for a due row logs why after this time, and then at four times the time each.
_IDLE_S = 10.0


class _Work:
    """What the lanes of a process share: the task, its progress, and the errors of rows."""

    def __init__(self, context: Context, store: Any, task: str, limits: Mapping[str, Any]) -> None:
        self.context, self.store, self.task, self.limits = context, store, task, limits
        self.rows = self.errors = 0
        self.wait_s = 0.0
        self.failed: dict[int, tuple[int, int]] = {}  # row -> generation, errors of the row alone

    def end_waits(self) -> None:
        """Ends calls that wait: closes the store, or of a store of another host the node."""
        (self.store if isinstance(self.store, Store) else self.context.node()).close()

    def report(self) -> None:
        """Reports progress, which is a heartbeat too."""
        self.context.report(rows=self.rows, wait_s=self.wait_s, **({"errors": self.errors} if self.errors else {}))


class _Lane:
    """One loop over claims, and its errors one after the other."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._errors = 0
        self._alone = 0  # claims of one row that are still to be made

    def limits(self) -> Mapping[str, Any]:
        """Limits of the next claim: after an error of several rows, rows are tried one by one."""
        return {"n": 1, "output": self._work.limits["output"]} if self._alone else self._work.limits

    def pause_s(self) -> float:
        """Time until the next claim."""
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._errors - 1)) if self._errors else 0.0

    @contextlib.contextmanager
    def turn(self, claim: Claim) -> Iterator[None]:
        """Counts the rows of a claim, or handles the error that the function or the put raised."""
        self._alone = max(0, self._alone - 1)
        try:
            yield
        except StaleClaimError as error:  # a row was taken back to make room, which is nobody's fault
            print(f"{self._work.task}: {error}", flush=True)
        except StoreClosedError:
            raise
        except Exception as error:
            self._failed(claim, error)
        else:
            self._errors = 0
            self._work.rows += len(claim)
            for row in claim.keys.row.tolist() if self._work.failed else ():
                self._work.failed.pop(row, None)
        self._work.report()

    def _failed(self, claim: Claim, error: Exception) -> None:
        work = self._work
        work.errors += 1
        self._errors += 1
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # from the function on
        traceback.print_exception(type(error), error, trace)
        last_line = traceback.format_exception_only(type(error), error)[-1].strip()
        effect = "they are due again, and rows are tried one by one"
        if len(claim) == 1:
            row, generation = int(claim.keys.row[0]), int(claim.keys.generation[0])
            before = work.failed.get(row, (generation, 0))
            errors = 1 + (before[1] if before[0] == generation else 0)
            work.failed[row] = generation, errors
            self._alone = max(self._alone, 1)
            effect = f"the row is due again, after {errors} of {ERRORS_OF_A_ROW} errors"
            if errors == ERRORS_OF_A_ROW:
                del work.failed[row]
                claim.drop()
                effect = f"the row is dropped after {errors} errors"
        else:
            self._alone = len(claim)
        claim.release()
        print(f"{work.task} failed on {len(claim)} row{'s' * (len(claim) > 1)}: {last_line}; {effect}", flush=True)
        if self._errors == ERRORS_IN_SEQUENCE:
            work.report()
            raise error


def work(
    context: Context,
    *,
    task: str,
    run: str,
    args: Mapping[str, Any],
    rows: int | None,
    max_items: int | None,
    of: str | None,
    concurrency: int | None,
    store: str,
    output: str,
) -> None:
    """Function that the processes of `launch.workers` run. See there."""
    found = find_or_exit(run)
    kind = found if inspect.isclass(found) else type(found)
    if not callable(found) or not any("__call__" in vars(each) for each in kind.__mro__):
        exit_unusable(ArgumentError(f"{run} is {shown(found)}, which cannot be called with a claim"))
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(kind.__call__)
    if concurrency is not None and not is_async:
        exit_unusable(
            ArgumentError(f"concurrency={concurrency} is for async functions, and {run} is none: raise processes")
        )
    opened: Any = context.store(name=store)
    limits = {"n": rows, "max_items": max_items, "of": of, "output": output}
    with contextlib.ExitStack() as stack:
        if isinstance(opened, Store):
            stack.enter_context(opened)
        try:
            opened.claims(task, **limits)  # checks its arguments, and claims at the first turn of a loop
        except ArgumentError as error:
            exit_unusable(error)
        function: Any = found(**args) if inspect.isclass(found) else functools.partial(found, **args)
        shared = _Work(context, opened, task, limits)
        if is_async:
            asyncio.run(_run_lanes(shared, function, concurrency or CONCURRENCY))
        else:
            _run(shared, function)
        shared.report()


def _run(work: _Work, function: Callable[[Claim], Any]) -> None:
    """One claim after the other, until none can become due any more or the job ends."""
    lane, context = _Lane(work), work.context
    word_s, since_s = _IDLE_S, time.monotonic()
    while not context.stopping:
        began_s = time.monotonic()
        claims = work.store.claims(work.task, **lane.limits(), timeout_s=_BEAT_S)
        try:
            claim = next(claims, None)
        except WaitTimeoutError as error:
            claim = error
        work.wait_s += time.monotonic() - began_s
        if claim is None:
            return
        if isinstance(claim, WaitTimeoutError):
            work.report()
            if (idle_s := time.monotonic() - since_s) >= word_s:
                print(f"idle for {idle_s:.0f} s: {claim}", flush=True)
                word_s *= 4
            continue
        with claim, lane.turn(claim):
            fields = function(claim)
            if fields is not None:
                claim.put(_checked(fields))
        until_s = time.monotonic() + lane.pause_s()
        while not context.stopping and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _BEAT_S))
            work.report()
        word_s, since_s = _IDLE_S, time.monotonic()


async def _run_lanes(work: _Work, function: Callable[[Claim], Any], concurrency: int) -> None:
    """Many claims at a time. When the job ends, functions that still run are cancelled."""
    waiting = 0

    async def run_lane() -> None:
        nonlocal waiting
        lane = _Lane(work)
        while True:
            waiting += 1
            try:
                claim = await work.store.claim_async(work.task, **lane.limits())
            finally:
                waiting -= 1
            if not claim:
                return
            with claim, lane.turn(claim):
                fields = await function(claim)
                if fields is not None:
                    await asyncio.to_thread(claim.put, _checked(fields))
            await asyncio.sleep(lane.pause_s())

    lanes = [asyncio.ensure_future(run_lane()) for _ in range(concurrency)]
    try:
        left: set[asyncio.Future[None]] = set(lanes)
        while left and not work.context.stopping:
            began_s = time.monotonic()
            ended, left = await asyncio.wait(left, timeout=_BEAT_S, return_when=asyncio.FIRST_EXCEPTION)
            work.wait_s += (time.monotonic() - began_s) * waiting / concurrency
            work.report()
            for each in ended:
                each.result()
    finally:
        for each in lanes:
            each.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        work.end_waits()  # of puts that wait for room on threads


def _checked(fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping):
        raise SchemaError(f"the function returns a dict of the task's fields, or None; it returned {shown(fields)}")
    return fields


__all__ = ["CONCURRENCY", "ERRORS_IN_SEQUENCE", "ERRORS_OF_A_ROW", "work"]
