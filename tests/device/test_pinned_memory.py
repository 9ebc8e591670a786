"""The host's limit on pinned memory: kept by all processes together, and not lost when one of them dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.device.cuda_device import CudaDevice
from geartrain.device.pinned_memory import Ledger, Pins, default_limit
from geartrain.errors import PinError

pytest.importorskip("torch")
from geartrain.tools.testing import SimulatedDevice

HOLDER = """
import sys, pathlib, geartrain as gt
from geartrain.device.pinned_memory import Ledger, Pins
from geartrain.tools.testing import SimulatedDevice
store = gt.Store.open(sys.argv[1])
pin = Pins(Ledger(pathlib.Path(sys.argv[2]))).hold(store, SimulatedDevice(), int(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def stores(store_name: Callable[[], str]) -> Iterator[list[gt.Store]]:
    made = [
        gt.Store.create(store_name(), {"x": gt.Field((), "float32")}, max_length=1000, capacity=100) for _ in range(2)
    ]
    yield made
    for store in made:
        store.close()


def holder(store: gt.Store, ledger: Ledger, limit: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.name, str(ledger.directory), str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_a_segment_counts_once_however_many_processes_have_it(stores: list[gt.Store], ledger: Ledger) -> None:
    size = stores[0].nbytes
    other = holder(stores[0], ledger, 2 * size)
    try:
        pins = Pins(ledger)
        mine = pins.hold(stores[0], SimulatedDevice(), 2 * size)
        assert ledger.total() == size
        assert {one.pid for one in ledger.entries()} == {os.getpid(), other.pid}
        second = pins.hold(stores[1], SimulatedDevice(), 2 * size)
        assert ledger.total() == 2 * size
        mine.release()
        second.release()
        assert ledger.total() == size
    finally:
        other.communicate("")


def test_the_least_limit_of_all_processes_holds_and_names_who_holds_what(
    stores: list[gt.Store], ledger: Ledger
) -> None:
    size = stores[0].nbytes
    other = holder(stores[0], ledger, size + 10)
    try:
        with pytest.raises(PinError, match=f"would bring this host to .* by process {other.pid}"):
            Pins(ledger).hold(stores[1], SimulatedDevice(), 100 * size)
    finally:
        other.communicate("")
    Pins(ledger).hold(stores[1], SimulatedDevice(), 100 * size).release()  # its limit went with it


def test_what_a_killed_process_held_is_free_again(stores: list[gt.Store], ledger: Ledger) -> None:
    size = stores[0].nbytes
    other = holder(stores[0], ledger, size)
    with pytest.raises(PinError, match="limit"):
        Pins(ledger).hold(stores[1], SimulatedDevice(), size)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert ledger.entries() == []
    assert list(ledger.directory.glob("*.*.*")) == []
    Pins(ledger).hold(stores[1], SimulatedDevice(), size).release()


def test_a_failed_registration_leaves_no_note(stores: list[gt.Store], ledger: Ledger) -> None:
    with pytest.raises(PinError, match="cannot be pinned: simulated"):
        Pins(ledger).hold(stores[0], SimulatedDevice(most_pinned=10))
    assert ledger.total() == 0


def test_memory_that_the_device_reads_is_not_let_go(stores: list[gt.Store], ledger: Ledger) -> None:
    device = SimulatedDevice()
    pin = Pins(ledger).hold(stores[0], device)
    device._reading[pin.memory.ctypes.data] = 1
    with pytest.raises(PinError, match="is being read"):
        pin.release()
    assert ledger.total() == 0


def test_a_ledger_that_is_held_for_ever_is_an_error(stores: list[gt.Store], ledger: Ledger, monkeypatch) -> None:
    import geartrain.core.locks as locks
    import geartrain.device.pinned_memory as pinning

    monkeypatch.setattr(pinning, "GUARD_S", 0.05)
    ledger.entries()
    with (ledger.directory / "guard").open("w") as guard:
        assert locks.take(guard.fileno(), locks.EXCLUSIVE, 0)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="was held by another process"):
            ledger.entries()
        assert time.monotonic() - began < patience(5)


def test_the_default_limit_is_at_most_half_of_the_memory() -> None:
    assert 0 < default_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_a_forked_child_has_no_registrations(stores: list[gt.Store], ledger: Ledger, fork) -> None:
    device = SimulatedDevice()
    pins = Pins(ledger)
    pin = pins.hold(stores[0], device)

    def child() -> int:
        pin.release()  # the parent's: nothing happens
        return 0 if device.registered else 1

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    assert len(np.asarray(list(device.registered))) == 1
    pin.release()


def test_a_release_within_a_registration_comes_after_it(stores: list[gt.Store], ledger: Ledger) -> None:
    """As of a dropped replay's finaliser, which a collection of garbage may run there."""
    pins, device = Pins(ledger), SimulatedDevice()
    first = pins.hold(stores[0], device)
    register = device.register

    def register_and_collect(memory: np.ndarray) -> None:
        register(memory)
        first.release()
        assert len(device.registered) == 2

    device.register = register_and_collect  # type: ignore[method-assign]
    ended = []
    thread = threading.Thread(target=lambda: ended.append(pins.hold(stores[1], device)), daemon=True)
    thread.start()
    thread.join(patience(5))
    assert ended, "it waits for its own lock"
    assert len(device.registered) == 1
    ended[0].release()
    assert not device.registered


def test_a_registration_that_cuda_refuses_says_why() -> None:
    """torch's runtime module gives codes of a type of its own, and takes nothing else for their text."""

    class Code:  # as pybind11 makes of cudaError_t
        def __int__(self) -> int:
            return 712

    def text(code: Any) -> str:
        if not isinstance(code, Code):
            raise TypeError("cudaGetErrorString(): incompatible function arguments")
        return "part or all of the requested memory range is already mapped"

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: Code(), cudaGetErrorString=text)
    forgotten: list[Any] = []
    device = object.__new__(CudaDevice)  # without CUDA
    device.device = "cuda:0"  # type: ignore[assignment]
    device._cuda = SimpleNamespace(cudart=lambda: cudart)
    device._torch = SimpleNamespace(  # type: ignore[assignment]
        cuda=SimpleNamespace(device=contextlib.nullcontext),
        empty=lambda *_, **named: SimpleNamespace(fill_=lambda _: forgotten.append(named)),
    )
    with pytest.raises(PinError, match=r"712, .* already mapped"):
        device.register(np.zeros(8, np.uint8))
    assert len(forgotten) == 1
