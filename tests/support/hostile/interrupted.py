"""Scenarios of signal handlers that raise, or call the same object, within any line of a call."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType

from hostile.instants import Interruption
from hostile.run import TIMEOUT_S, InterruptionError, Run, show_stacks
from hostile.subject import Subject


def raise_at_any_line(run: Run) -> None:
    """A handler raises before any line of any call: all calls end afterwards, of any thread, and `close` works."""

    def raise_it() -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                return  # Python prints what is raised there, and goes on
            frame = frame.f_back
        raise InterruptionError

    _interrupted_at_any_line(run, "raised", lambda subject, name: raise_it)


def call_at_any_line(run: Run) -> None:
    """A handler makes a call before any line of any call: both end, and may be refused, and so do all that follow."""

    def calls_of(subject: Subject, name: str) -> Callable[[], object]:
        other = run.random.choice([name, *subject.calls] if name in subject.calls else list(subject.calls))
        return functools.partial(run.attempt, other, subject.calls[other], f"in a signal's handler, within {name}")

    _interrupted_at_any_line(run, "called", calls_of)


def _interrupted_at_any_line(run: Run, what: str, handler: Callable[[Subject, str], Callable[[], object]]) -> None:
    lines: dict[str, int] = {}
    for _ in run.race_rounds():
        subject = run.make()
        calls = {**subject.calls, **subject.blocked, "close": subject.close}
        name = run.random.choice(list(calls))
        one = Interruption(run.random.randrange(lines[name]) if name in lines else None, handler(subject, name))
        ender = threading.Timer(run.tools.patience(0.01), subject.close)
        if name in subject.blocked:
            ender.start()

        def call_it(one: Interruption = one, call: Callable[[], object] = calls[name]) -> None:
            with contextlib.suppress(InterruptionError):
                one.during(call)

        run.attempt(name, call_it, f"in which a handler {what}")
        lines.setdefault(name, max(1, one.lines))

        def call_all(subject: Subject = subject) -> None:
            for each, call in subject.calls.items():
                run.attempt(each, call, f"after a handler has {what}")

        again = threading.Thread(target=call_all, daemon=True)
        if run.factory.one_thread:
            call_all()
        else:
            again.start()
            again.join(run.tools.patience(TIMEOUT_S))
            if again.is_alive():
                run.found(f"a call hangs after a handler has {what} within {name} at {one.where}")
                show_stacks()
                return
        if name in subject.blocked:
            ender.join()
        closers = [] if run.factory.one_thread else [threading.Thread(target=subject.close, daemon=True)]
        run.must("close", subject.close, f"after a handler has {what} within {name}")
        for closer in closers:
            closer.start()
            closer.join(run.tools.patience(TIMEOUT_S))
            if closer.is_alive():
                run.found(f"close by another thread hangs after a handler has {what} within {name} at {one.where}")
                show_stacks()
                return
        run.tools.clean()
        if run.findings:
            run.findings.append(f"(within {name}, at {one.where})")
        if run.findings or run.over():
            return
