"""One run of a scenario: makes subjects, makes their calls, collects findings."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
from collections.abc import Callable

import hanging

from geartrain.errors import GeartrainError
from hostile.subject import Factory, Subject, Tools

Findings = list[str]
#: Rounds of races in short tests end after so many seconds, on an idle machine or not.
RACE_S = 0.15
#: A forked child, and threads that were told to end, end within this.
CHILD_S, THREAD_S = 4.0, 6.0
#: `close` beside a call that waits, and that call, end within this on an idle machine.
CLOSE_S = 1.0
#: No close takes longer than its own timeout, for processes that are to end or ranks that are to ask for a batch.
TIMEOUT_S = 25.0


class Run:
    """One run of one scenario: makes subjects, collects findings.

    Args:
        factory: of the subjects.
        tools: for it.
        seed: of delays.
        rounds: of races, at most; None for as many as `RACE_S` allows.
    """

    def __init__(self, factory: Factory, tools: Tools, seed: int, rounds: int | None) -> None:
        self.factory, self.tools, self.rounds = factory, tools, rounds
        self.random = random.Random(seed)
        self.findings: Findings = []

    def make(self) -> Subject:
        """A new subject."""
        subject = self.factory.make(self.tools)
        assert bool(subject.blocked) == self.factory.waits, "the factory's `waits` says whether there are blocked calls"
        return subject

    def race_rounds(self) -> range:
        """Numbers of the rounds of a race."""
        if self.rounds is not None:
            return range(self.rounds)
        self._until_s = time.monotonic() + RACE_S
        return range(1000)

    def over(self) -> bool:
        """Whether a short test has raced for long enough."""
        return self.rounds is None and time.monotonic() > self._until_s

    def found(self, what: str) -> None:
        """Notes a defect."""
        if what not in self.findings:
            self.findings.append(what)

    def attempt(self, name: str, call: Callable[[], object], when: str) -> BaseException | None:
        """Makes a call that may be refused; an error that is not geartrain's is a defect."""
        try:
            call()
        except GeartrainError as refusal:
            return refusal
        except Exception as error:
            self.found(f"{name} {when} raised {type(error).__name__}: {error}")
            return error
        return None

    def must(self, name: str, call: Callable[[], object], when: str) -> None:
        """Makes a call that must succeed."""
        try:
            call()
        except Exception as error:
            self.found(f"{name} {when} raised {type(error).__name__}: {error}")

    def all_must(self, subject: Subject, when: str) -> None:
        """Makes all calls, which must succeed."""
        for name, call in subject.calls.items():
            self.must(name, call, when)


def show_stacks() -> None:
    """Of all threads of this process, and what they do in the kernel."""
    print(hanging.describe(os.getpid(), debugger_s=0)[1], file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


class InterruptionError(Exception):
    """What a signal's handler raises."""
