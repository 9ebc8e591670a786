"""Staging of GPU tensors for all-reduce, on a simulated device: nothing is right that an event does not make so."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deadlines import patience

torch = pytest.importorskip("torch")

from geartrain.collectives.torch_backend.staging import Staging  # noqa: E402
from geartrain.errors import ConnectionClosedError, PeerLostError, WaitTimeoutError  # noqa: E402
from geartrain.tools.testing import SimulatedDevice  # noqa: E402

CHUNK = 64  # bytes


# Of work that runs before the host waits for it.
PACES = {"late": 0.0, "at once": 1.0, "random": 0.4}


class Network:
    """Doubles every buffer, as two equal ranks would; between start and wait the buffer is the network's."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.most = self.open = 0
        self.error_at: int | None = None

    def reduce(self, host: torch.Tensor) -> Any:
        if self.error_at == len(self.sent):
            raise PeerLostError("rank 1 went away")
        self.sent.append(host.clone())
        self.open += 1
        self.most = max(self.most, self.open)
        return Reduction(self, host)


class Reduction:
    def __init__(self, network: Network, host: torch.Tensor) -> None:
        self.network, self.host, self.before = network, host, host.clone()

    def wait(self, timeout_s: float | None = None) -> None:
        assert torch.equal(self.host, self.before), "the buffer was written while it was on the network"
        self.network.open -= 1
        self.host.mul_(2)


@contextlib.contextmanager
def staging(device: SimulatedDevice, **options: Any) -> Iterator[Staging]:
    aborted: list[str] = []
    one = Staging(device, aborted.append, chunk_bytes=CHUNK, **options)
    one.aborted = aborted
    yield one
    one.close(5)


def train(
    device: SimulatedDevice, one: Staging, network: Network, sizes: list[int], dtype: Any = torch.float32
) -> list[Any]:
    """What a backward pass does: makes gradients late, submits each, waits, and uses them; returns what was used."""
    gradients = [torch.zeros(size, dtype=dtype) for size in sizes]
    jobs = []
    for i, gradient in enumerate(gradients):
        device.run(lambda g=gradient, i=i: g.copy_(torch.arange(g.numel()) % 50 + i))
        jobs.append(one.submit(gradient, network.reduce))
    used = []
    for job, gradient in zip(jobs, gradients, strict=True):
        job.wait(patience(5))
        one.join(job)
        device.run(lambda g=gradient: used.append(g.clone()))
    device.waits_of_staging = list(device.host_waits)
    device.sync(device.record())
    return used


def expected(sizes: list[int], dtype: Any = torch.float32) -> list[Any]:
    return [2 * (torch.arange(size) % 50 + i).to(dtype) for i, size in enumerate(sizes)]


SIZES = [16, 5, 1, 33, 160, 17]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_results_are_right_however_late_or_early_the_device_works(pace: str, dtype: Any) -> None:
    for seed in range(10):
        device, network = SimulatedDevice(seed, chance=PACES[pace]), Network()
        with staging(device) as one:
            used = train(device, one, network, SIZES, dtype)
        for got, wanted in zip(used, expected(SIZES, dtype), strict=True):
            assert torch.equal(got, wanted)


def test_without_the_events_results_would_be_wrong() -> None:
    # What the test above is worth: the same on a device that ignores what its streams are told to wait for.
    device, network = SimulatedDevice(chance=0, obeys_waits=False), Network()
    with staging(device) as one:
        used = train(device, one, network, SIZES)
    assert not all(torch.equal(a, b) for a, b in zip(used, expected(SIZES), strict=True))


def test_no_host_thread_waits_for_the_callers_stream() -> None:
    device, network = SimulatedDevice(chance=0), Network()
    with staging(device) as one:
        train(device, one, network, SIZES)
    assert set(device.waits_of_staging) == {("geartrain-staging", "stream 1")}


