"""Tensors on real GPUs in calls and results. Run on a machine that has one, better two:

pytest tests/gpu/test_rpc_devices_gpu.py
pytest tests/gpu/test_rpc_devices_gpu.py -m slow -s      # how long they take
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import geartrain.device.cuda_ipc as cuda_ipc
from geartrain import rpc
from geartrain.device.cuda_ipc import IpcReceiver
from geartrain.device.cuda_runtime import CudaRuntime
from geartrain.errors import DeviceError, PeerLostError, RemoteError, TransportError
from geartrain.transport.one_sided import nixl

torch = pytest.importorskip("torch")
reason = cuda_ipc.why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no GPU whose memory can be shared: {reason}")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PEER = """
import sys, time
import torch
from geartrain import rpc

kept = []

@rpc.function
def twice(tensor):
    return tensor * 2

@rpc.function
def where(*tensors):
    return [str(tensor.device) for tensor in tensors]

@rpc.function
def keep(tensor):
    kept[:] = [tensor]

@rpc.function
def get():
    return kept[0]

@rpc.function
def overwrite(value):
    kept[0].fill_(value)

@rpc.function
def fail(tensor):
    raise ValueError(f"got {tensor.sum().item()}")

@rpc.function
def used():
    free, total = torch.cuda.mem_get_info(0)
    return total - free

node = rpc.Node("peer")
torch.cuda.init()
print(node.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[rpc.Node, subprocess.Popen[str]]]]:
    nodes: list[rpc.Node] = []
    processes: list[subprocess.Popen[str]] = []

    def make(code: str = PEER, **options: Any) -> tuple[rpc.Node, subprocess.Popen[str]]:
        processes.append(
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert processes[-1].stdout is not None
        address = processes[-1].stdout.readline().strip()
        nodes.append(rpc.Node("me", peers={"peer": address}, timeout_s=60, **options))
        return nodes[-1], processes[-1]

    yield make
    for node in nodes:
        node.close()
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", [None, "cuda_ipc", "shm"])
def test_tensors_go_and_come_back_the_same(start: Callable[..., Any], transport: str | None) -> None:
    node, _ = start(transport=transport)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool, torch.complex64):
        for shape in ((0,), (), (3,), (1000, 1001)):
            given = torch.ones(shape, device="cuda").to(dtype)
            node.call("peer", "keep", given)
            result = node.call("peer", "get")
            assert result.device == given.device
            assert result.dtype == dtype
            assert torch.equal(result.reshape(-1).view(torch.uint8), given.reshape(-1).view(torch.uint8))
    odd = torch.arange(1_000_000, device="cuda").reshape(1000, 1000).t()[::3]
    assert torch.equal(node.call("peer", "twice", odd), 2 * odd)
    if transport == "cuda_ipc":
        assert set(node.counts()["peer"]["tensors"]) == {"cuda_ipc"}
        assert "cuda:0 -> its cuda:0: cuda_ipc" in node.connections()["peer"]


def test_order_is_that_of_the_stream_without_waiting_for_it(start: Callable[..., Any]) -> None:
    node, _ = start(transport="cuda_ipc")
    given = torch.zeros(50_000_000, device="cuda")
    node.call("peer", "twice", given)
    stream = torch.cuda.Stream()
    futures = []
    with torch.cuda.stream(stream):
        for i in range(30):
            torch.cuda._sleep(2_000_000)
            given.fill_(i)
            futures.append(node.call_async("peer", "twice", given))
        given.fill_(-1)  # after the last copy, in the stream's order
        for i, future in enumerate(futures):
            assert bool((future.result() == 2 * i).all()), i


def test_a_result_is_as_it_was_when_the_function_returned(start: Callable[..., Any]) -> None:
    node, _ = start(transport="cuda_ipc")
    for i in range(10):
        node.call("peer", "keep", torch.full((10_000_000,), float(i), device="cuda"))
        future = node.call_async("peer", "get")
        node.call("peer", "overwrite", -1.0)
        assert bool((future.result() == i).all())


