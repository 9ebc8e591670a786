"""The pool of registered memory, whose buffers come back wherever their last view goes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from deadlines import patience

from geartrain.transport.one_sided import nixl, registered_memory
from geartrain.transport.one_sided.registered_memory import RegisteredMemoryPool


class Region:
    """Of no library."""

    def __init__(self, memory: np.ndarray) -> None:
        self.nbytes, self.address, self.descriptor = memory.nbytes, memory.ctypes.data, b""

    def close(self) -> None:
        pass


def test_a_buffer_comes_back_within_a_lease_of_the_same_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a collection of garbage finds its last view there."""
    monkeypatch.setattr(nixl, "expose", Region)
    pool = RegisteredMemoryPool("nixl")
    kept = [pool.lease(1 << 16).array()]
    pool.lease(1 << 16).release()
    made = registered_memory.RegisteredBuffer

    def make(*args: Any) -> Any:
        kept.clear()
        return made(*args)

    monkeypatch.setattr(registered_memory, "RegisteredBuffer", make)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(pool.lease(1 << 16)), daemon=True)
    thread.start()
    thread.join(patience(5))
    assert ended, "it waits for its own lock"
    assert not kept
    pool.close()
