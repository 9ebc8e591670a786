"""Scenarios: ways to misuse a subject. Each runs in a process of its own, and returns what it found wrong.

What must hold in all of them: the process ends by itself and in time, without a signal; a refused call is an error of
geartrain's; `close` returns, and ends the calls that wait.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

import hanging
import numpy as np

from geartrain.errors import GeartrainError
from hostile.instants import Interruption
from hostile.interrupted import call_at_any_line
from hostile.run import CHILD_S, CLOSE_S, THREAD_S, TIMEOUT_S, InterruptionError, Run, show_stacks
from hostile.subject import Factory, Subject


def use_after_close(run: Run) -> None:
    """Each call works before, and is refused after `close`, but for those that go on by contract."""
    subject = run.make()
    run.all_must(subject, "while it is open")
    run.must("close", subject.close, "once")
    for _ in range(2):
        for name, call in subject.calls.items():
            refused = run.attempt(name, call, "after close")
            if name in subject.either:
                continue
            if name in subject.survives:
                if isinstance(refused, GeartrainError):
                    run.found(f"{name} after close was refused, and should go on: {refused}")
            elif refused is None:
                run.found(f"{name} after close was not refused")
    run.must("close", subject.close, "a second time")
    run.tools.clean()


def close_twice(run: Run) -> None:
    """The second `close`, and the third after a collection, have no effect."""
    subject = run.make()
    holder = subject.work() if subject.work is not None else None
    for when in ("once", "a second time"):
        run.must("close", subject.close, when)
    del holder
    gc.collect()
    run.must("close", subject.close, "a third time")
    run.tools.clean()


def close_from_two_threads(run: Run) -> None:
    """Two threads close at once, and both return."""
    for _ in run.race_rounds():
        subject = run.make()
        holder = subject.work() if subject.work is not None else None
        start = threading.Barrier(2)

        def close(
            delay_s: float = run.random.random() * 2e-4, subject: Subject = subject, start: threading.Barrier = start
        ) -> None:
            start.wait()
            time.sleep(delay_s)
            run.must("close", subject.close, "beside another close")

        _join(run, [threading.Thread(target=close, daemon=True) for _ in range(2)], "close beside another close")
        del holder
        run.tools.clean()
        if run.findings or run.over():
            return


def close_beside_calls(run: Run) -> None:
    """`close` while two threads make calls, which end or are refused."""
    for _ in run.race_rounds():
        subject = run.make()
        closed = threading.Event()

        def call_on(subject: Subject = subject, closed: threading.Event = closed, at: int = 0) -> None:
            calls = list(subject.calls.items())
            while not closed.is_set():
                for name, call in calls[at:] + calls[:at]:
                    run.attempt(name, call, "beside close")
            for name, call in calls:
                run.attempt(name, call, "after close")

        threads = [
            threading.Thread(target=call_on, kwargs={"at": run.random.randrange(len(subject.calls))}, daemon=True)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        time.sleep(run.random.random() * 5e-3)
        run.must("close", subject.close, "beside calls")
        closed.set()
        _join(run, threads, "calls beside close", started=True)
        run.tools.clean()
        if run.findings or run.over():
            return


def close_beside_a_blocked_call(run: Run) -> None:
    """`close` while calls wait: it returns, and they end, within a second."""
    subject = run.make()
    ended: dict[str, float] = {}

    def wait(name: str, call: Callable[[], object]) -> None:
        run.attempt(name, call, "that waits while it is closed")
        ended[name] = time.monotonic()

    threads = [threading.Thread(target=wait, args=each, daemon=True, name=each[0]) for each in subject.blocked.items()]
    for thread in threads:
        thread.start()
    time.sleep(run.tools.patience(0.05))  # until they wait
    for thread in threads:
        if not thread.is_alive():
            run.found(f"{thread.name} did not wait, so that this tests nothing")
    before_s = time.monotonic()
    run.must("close", subject.close, "beside a call that waits")
    took_s = time.monotonic() - before_s
    limit_s = run.tools.patience(CLOSE_S)
    if took_s > limit_s:
        run.found(f"close beside a call that waits took {took_s:.1f} s")
    for thread in threads:
        thread.join(max(0.0, before_s + limit_s - time.monotonic()))
        if thread.is_alive():
            run.found(f"{thread.name} still waits {time.monotonic() - before_s:.1f} s after close")
            show_stacks()
    run.tools.clean()


def raise_in_a_signal_handler(run: Run) -> None:
    """A handler raises while the main thread waits in a call: that ends with it, and `close` works."""
    subject = run.make()

    def raise_it(*_: object) -> None:
        raise InterruptionError

    for name, call in subject.blocked.items():
        ended = _signalled(run, name, call, raise_it)
        if not isinstance(ended, InterruptionError):
            run.found(f"{name} ended with {ended!r} when a signal's handler raised")
    run.must("close", subject.close, "after a signal's handler has raised")
    run.tools.clean()


def close_in_a_signal_handler(run: Run) -> None:
    """A handler closes while the main thread waits in a call: both return, and the call may be refused."""
    subject = run.make()
    for name, call in subject.blocked.items():
        ended = _signalled(run, name, call, lambda *_: run.must("close", subject.close, "in a signal's handler"))
        if ended is not None and not isinstance(ended, GeartrainError):
            run.found(f"{name} ended with {ended!r} when a signal's handler closed it")
        break  # the others find it closed
    run.must("close", subject.close, "after a signal's handler has closed it")
    run.tools.clean()


def close_at_any_line(run: Run) -> None:
    """A handler closes before any line of any call, also of `close`: both return, and the call may be refused."""
    lines: dict[str, int] = {}
    for _ in run.race_rounds():
        subject = run.make()
        calls = {**subject.calls, **subject.blocked, "close": subject.close}
        name = run.random.choice(list(calls))
        took_s: list[float] = []

        def handler(subject: Subject = subject, name: str = name, took_s: list[float] = took_s) -> None:
            before_s = time.monotonic()
            run.must("close", subject.close, f"in a signal's handler, within {name}")
            took_s.append(time.monotonic() - before_s)

        # The first time of a call counts its lines.
        one = Interruption(run.random.randrange(lines[name]) if name in lines else None, handler)
        ender = threading.Timer(run.tools.patience(0.01), subject.close)
        if name in subject.blocked:
            ender.start()
        run.attempt(name, functools.partial(one.during, calls[name]), "that a signal's handler interrupted")
        lines.setdefault(name, max(1, one.lines))
        if took_s and took_s[0] > run.tools.patience(TIMEOUT_S):
            run.found(f"close in a signal's handler, within {name}, took {took_s[0]:.1f} s")
        if name in subject.blocked:
            ender.join()
        run.must("close", subject.close, "after a signal's handler has closed it")
        run.tools.clean()
        if run.findings or run.over():
            return


def _signalled(run: Run, name: str, call: Callable[[], object], handler: Callable[..., object]) -> BaseException | None:
    """What a call of this thread raises, in which a signal comes while it waits."""
    before = signal.signal(signal.SIGUSR2, handler)
    sent_s: list[float] = []
    main = threading.get_ident()

    def send() -> None:
        time.sleep(run.tools.patience(0.1))  # until it waits
        sent_s.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGUSR2)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    raised = None
    try:
        call()
    except BaseException as error:
        raised = error
    if not sent_s:
        run.found(f"{name} did not wait, so that this tests nothing")
    elif time.monotonic() - sent_s[0] > run.tools.patience(CLOSE_S):
        run.found(f"{name} ended {time.monotonic() - sent_s[0]:.1f} s after a signal")
    sender.join()
    signal.signal(signal.SIGUSR2, before)
    return raised


def use_after_fork(run: Run) -> None:
    """A forked child makes all calls and closes; the parent's subject is as before."""
    subject = run.make()
    holder = subject.work() if subject.work is not None else None
    run.all_must(subject, "before a fork")
    _in_child(run, subject)
    run.all_must(subject, "in the parent after a fork")
    _in_child(run, subject, calls=False)
    run.all_must(subject, "after a forked child that did nothing")
    run.must("close", subject.close, "in the parent after a fork")
    del holder
    run.tools.clean()


