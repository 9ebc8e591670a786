"""Terminal of `geartrain top`: reads single keys, uses the alternate screen, and restores everything afterwards."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from geartrain.core.threads import SIGNAL_S, ReentrantEvent

_KEYS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\r": "enter",
    b"\n": "enter",
    b"\t": "tab",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b": "esc",
    b"\x04": "ctrl-d",
}
_MOST_BYTES = 4096


def keys_of(typed: bytes) -> Iterator[str]:
    """Names of keys in bytes from a terminal; sequences that mean nothing here are skipped."""
    while typed:
        if typed[:2] in (b"\x1b[", b"\x1bO"):
            end = 2
            while end < len(typed) and not 0x40 <= typed[end] <= 0x7E:
                end += 1
            end += 1
        else:
            end = 1
        one, typed = typed[:end], typed[end:]
        if one in _KEYS:
            yield _KEYS[one]
        elif len(one) == 1 and one.isascii() and one.decode().isprintable():
            yield one.decode()


class Terminal:
    """The terminal of stdin and stdout while the screen is shown. A context manager, for the main thread."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        # The size is the terminal's, also after it has changed; COLUMNS and LINES are what it was when they were set.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._console = Console(emoji=False, highlight=False, _environ=environment)
        self._live: Live | None = None
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._suspend = ReentrantEvent()

    @staticmethod
    def why_not() -> str | None:
        """Why no screen can be shown; None if it can."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return "stdin or stdout is no terminal"
        if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
            return f"TERM={os.environ.get('TERM', '')!r} is a terminal without a screen"
        return None

    def __enter__(self) -> Terminal:
        self._handlers = {
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda *_: self.wake()),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._on_suspend),
            signal.SIGTERM: signal.signal(signal.SIGTERM, _end),
        }
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def wake(self) -> None:
        """Ends the current or the next `wait`; from any thread or signal handler."""
        try:
            os.write(self._writer, b"!")
        except (BlockingIOError, OSError):  # one is there already, or the screen has ended
            return

    def draw(self, lines: Callable[[int, int], list[Text]]) -> None:
        """Shows the lines for the terminal's size."""
        if self._live is not None:
            width, height = self._console.size
            self._live.update(Group(*_ended(lines(width, height))), refresh=True)

    def wait(self) -> list[str]:
        """Sleeps until keys are pressed, `wake` is called, the size changes, or `SIGNAL_S` is over.

        Returns the keys; "ctrl-d" at the input's end.
        """
        if self._suspend.is_set():
            self._stop_until_continued()
            return []
        ready, _, _ = select.select([self._input, self._reader], [], [], SIGNAL_S)
        if self._reader in ready:
            os.read(self._reader, _MOST_BYTES)
        if self._input not in ready:
            return []
        typed = os.read(self._input, _MOST_BYTES)
        return list(keys_of(typed)) if typed else ["ctrl-d"]

    def _begin(self) -> None:
        self._before = termios.tcgetattr(self._input)
        tty.setcbreak(self._input, termios.TCSANOW)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def _restore(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _on_suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._suspend.set()
        self.wake()

    def _stop_until_continued(self) -> None:
        self._suspend.clear()
        self._restore()
        with _default(signal.SIGTSTP):
            os.kill(os.getpid(), signal.SIGTSTP)
        self._begin()


def _ended(lines: list[Text]) -> list[Text]:
    """The same with line ends, but after the last: it would scroll the screen."""
    for line in lines[:-1]:
        line.end = "\n"
    return lines


@contextmanager
def _default(number: int) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


__all__ = ["Terminal", "keys_of"]
