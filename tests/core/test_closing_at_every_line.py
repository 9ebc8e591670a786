"""Closes that a signal's handler interrupts before any of their lines, and closes as well."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hostile.instants import Interruption

from geartrain.core.metrics_server import MetricsServer
from geartrain.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bar() -> Callable[[], object]:
    pytest.importorskip("rich")
    one = Progress("rows", 10, stream=Terminal()).__enter__()
    return lambda: one.__exit__(None, None, None)


def server() -> Callable[[], object]:
    pytest.importorskip("prometheus_client")
    return MetricsServer(lambda: (), "127.0.0.1", 0).close


@pytest.mark.parametrize("make", [bar, server])
def test_a_close_within_any_line_of_a_close_is_no_error(make):
    def lines_of(at: int | None) -> int:
        close = make()
        one = Interruption(at, close)
        one.during(close)
        close()
        return one.lines

    lines_of(None)  # imports
    for at in range(lines_of(None)):
        lines_of(at)
