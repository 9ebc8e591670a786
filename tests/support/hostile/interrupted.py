"""The scenario of signal handlers that call the same object within any line of a call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from hostile.instants import Interruption
from hostile.run import TIMEOUT_S, Run, show_stacks
from hostile.subject import Subject


def call_at_any_line(run: Run) -> None:
    """A handler makes a call before any line of any call: both end, and may be refused, and so do all that follow."""

    def calls_of(subject: Subject, name: str) -> Callable[[], object]:
        other = run.random.choice([name, *subject.calls] if name in subject.calls else list(subject.calls))
        return functools.partial(run.attempt, other, subject.calls[other], f"in a signal's handler, within {name}")

    lines: dict[str, int] = {}
    for _ in run.race_rounds():
        subject = run.make()
        calls = {**subject.calls, **subject.blocked, "close": subject.close}
        name = run.random.choice(list(calls))
        one = Interruption(run.random.randrange(lines[name]) if name in lines else None, calls_of(subject, name))
        ender = threading.Timer(run.tools.patience(0.01), subject.close)
        if name in subject.blocked:
            ender.start()

        run.attempt(name, functools.partial(one.during, calls[name]), "within which a handler has made a call")
        lines.setdefault(name, max(1, one.lines))

        def call_all(subject: Subject = subject) -> None:
            for each, call in subject.calls.items():
                run.attempt(each, call, "after a handler has made a call")

        again = threading.Thread(target=call_all, daemon=True)
        if run.factory.one_thread:
            call_all()
        else:
            again.start()
            again.join(run.tools.patience(TIMEOUT_S))
            if again.is_alive():
                run.found(f"a call hangs after a handler has made a call within {name} at {one.where}")
                show_stacks()
                return
        if name in subject.blocked:
            ender.join()
        closers = [] if run.factory.one_thread else [threading.Thread(target=subject.close, daemon=True)]
        run.must("close", subject.close, f"after a handler has made a call within {name}")
        for closer in closers:
            closer.start()
            closer.join(run.tools.patience(TIMEOUT_S))
            if closer.is_alive():
                run.found(f"close by another thread hangs after a handler has made a call within {name} at {one.where}")
                show_stacks()
                return
        run.tools.clean()
        if run.findings:
            run.findings.append(f"(within {name}, at {one.where})")
        if run.findings or run.over():
            return
