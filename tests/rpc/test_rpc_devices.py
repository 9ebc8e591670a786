"""Tensors on GPUs in calls and results: where they arrive, which way they took, and what is left when a side dies.

The GPUs are simulated; everything above the runtime is real, and between processes. tests/gpu has real ones.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience, stop, until

from geartrain import rpc
from geartrain.errors import (
    DeviceError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    TransportError,
    WaitTimeoutError,
)
from geartrain.rpc.tensors.pytree import put_back, take_out
from geartrain.tools.testing import SimulatedRuntime, SimulatedTensor
from geartrain.transport.connection import MessageLimits

torch = pytest.importorskip("torch")
WORKER = Path(__file__).parents[1] / "support" / "devices_worker.py"


class Peer:
    """A peer in a process of its own, which can pretend to be another machine."""

    def __init__(self, folder: Path) -> None:
        self.process = preloaded.Popen(
            [sys.executable, str(WORKER), str(folder), "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.folder = folder
        options = rpc.NodeOptions(driver=SimulatedRuntime(folder, 0))
        self.control = rpc.Node("control", peers={"peer": self.address}, options=options)

    def be(self, count: int = 2, folder: Path | None = None, delay_s: float = 0.0, why: str | None = None) -> str:
        self.control.call("peer", "be", count, str(folder or self.folder), delay_s, why)
        return self.address

    def memory(self) -> dict[str, int]:
        return self.control.call("peer", "memory")  # type: ignore[no-any-return]

    def close(self) -> None:
        self.control.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


class World:
    """The nodes here, and the peer that tests share which do not hurt it."""

    def __init__(self, peer: Peer) -> None:
        self.folder, self._peer = peer.folder, peer
        self.nodes: list[rpc.Node] = []
        self.own: list[Peer] = []

    def peer(self, count: int = 2, **options: Any) -> str:
        return self._peer.be(count, **options)

    def own_peer(self) -> Peer:
        self.own.append(Peer(self.folder))
        return self.own[-1]

    def node(self, address: str, count: int = 2, *, delay_s: float = 0.0, **options: Any) -> rpc.Node:
        driver = SimulatedRuntime(self.folder, count, delay_s=delay_s, why=options.pop("why", None))
        rare = rpc.NodeOptions(driver=driver, limits=options.pop("limits", None))
        self.nodes.append(rpc.Node("me", peers={"peer": address}, options=rare, **options))
        return self.nodes[-1]

    def close(self) -> None:
        for one in (*self.nodes, *self.own):
            one.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    one = Peer(tmp_path_factory.mktemp("gpus"))
    yield one
    one.close()


@pytest.fixture
def world(shared: Peer) -> Iterator[World]:
    one = World(shared)
    yield one
    one.close()


def tensor(node: rpc.Node, device: int, array: Any) -> SimulatedTensor:
    driver = node.devices.driver
    assert isinstance(driver, SimulatedRuntime)
    return driver.tensor(device, array)


def test_a_tensor_goes_to_a_gpu_and_its_result_comes_back_to_one(world: World) -> None:
    node = world.node(world.peer())
    for size in (0, 1, 5000, 3_000_000):
        given = tensor(node, 1, np.arange(size, dtype=np.float32))
        result = node.call("peer", "twice", given)
        assert isinstance(result, SimulatedTensor)
        assert result.device == 1
        np.testing.assert_array_equal(result.numpy(), 2 * np.arange(size, dtype=np.float32))
    described = node.connections()["peer"]
    assert "cuda:1 -> its cuda:1: cuda_ipc" in described
    assert "its cuda:1 -> cuda:1: cuda_ipc" in described
    assert node.counts()["peer"]["tensors"]["cuda_ipc"] > 12_000_000
    assert node.call("peer", "memory")["held"] == node.call("peer", "memory")["lent"] == 0


def test_tensors_stand_anywhere_in_a_value_beside_anything_else(world: World) -> None:
    node = world.node(world.peer())
    a, b, c = (tensor(node, i % 2, np.full(10, i)) for i in range(3))
    plain = {"text": "x", "array": np.arange(1000), "tensor": torch.ones(2000)}
    result = node.call("peer", "mixed", {"a": a, "bc": [b, c], "plain": plain})
    assert result["sum"] == 0
    assert (result["back"][0].numpy() == 2).all()
    assert (result["back"][1]["b"].numpy() == 1).all()
    assert result["same"]["text"] == "x"
    assert (result["same"]["array"] == np.arange(1000)).all()
    assert (result["same"]["tensor"] == 1).all()


def test_streams_that_lag_behind_change_nothing(world: World) -> None:
    node = world.node(world.peer(delay_s=0.002), delay_s=0.002)
    given = tensor(node, 0, np.zeros(10_000))
    futures = []
    for i in range(15):
        given.fill_(i)
        futures.append(node.call_async("peer", "twice", given))  # what is queued later must not be seen
    given.fill_(-5)
    for i, future in enumerate(futures):
        assert (future.result().numpy() == 2 * i).all(), i


def test_a_result_is_as_it_was_when_the_function_returned(world: World) -> None:
    node = world.node(world.peer(), transport="cuda_ipc")  # so that the first result waits for its room already
    for i in range(5):
        node.call("peer", "keep", tensor(node, 0, np.full(100_000, i)))
        future = node.call_async("peer", "kept")
        node.call("peer", "overwrite", -1)
        assert (future.result().numpy() == i).all()


def test_results_that_are_awaited_are_ready_for_any_stream(world: World) -> None:
    node = world.node(world.peer(), delay_s=0.005)
    node.call("peer", "twice", tensor(node, 0, np.ones(3)))
    done = threading.Event()
    seen: list[Any] = []

    def look(future: rpc.Future) -> None:
        seen.append(future.result()._array.copy())  # without waiting for the stream
        done.set()

    node.call_async("peer", "twice", tensor(node, 0, np.full(1000, 4.0))).add_done_callback(look)
    assert done.wait(patience(10))
    assert (seen[0] == 8).all()


def test_a_device_map_says_where_they_go_and_results_take_it_back(world: World) -> None:
    address = world.peer(3)
    node = world.node(address, device_map={"peer": {0: 2, 1: 0}})
    assert node.call("peer", "where", tensor(node, 0, [1]), tensor(node, 1, [1])) == ["cuda:2", "cuda:0"]
    assert node.call("peer", "twice", tensor(node, 0, [1])).device == 0
    assert node.call("peer", "twice", tensor(node, 1, [1])).device == 1
    with pytest.raises(DeviceError, match="on cuda:1 of 'peer', but the device map names no GPU here"):
        node.call("peer", "on_your", 1, 5)
    assert node.call("peer", "memory")["held"] == 0
    other = world.node(address, device_map="peer_0_2")
    with pytest.raises(DeviceError, match="on cuda:1, but the device map to 'peer' does not name that GPU: 0->2"):
        other.call("peer", "twice", tensor(other, 1, [1]))
    wrong = world.node(address, device_map="peer_0_5")
    with pytest.raises(DeviceError, match="to cuda:5 of 'peer', which has 3 GPUs"):
        wrong.call("peer", "twice", tensor(wrong, 0, [1]))
    with pytest.raises(DeviceError, match="names cuda:2, and here are 2 GPUs"):
        world.node(address, device_map="peer_2_0")


def test_a_map_may_name_ranks(world: World) -> None:
    node = world.node(world.peer(), device_map="0_1_1,1_0_1,1_1_0")

    class Store:
        def check(self, keys: list[str]) -> bool:
            return keys[0].endswith("rank/1")

        def get(self, key: str) -> bytes:
            return b"peer"

        def set(self, key: str, value: str) -> None: ...

        def wait(self, *_: object) -> None: ...

    node.directory.store = Store()
    assert node.call("peer", "where", tensor(node, 0, [1])) == ["cuda:1"]


def test_without_a_map_it_is_the_same_index_then_in_turn_then_the_cpu(world: World) -> None:
    node = world.node(world.peer(2), count=4)
    tensors = [tensor(node, i, [i]) for i in range(4)]
    assert node.call("peer", "where", *tensors) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    world.peer(0)
    without = world.node(node.directory.known["peer"], count=1)
    assert without.call("peer", "where", tensor(without, 0, [1])) == ["Tensor"]
    assert without.call("peer", "twice", tensor(without, 0, [1])).tolist() == [2]  # which stays on the CPU


def test_a_node_without_gpus_gets_their_results_on_the_cpu(world: World) -> None:
    node = world.node(world.peer(2), count=0)
    result = node.call("peer", "on_your", 1, 5.0)
    assert isinstance(result, torch.Tensor)
    assert (result == 5).all()


def test_where_memory_cannot_be_opened_it_goes_through_the_host_and_says_so_once(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "another container"
    elsewhere.mkdir()
    node = world.node(world.peer(folder=elsewhere))
    with caplog.at_level(logging.INFO, logger="geartrain.rpc.tensors.sender"):
        for i in range(3):
            assert (node.call("peer", "twice", tensor(node, 0, np.full(1000, i))).numpy() == 2 * i).all()
    said = [record.getMessage() for record in caplog.records if "cuda:0" in record.getMessage()]
    assert len(said) == 2, said  # one for each direction
    assert "cuda:0 -> its cuda:0: through host memory (no cuda_ipc: cudaIpcOpenMemHandle" in said[0]
    assert "through host memory" in node.connections()["peer"]
    assert set(node.counts()["peer"]["tensors"]) == {"host"}
    assert node.call("peer", "memory")["lent"] == 0


def test_a_peer_that_may_not_share_memory_is_served_through_the_host(world: World) -> None:
    node = world.node(world.peer(why="no such driver"))
    assert node.call("peer", "twice", tensor(node, 0, [4])).numpy() == [8]
    assert "not viable there: no such driver" in node.connections()["peer"]


def test_a_way_that_was_asked_for_is_taken_or_refused_with_the_reason(world: World, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    address = world.peer()
    good = world.node(address, transport="cuda_ipc")
    assert (good.call("peer", "on_your", 1, 3.0).numpy() == 3).all()  # the first result already
    assert (good.call("peer", "twice", tensor(good, 0, [4])).numpy() == 8).all()
    assert set(good.counts()["peer"]["tensors"]) == {"cuda_ipc"}
    world.peer(folder=tmp_path / "else")
    bad = world.node(address, transport="cuda_ipc")
    with pytest.raises(TransportError, match=r"cuda_ipc to 'peer', .*cudaIpcOpenMemHandle"):
        bad.call("peer", "twice", tensor(bad, 0, [4]))
    with pytest.raises(TransportError, match=r"cannot be opened|OpenMemHandle"):
        bad.call("peer", "on_your", 1, 3.0)
    assert bad.call("peer", "memory")["held"] == 0
    assert bad.call("peer", "where", 1) == ["int"]  # the rest works
    with pytest.raises(TransportError, match="'cuda_ipc' is not viable here: no luck"):
        world.node(address, transport="cuda_ipc", why="no luck")


def test_what_finds_no_room_goes_through_the_host(world: World) -> None:
    node = world.node(world.peer(), limits=MessageLimits(max_segment_bytes=3 << 20))  # for results
    for size in (10, 10, 1 << 20, 10):
        assert (node.call("peer", "twice", tensor(node, 0, np.full(size, 3))).numpy() == 6).all()
    assert node.counts()["peer"]["tensors"]["host"] >= 8 << 20
    assert node.counts()["peer"]["tensors"]["cuda_ipc"] > 8 << 20
    assert node.call("peer", "memory")["held"] == 0


def test_errors_tells_and_topics_work_with_tensors(world: World) -> None:
    address = world.peer()
    node = world.node(address)
    with pytest.raises(RemoteError, match="got 7"):
        node.call("peer", "fail", tensor(node, 0, [7]))
    node.tell("peer", "keep", tensor(node, 0, np.full(10, 6)))
    assert (node.call("peer", "kept").numpy() == 6).all()
    topic = node.topic("weights")
    other = world.node(address)  # in this process: no handles for each other, so through the host
    other.name = "other"
    node.directory.known["other"] = other.address
    other.directory.known["me"] = node.address
    got: list[Any] = []
    other.subscribe("me", "weights", lambda number, value: got.append(value))
    topic.publish({"w": tensor(node, 1, np.full(5, 9))})
    until(lambda: bool(got), "published")
    assert (got[0]["w"].numpy() == 9).all()
    assert got[0]["w"].device == 1


def test_tensors_go_on_from_peer_to_peer(world: World) -> None:
    node = world.node(world.peer())

    @rpc.function(name="mine_times_three")
    def mine_times_three(given: Any) -> Any:
        return given.times(3)

    result = node.call("peer", "call_back", "me", node.address, tensor(node, 1, np.ones(100)))
    assert (result.numpy() == 3).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_may_take_any_transport(world: World, transport: str) -> None:
    node = world.node(world.peer(), transport=transport)
    for _ in range(2):
        assert (node.call("peer", "twice", tensor(node, 0, np.ones(10))).numpy() == 2).all()
    assert node.connections()["peer"].startswith(transport)


def test_a_dead_peer_is_an_error_and_everything_of_its_is_closed(world: World) -> None:
    peer = world.own_peer()
    node = world.node(peer.address)
    driver: Any = node.devices.driver
    for _ in range(2):
        node.call("peer", "twice", tensor(node, 0, np.ones(100)))
    assert driver.opened > 0
    assert driver.allocated > 0
    future = node.call_async("peer", "nap", 60.0, tensor(node, 0, np.ones(10)))
    peer.process.kill()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError):
        future.result()
    with pytest.raises(GeartrainError):
        node.call("peer", "twice", tensor(node, 0, np.ones(10)), timeout_s=2)
    assert time.monotonic() - began_s < patience(8)
    until(lambda: driver.opened == driver.allocated == 0, "what was opened is closed, what was lent is freed")


def test_a_dead_caller_gives_the_memory_back_that_was_lent_to_it(world: World) -> None:
    peer = world.own_peer()
    code = f"""
