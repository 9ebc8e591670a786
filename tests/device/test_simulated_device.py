"""The simulated device's own promises, on which tests of other parts rely."""

from __future__ import annotations

import threading

import pytest
from deadlines import patience

from geartrain.tools.testing import SimulatedDevice

torch = pytest.importorskip("torch")


def test_memory_is_freed_by_a_thread_for_which_the_devices_work_waits() -> None:
    """As by a collective's own thread, which drops the last reference to what it has sent."""
    device = SimulatedDevice(chance=0)
    kept = [device.empty((8,), torch.uint8)]
    freed, waited = threading.Event(), []

    def free() -> None:
        kept.clear()
        freed.set()

    device.run(lambda: (threading.Thread(target=free, daemon=True).start(), waited.append(freed.wait(patience(5)))))
    device.finish()
    assert waited == [True]
    again = device.empty((8,), torch.uint8)
    assert device.empty((8,), torch.uint8).data_ptr() != again.data_ptr()


def test_memory_that_was_freed_meanwhile_is_used_again() -> None:
    device = SimulatedDevice(chance=0)
    kept = [device.empty((8,), torch.uint8)]
    address = kept[0].data_ptr()

    def free() -> None:
        thread = threading.Thread(target=kept.clear, daemon=True)
        thread.start()
        thread.join(patience(5))

    device.run(free)
    device.finish()
    assert device.empty((8,), torch.uint8).data_ptr() == address
