"""Fetches whose arguments change beneath them: keys that another thread writes to, tensors whose memory has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import preloaded
import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, GeartrainError

ROWS = 512
#: Of a thread beside; code that trusts the rows it checked ends within a fifth of it.
BESIDE_S = 0.5

# Keys whose rows another thread sets to some that no store has, and back. In a process of its own, which may end.
WRITTEN_KEYS = """
import sys, threading, time
import numpy as np
import geartrain as gt
from geartrain.errors import GeartrainError
rows, seconds = int(sys.argv[1]), float(sys.argv[2])
options = {"priority_per": "step"} if sys.argv[3] == "steps" else {}
fields = {"x": gt.Field((64,), "float32"), "n": gt.Field((), "int64", per_row=True)}
with gt.Store.create(fields, max_length=4, capacity=rows, **options) as store:
    x = np.broadcast_to(np.arange(rows, dtype=np.float32)[:, None, None], (rows, 4, 64)).copy()
    store.insert({"x": x, "n": np.arange(rows)})
    of = store.keys()
    steps = np.full(rows, 3, np.uint32) if options else None
    keys = gt.Keys(of.row.copy(), of.generation.copy(), store=store.id, step=steps)
    row, right = keys.row, keys.row.copy()
    lengths, few = np.full(rows, 4, np.uint32), {"x": x[:, :4], "n": np.arange(rows)}
    over = threading.Event()
    def write():
        while not over.is_set():
            row[:] = 0xFFFFFFF0
            lengths[:] = 0xFFFFFFF0
            row[:] = right
            lengths[:] = 4
    out = {"x": np.empty((rows, 4, 64), np.float32), "n": np.empty(rows, np.int64)}
    calls = {
        "fetch": lambda: gt.fetch(store, keys, output="numpy"),
        "out": lambda: gt.fetch(store, keys, output="numpy", out=out),
        "priorities": lambda: store.update_priorities(keys, np.ones(rows)),
        "steps": lambda: store.update_priorities(keys, np.ones(rows)),
        "write": lambda: store.write(keys, {"n": np.arange(rows)}),
        "insert": lambda: store.insert(few, lengths=lengths),
    }
    call = calls[sys.argv[3]]
    writer = threading.Thread(target=write)
    writer.start()
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            found = call()
            done += 1
        except GeartrainError:
            pass
    over.set()
    writer.join()
    row[:] = right
    if sys.argv[3] != "insert":
        found = gt.fetch(store, keys.without_steps(), output="numpy")
        assert (found["x"][:, :, 5] == found["n"][:, None]).all()
    assert not store.audit()
    print("done")
