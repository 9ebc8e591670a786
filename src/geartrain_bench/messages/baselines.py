"""Baselines of `geartrain bench p2p`, each in its own environment: ZeroMQ, gRPC and Ray.

Runs with the baseline's own Python, which needs NumPy and the baseline, not geartrain. Reads one JSON object a line
and answers each with one; the client is this process, the server one that it starts:

    {"do": "setup", "system": "zmq ipc"}                                  -> {"versions": {...}}
    {"do": "lap", "what": "echo" | "acknowledge", "bytes": 8000, "calls": 100}    -> {"seconds", "disturbed"}
    {"do": "lap", "what": "in flight", "open": 64, "calls": 500}                   -> the same
    {"do": "finish"}                                                      -> {}

`bytes` 0 stands for the number 7. Each system is used as documented for arrays: ZeroMQ with a frame for
the array's bytes, not copied on either side; gRPC with one message of pickled bytes, without a limit on its size; Ray
with an actor's method.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

# --- ZeroMQ -----------------------------------------------------------------------------------------------------------


def _frames(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [json.dumps([value.dtype.str, value.shape]).encode(), value.reshape(-1).view(np.uint8)]
    return [b"", pickle.dumps(value)]


def _value(frames: list[Any]) -> Any:
    if not frames[0].bytes:
        return pickle.loads(frames[1].buffer)
    dtype, shape = json.loads(frames[0].bytes)
    return np.frombuffer(frames[1].buffer, dtype).reshape(shape)


class ZeroMq:
    """DEALER and ROUTER sockets."""

    package = "pyzmq"

    def __init__(self, way: str, directory: str) -> None:
        import zmq  # type: ignore[import-not-found, import-untyped, unused-ignore]

        address = f"ipc://{directory}/zmq" if way == "ipc" else "tcp://127.0.0.1:*"
        self.server = _start("zmq", address)
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.connect(self.server.stdout.readline().strip())  # type: ignore[union-attr]

    def start(self, what: str, value: Any) -> None:
        """Starts a call."""
        self.socket.send_multipart([what.encode(), *_frames(value)], copy=False)

    def wait(self, _: Any) -> Any:
        """Its answer."""
        return _value(self.socket.recv_multipart(copy=False))

    def call(self, what: str, value: Any) -> Any:
        """A call and its reply."""
        self.start(what, value)
        return self.wait(None)

    @staticmethod
    def serve(address: str) -> None:
        """The server; prints its address."""
        import zmq  # type: ignore[import-not-found, import-untyped, unused-ignore]

        socket = zmq.Context().socket(zmq.ROUTER)
        socket.bind(address)
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        print(endpoint.decode().rstrip("\0"), flush=True)
        while True:
            caller, what, *frames = socket.recv_multipart(copy=False)
            value = _value(frames)
            socket.send_multipart([caller, *_frames(value if what.bytes == b"echo" else None)], copy=False)

    def finish(self) -> None:
        """Ends the server."""
        self.socket.close(0)
        _stop(self.server)


# --- gRPC -------------------------------------------------------------------------------------------------------------

_NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _dumps(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


class Grpc:
    """One unary method, generic, with pickled values."""

    package = "grpcio"

    def __init__(self, way: str, directory: str) -> None:
        import grpc  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self.server = _start("grpc", f"unix:{directory}/grpc" if way == "unix" else "127.0.0.1:0")
        self.channel = grpc.insecure_channel(self.server.stdout.readline().strip(), _NO_LIMIT)  # type: ignore[union-attr]
        self.method = self.channel.unary_unary("/p2p/call", _dumps, pickle.loads)

    def start(self, what: str, value: Any) -> Any:
        """Starts a call."""
        return self.method.future((what, value), timeout=300)

    def wait(self, future: Any) -> Any:
        """Its answer."""
        return future.result()

    def call(self, what: str, value: Any) -> Any:
        """A call and its reply."""
        return self.method((what, value), timeout=300)

    @staticmethod
    def serve(address: str) -> None:
        """The server; prints its address."""
        from concurrent.futures import ThreadPoolExecutor

        import grpc  # type: ignore[import-not-found, import-untyped, unused-ignore]

        def answer(request: Any, _: Any) -> Any:
            what, value = request
            return value if what == "echo" else True  # gRPC takes None for a failure

        handler = grpc.unary_unary_rpc_method_handler(answer, pickle.loads, _dumps)
        server = grpc.server(ThreadPoolExecutor(10), options=_NO_LIMIT)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("p2p", {"call": handler}),))
        port = server.add_insecure_port(address)
        server.start()
        print(address if address.startswith("unix:") else f"127.0.0.1:{port}", flush=True)
        server.wait_for_termination()

    def finish(self) -> None:
        """Ends the server."""
        self.channel.close()
        _stop(self.server)


# --- Ray --------------------------------------------------------------------------------------------------------------


class Ray:
    """An actor on this host, without dashboard."""

    package = "ray"

    def __init__(self, way: str, directory: str) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self.ray = ray
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            configure_logging=False,
            object_store_memory=3 << 30,
            _temp_dir=directory,
        )

        class Answering:
            def echo(self, value: Any) -> Any:
                """The value back."""
                return value

            def acknowledge(self, _: Any) -> None:
                """An acknowledgement."""
                return

        self.actor = ray.remote(Answering).remote()
        ray.get(self.actor.echo.remote(7))

    def start(self, what: str, value: Any) -> Any:
        """Starts a call."""
        return getattr(self.actor, what).remote(value)

    def wait(self, reference: Any) -> Any:
        """Its answer."""
        return self.ray.get(reference)

    def call(self, what: str, value: Any) -> Any:
        """A call and its reply."""
        return self.ray.get(self.start(what, value))

    def finish(self) -> None:
        """Ends the server."""
        self.ray.shutdown()


SYSTEMS: dict[str, Any] = {"zmq": ZeroMq, "grpc": Grpc, "ray": Ray}


# --- the bench's requests ---------------------------------------------------------------------------------------------


class Worker:
    """One system, and its requests."""

    def __init__(self) -> None:
        self.system: Any = None
        self.directory = tempfile.TemporaryDirectory(prefix="p2p-")

    def setup(self, system: str) -> dict[str, Any]:
        """Starts a system and tries it."""
        from importlib.metadata import version

        kind, _, way = system.partition(" ")
        self.system = SYSTEMS[kind](way, self.directory.name)
        value = np.arange(4.0)
        assert self.system.call("echo", 7) == 7
        assert (self.system.call("echo", value) == value).all()
        assert self.system.call("acknowledge", value) in (None, True)
        return {"versions": {self.system.package: version(self.system.package)}}

    def lap(self, what: str, calls: int, bytes: int = 0, open: int = 1) -> dict[str, Any]:
        """Seconds of one call, of so many."""
        value = np.ones(bytes // 4, np.float32) if bytes else 7
        began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        began_s = time.perf_counter()
        if what == "in flight":
            under_way: list[Any] = []
            for _ in range(calls):
                under_way.append(self.system.start("echo", value))
                if len(under_way) == open:
                    self.system.wait(under_way.pop(0))
            for one in under_way:
                self.system.wait(one)
        else:
            for _ in range(calls):
                self.system.call(what, value)
        seconds = (time.perf_counter() - began_s) / calls
        return {"seconds": seconds, "disturbed": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != began}

    def finish(self) -> dict[str, Any]:
        """Ends the server."""
        self.system.finish()
        self.directory.cleanup()
        return {}


def _start(kind: str, address: str) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "serve", kind, address]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Answers requests until end of input; or serves, depending on the arguments."""
    if sys.argv[1:2] == ["serve"]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        SYSTEMS[sys.argv[2]].serve(sys.argv[3])
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    one = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            words = getattr(one, what)(**request)
        except Exception as error:
            words = {"error": f"{type(error).__name__}: {error}"[:800]}
        answers.write(json.dumps(words) + "\n")
        answers.flush()
        if "error" in words or what == "finish":
            break
    os._exit(0)  # without waiting for threads that a baseline left running


if __name__ == "__main__":
    main()
