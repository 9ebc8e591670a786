"""Python programs as forks of one process that has imported NumPy, torch and geartrain.

An interpreter of its own costs a test half a second of a core before its first line, and two seconds more where it
imports torch. `Popen` and `run` are subprocess's for command lines that begin with `sys.executable`, and fork instead:
the program has a process, environment, arguments, folder and pipes of its own, its atexit handlers run, and it can be
killed or stopped. What it shares is what was imported. So it is not for programs that test imports, or that set
variables which torch, OpenMP or geartrain read when they are imported.

`Child` is for code that is tested and starts interpreters by `subprocess.Popen`: a fork too, which becomes a child of
this process like any other, for it is orphaned at birth while this process is a subreaper (prctl(2)). `children`
has a test's processes made so; those that they start by `subprocess.Popen` are again.

`python preloaded.py NUMBER` is the other side, which takes orders from the socket of that number.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import operator
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deadlines import patience

if TYPE_CHECKING:
    from geartrain.tools.testing.cluster import HostFiles

# (torch's first optimizer imports torch._dynamo, 1.5 s of a core)
PACKAGES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "typer",
    "rich.console",
    "rich.table",
    "rich.progress",
    "matplotlib.pyplot",
    "geartrain",
)
# of geartrain, whose parts are imported when they are first used
USED = ("Store", "Replay", "actors.Actor", "launch.Job", "rpc.Node", "weights.Reader", "weights.Publisher")
ORDER_BYTES = 1 << 20
FILES = 64  # that an order can carry at most
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000  # <sched.h>
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19  # <sys/mount.h>
INTERPRETS = "TRITON_INTERPRET"  # which Triton reads when it is imported
NESTED = "GEARTRAIN_TEST_PRELOADED_CHILDREN"  # how many generations of processes below a program are forks
_Popen = subprocess.Popen  # which `children` replaces


class Popen(_Popen[str]):
    """A process that the preloaded one forks, and that is its child and not this process's.

    With a `host` it is in that emulated one (`Hosts.files`), and so are the processes that it starts.
    """

    def __init__(self, command: Sequence[str | Path], host: HostFiles | None = None, **options: Any) -> None:
        assert command[0] == sys.executable, "only programs of this interpreter"
        self._host = [os.fspath(each) for each in host or ()]
        super().__init__(command, **{"text": True, **options})

    def _execute_child(self, args: Any, *options: Any) -> None:
        cwd, env, pipes = options[4], options[5], options[9:15]
        order = {
            "argv": [os.fspath(each) for each in args[1:]],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "session": bool(options[20]),
            "passed": [],
            "adopted": False,
            "host": self._host,
        }
        theirs = [each if each != -1 else number for number, each in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._server = server(interprets=order["env"].get(INTERPRETS) == "1")
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


class Child(_Popen):
    """`subprocess.Popen`, but that programs of this interpreter are forked."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        executable, preexec, _, pass_fds, cwd, env, *_ = options
        usual = executable in (None, sys.executable) and preexec is None and not options[8]
        words = _program(args) if usual and all(each in (None, -1) for each in (*options[16:20], options[21])) else None
        if words is None:
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        pipes = options[9:15]
        order = {
            "argv": words,
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "session": bool(options[20]),
            "passed": [int(each) for each in pass_fds],
            "adopted": True,
        }
        theirs = [each if each != -1 else number for number, each in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = server().start(order, [*theirs, *order["passed"]])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program(args: Any) -> list[str] | None:
    """What follows the interpreter and its options in a command line; None where it is another program's."""
    if isinstance(args, str | bytes | os.PathLike) or os.fspath(args[0]) != sys.executable:
        return None
    words = [os.fspath(each) for each in args[1:]]
    while words[:1] in (["-B"], ["-u"]):  # the first this interpreter has passed on, the second are all forks
        del words[0]
    plain = bool(words) and all(isinstance(each, str) for each in words)
    return words if plain and (words[0] in ("-m", "-c") or not words[0].startswith("-")) else None


@contextlib.contextmanager
def children() -> Iterator[None]:
    """Meanwhile interpreters that this process starts by `subprocess.Popen` are `Child`, and those that they start."""
    before, nested = subprocess.Popen, os.environ.get(NESTED)
    subprocess.Popen, os.environ[NESTED] = Child, "1"  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]
        if nested is None:
            del os.environ[NESTED]


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

    def __init__(self, forked: bool = False, interprets: bool = False) -> None:
        """Starts it, or with `forked` forks it from this process, which is a fork of another one itself.

        In one that `interprets` Triton interprets its kernels.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER_BYTES)
        self._end: Callable[[], object]
        if forked:
            self._fork(ours, theirs)
        else:
            with theirs:
                process = _Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **({INTERPRETS: "1"} if interprets else {})},
                )
            self._end = process.wait
        self._socket = ours
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._codes: dict[int, int] = {}
        self._ended = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._close)

    def _fork(self, ours: socket.socket, theirs: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.setsid()  # signals to this program's group are not for that process
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):  # or whoever reads what this program writes would wait for that process as well
                os.dup2(nothing, number)
            serve(theirs)
            os._exit(0)
        theirs.close()
        self._end = lambda: os.waitpid(pid, 0)

    def _close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._end()

    def _listen(self) -> None:
        while message := self._socket.recv(1000):
            answer = json.loads(message)
            if "code" not in answer:
                self._pids.put(answer["pid"])
                continue
            with self._ended:
                self._codes[answer["pid"]] = answer["code"]
                self._ended.notify_all()
        self._pids.put(0)  # whoever waits for a process need not wait for the deadline

    def start(self, order: dict[str, Any], files: Sequence[int]) -> int:
        """Forks a program that has the first three files as its standard streams; returns its process id."""
        adopted = order.get("adopted", False)
        assert os.getpid() == self._owner or not adopted, "a fork of the process that is to be the parent"
        with self._lock:
            if adopted:
                _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(order).encode()], list(files))
                pid = self._pids.get(timeout=patience(100))
                if pid == 0:
                    self._pids.put(0)  # for the next one, too
                    raise RuntimeError("the process that forks programs for the tests has ended")
            finally:
                if adopted:
                    _adopt_orphans(False)
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


def _adopt_orphans(wanted: bool) -> None:
    """Whether orphans below this process become its children, or the first process's (of the machine or container)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def server(interprets: bool = False) -> Server:
    """The preloaded process of this one, started when it is first needed; it ends with this process."""
    return _server(interprets)


