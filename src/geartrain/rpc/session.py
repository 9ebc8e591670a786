"""Server side of one client: its connection, the replies to it, and the objects kept for it."""

from __future__ import annotations

import itertools
import os
import time
import traceback
from math import inf
from pathlib import Path
from typing import Any

import geartrain._native as _native
import geartrain.core.trace as trace
from geartrain.errors import GeartrainError, MessageError, WaitTimeoutError
from geartrain.rpc.event_loop import EventLoop
from geartrain.rpc.protocol import ERROR, HELLO, RESULT, TELL
from geartrain.rpc.tensors.receiver import TensorReceiver
from geartrain.transport.codec import native_codec

#: Most characters of an error's text, and of its traceback, that are sent.
_MOST_TEXT = 64 << 10
#: Numbers of kept objects start at random, so a handle of a lost connection or earlier process names no object.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))


class ServerSession:
    """A client that has connected to this node, from its first message to the end of its connection.

    Functions registered `with_caller` get the session. Its public part is `rpc.Caller`: `name`, `node`, `authenticated`
    and `keep`.

    Args:
        node: the `Node` that is called.
        number: in the server's inbox.
        connection: to the client.
        pickle: whether pickled values are accepted, if the client is authenticated.
        tensors: receives tensors that are not in messages.
        loop: runs `async def` functions.
        timeout_s: how long a reply waits for a client that does not take it.
    """

    def __init__(
        self,
        node: Any,
        number: int,
        connection: _native.Connection,
        tensors: TensorReceiver,
        loop: EventLoop,
        *,
        pickle: bool,
        timeout_s: float,
    ) -> None:
        self.node, self.number, self.connection, self.tensors = node, number, connection, tensors
        self.loop = loop
        self.pickle = pickle and connection.authenticated
        self.name = ""
        self.objects: dict[int, Any] = {}  # that the client keeps here
        self._codec, self._timeout_s = native_codec(), timeout_s

    @property
    def authenticated(self) -> bool:
        """Whether the client proved that it knows the cluster's secret."""
        return self.connection.authenticated

    def flow(self, tag: int) -> str:
        """The trace arrow of a call. The client uses the same one."""
        return f"{self.name}>{self.node.name}:{tag}"

    def keep(self, kept: Any) -> int:
        """Keeps an object for the client until the client drops it or is lost.

        The client's `Remote` calls it by its number.
        """
        number = next(_numbers)
        self.objects[number] = kept
        return number

    def reply(self, kind: int, tag: int, value: Any = None, error: BaseException | None = None) -> None:
        """Replies to a message of the client. The error of a message that has no reply is printed."""
        if kind in (TELL, HELLO):
            if error is not None:
                traceback.print_exception(error)
            return
        if trace.on:
            now_s = time.perf_counter()
            trace.slice_of("answer", "rpc", now_s, now_s, flow_out=f"{self.flow(tag)}r", peer=self.name)
        if error is None:
            error = self._send(tag, RESULT, value)
        if error is not None:
            self._send(tag, ERROR, _described(error))

    def _send(self, tag: int, kind: int, value: Any) -> BaseException | None:
        """Sends a reply: None; or the error of a value that cannot be sent, where nothing was."""
        try:
            kind, payload = self._codec.encode_message(kind, value, self.pickle, self.tensors, tag, inf)
        except BaseException as error:
            return error
        try:
            self.connection.send(tag, kind, payload, self._timeout_s)
        except MessageError as too_large:
            return too_large
        except WaitTimeoutError:
            self.connection.close()  # the client does not read replies
        except GeartrainError:
            pass  # it is gone, which the inbox reports
        return None

    def close(self) -> None:
        """The connection has ended: frees what was kept for the client."""
        self.objects.clear()
        self.tensors.close()


def _described(error: BaseException) -> tuple[str, str, str]:
    """An error as it is sent: type, text, and traceback without this package's own frames."""
    own = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != own]
    try:
        text = _cut(str(error))
        last = "".join(_cut(line) for line in traceback.format_exception_only(type(error), error))
    except Exception as failure:  # of its own __str__
        text, last = f"(its text cannot be had: {type(failure).__name__})", f"{type(error).__name__}\n"
    lines = _cut("".join(traceback.format_list(frames)))
    said = (_cut(type(error).__name__), text, lines + _cut(last) if frames else "")
    name, text, where = (part.encode(errors="replace").decode() for part in said)
    return name, text, where


def _cut(text: str) -> str:
    """The text, or its beginning and its length if it is too long. Every error must fit into a reply."""
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}... (cut here; the text has {len(text):,} characters)"
