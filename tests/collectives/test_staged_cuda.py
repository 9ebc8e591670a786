"""All-reduces of CUDA tensors by the backend "geartrain": real groups of ranks, each with a simulated device.

What runs on hardware is not shown here: the order of copies, chunks, waits and errors is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from deadlines import patience

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import simulated_cuda  # noqa: E402
from process_groups import ranks, right  # noqa: E402

import geartrain.collectives.torch_backend.staging as staging  # noqa: E402
from geartrain.collectives.torch_backend.options import BackendOptions  # noqa: E402
from geartrain.collectives.torch_backend.process_group import ProcessGroup  # noqa: E402
from geartrain.device.cuda_device import CudaDevice  # noqa: E402
from geartrain.errors import WaitTimeoutError  # noqa: E402
from geartrain.tools.testing import SimulatedDevice  # noqa: E402

PACES = {"late": 0.0, "at once": 1.0, "random": 0.4}
SIZES = [1, 4000, 100_003]  # of float32; chunks of 64 KB

Body = Callable[[ProcessGroup, int, SimulatedDevice], Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = dict(staging.Staging.__init__.__kwdefaults__, chunk_bytes=64 << 10)
    monkeypatch.setattr(staging.Staging.__init__, "__kwdefaults__", defaults)


def run_on(
    monkeypatch: pytest.MonkeyPatch,
    devices: list[SimulatedDevice],
    body: Body,
    environment: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """What `body` returned or raised on each rank; rank r has the device "cuda:r"."""
    simulated_cuda.simulate(monkeypatch, devices)
    options = BackendOptions.from_environment(environment or {"GEARTRAIN_ALLREDUCE_CUDA": "staged"})
    return ranks(len(devices), lambda group, rank: body(group, rank, devices[rank]), options, timeout_s)


def made(rank: int, size: int) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size % 97))


def in_rank_order(world_size: int, size: int) -> Any:
    total = made(0, size)
    for rank in range(1, world_size):
        total = total + made(rank, size)
    return total


def train(group: ProcessGroup, rank: int, device: SimulatedDevice, how: str) -> list[Any]:
    """What a backward pass does: gradients made late by the device, each all-reduced as soon as it is queued."""
    tensors = [simulated_cuda.SimulatedCudaTensor.of(torch.zeros(size), rank) for size in SIZES]
    works = []
    for tensor, size in zip(tensors, SIZES, strict=True):
        simulated_cuda.write(device, tensor, made(rank, size))
        works.append(group.allreduce([tensor]))
    waited = len(device.host_waits)
    assert not [thread for thread, _ in device.host_waits[:waited] if "staging" not in thread], "the caller waited"
    if how == "futures":
        for work in [work.get_future() for work in works]:
            work.wait()
        for work in works:
            work.synchronize()
    else:
        for work in reversed(works):
            assert work.wait() and work.is_completed() and work.is_success()
    return [simulated_cuda.read(device, tensor) for tensor in tensors]


@pytest.mark.parametrize("how", ["waits", "futures"])
@pytest.mark.parametrize("pace", PACES)
def test_results_are_those_of_rank_order_to_the_bit_however_the_devices_lag(
    monkeypatch: pytest.MonkeyPatch, pace: str, how: str
) -> None:
    devices = [SimulatedDevice(rank, chance=PACES[pace]) for rank in range(2)]

    def body(group: ProcessGroup, rank: int, device: SimulatedDevice) -> Any:
        found = train(group, rank, device, how)
        counters = group.counters()
        assert counters["operations"] == len(SIZES) and counters["inner_operations"] == 0
        assert list(counters["groups"]) == ["cuda/0"]  # one, although the ranks' devices have other indices
        assert counters["groups"]["cuda/0"]["operations"] == 1 + 1 + -(-SIZES[2] * 4 // (64 << 10))
        return found

    for found in right(run_on(monkeypatch, devices, body)):
        for got, size in zip(found, SIZES, strict=True):
            assert torch.equal(got, in_rank_order(2, size))


def test_a_device_that_is_slow_has_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimulatedDevice(0, delay_s=0.002), SimulatedDevice(1, chance=0.0)]
    found = right(run_on(monkeypatch, devices, lambda group, rank, device: train(group, rank, device, "waits")))
    for of_rank in found:
        assert all(torch.equal(got, in_rank_order(2, size)) for got, size in zip(of_rank, SIZES, strict=True))
    assert not devices[0].failures


def test_a_later_chunk_is_copied_out_while_an_earlier_one_is_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 does not begin before rank 0 has copied all chunks that may be ahead: without overlap it never would."""
    devices = [SimulatedDevice(rank, chance=1.0) for rank in range(2)]
    chunks = 2 * (staging.DEPTH + staging.AHEAD)
    ahead = staging.DEPTH + staging.AHEAD

    def body(group: ProcessGroup, rank: int, device: SimulatedDevice) -> Any:
        tensor = simulated_cuda.SimulatedCudaTensor.of(torch.ones(chunks * (16 << 10)), rank)
        warm = simulated_cuda.SimulatedCudaTensor.of(torch.ones(8), rank)
        group.allreduce([warm]).wait()
        if rank == 1:
            until = time.monotonic() + patience(20)
            while devices[0].copies < 2 + ahead and time.monotonic() < until:
                time.sleep(0.001)
            assert devices[0].copies == 2 + ahead, "chunks were not copied ahead of the network"
        group.allreduce([tensor]).wait()
        return simulated_cuda.read(device, tensor)

    assert all((found == 2).all() for found in right(run_on(monkeypatch, devices, body)))