def test_a_dead_peer_is_an_error_and_its_memory_comes_back(start: Callable[..., Any]) -> None:
    node, process = start(transport="cuda_ipc")
    given = torch.ones(100_000_000, device="cuda")
    for _ in range(3):
        node.call("peer", "twice", given)
    future = node.call_async("peer", "twice", given)
    process.kill()
    process.wait()
    with pytest.raises((PeerLostError, TransportError)):
        future.result()
        node.call("peer", "twice", given, timeout_s=5)
    torch.cuda.synchronize()  # the context is as good as before
    assert bool((given * 2 == 2).all())


def test_errors_and_maps_work_with_real_tensors(start: Callable[..., Any]) -> None:
    node, _ = start(device_map={"peer": {0: 0}})
    with pytest.raises(RemoteError, match="got 5"):
        node.call("peer", "fail", torch.ones(5, device="cuda"))
    with pytest.raises(DeviceError, match="and here are"):
        rpc.Node("wrong", device_map={"peer": {99: 0}})
    with pytest.raises(DeviceError, match="make it dense"):
        node.call("peer", "twice", torch.ones(3, 3, device="cuda").to_sparse())


def test_handles_of_this_process_are_refused_and_the_host_is_taken(start: Callable[..., Any]) -> None:
    mine = rpc.Node("a")
    other = rpc.Node("b", peers={"a": mine.address})
    rpc.function(name="same")(lambda tensor: tensor)
    assert bool((other.call("a", "same", torch.ones(5, device="cuda")) == 1).all())
    assert "through host memory" in other.connections()["a"]
    other.close()
    mine.close()


def test_expandable_segments_change_nothing(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    node, _ = start(transport="cuda_ipc")
    assert bool((node.call("peer", "twice", torch.ones(1000, device="cuda")) == 2).all())


@two
def test_two_gpus_reach_each_other(start: Callable[..., Any]) -> None:
    node, _ = start(device_map={"peer": {0: 1, 1: 0}})
    on_0, on_1 = (torch.full((1000,), float(i), device=f"cuda:{i}") for i in range(2))
    assert node.call("peer", "where", on_0, on_1) == ["cuda:1", "cuda:0"]
    for _ in range(2):
        assert node.call("peer", "twice", on_1).device == on_1.device
    print(node.connections()["peer"])


@pytest.mark.skipif(not nixl.installed(), reason=f"nixl is not installed: {nixl.INSTALL}")
def test_nixl_carries_gpu_memory(start: Callable[..., Any]) -> None:
    node, _ = start(transport="nixl")
    for size in (1000, 10_000_000):
        given = torch.rand(size, device="cuda")
        assert torch.equal(node.call("peer", "twice", given), 2 * given)
    assert set(node.counts()["peer"]["tensors"]) == {"nixl"}


def test_slots_are_real_memory_that_comes_back() -> None:
    free_before, _ = torch.cuda.mem_get_info(0)
    receiver = IpcReceiver(CudaRuntime())
    slots = [receiver.lease(2 << 30, 0) for _ in range(4)]
    # Half of it is left to what other processes take and give back meanwhile.
    assert torch.cuda.mem_get_info(0)[0] <= free_before - (4 << 30)
    assert len({slot.descriptor[2] for slot in slots}) == 4
    receiver.close()
    assert torch.cuda.mem_get_info(0)[0] >= free_before - (4 << 30)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_how_long_a_tensor_takes(start: Callable[..., Any], transport: str) -> None:
    """Prints; a figure belongs to the machine it was measured on."""
    node, _ = start(transport=transport)
    for mb in (0.02, 1.25, 10, 40, 640):
        given = torch.ones(int(mb * 250_000), device="cuda")
        local = torch.empty_like(given)
        taken, floor = [], []
        for _ in range(12):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            node.call("peer", "keep", given)
            taken.append(time.perf_counter() - began_s)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            local.copy_(given)
            torch.cuda.synchronize()
            floor.append(time.perf_counter() - began_s)
        best, least = min(taken) * 1e3, min(floor) * 1e3
        print(f"{transport} {mb} MB: call {best:.3f} ms, copy on one GPU {least:.3f} ms, {best / least:.1f}x")
