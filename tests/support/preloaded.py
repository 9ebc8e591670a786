"""Python programs as forks of one process that has imported NumPy, torch and geartrain.

An interpreter of its own costs a test half a second of a core before its first line, and two seconds more where it
imports torch. `Popen` and `run` are subprocess's for command lines that begin with `sys.executable`, and fork instead:
the program has a process, environment, arguments, folder and pipes of its own, its atexit handlers run, and it can be
killed or stopped. What it shares is what was imported. So it is not for programs that test imports, or that set
variables which torch, OpenMP or geartrain read when they are imported.

`python preloaded.py NUMBER` is the other side, which takes orders from the socket of that number.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from deadlines import patience

PACKAGES = ("numpy", "torch", "torch.distributed", "typer", "rich.console", "rich.table", "rich.progress", "geartrain")
USED = ("Store", "Replay")  # of geartrain, whose parts are imported when they are first used
ORDER_BYTES = 1 << 20


class Popen(subprocess.Popen[str]):
    """A process that the preloaded one forks, and that is its child and not this process's."""

    def __init__(self, command: Sequence[str | Path], **options: Any) -> None:
        assert command[0] == sys.executable, "only programs of this interpreter"
        super().__init__(command, **{"text": True, **options})

    def _execute_child(self, args: Any, *options: Any) -> None:
        cwd, env, pipes = options[4], options[5], options[9:15]
        order = {
            "argv": [os.fspath(each) for each in args[1:]],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "session": bool(options[20]),
        }
        theirs = [each if each != -1 else number for number, each in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._server = server()
        self.pid = self._server.start(order, theirs)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        code = self._server.code_of(self.pid, wait=not wait_flags & os.WNOHANG)
        return (0, 0) if code is None else (self.pid, code)

    def _handle_exitstatus(self, sts: int, *_: Any, **__: Any) -> None:
        self.returncode = sts  # an exit code already, or below zero the signal's number

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, wait=False)  # type: ignore[assignment]
        return self.returncode


def run(command: Sequence[str | Path], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, capture_output=True, text=True, check=False, ...)`."""
    with Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


class Server:
    """This side of the preloaded process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._codes: dict[int, int] = {}
        self._ended = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _listen(self) -> None:
        while message := self._socket.recv(1000):
            answer = json.loads(message)
            if "code" not in answer:
                self._pids.put(answer["pid"])
                continue
            with self._ended:
                self._codes[answer["pid"]] = answer["code"]
                self._ended.notify_all()

    def start(self, order: dict[str, Any], streams: Sequence[int]) -> int:
        """Forks a program that has these three files as its standard streams; returns its process id."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], list(streams))
            pid = self._pids.get(timeout=patience(100))
            with self._ended:
                self._codes.pop(pid, None)  # of an earlier process of that number
            self._socket.send(b"{}")  # and now it may begin
            return pid

    def code_of(self, pid: int, wait: bool) -> int | None:
        """What a program ended with; None where it runs still."""
        with self._ended:
            if wait:
                self._ended.wait_for(lambda: pid in self._codes)
            return self._codes.get(pid)


@functools.cache
def server() -> Server:
    """The preloaded process of this one, started when it is first needed; it ends with this process."""
    return Server()


# --- the preloaded process --------------------------------------------------------------------------------------------


def serve(number: int) -> None:
    """Forks programs until the socket is closed; in a forked process, returns when its program has."""
    orders = socket.socket(fileno=number)
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    for name in USED:
        getattr(sys.modules["geartrain"], name)
    gc.freeze()  # a collection in a forked process is not to touch, and so copy, what is here
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([orders, told], [], [])
        if told in ready:
            os.read(told, 1000)
            for pid in list(running):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    running.discard(pid)
                    with contextlib.suppress(OSError):
                        orders.send(json.dumps({"pid": pid, "code": code}).encode())
        if orders not in ready:
            continue
        message, streams, _, _ = socket.recv_fds(orders, ORDER_BYTES, 3)
        if not message:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        begin, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            for each in (go, told, tell):
                os.close(each)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os.read(begin, 1)
            os.close(begin)
            end(execute(json.loads(message), streams))
        running.add(pid)
        for each in (begin, *streams):
            os.close(each)
        orders.send(json.dumps({"pid": pid}).encode())
        orders.recv(10)
        os.close(go)


def execute(order: dict[str, Any], streams: list[int]) -> int:
    """Runs a program as the interpreter would: a module (-m), a text (-c) or a file. Returns what it ends with."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    first, *rest = order["argv"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    inside = order["cwd"] if first in ("-m", "-c") else str(Path(first).resolve().parent)
    sys.path[:1] = [inside, *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))]
    main.__dict__["__builtins__"] = __builtins__
    try:
        if first == "-m":
            sys.argv = rest
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv, main.__file__ = order["argv"], first
            exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)
    except SystemExit as wish:
        if wish.code is None or isinstance(wish.code, int):
            return wish.code or 0
        print(wish.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> NoReturn:
    """Ends a forked process as the interpreter ends, but for the modules: to free torch's takes most of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