def test_hosts_and_devices_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimulatedDevice(rank, chance=0.4) for rank in range(3)]
    environment = {"GEARTRAIN_ALLREDUCE_CUDA": "staged", "GEARTRAIN_ALLREDUCE_HIERARCHICAL": "1"}
    found = run_on(monkeypatch, devices, lambda group, rank, device: train(group, rank, device, "waits"), environment)
    for of_rank in right(found):  # one host: rank order
        assert all(torch.equal(got, in_rank_order(3, size)) for got, size in zip(of_rank, SIZES, strict=True))


def test_left_to_nccl_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup, rank: int, device: SimulatedDevice) -> None:
        tensor = simulated_cuda.SimulatedCudaTensor.of(torch.ones(8), rank)
        group.allreduce([tensor]).wait()  # torch's C++ sees host memory here, and takes Gloo
        assert (tensor == 2).all() and not device.copies
        host = torch.ones(8)
        group.allreduce([host]).wait()
        counters = group.counters()
        assert counters["inner"] == {"allreduce": 1} and counters["ours"] == {"allreduce": 1}
        assert list(counters["groups"]) == ["cpu"]

    right(run_on(monkeypatch, [SimulatedDevice(rank) for rank in range(2)], body, {"GEARTRAIN_ALLREDUCE_CUDA": "nccl"}))


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])  # before the ranks have connected, and amid chunks
def test_a_copy_that_fails_is_an_error_of_every_rank_that_names_this_one(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    devices = [SimulatedDevice(rank, chance=0.4) for rank in range(2)]
    devices[1].break_copy(number)

    def body(group: ProcessGroup, rank: int, device: SimulatedDevice) -> Any:
        tensors = [simulated_cuda.SimulatedCudaTensor.of(torch.ones(100_003), rank) for _ in range(3)]
        works, errors = [], []
        for tensor in tensors:
            try:
                works.append(group.allreduce([tensor]))
            except dist.DistBackendError as error:  # the device's error, in a call after the copy
                errors.append(str(error))
        assert works
        for work in works:
            with pytest.raises(dist.DistBackendError) as caught:
                work.wait()
            errors.append(str(caught.value))
            assert work.is_completed() and not work.is_success() and work.exception() is caught.value
        return errors

    here, there = run_on(monkeypatch, devices, body)[::-1]
    assert all("illegal memory access" in text for text in here), here
    assert all("rank 1 aborted: RuntimeError" in text and "illegal memory access" in text for text in there), there


@pytest.mark.parametrize("stream", ["stream 1", "stream 2"])  # out of the device, and back
def test_an_event_that_is_never_signalled_is_an_error_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    devices = [SimulatedDevice(rank, chance=0.4) for rank in range(2)]
    chunks = 3 * (staging.DEPTH + staging.AHEAD)  # the slots of those before are waited for

    def body(group: ProcessGroup, rank: int, device: SimulatedDevice) -> Any:
        first = simulated_cuda.SimulatedCudaTensor.of(torch.ones(8), rank)
        group.allreduce([first]).wait()
        assert (simulated_cuda.read(device, first) == 2).all()
        if rank == 0:
            device.stall(stream)
        tensor = simulated_cuda.SimulatedCudaTensor.of(torch.ones(chunks * (16 << 10)), rank)
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=1.0 if rank == 0 else patience(40))
        began = time.monotonic()
        work = group.allreduce([tensor], opts)
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        assert time.monotonic() - began < patience(30)
        return str(caught.value)

    here, there = run_on(monkeypatch, devices, body)
    assert "simulated:0 did not reach an event within" in here, here
    assert "rank 0 aborted: WaitTimeoutError: simulated:0 did not reach an event" in there, there


def test_a_rank_that_is_lost_is_named_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimulatedDevice(rank, chance=0.4) for rank in range(3)]
    trained = threading.Barrier(3)

    def body(group: ProcessGroup, rank: int, device: SimulatedDevice) -> Any:
        train(group, rank, device, "waits")
        trained.wait(patience(60))  # or what is lost would be an operation of `train`
        if rank == 2:
            group.abort()
            return ""
        with pytest.raises(dist.DistBackendError) as caught:  # at the call, where the rank is lost by then
            group.allreduce([simulated_cuda.SimulatedCudaTensor.of(torch.ones(100_003), rank)]).wait()
        return str(caught.value)

    found = run_on(monkeypatch, devices, body)
    assert "rank 2" in found[0] and "rank 2" in found[1], found


def test_a_wait_for_cuda_with_a_deadline_ends_and_one_without_sleeps_in_the_driver() -> None:
    class Event:
        looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > 5

        def synchronize(self) -> None:
            self.looks = -1

    device = object.__new__(CudaDevice)  # without CUDA
    device.name = "cuda:0"
    event = Event()
    device.sync(event, patience(5))
    assert event.looks == 6
    device.sync(event)
    assert event.looks == -1
    event.looks = -(10**9)
    with pytest.raises(WaitTimeoutError, match="cuda:0 did not reach an event within"):
        device.sync(event, 0.05)