def test_submitting_waits_for_nothing() -> None:
    device, network = SimulatedDevice(chance=0), Network()
    gate = threading.Event()

    def slow(host: torch.Tensor) -> Any:
        assert gate.wait(patience(5))
        return network.reduce(host)

    with staging(device) as one:
        before = time.monotonic()
        jobs = [one.submit(torch.ones(400), slow) for _ in range(20)]
        assert time.monotonic() - before < patience(1)
        assert not any(job.finished.is_set() for job in jobs)
        gate.set()
        for job in jobs:
            job.wait(patience(5))


def test_chunks_go_in_order_and_depend_on_the_tensor_alone() -> None:
    device, network = SimulatedDevice(chance=PACES["random"]), Network()
    with staging(device) as one:
        train(device, one, network, SIZES)
    assert [chunk.numel() for chunk in network.sent] == [16, 5, 1, 16, 16, 1, *[16] * 10, 16, 1]
    assert torch.equal(torch.cat(network.sent), torch.cat(expected(SIZES)) / 2)


def test_several_chunks_are_on_the_network_at_once_and_no_more_than_the_depth() -> None:
    for depth in (1, 3):
        device, network = SimulatedDevice(chance=PACES["random"]), Network()
        with staging(device, depth=depth) as one:
            train(device, one, network, [16] * 12)
        assert network.most == depth


def test_memory_stays_until_the_side_streams_are_done_with_it() -> None:
    device, network = SimulatedDevice(chance=0), Network()
    gradient = torch.ones(40)
    with staging(device) as one:
        one.submit(gradient, network.reduce).wait(patience(5))
    assert {stream for address, stream in device.used_by if address == gradient.data_ptr()} == {"stream 1", "stream 2"}


def test_more_work_follows_the_result_before_the_caller_goes_on() -> None:
    device, network = SimulatedDevice(chance=0), Network()
    flat, strided = torch.ones(40), torch.zeros(40, 2)[:, 0]
    with staging(device) as one:
        job = one.submit(flat, network.reduce, after=lambda: device.copy(strided, flat))
        job.wait(patience(5))
        one.join(job)
        seen: list[float] = []
        device.run(lambda: seen.append(float(strided.sum())))
        device.sync(device.record())
    assert seen == [80.0]


@pytest.mark.parametrize("error_at", [0, 3, 9])
def test_a_lost_peer_fails_the_tensor_and_ends_the_group(error_at: int) -> None:
    device, network = SimulatedDevice(chance=PACES["random"]), Network()
    network.error_at = error_at
    with staging(device) as one:
        jobs = [one.submit(torch.ones(64), network.reduce) for _ in range(5)]
        failed = 0
        for job in jobs:
            try:
                job.wait(patience(5))
            except PeerLostError as error:
                failed += 1
                assert "rank 1 went away" in str(error)
        assert failed == 5 - error_at // 4
        assert "rank 1 went away" in one.aborted[0]
    assert network.open == 0, "an operation was left without a wait"


def test_a_wait_has_a_deadline_and_a_closed_stage_takes_nothing() -> None:
    device, network = SimulatedDevice(chance=0), Network()
    gate = threading.Event()

    def slow(host: torch.Tensor) -> Any:
        assert gate.wait(patience(5))
        return network.reduce(host)

    with staging(device) as one:
        job = one.submit(torch.ones(4), slow)
        with pytest.raises(WaitTimeoutError, match="not done within"):
            job.wait(0.05)
        gate.set()
        job.wait(patience(5))
    with pytest.raises(ConnectionClosedError):
        one.submit(torch.ones(4), network.reduce)


def test_a_child_forked_beside_a_thread_that_submits_closes_at_once() -> None:
    with staging(SimulatedDevice(chance=0)) as one, one._lock:  # as a thread that submits holds it
        done = threading.Event()
        fork = threading.Thread(target=lambda: done.set() if ended_child(lambda: one.close(5)) == 0 else None)
        fork.start()
        fork.join(20)
        assert done.is_set()


def ended_child(act: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        act()
        os._exit(0)
    return os.waitpid(child, 0)[1]
