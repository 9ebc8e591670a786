"""A process of the overheads benchmark: laps of batches, calls or inserts, as its stdin asks for them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

import geartrain.rpc as rpc
from geartrain.core.schema import Field
from geartrain.replay.replay import Replay
from geartrain.replay.transitions import Transitions
from geartrain.selection.random import Prioritized
from geartrain.store.recorder import recorded_fields
from geartrain.store.store import Store

TRANSITIONS, STEPS = 200_000, 100
ROW_BYTES, ROWS, CAPACITY = 100_000, 10, 2_000
INSERT_BYTES_PER_S = 100e6
CALL_BYTES = 1_000


@rpc.function
def echo(data: bytes) -> bytes:
    """What it was given."""
    return data


def batches() -> Callable[[], None]:
    """One batch of transitions, and new priorities for it."""
    fields = recorded_fields(
        {"obs": Field((8,), "float32"), "action": Field((8,), "float32"), "reward": Field((), "float32")}
    )
    store = Store.create(fields, max_length=STEPS, capacity=TRANSITIONS // STEPS, priority_per="step")
    rows = TRANSITIONS // STEPS
    store.insert({name: np.ones((rows, *field.block_shape(STEPS)), field.dtype) for name, field in fields.items()})
    replay = Replay(store, Prioritized(seed=0), view=Transitions(), batch_size=256, output="numpy")
    source = iter(replay)
    priorities = np.ones(256)

    def one() -> None:
        batch = next(source)
        replay.update_priorities(batch.keys, priorities)

    return one


def calls() -> Callable[[], None]:
    """One call of a function of this process's own node by another one of its nodes."""
    server = rpc.Node("server", secret=b"of the benchmark")
    client = rpc.Node("client", peers={"server": server.address}, secret=b"of the benchmark")
    data = bytes(CALL_BYTES)

    def one() -> None:
        client.call("server", "echo", data)

    return one


def inserts(journal: str | None) -> Callable[[], None]:
    """One insert, no earlier than it is due."""
    store = Store.create(
        {"x": Field((ROW_BYTES,), "uint8", per_row=True)},
        max_length=1,
        capacity=CAPACITY,
        journal=journal,
        timeout_s=60,
    )
    rows = {"x": np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)}
    due_s = time.monotonic()

    def one() -> None:
        nonlocal due_s
        time.sleep(max(0.0, due_s - time.monotonic()))
        due_s = max(due_s, time.monotonic() - 0.1) + ROWS * ROW_BYTES / INSERT_BYTES_PER_S
        store.insert(rows, threads=1)

    return one


def lap(one: Callable[[], None], lap_s: float) -> tuple[float, float]:
    """CPU seconds of an operation: of this thread, and of the process."""
    count, end_s = 0, time.monotonic() + lap_s
    thread_s, process_s = time.thread_time(), time.process_time()
    while time.monotonic() < end_s:
        one()
        count += 1
    return (time.thread_time() - thread_s) / count, (time.process_time() - process_s) / count


def main() -> None:
    """Answers each line of stdin, a case and the seconds of a lap, by the lap's figures."""
    journal = sys.argv[1] if len(sys.argv) > 1 else None
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "batches": batches,
        "calls": calls,
        "inserts": lambda: inserts(journal),
    }
    made: dict[str, Callable[[], None]] = {}
    for line in sys.stdin:
        case, lap_s = json.loads(line)
        if case not in made:
            made[case] = makers[case]()
        print(json.dumps(lap(made[case], float(lap_s))), flush=True)


if __name__ == "__main__":
    main()