def fork_beside_calls(run: Run) -> None:
    """Forks while a thread makes calls; the child makes them too, beside those of the parent, closes and ends."""
    subject = run.make()
    over, wanted, made = threading.Event(), threading.Event(), threading.Event()

    def call_on() -> None:
        while not over.is_set():
            for name, call in subject.calls.items():
                if not wanted.is_set():
                    wanted.wait()
                made.set()
                run.attempt(name, call, "beside a fork")

    thread = threading.Thread(target=call_on, daemon=True)
    thread.start()
    for _ in run.race_rounds():
        made.clear()
        wanted.set()
        made.wait(run.tools.patience(THREAD_S))
        time.sleep(run.random.random() * 3e-3)
        _in_child(run, subject, reported=wanted.clear)
        if run.findings or run.over():
            break
    over.set()
    wanted.set()
    _join(run, [thread], "calls beside a fork", started=True)
    run.all_must(subject, "in the parent after forks")
    run.must("close", subject.close, "in the parent after forks")
    run.tools.clean()


def alive_at_exit(run: Run) -> None:
    """The interpreter ends while a global, and a cycle, hold it with work under way."""
    subject = run.make()
    run.all_must(subject, "while it is open")
    cycle: list[object] = [subject]
    cycle.append(cycle)
    sys.modules["__main__"].kept = (subject, subject.work and subject.work(), cycle)  # type: ignore[attr-defined]