@functools.cache
def _server(interprets: bool) -> Server:
    return Server(_forked and not interprets, interprets)


_forked = False  # whether this process is a fork of the preloaded one


# --- the preloaded process --------------------------------------------------------------------------------------------


def load() -> None:
    """Imports what programs need."""
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    for name in USED:
        operator.attrgetter(name)(sys.modules["geartrain"])
    gc.freeze()  # a collection in a forked process is not to touch, and so copy, what is here


def serve(orders: socket.socket) -> None:
    """Forks programs until the socket is closed."""
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
        message, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, FILES)
        if not message:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        order = json.loads(message)
        begin, go = os.pipe()
        born, bear = os.pipe()
        pid = os.fork()
        if pid == 0 and order["adopted"] and (orphan := os.fork()) != 0:
            os.write(bear, orphan.to_bytes(4, "little"))
            os._exit(0)
        if pid == 0:
            for each in (go, told, tell, born, bear):
                os.close(each)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os.read(begin, 1)
            os.close(begin)
            end(execute(order, files))
        if order["adopted"]:
            os.waitpid(pid, 0)  # its child is an orphan now, and who gave the order has adopted it
            pid = int.from_bytes(os.read(born, 4), "little")
        else:
            running.add(pid)
        for each in (begin, born, bear, *files):
            os.close(each)
        orders.send(json.dumps({"pid": pid}).encode())
        orders.recv(10)
        os.close(go)


def execute(order: dict[str, Any], files: list[int]) -> int:
    """Runs a program as the interpreter would: a module (-m), a text (-c) or a file. Returns what it ends with."""
    wanted = dict(zip([0, 1, 2, *order["passed"]], files, strict=True))
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for each in files]
    for each in files:
        os.close(each)
    for number, each in zip(wanted, high, strict=True):
        os.dup2(each, number)
        os.close(each)
    if order["session"]:
        os.setsid()
    if order.get("host"):
        _enter(*order["host"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # it may be that of this process's own environment
    generations = int(os.environ.pop(NESTED, "0")) - order["adopted"]
    if generations > 0:
        os.environ[NESTED] = str(generations)
        _give_children()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
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


def _enter(network: str, hostname: str, hosts: str, memory: str) -> None:
    """Has this process, which has one thread, be in an emulated host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def done(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    descriptor = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    done(libc.setns(descriptor, CLONE_NEWNET), "setns")
    os.close(descriptor)
    done(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "unshare")
    socket.sethostname(hostname)
    done(libc.mount(None, b"/", None, MS_SLAVE | MS_REC, None), "mount /")
    for source, target in ((hosts, "/etc/hosts"), (memory, "/dev/shm")):
        done(libc.mount(source.encode(), target.encode(), None, MS_BIND, None), f"mount {target}")


def _give_children() -> None:
    """Lets this fork have children that are forks, by a preloaded process of its own."""
    global _forked
    _forked = True
    server()
    subprocess.Popen = Child  # type: ignore[misc]


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
    load()
    serve(socket.socket(fileno=int(sys.argv[1])))
