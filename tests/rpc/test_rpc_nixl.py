"""Big arrays and tensors of calls over NIXL: asked for, proved, counted; or refused with the reason."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience, stop

from geartrain import rpc
from geartrain.errors import BusyError, GeartrainError, PeerLostError, TransportError, WaitTimeoutError
from geartrain.transport.connection import MessageLimits
from geartrain.transport.one_sided import nixl
from geartrain.transport.one_sided.registered_memory import RegisteredMemoryPool

WORKER = Path(__file__).parents[1] / "support" / "devices_worker.py"
here = pytest.mark.skipif(not nixl.installed(), reason=f"nixl is not installed: {nixl.INSTALL}")


class Peer:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.node = self.another(**options)

    def another(self, **options: Any) -> rpc.Node:
        return rpc.Node("me", peers={"peer": self.address}, transport="nixl", timeout_s=patience(90), **options)

    def close(self) -> None:
        self.node.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    one = Peer(tmp_path_factory.mktemp("gpus"))
    yield one
    one.close()


@here
def test_big_arrays_go_over_nixl_both_ways_and_small_ones_do_not(peer: Peer) -> None:
    torch = pytest.importorskip("torch")
    node = peer.node
    for size in (1, 1000, 100_000, 1_000_003, 8 << 20):
        array = np.random.default_rng(size).random(size)
        before = node.counts().get("peer", {}).get("tensors", {}).get("nixl", 0)
        np.testing.assert_array_equal(node.call("peer", "twice", array), 2 * array)
        moved = node.counts()["peer"]["tensors"].get("nixl", 0) - before
        assert moved == (2 * array.nbytes if array.nbytes >= 256 << 10 else 0)
    odd = torch.arange(1_000_000, dtype=torch.bfloat16).reshape(1000, 1000).t()
    result = node.call("peer", "twice", odd)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, 2 * odd)
    first, second = node.call("peer", "ranges", 1 << 17)
    assert (first == np.arange(1 << 17)).all()
    assert second.dtype == np.float32
    assert "nixl over UCX" in node.connections()["peer"]
    assert node.call("peer", "memory")["held"] == node.call("peer", "memory")["lent"] == 0


@here
def test_what_was_received_stays_as_it_was(peer: Peer) -> None:
    kept = [peer.node.call("peer", "twice", np.full(100_000, i)) for i in range(6)]
    for i, array in enumerate(kept):
        assert (array == 2 * i).all()
    del kept, array
    gc.collect()
    futures = [peer.node.call_async("peer", "twice", np.full(100_000, i)) for i in range(10)]
    for i, future in enumerate(futures):
        assert (future.result() == 2 * i).all()


@here
def test_more_than_is_lent_is_refused_and_nothing_is_left(peer: Peer) -> None:
    small = peer.another(options=rpc.NodeOptions(limits=MessageLimits(max_segment_bytes=1 << 20)))
    with pytest.raises(BusyError, match="leased to this peer already"):
        small.call("peer", "ranges", 1 << 20)
    assert small.call("peer", "memory")["held"] == 0
    assert (small.call("peer", "twice", np.full(50_000, 1)) == 2).all()
    small.close()


@here
def test_a_peer_that_dies_or_stops_is_a_named_error(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    array = np.ones(4 << 20)
    assert (peer.node.call("peer", "twice", array) == 2).all()
    stop(peer.process.pid)
    began_s = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        peer.node.call("peer", "twice", array, timeout_s=0.5)
    assert time.monotonic() - began_s < patience(5)
    peer.process.send_signal(signal.SIGCONT)
    assert (peer.node.call("peer", "twice", array) == 2).all()
    peer.process.kill()
    peer.process.wait()
    with pytest.raises(GeartrainError) as caught:
        peer.node.call("peer", "twice", array, timeout_s=2)
    assert isinstance(caught.value, (PeerLostError, TransportError, WaitTimeoutError))
    peer.close()


@here
def test_a_peer_without_nixl_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wheel in nixl.WHEELS:
        (tmp_path / f"{wheel}.py").write_text("raise ImportError('not on this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peer = Peer(tmp_path)
    with pytest.raises(TransportError, match=r"nixl to 'peer': .*not on this machine"):
        peer.node.call("peer", "twice", np.ones(3))
    peer.close()


@here
def test_registered_buffers_are_used_again_and_abandoned_ones_never() -> None:
    pool = RegisteredMemoryPool("nixl", max_warm_bytes=1 << 20)
    first = pool.lease(100_000)
    array = first.array()
    address = array.ctypes.data
    view = array[5:]
    del array
    gc.collect()
    other = pool.lease(100_000)
    assert other.array().ctypes.data != address  # the view still holds it
    del view
    assert pool.lease(100_000).array().ctypes.data == address
    lost = pool.lease(300_000)
    at = lost.region.address
    lost.abandon()
    buffers = [pool.lease(300_000) for _ in range(3)]
    assert at not in [buffer.region.address for buffer in buffers]
    assert pool.abandoned == 1
    pool.close()


@pytest.mark.skipif(nixl.installed(), reason="nixl is installed")
def test_without_the_package_it_is_refused_with_how_to_get_it() -> None:
    with pytest.raises(TransportError, match="'nixl' is not viable here") as caught:
        rpc.Node("me", transport="nixl")
    assert nixl.INSTALL in str(caught.value)
