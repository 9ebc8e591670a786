"""Processes of the feeding benchmark: a learner's, which serves a store, and a simulators', which feeds it."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import geartrain.rpc as rpc
from geartrain.actors import RemoteStore, StoreServer
from geartrain.core.schema import Field
from geartrain.store.recorder import recorded_fields
from geartrain.store.store import Store

SECRET = b"of the feeding benchmark"
ENVIRONMENTS, FRAME = 8, (84, 84, 4)
ROW_BYTES, ROWS = 100_000, 16


def learner() -> None:
    """Serves two stores and a socket that takes bytes, until its stdin ends."""
    frames = recorded_fields({"obs": Field(FRAME, "uint8"), "reward": Field((), "float32")})
    with (
        Store.create(frames, max_length=65, capacity=64) as steps,
        Store.create({"x": Field((ROW_BYTES,), "uint8")}, max_length=1, capacity=256) as rows,
        rpc.Node("learner", host="0.0.0.0", secret=SECRET) as node,
        StoreServer(node, steps, "steps"),
        StoreServer(node, rows, "rows"),
        socket.create_server(("0.0.0.0", 0)) as plain,
    ):
        threading.Thread(target=take, args=(plain,), daemon=True).start()
        print(json.dumps({"address": node.address, "port": plain.getsockname()[1]}), flush=True)
        sys.stdin.read()


def take(plain: socket.socket) -> None:
    """The floor's other side: reads so many bytes into memory that is there, and acknowledges them."""
    connection, _ = plain.accept()
    room = bytearray(1 << 20)
    while length := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(length, "little")
        while left:
            left -= connection.recv_into(room, min(left, len(room)))
        connection.sendall(b"!")


def simulator(asked: dict[str, Any]) -> None:
    """Feeds, a lap each in turn, and prints the seconds of each lap."""
    lap_bytes = int(asked["lap_bytes"])
    with (
        rpc.Node("simulator", peers={"learner": asked["address"]}, host="0.0.0.0", secret=SECRET) as node,
        socket.create_connection((asked["host"], asked["port"])) as plain,
    ):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        systems = {
            "floor": _plain(plain, lap_bytes),
            "steps": _steps(RemoteStore(node, "learner", "steps"), lap_bytes),
            "rows": _rows(RemoteStore(node, "learner", "rows"), lap_bytes),
        }
        laps: dict[str, list[float]] = {name: [] for name in systems}
        for lap in range(int(asked["laps"]) + 1):
            if lap > 1 and time.monotonic() > asked["until_s"]:
                break
            for name, feed in systems.items():
                began_s = time.perf_counter()
                fed = feed()
                seconds = time.perf_counter() - began_s
                if lap:  # the first warms connections and memory up
                    laps[name].append(seconds * lap_bytes / fed)
    print(json.dumps(laps), flush=True)


def _plain(plain: socket.socket, lap_bytes: int) -> Callable[[], int]:
    data = np.random.default_rng(0).bytes(lap_bytes)

    def feed() -> int:
        plain.sendall(lap_bytes.to_bytes(8, "little"))
        plain.sendall(data)
        plain.recv(1, socket.MSG_WAITALL)
        return lap_bytes

    return feed


def _steps(store: RemoteStore, lap_bytes: int) -> Callable[[], int]:
    frames = np.random.default_rng(0).integers(0, 256, (2, ENVIRONMENTS, *FRAME), dtype=np.uint8)
    recorder = store.recorder(ENVIRONMENTS, autoreset="disabled")
    reward, never = np.zeros(ENVIRONMENTS, np.float32), np.zeros(ENVIRONMENTS, bool)
    count: int = max(1, round(lap_bytes / frames[0].nbytes) - 1)  # and the observation that the episodes begin with

    def feed() -> int:
        recorder.reset(frames[0])
        for step in range(count):
            recorder.step(frames[step % 2], reward=reward, terminated=never, truncated=never)
        recorder.cut()
        return int(frames[0].nbytes) * (count + 1)

    return feed


def _rows(store: RemoteStore, lap_bytes: int) -> Callable[[], int]:
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, 1, ROW_BYTES), dtype=np.uint8)
    count: int = max(1, round(lap_bytes / rows.nbytes))

    def feed() -> int:
        for _ in range(count):
            store.insert({"x": rows})
        return int(rows.nbytes) * count

    return feed


if __name__ == "__main__":
    learner() if sys.argv[1] == "learner" else simulator(json.loads(sys.argv[2]))