"""


@pytest.mark.parametrize("what", ["fetch", "out", "priorities", "steps", "write", "insert"])
def test_rows_and_lengths_that_another_thread_writes_to_lead_nowhere_else(what: str) -> None:
    ran = preloaded.run([sys.executable, "-c", WRITTEN_KEYS, str(ROWS), str(BESIDE_S), what], timeout=100)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr[-3000:]


@pytest.fixture
def store() -> Any:
    with gt.Store.create(
        {"x": gt.Field((3,), "float32"), "h": gt.Field((), "bfloat16")}, max_length=2, capacity=4
    ) as made:
        for n in range(4):
            with made.row() as row:
                row["x"], row["h"], row.length = n, n, 2
        yield made


def outputs(torch: Any, **given: Any) -> dict[str, Any]:
    return {"x": torch.zeros(4, 2, 3), "h": torch.zeros(4, 2, dtype=torch.bfloat16), **given}


@pytest.mark.parametrize(
    ("name", "spoil", "why"),
    [
        ("x", lambda torch, given: given.untyped_storage().resize_(0), "no memory"),
        ("x", lambda torch, given: given.untyped_storage().resize_(95), "no memory"),
        ("h", lambda torch, given: given.untyped_storage().resize_(0), "no memory"),
        ("x", lambda torch, given: torch._neg_view(given), "lazy conjugate or negative"),
    ],
    ids=["freed", "one byte short", "freed, raw", "negative"],
)
def test_tensors_that_cannot_be_filled_are_refused_each_time(
    store: gt.Store, name: str, spoil: Callable[[Any, Any], Any], why: str
) -> None:
    torch = pytest.importorskip("torch")
    out = outputs(torch)
    assert gt.fetch(store, store.keys(), out=out)["x"].sum() == 36
    made = spoil(torch, out[name])
    if isinstance(made, torch.Tensor):
        out[name] = made
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"out\['{name}'\].*{why}"):
            gt.fetch(store, store.keys(), out=out)
    assert gt.fetch(store, store.keys(), out=outputs(torch))["x"].sum() == 36


def test_arrays_that_share_memory_and_masked_ones_are_refused() -> None:
    fields = {"a": gt.Field((3,), "float32"), "b": gt.Field((3,), "float32")}
    with gt.Store.create(fields, max_length=2, capacity=4) as store:
        keys = store.insert({"a": np.ones((4, 2, 3), np.float32), "b": np.full((4, 2, 3), 2, np.float32)})
        memory = np.zeros((9, 2, 3), np.float32)
        for a, b in ((memory[:4], memory[:4]), (memory[:4], memory[3:7]), (memory[3:7], memory[:4])):
            with pytest.raises(ArgumentError, match=r"'a' and 'b'|'b' and 'a'") as raised:
                gt.fetch(store, keys, output="numpy", out={"a": a, "b": b})
            assert "share memory" in str(raised.value)
        assert not memory.any()
        gt.fetch(store, keys, output="numpy", out={"a": memory[4:8], "b": memory[:4]})
        assert memory[4:8].tolist() == np.ones((4, 2, 3)).tolist() and (memory[:4] == 2).all()
        masked = np.ma.masked_all((4, 2, 3), np.float32)
        with pytest.raises(ArgumentError, match="masked"):
            gt.fetch(store, keys, output="numpy", out={"a": masked, "b": memory[:4]})
        gt.fetch(store, keys, output="numpy", out={"a": masked.data, "b": memory[:4]})
        assert (masked.data == 1).all()


def test_autograd_knows_that_a_tensor_was_filled(store: gt.Store) -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.ones(4, 2, 3, requires_grad=True)
    saved = leaf * 1
    loss = (saved * saved).sum()
    gt.fetch(store, store.keys(), out=outputs(torch, x=saved))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        out = outputs(torch)
    assert gt.fetch(store, store.keys(), out=out)["x"].sum() == 36


def test_closes_beside_fetches_end_them_with_an_error_and_nothing_is_torn() -> None:
    fields = {"x": gt.Field((64,), "float32"), "n": gt.Field((), "int64", per_row=True)}
    for delay_s in (0, 0.001, 0.003, 0.01):
        store = gt.Store.create(fields, max_length=4, capacity=ROWS)
        x = np.broadcast_to(np.arange(ROWS, dtype=np.float32)[:, None, None], (ROWS, 4, 64)).copy()
        keys = store.insert({"x": x, "n": np.arange(ROWS)})
        errors: list[str] = []
        begin = threading.Barrier(5)

        def fetch(store: gt.Store = store, keys: Any = keys, errors: Any = errors, begin: Any = begin) -> None:
            begin.wait()
            try:
                while True:
                    batch = gt.fetch(store, keys, output="numpy", threads=3)
                    assert (batch["x"][:, :, 63] == batch["n"][:, None]).all()
            except GeartrainError as error:
                errors.append(type(error).__name__)

        def close(store: gt.Store = store, begin: Any = begin, delay_s: float = delay_s) -> None:
            begin.wait()
            time.sleep(delay_s)
            store.close()

        threads = [threading.Thread(target=each) for each in (fetch, fetch, fetch, close, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == ["StoreClosedError"] * 3


# A signal that the program blocks and waits for, beside the threads that copy. NumPy's own would take it.
SIGNALS = """
import os, signal
import numpy as np
import geartrain as gt
fields = {"x": gt.Field((250_000,), "uint8", per_row=True)}
with gt.Store.create(fields, max_length=1, capacity=16) as store:
    keys = store.insert({"x": np.ones((16, 250_000), np.uint8)})
    for _ in range(20):
        gt.fetch(store, keys, output="numpy", threads=4)
    threads = len(os.listdir("/proc/self/task"))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.sigtimedwait({signal.SIGUSR1}, 10).si_signo == signal.SIGUSR1
    print(threads)
"""


def test_copying_threads_leave_signals_to_the_program() -> None:
    few = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SIGNALS],
        env={**os.environ, **few},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])
    assert int(ran.stdout) >= 4  # there were some


# Calls hung there. From Python 3.12 on the module that makes interpreters has another name.
INTERPRETER = """
import sys
import _xxsubinterpreters as interpreters
code = f"import sys; sys.path[:0] = {[each for each in sys.path if each]!r}" + '''
try:
    import geartrain._native
except ImportError as error:
    print(error.__cause__, flush=True)
'''
interpreters.run_string(interpreters.create(), code)
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="extension modules say themselves which interpreters they run in"
)
def test_another_interpreter_of_the_process_is_refused_at_the_import() -> None:
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETER]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "geartrain runs in the main interpreter of a process, and in no other\n", ran.stderr