import sys; sys.path.insert(0, {str(WORKER.parent)!r})
import numpy as np
from geartrain.tools.testing import SimulatedRuntime
from geartrain import rpc
driver = SimulatedRuntime({str(world.folder)!r})
node = rpc.Node("dies", peers={{"peer": {peer.address!r}}}, options=rpc.NodeOptions(driver=driver))
for _ in range(2):
    node.call("peer", "twice", driver.tensor(0, np.ones(10)))
peer = node.client("peer", timeout_s=5)
for _ in range(3):
    peer.tensors.ask("lease", "cuda_ipc", 1, 100, until_s=1e9)  # and never pushes
print("ready", flush=True)
input()
"""
    dies = preloaded.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert dies.stdout is not None
    assert dies.stdout.readline() == "ready\n"
    before = peer.memory()
    assert before["lent"] == 3
    assert before["opened"] > 0
    dies.kill()
    dies.wait()
    until(lambda: peer.memory() == {"allocated": 0, "opened": 0, "held": 0, "lent": 0}, "all is back")


def test_a_stopped_peer_is_a_deadline(world: World) -> None:
    peer = world.own_peer()
    node = world.node(peer.address)
    node.call("peer", "twice", tensor(node, 0, np.ones(10)))
    stop(peer.process.pid)
    began_s = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        node.call("peer", "twice", tensor(node, 0, np.ones(10)), timeout_s=0.5)
    assert time.monotonic() - began_s < patience(3)
    peer.process.send_signal(signal.SIGCONT)
    assert (node.call("peer", "twice", tensor(node, 0, np.ones(10))).numpy() == 2).all()


def test_messages_that_say_of_tensors_what_cannot_be_are_refused(world: World) -> None:
    from geartrain.rpc.protocol import CALL, OUT_OF_BAND
    from geartrain.transport.codec import native_codec

    node = world.node(world.peer())
    peer = node.client("peer", timeout_s=5)
    form = (12, (4,), 0, "tensor")
    for groups in (
        5,
        [("host", 0, 0, b"", [((9,), form)])],
        [("host", 9, 0, b"", [((1, 0), form)])],
        [("host", 0, 0, b"", [((0,), form)])],  # a text to a GPU
        [("cuda_ipc", 0, 12345, b"", [((1, 0), form)])],
        [("cuda_ipc", 0, 0, b"", [((1, -1), form)])],
        [("smoke", 0, 0, b"", [((1, 0), (12, (-4,), 0, "tensor"))])],
    ):
        value = (("where", (None,), {}), groups)
        tag = peer.calls.start(CALL | OUT_OF_BAND, native_codec().encode(value), peer.tensors, time.monotonic() + 5.0)
        reply = peer.wait(tag, time.monotonic() + 5.0)
        with pytest.raises(RemoteError):
            peer.value_of(reply)
    assert node.call("peer", "where", 1) == ["int"]


def test_what_cannot_travel_is_refused_at_the_door(world: World) -> None:
    node = world.node(world.peer(), count=0)
    with pytest.raises(MessageError, match="on meta"):
        node.call("peer", "where", torch.ones(3, device="meta"))
    with pytest.raises(MessageError):
        node.call("peer", "where", torch.ones(3, 3).to_sparse())
    odd = torch.arange(12).reshape(3, 4).t()[::2]  # strides are no obstacle
    assert node.call("peer", "twice", odd).tolist() == (2 * odd).tolist()
    assert node.call("peer", "twice", torch.ones(1).expand(5)).tolist() == [2] * 5
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(MessageError, match="nested deeper"):
        node.call("peer", "where", nested)


def test_leaves_are_taken_out_and_put_back_anywhere() -> None:
    value = ({"a": [1, "x", ("y", 2)], "b": "z"}, "w", 3)
    tree, leaves = take_out(value, lambda leaf: isinstance(leaf, str))
    assert [leaf for _, leaf in leaves] == ["x", "y", "z", "w"]
    assert tree == ({"a": [1, None, (None, 2)], "b": None}, None, 3)
    assert put_back(tree, leaves) == value
    assert put_back(None, [((), "all of it")]) == "all of it"
    for wrong in ((9,), (0, 2), (2, 0), (0, 0, 0, 0)):
        with pytest.raises(MessageError):
            put_back(tree, [(wrong, "?")])


def test_calls_without_tensors_know_nothing_of_this(world: World) -> None:
    node = world.node(world.peer())
    assert node.call("peer", "twice", np.ones(10)).sum() == 20
    peer = node.client("peer", timeout_s=5)
    assert not peer.tensors.negotiated
    assert node.connections()["peer"] == peer.connection.describe()
    with contextlib.suppress(GeartrainError):
        node.close()
    gc.collect()