def daemon_thread_at_exit(run: Run) -> None:
    """The interpreter ends while daemon threads make calls, and wait in some."""
    subject = run.make()

    def call_on() -> None:
        while True:
            for call in subject.calls.values():
                with contextlib.suppress(Exception):
                    call()

    def wait(call: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            call()

    targets = [] if run.factory.one_thread else [(call_on,), (call_on,)]
    for target, *arguments in [*targets, *((wait, call) for call in subject.blocked.values())]:
        threading.Thread(target=target, args=arguments, daemon=True).start()
    time.sleep(0.03 + run.random.random() * 0.03)


def dropped_with_work(run: Run) -> None:
    """The last references go while work is under way, which must not write into memory that others have then."""
    for _ in range(3):
        subject = run.make()
        holder = subject.work() if subject.work is not None else None
        del subject, holder
        gc.collect()
        others = [np.full(1 << 16, number, np.float32) for number in range(64)]
        others += [np.full(1000, number, np.float32) for number in range(64)]
        time.sleep(0.02)
        if any((each != number % 64).any() for number, each in enumerate(others)):
            run.found("work of an object that was dropped has written into memory of others")
        run.tools.clean()


SCENARIOS: dict[str, Callable[[Run], None]] = {
    scenario.__name__: scenario
    for scenario in (
        use_after_close,
        close_twice,
        close_from_two_threads,
        close_beside_calls,
        close_beside_a_blocked_call,
        raise_in_a_signal_handler,
        close_in_a_signal_handler,
        close_at_any_line,
        call_at_any_line,
        use_after_fork,
        fork_beside_calls,
        alive_at_exit,
        daemon_thread_at_exit,
        dropped_with_work,
    )
}
#: Scenarios that are tried again and again, at other instants.
RACES = ("close_from_two_threads", "close_beside_calls", "close_at_any_line", "fork_beside_calls")
#: Scenarios that leave subjects to the interpreter's end.
AT_EXIT = ("alive_at_exit", "daemon_thread_at_exit", "dropped_with_work")
#: Scenarios that need a call that waits.
WAITING = ("close_beside_a_blocked_call", "raise_in_a_signal_handler", "close_in_a_signal_handler")
#: Scenarios that need more than one thread at the subject.
THREADED = ("close_from_two_threads", "close_beside_calls", "close_beside_a_blocked_call", "fork_beside_calls")


#: Classes that `call_at_any_line` is tried with: what has locks of threads that a handler interrupts. (Ranks that are
#: out of step wait for each other until their timeout, and prove nothing.)
HANDLED = (
    "Bus",
    "Future",
    "LeRobotReplayBuffer",
    "Node",
    "Publisher",
    "Reader",
    "Remote",
    "RemoteRecorder",
    "Topic",
    "TrajectoryReplayBuffer",
    "Work",
)


def applies(scenario: str, factory: Factory) -> bool:
    """Whether a scenario says anything about a subject."""
    if scenario == "call_at_any_line" and factory.of not in HANDLED:
        return False
    if factory.one_thread and scenario in THREADED:
        return False
    return factory.waits or scenario not in WAITING


def _join(run: Run, threads: list[threading.Thread], what: str, started: bool = False) -> None:
    if not started:
        for thread in threads:
            thread.start()
    until_s = time.monotonic() + run.tools.patience(THREAD_S)
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            run.found(f"{what}: a thread hangs")
            show_stacks()


class _Returned(SystemExit):
    """Leaves a forked child by the interpreter's own way out."""


def _in_child(run: Run, subject: Subject, calls: bool = True, reported: Callable[[], object] = lambda: None) -> None:
    """Forks; the child makes all calls, closes, and ends as an interpreter does; before that `reported` is called."""
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        run.findings = []
        if calls:
            for name, call in subject.calls.items():
                refused = run.attempt(name, call, "in a forked child")
                if refused is not None and name in subject.in_child:
                    run.found(f"{name} in a forked child was refused: {refused}")
            run.attempt("close", subject.close, "in a forked child")
        os.write(write, "\n".join(run.findings).encode() or b"-")
        raise _Returned(0)
    os.close(write)
    said = b""
    began_s = said_s = time.monotonic()
    until_s = began_s + run.tools.patience(CHILD_S)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        if select.select([pipe], [], [], run.tools.patience(CHILD_S))[0]:
            said = pipe.read(1 << 16)
            said_s = time.monotonic()
    reported()
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], max(0.0, until_s - time.monotonic()))[0]:
        where, at_length = hanging.describe(child)
        took = f" while it ends, {said_s - began_s:.1f} s after the fork" if said else ""
        run.found(f"a forked child hangs{took} ({where})")
        print(at_length, file=sys.stderr, flush=True)
        if hanging.show_python_stacks(child):
            select.select([handle], [], [], 0.2)
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0 and not run.findings:
        run.found(f"a forked child was ended by {signal.Signals(-code).name}")
    elif code > 0:
        run.found(f"a forked child ended with {code}")
    for line in said.decode(errors="replace").splitlines():
        if line != "-":
            run.found(line)
