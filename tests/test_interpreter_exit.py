"""Daemon threads in native calls while the interpreter ends: they take nothing with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from deadlines import patience

# CPython before 3.14 ends a thread that wants the GIL of an interpreter that has ended by unwinding its stack, which
# aborts a process whose C++ code is in the way (native/python/finalization.h). `sum` is called after everything else
# that runs at exit: it holds the GIL without a break until the interpreter has ended, so whoever comes back meanwhile
# waits for it at that instant. Then the interpreter takes its time, so that they are unwound.
PROGRAM = """
    import atexit, sys, threading, time

    atexit.register(sum, range(12_000_000))

    class Slow:
        def __del__(self, sleep=time.sleep):
            sleep(0.3)

    kept = Slow()
"""
HANDSHAKES = """
    import socket
    from geartrain import transport

    listening = socket.create_server(("127.0.0.1", 0))

    def hang_up():
        while True:
            listening.accept()[0].close()

    def call():
        transport.connect(f"id={'0' * 32};tcp=127.0.0.1:{listening.getsockname()[1]}", timeout_s=60)

    threading.Thread(target=hang_up, daemon=True).start()
"""
MEETINGS = """
    import json
    from geartrain.collectives import Group, GroupOptions

    class Places:  # rank 0 says the same as rank 1, but for its address, where nobody listens
        said = "{}"
        def set(self, key, value):
            self.said = value if isinstance(value, str) else value.decode()
        def get(self, key):
            record = json.loads(self.said)
            return json.dumps({**record, "address": "127.0.0.1:9"} if key.endswith("/0") else record).encode()
        def check(self, keys):
            return not any("failure" in key for key in keys)

    def call():
        Group(1, 2, store=Places(), timeout_s=60, options=GroupOptions(host="127.0.0.1"))
"""
PICKLES = """
    from geartrain.transport.codec import native_codec

    codec = native_codec()

    class Slow:
        def __reduce__(self):
            for _ in range(1000):
                pass
            return str, ("",)

    def call():
        while True:
            codec.encode(Slow(), True)
"""
COPIES = """
    import numpy as np
    from geartrain.transport.codec import native_codec

    codec = native_codec()
    columns = np.zeros((3000, 3000), np.float32)[:, ::2]

    def call():
        while True:
            codec.encode(columns, True)
"""
KEYS = """
    from geartrain.transport.codec import native_codec, pack

    codec = native_codec()

    class Key:
        def __hash__(self):
            for _ in range(1000):
                pass
            return 1

        def __eq__(self, other):
            return self is other

    packed = pack(codec.encode([{Key(): 1 for _ in range(10)}, {Key() for _ in range(10)}], True))

    def call():
        while True:
            codec.decode(packed, True)
"""
# torch's own functions are noexcept where they take the GIL again, and a program makes its tensors as it calls.
TENSORS = """
    import itertools
    import torch
    import geartrain as gt
    from geartrain.errors import StaleKeyError
    from geartrain.transport.codec import native_codec

    codec = native_codec()
    fields = {"x": gt.Field((8,), "float32"), "y": gt.Field((8,), "bfloat16")}
    store = gt.Store.create(fields, max_length=4, capacity=64)

    def rows():
        return {"x": torch.ones(2, 4, 8), "y": torch.ones(2, 4, 8, dtype=torch.bfloat16)}

    out = rows()
    keys = store.insert(rows())

    def insert():
        global keys
        keys = store.insert({**rows(), "x": torch.ones(2, 4, 8, requires_grad=True)})

    def fetch():
        try:
            gt.fetch(store, keys, out=out)
        except StaleKeyError:
            pass

    def write():
        store.write(keys, rows())

    def encode():
        codec.encode([torch.ones(3, 4).t(), torch.ones(3, requires_grad=True), torch.Size([1])], False)

    calls = itertools.cycle([insert, fetch, write, encode])

    def call(lock=threading.Lock()):
        with lock:
            mine = next(calls)
        while True:
            mine()
"""
END = """
    for _ in range(4):
        threading.Thread(target=call, daemon=True).start()
    time.sleep(1.0)
    print("ends", flush=True)
"""


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(HANDSHAKES, id="handshakes"),
        pytest.param(MEETINGS, id="meetings", marks=pytest.mark.slow),
        pytest.param(PICKLES, id="pickles"),
        pytest.param(COPIES, id="copies"),
        pytest.param(KEYS, id="keys"),
        pytest.param(TENSORS, id="tensors"),
    ],
)
def test_a_process_ends_beside_daemon_threads(calls):
    program = "\n".join(textwrap.dedent(part) for part in (PROGRAM, calls, END))
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=patience(30)
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ends\n", "")
