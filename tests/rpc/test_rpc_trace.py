"""A trace shows the program that runs without it: the same native calls, for each kind of call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience, until

import geartrain.core.trace as trace
from geartrain import rpc
from geartrain.errors import RemoteError

_told = threading.Event()
SECRET = b"a secret of these tests"


@rpc.function(name="traced.echo")
def echo(value: Any) -> Any:
    return value


@rpc.function(name="traced.note")
def note() -> None:
    _told.set()


@rpc.function(name="traced.unsendable")
def unsendable() -> Any:
    return threading.Lock()


@rpc.batched(max_size=2, max_wait_us=100)
def traced_doubled(values: list[int]) -> list[int]:
    return [2 * value for value in values]


class Noting:
    """A native object, with a note of each of its methods that is called, and of how many arguments it gets."""

    def __init__(self, native: Any, notes: set[tuple[str, int]]) -> None:
        self._native, self._notes = native, notes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if not callable(found):
            return found

        def noted(*arguments: Any) -> Any:
            self._notes.add((name, len(arguments)))
            return found(*arguments)

        return noted


@pytest.fixture
def pair() -> Iterator[tuple[rpc.Node, rpc.Node]]:
    with rpc.Node("server", secret=SECRET) as server:
        with rpc.Node("client", peers={"server": server.address}, secret=SECRET, timeout_s=patience(10)) as client:
            yield server, client


def called_back(node: rpc.Node, *arguments: Any) -> None:
    done = threading.Event()
    node.call_async("server", *arguments).add_done_callback(lambda _: done.set())
    assert done.wait(patience(10))


def told(node: rpc.Node) -> None:
    _told.clear()
    node.tell("server", note)
    assert _told.wait(patience(10))


CALLS: dict[str, Callable[[rpc.Node], object]] = {
    "call": lambda node: node.call("server", echo, 1),
    "call of arrays": lambda node: node.call("server", echo, np.zeros(1 << 17)),
    "call of a function that is not registered": lambda node: node.call("server", len, "abc"),
    "call of a batched function": lambda node: node.call("server", traced_doubled, 1),
    "call that fails": lambda node: node.call("server", "traced.unsendable"),
    "call that cannot be sent": lambda node: node.call("server", echo, threading.Lock()),
    "future": lambda node: node.call_async("server", echo, 1).result(),
    "future with a callback": lambda node: called_back(node, echo, 1),
    "future that fails": lambda node: node.call_async("server", "traced.unsendable").result(),
    "tell": told,
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_trace_changes_no_native_call(pair: tuple[rpc.Node, rpc.Node], kind: str, tmp_path: Path) -> None:
    server, node = pair
    node.call("server", echo, 0)
    sessions: list[Any] = server.server.sessions
    (session,) = sessions
    client: Any = node.client("server")
    native = client.calls, client.connection, client._codec, session.connection, session._codec

    def use(parts: Iterable[Any]) -> None:
        client.calls, client.connection, client._codec, session.connection, session._codec = parts

    def native_calls() -> set[tuple[str, int]]:
        notes: set[tuple[str, int]] = set()
        use(Noting(one, notes) for one in native)
        try:
            with contextlib.suppress(RemoteError, TypeError):
                CALLS[kind](node)
            until(lambda: not server.server.scheduler.open_calls(session), "the call is over")
        finally:
            use(native)
        return notes

    plain = native_calls()
    trace.start(tmp_path / "trace.json")
    try:
        traced = native_calls()
    finally:
        trace.stop()
    assert plain and traced == plain
