"""Child process that writes a dataset with a library that might crash.

HDF5 crashes a process whose open file it cannot flush. So a child process opens the file. The parent sends it rows and
receives its answers, including errors. If the child dies, the parent raises an error with the cause. If the parent no
longer needs the child, it kills the child and removes the file. The child has its own session, so Ctrl-C in a terminal
reaches only the parent. The child ends when the parent ends.

Messages in both directions go over a socket pair: a length of 8 bytes, then a pickle.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

from geartrain.core.lifetime import on_error
from geartrain.errors import ProcessDiedError, WaitTimeoutError

#: Longest wait for the child to take a message, and for its answer: a group of rows, or what an import takes.
ANSWER_S = 600.0
_PARENT_CHECK_S = 5.0
_END_S = 10.0
_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from geartrain.integrations.datasets.writer_process import serve; serve(int(sys.argv[1]))"
)


class WriterProcess:
    """An object in a child process. Its methods are called one at a time.

    Args:
        kind: its class, as "module:Class".
        arguments: of its constructor, by keyword.
        what: description of the output, for messages.
        answer_s: longest wait for the child to take a message, and for its answer.

    Attributes:
        answer_s: the wait of later calls; can be set.

    Raises:
        ProcessDiedError: the child died; also of `call`. What its constructor or method raises is raised here.
        WaitTimeoutError: it did not answer in time, and was killed: a late answer would be taken for that of the next
            call.
    """

    def __init__(self, kind: str, arguments: dict[str, Any], what: str, *, answer_s: float = ANSWER_S) -> None:
        self._what, self.answer_s = what, answer_s
        self._closing = threading.RLock()  # a signal's handler may close while its thread does
        self._said = os.memfd_create("writer-stderr", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair()
        with on_error(os.close, self._said), on_error(self._socket.close):
            with theirs:
                command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)]
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        with on_error(self.close):
            self._asked(("", (kind, arguments)))

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the object and returns its result."""
        return self._asked((method, arguments))

    def _asked(self, message: Any) -> Any:
        if self._said < 0:
            raise ProcessDiedError(f"the process that writes {self._what} was ended")
        try:
            self._socket.settimeout(self.answer_s)
            _send(self._socket, message)
            answer = _receive(self._socket)
        except TimeoutError:
            self.close()
            raise WaitTimeoutError(
                f"the process that writes {self._what} has not answered in {self.answer_s:g} s, and was killed"
            ) from None
        except (EOFError, OSError):
            raise ProcessDiedError(f"the process that writes {self._what} {self._cause()}") from None
        good, value = answer
        if not good:
            raise value
        return value

    def _cause(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "hung up"
        ended = f"exited with {code}"
        if code < 0:
            with suppress(ValueError):
                ended = f"died of {signal.Signals(-code).name}"
        with self._closing:
            if self._said < 0:
                return "was ended"
            lines = os.pread(self._said, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return f"{ended}: {lines[-1][:300]}" if lines else ended

    def close(self) -> None:
        """Kills the child if it is there, and waits for its end. May be called again, by any thread."""
        with self._closing:
            if self._said < 0:
                return
            said, self._said = self._said, -1
            with suppress(OSError):  # the child is gone
                self._socket.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer has its end
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in a call to a disk that does not answer: it ends with that
                self._process.wait(timeout=_END_S)
            self._socket.close()
            os.close(said)


def serve(descriptor: int) -> None:
    """The child: makes the object, calls its methods, and ends without what libraries do at exit."""
    try:
        _serve(descriptor)
    except (EOFError, OSError):  # the parent has died in the middle of a message, or before it took the answer
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _serve(descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    parent, made = os.getppid(), None
    with socket.socket(fileno=descriptor) as to:
        while True:
            to.settimeout(_PARENT_CHECK_S)
            try:
                if not to.recv(1, socket.MSG_PEEK):
                    os._exit(0)
            except TimeoutError:
                if os.getppid() != parent:
                    os._exit(0)
                continue
            except ConnectionError:
                os._exit(0)
            to.settimeout(ANSWER_S)
            method, arguments = _receive(to)
            try:
                if method:
                    answer = (True, getattr(made, method)(*arguments))
                else:
                    module, _, name = arguments[0].partition(":")
                    made = getattr(importlib.import_module(module), name)(**arguments[1])
                    answer = (True, None)
            except Exception as error:
                answer = (False, _portable(error))
            _send(to, answer)


def _portable(error: Exception) -> Exception:
    """The error, or one with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _send(to: socket.socket, message: Any) -> None:
    raw = pickle.dumps(message, protocol=5)
    to.sendall(len(raw).to_bytes(8, "little"))
    to.sendall(raw)


def _receive(source: socket.socket) -> Any:
    size = int.from_bytes(_read(source, 8), "little")
    return pickle.loads(_read(source, size))


def _read(source: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        n = source.recv_into(view[at:])
        if n == 0:
            raise EOFError
        at += n
    return found


__all__ = ["WriterProcess", "serve"]
