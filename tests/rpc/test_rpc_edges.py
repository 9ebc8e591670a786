"""Calls at their edges: names that are taken, errors of any size, timeouts that are none, peers that are dead."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience, stop

from geartrain import rpc, weights
from geartrain.errors import (
    ArgumentError,
    MessageError,
    NameTakenError,
    PeerLostError,
    PeerUnreachableError,
    RemoteError,
    TransportError,
    WaitTimeoutError,
)
from geartrain.rpc.registry import functions
from geartrain.transport.codec import decode, encode, pack
from geartrain.transport.connection import connect

NO_TIMEOUTS: list[Any] = [float("inf"), float("nan"), -1, -1e-9, 1e10, "3", [1], np.ones(2)]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail(kind: str) -> None:
    if kind == "unprintable":
        raise UnprintableError
    if kind == "key":
        raise KeyError("x" * 50_000_000)
    raise ValueError("x" * int(kind))


def same(value: Any) -> Any:
    return value


class LateError(Exception):
    """Arrives as an error of the wait that it is the result of."""

    def __reduce__(self) -> Any:
        return late, ()


class UnpicklableError(Exception):
    """Its pickling raises what a connection raises, too."""

    def __init__(self, kind: type[Exception] = WaitTimeoutError) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        raise self.kind("from a pickle")


def late() -> Any:
    raise WaitTimeoutError("from a pickle")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[rpc.Node, rpc.Node]]:
    rpc.function(name="edge-fail")(fail)
    rpc.function(name="edge-same")(same)
    with rpc.Node("server", timeout_s=patience(20)) as server:
        with rpc.Node("client", peers={"server": server.address}, timeout_s=patience(20)) as client:
            yield server, client
    del functions["edge-fail"], functions["edge-same"]


# --- names --------------------------------------------------------------------------------------------------------


def stores(tmp_path: Any) -> dict[str, Callable[[], Any]]:
    distributed = pytest.importorskip("torch.distributed")
    return {
        "hash": distributed.HashStore,
        "file": lambda: distributed.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_name_is_one_living_nodes(tmp_path: Any, kind: str) -> None:
    store = stores(tmp_path)[kind]()
    first = rpc.Node("same", store=store)
    with pytest.raises(NameTakenError, match=r"the name 'same', at .*: it is alive"):
        rpc.Node("same", store=store)
    with rpc.Node("caller", store=store) as caller:
        assert caller.directory.find("same", 0.0) == first.address  # which is still the one that is called
        first.close()
        with rpc.Node("same", store=store) as second:
            assert caller.directory.find("same", 0.0) == second.address


def test_a_name_goes_over_from_a_killed_node_and_not_from_a_stopped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    process, address = start()
    store.set("geartrain/rpc/same", address)
    stop(process.pid)
    with pytest.raises(NameTakenError, match="may be alive"):
        rpc.Node("same", store=store, timeout_s=0.5)
    assert store.get("geartrain/rpc/same") == address.encode()
    process.kill()
    process.communicate()
    with rpc.Node("same", store=store) as node:
        assert store.get("geartrain/rpc/same") == node.address.encode()


@pytest.mark.parametrize("by", ["a node", "another service"])
def test_a_name_goes_over_from_a_node_whose_port_is_anothers_by_now(by: str) -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    process, address = start()
    store.set("geartrain/rpc/same", address)
    process.kill()
    process.communicate()
    port = int(address.rpartition(":")[2])
    with contextlib.ExitStack() as there:
        if by == "a node":
            there.enter_context(rpc.Node("neighbour", port=port))
        else:
            service = there.enter_context(socket.create_server(("127.0.0.1", port)))
            greeting = b"SSH-2.0-OpenSSH_9.6 and more\r\n" * 4
            threading.Thread(target=lambda: service.accept()[0].sendall(greeting)).start()
        with rpc.Node("same", store=store, timeout_s=patience(5)) as node:
            assert store.get("geartrain/rpc/same") == node.address.encode()


def test_of_many_that_come_at_once_one_has_the_name() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    for number in range(5):
        together, made, refused = threading.Barrier(6), [], []

        def join(together: Any, made: list[Any], refused: list[Any], name: str) -> None:
            together.wait(patience(10))
            try:
                made.append(rpc.Node(name, store=store))
            except NameTakenError as error:
                refused.append(error)

        threads = [threading.Thread(target=join, args=(together, made, refused, f"n{number}")) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(20))
        assert (len(made), len(refused)) == (1, 5)
        assert store.get(f"geartrain/rpc/n{number}") == made[0].address.encode()
        made[0].close()


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (2, 1), (0, 0), (None, 0)])
def test_a_rank_beyond_the_world_is_refused(rank: int | None, world_size: int) -> None:
    with pytest.raises(ArgumentError, match=f"found rank={rank}, world_size={world_size}"):
        try:
            rpc.init("alone", rank=rank, world_size=world_size)
        finally:
            rpc.shutdown()


def test_an_unknown_function_is_answered_by_the_callers_own_ones(pair: tuple[rpc.Node, rpc.Node]) -> None:
    with pytest.raises(LookupError, match="has no function 'nowhere'; it has ") as caught:
        pair[1].call(pair[0].name, "nowhere")
    assert "geartrain." not in str(caught.value).split("\n")[0]


def test_a_rank_is_one_living_nodes() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    with rpc.Node("one", store=store) as one, rpc.Node("other", store=store) as other:
        one.directory.join("one", 0, 1, 5.0, one.why_not_gone)
        with pytest.raises(NameTakenError, match=r"rank 0 is taken: .*alive"):
            other.directory.join("other", 0, 1, 5.0, other.why_not_gone)
        one.close()
        other.directory.join("other", 0, 1, 5.0, other.why_not_gone)


# --- errors and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["50000000", "key", "unprintable"])
def test_an_error_of_any_text_reaches_its_caller(pair: tuple[rpc.Node, rpc.Node], kind: str) -> None:
    expected = {"50000000": ValueError, "key": KeyError, "unprintable": RemoteError}[kind]
    with pytest.raises(expected) as caught:
        pair[1].call("server", "edge-fail", kind)
    assert isinstance(caught.value, RemoteError)
    said = str(caught.value)
    assert len(said) < 500_000
    assert "in fail" in caught.value.remote_traceback
    if kind == "50000000":
        assert "x" * 60_000 + "" in said
        assert "(cut here; the text has 50,000,000 characters)" in said
    elif kind == "unprintable":
        assert caught.value.remote_type == "UnprintableError"
        assert "its text cannot be had: RuntimeError" in said


def test_what_torch_makes_of_values_goes_without_pickle(pair: tuple[rpc.Node, rpc.Node]) -> None:
    torch = pytest.importorskip("torch")
    _, client = pair
    for value in (torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.device("cuda", 1)):
        found = client.call("server", "edge-same", {"a": [value]})["a"][0]
        assert type(found) is type(value)
        assert found == value
        assert decode(pack(encode([value, (), {}]))) == [value, (), {}]  # what follows them is counted as theirs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", ["jagged", "strided"])
def test_nested_tensors_go_there_and_back(pair: tuple[rpc.Node, rpc.Node], layout: str) -> None:
    torch = pytest.importorskip("torch")
    parts = [torch.arange(6.0).reshape(3, 2), torch.ones(1, 2), torch.zeros(5000, 2)]
    given = torch.nested.nested_tensor(parts, layout=getattr(torch, layout), requires_grad=True)
    found = pair[1].call("server", "edge-same", (given, 1))[0]
    assert found.is_nested
    assert found.layout is given.layout
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), parts, strict=True))


def test_a_message_with_no_value_of_torchs_is_refused() -> None:
    torch = pytest.importorskip("torch")
    good = {kind: pack(encode(value)) for kind, value in ((0, torch.Size([1])), (1, torch.int8))}
    for kind in (0, 1, 2, 3, 4, 255):
        for value in ("os", "Tensor", ("jagged", 3), ("strided", [1]), ("sparse_coo", []), ("a",), (2**70,), None):
            header = b"x" + bytes([kind]) + pack(encode(value)).header
            with pytest.raises(MessageError):
                decode(type(good[0]).make(header, []))
    assert decode(good[0]) == torch.Size([1])
    assert decode(good[1]) is torch.int8


# --- timeouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", NO_TIMEOUTS, ids=repr)
def test_a_timeout_is_a_number_of_seconds(pair: tuple[rpc.Node, rpc.Node], name: str, timeout_s: Any) -> None:
    _, client = pair
    future = client.call_async("server", "edge-same", 1)
    calls: list[Callable[[], object]] = [
        lambda: client.call("server", "edge-same", 1, timeout_s=timeout_s),
        lambda: client.call_async("server", "edge-same", 1, timeout_s=timeout_s),
        lambda: client.tell("server", "edge-same", 1, timeout_s=timeout_s),
        lambda: client.client("server", timeout_s=timeout_s),
        lambda: client.wait_for("server", timeout_s=timeout_s),
        lambda: client.topic("edge", timeout_s=timeout_s),
        lambda: future.result(timeout_s=timeout_s),
        lambda: future.exception(timeout_s=timeout_s),
        lambda: rpc.Node("other", timeout_s=timeout_s),
        lambda: rpc.init("other", timeout_s=timeout_s),
        lambda: weights.Reader(name, timeout_s=timeout_s),
        lambda: weights.Publisher(name, timeout_s=timeout_s),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="timeout_s must be from 0 to 1e9 seconds, found"):
            call()
    assert future.result() == 1
    assert name not in weights.names()


def test_a_timeout_of_nothing_does_not_wait(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    hold = threading.Event()
    rpc.function(name="edge-hold")(lambda: hold.wait(patience(20)))
    try:
        client.call("server", "edge-same", 1)
        with pytest.raises(WaitTimeoutError):
            client.call("server", "edge-hold", timeout_s=0)
        future = client.call_async("server", "edge-hold")
        with pytest.raises(WaitTimeoutError):
            future.result(timeout_s=0)
        hold.set()
        assert future.result() is True
        assert client.call("server", "edge-same", 2, timeout_s=1e9) == 2
    finally:
        hold.set()
        del functions["edge-hold"]


# --- dead peers ---------------------------------------------------------------------------------------------------

PEER = """
import sys
from geartrain import rpc
node = rpc.Node("dies", transport=None if sys.argv[1] == "auto" else sys.argv[1])
print(node.address, flush=True)
sys.stdin.read()
"""


def start(transport: str = "auto") -> tuple[subprocess.Popen[str], str]:
    process = preloaded.Popen([sys.executable, "-c", PEER, transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("transport", [None, "shm", "tcp"])
@pytest.mark.parametrize("connected", [True, False])
def test_a_call_to_a_dead_peer_is_a_lost_peer(transport: str | None, connected: bool) -> None:
    process, address = start()
    with rpc.Node("me", peers={"dies": address}, transport=transport, timeout_s=patience(20)) as me:
        if connected:
            assert me.call("dies", "geartrain.rpc.take", np.ones(1)) == 8
            stop(process.pid)
            pending, told = me.call_async("dies", "geartrain.rpc.take", np.ones(1)), threading.Event()
            pending.add_done_callback(lambda _: told.set())
        process.kill()
        process.communicate()
        if connected:
            assert told.wait(patience(5)) and isinstance(pending.exception(), PeerLostError)
        until_s = time.monotonic() + patience(20)
        for ask in (me.call, me.tell, lambda *args: me.call_async(*args).result()):
            with pytest.raises(PeerLostError, match="'dies' is lost"):
                ask("dies", "geartrain.rpc.take", np.ones(1))
        with pytest.raises(PeerUnreachableError) as caught:
            while time.monotonic() < until_s:  # the first may still have met the old connection
                with pytest.raises(PeerLostError) as lost:
                    me.call("dies", "geartrain.rpc.take", np.ones(1))
                if isinstance(lost.value, PeerUnreachableError):
                    raise lost.value
        assert isinstance(caught.value, TransportError)


def test_a_message_of_any_kind_ends_neither_the_connection_nor_the_server(pair: tuple[rpc.Node, rpc.Node]) -> None:
    server, client = pair
    with connect(server.address) as stranger:
        for kind in (0, 2**32 - 1, 7):
            stranger.send(encode((("edge-same",), (1,), {})), kind=kind, tag=1)
        stranger.send(b"no value", kind=2, tag=2)
        stranger.send(encode(("edge-same", (np.datetime64("2026-01-01"),), {}), pickle=True), kind=2, tag=3)
        stranger.send(encode((abs, (-1,), {}), pickle=True), kind=3, tag=4)
        stranger.send(encode(("edge-same", (5,), {})), kind=2, tag=5)
        answers = {}
        while 5 not in answers:
            answer = stranger.receive(timeout_s=patience(20))
            answers[answer.tag] = decode(answer)
        assert answers[5] == 5
        assert answers[2][0] == "MessageError"
        assert answers[3][0] == answers[4][0] == "UntrustedPeerError"  # of who has no secret no pickle is read
    assert client.call("server", "edge-same", 6) == 6


def test_a_result_whose_unpickling_raises_is_no_timeout_of_the_call() -> None:
    rpc.function(name="edge-late")(LateError)
    secret = b"between us"
    try:
        with rpc.Node("server", secret=secret) as server:
            peers = {"server": server.address}
            with rpc.Node("client", secret=secret, peers=peers, timeout_s=patience(20)) as client:
                with pytest.raises(WaitTimeoutError, match="from a pickle"):
                    client.call("server", "edge-late")
                with pytest.raises(WaitTimeoutError, match="from a pickle"):
                    client.call_async("server", "edge-late").result()
    finally:
        del functions["edge-late"]


def test_an_argument_or_a_result_whose_pickling_raises_is_no_timeout_and_ends_no_connection() -> None:
    rpc.function(name="edge-unpicklable")(UnpicklableError)
    secret = b"between us"
    try:
        with rpc.Node("server", secret=secret) as server:
            peers = {"server": server.address}
            with rpc.Node("client", secret=secret, peers=peers, timeout_s=patience(20)) as client:
                for send in (client.call, client.call_async, client.tell):
                    for kind in (WaitTimeoutError, PeerLostError):
                        with pytest.raises(kind, match=r"^from a pickle"):
                            send("server", "edge-unpicklable", UnpicklableError(kind))
                with pytest.raises(RemoteError, match="WaitTimeoutError: from a pickle"):
                    client.call("server", "edge-unpicklable")
                assert not client.client("server").connection.lost
    finally:
        del functions["edge-unpicklable"]


def test_messages_around_the_size_that_leaves_in_one_buffer_arrive_whole() -> None:
    rpc.function(name="edges-same")(lambda *values: values)
    try:
        with (
            rpc.Node("server", transport="tcp") as server,
            rpc.Node("client", transport="tcp", peers={"server": server.address}) as client,
        ):
            for size in range(820, 1100):  # with the frame and the call around it, 1,024 bytes are among them
                bulk = np.arange(size, dtype=np.uint8)
                assert client.call("server", "edges-same", bulk.tobytes()) == (bulk.tobytes(),)
                text, array = client.call("server", "edges-same", "y" * (size // 3), bulk)
                assert text == "y" * (size // 3)
                np.testing.assert_array_equal(array, bulk)
    finally:
        del functions["edges-same"]
