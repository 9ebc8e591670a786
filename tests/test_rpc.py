"""Named functions of named peers: answers, errors, deadlines, order, batches, and peers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from geartrain import rpc
from geartrain.errors import (
    BusyError,
    CallCancelledError,
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    UnknownPeerError,
    UntrustedPeerError,
    WaitTimeoutError,
)

TRANSPORTS = ("inproc", "shm", "tcp")


@rpc.function
def add(a: object, b: object) -> object:
    return a + b  # type: ignore[operator]


@rpc.function
def overwhelmed() -> None:
    raise BusyError("too much")


@rpc.function
def missing() -> None:
    {}["x"]  # type: ignore[index]


@rpc.function
def fail(text: str) -> None:
    raise ValueError(text)


@rpc.function(concurrent=True)
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@rpc.function
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


_seen: list[int] = []


@rpc.function
def note(number: int) -> int:
    _seen.append(number)
    return number


@rpc.function
async def later(value: object) -> object:
    await asyncio.sleep(0.01)
    return value


_batches: list[int] = []


@rpc.batched(max_size=4, max_wait_us=20_000)
def double(values: list[int]) -> list[int]:
    _batches.append(len(values))
    return [2 * value for value in values]


@rpc.batched(max_size=3, max_wait_us=None, stack=True)
def total(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows).sum(axis=1)


@rpc.batched(max_size=2, max_wait_us=None, max_queued=2)
def never_filled(values: list[int]) -> list[int]:
    return values


@rpc.function
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def _hidden(self) -> None:
        raise AssertionError("nobody may call this")


def unregistered(x: int) -> int:
    return x + 1000


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[rpc.Node, rpc.Node]]:
    """Two nodes in this process that know each other, over one transport."""
    with rpc.Node("server", timeout_s=10, transport=request.param) as server:
        with rpc.Node("client", peers={"server": server.address}, timeout_s=10, transport=request.param) as client:
            yield server, client


def test_values_arrays_and_tensors_go_there_and_back(pair: tuple[rpc.Node, rpc.Node]) -> None:
    torch = pytest.importorskip("torch")
    _, client = pair
    assert client.call("server", "add", 1, 2) == 3
    assert client.call("server", add, a=[1], b=[2]) == [1, 2]
    for size in (10, 5000, 3_000_000):
        array = np.arange(size, dtype=np.float32)
        assert (client.call("server", "add", array, 1) == array + 1).all()
        tensor = torch.arange(size)
        assert torch.equal(client.call("server", "add", tensor, tensor), 2 * tensor)
    assert client.connections()["server"].split()[0] in TRANSPORTS


def test_an_exception_comes_back_with_its_type_and_traceback(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    with pytest.raises(ValueError, match="no such luck") as caught:
        client.call("server", "fail", "no such luck")
    assert isinstance(caught.value, RemoteError)
    assert "in fail" in caught.value.remote_traceback
    assert caught.value.remote_type == "ValueError"
    with pytest.raises(LookupError, match="no function 'nonsense'"):
        client.call("server", "nonsense")
    with pytest.raises(TypeError):
        client.call("server", "add", 1)
    with pytest.raises(MessageError, match="pickle"):
        client.call("server", "add", object(), 1)
    with pytest.raises(BusyError, match="too much") as busy:
        client.call("server", "overwhelmed")
    assert isinstance(busy.value, RemoteError)
    with pytest.raises(KeyError) as caught_key:
        client.call("server", "missing")
    assert "line" in str(caught_key.value)
    assert "\\n" not in str(caught_key.value)
    assert client.call("server", "add", 1, 2) == 3


def test_a_peers_calls_begin_in_their_order(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    _seen.clear()
    futures = [client.call_async("server", "note", i) for i in range(2000)]
    assert [future.result() for future in futures] == list(range(2000))
    assert _seen == list(range(2000))


def test_many_threads_share_a_connection(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    wrong = []

    def ask(seed: int) -> None:
        for i in range(200):
            if client.call("server", "add", seed, i) != seed + i:
                wrong.append((seed, i))

    threads = [threading.Thread(target=ask, args=(1000 * t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_futures_callbacks_and_await(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    done = threading.Event()
    future = client.call_async("server", "sleep", 0.05)
    assert not future.done()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(5)
    assert future.result() == 0.05

    async def many() -> list[int]:
        return await asyncio.gather(*(client.call_async("server", "add", i, i) for i in range(50)))

    assert asyncio.run(many()) == [2 * i for i in range(50)]
    assert client.call("server", "later", [1, 2]) == [1, 2]
    failing = client.call_async("server", "fail", "x")
    assert isinstance(failing.exception(), ValueError)


def test_a_call_ends_at_its_deadline_and_others_go_on(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    began_s = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="'server'"):
        client.call("server", "sleep", 1.0, timeout_s=0.1)
    assert time.monotonic() - began_s < 0.9
    assert client.call("server", "add", 1, 1) == 2  # the handler still sleeps
    future = client.call_async("server", "sleep", 1.0, timeout_s=0.1)
    with pytest.raises(WaitTimeoutError):
        future.result()
    with_callback = client.call_async("server", "sleep", 1.0, timeout_s=0.1)
    ended = threading.Event()
    with_callback.add_done_callback(lambda f: ended.set())
    assert ended.wait(3)
    assert isinstance(with_callback.exception(), WaitTimeoutError)


def test_a_slow_function_holds_up_its_peers_own_calls_until_given_up_and_nobody_elses(
    pair: tuple[rpc.Node, rpc.Node],
) -> None:
    server, client = pair
    with rpc.Node("other", peers={"server": server.address}, timeout_s=10) as other:
        slow = client.call_async("server", "sleep", 0.4)
        behind = client.call_async("server", "add", 1, 2)
        assert other.call("server", "add", 3, 4, timeout_s=0.3) == 7
        assert not behind.done()
        assert behind.result() == 3
        assert slow.done()
        beside = client.call_async("server", "nap", 0.4)
        assert client.call("server", "add", 1, 2, timeout_s=0.3) == 3
        assert beside.result() == 0.4
        endless = client.call_async("server", "sleep", 3.0, timeout_s=0.1)
        behind = client.call_async("server", "add", 5, 6)
        with pytest.raises(WaitTimeoutError):
            endless.result()
        assert behind.result(timeout_s=1.0) == 11


def test_a_cancelled_call_is_given_up_on_both_sides(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    future = client.call_async("server", "never_filled", 1)
    assert future.cancel()
    with pytest.raises(CallCancelledError):
        future.result()
    assert not client.call_async("server", "add", 1, 1).exception()
    # The batch that the cancelled call was in runs without it, for those that follow.
    found = client.call_async("server", "never_filled", 2)
    assert found.result(timeout_s=5) == 2


def test_batches_are_run_when_full_or_when_time_is_up(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    _batches.clear()
    futures = [client.call_async("server", "double", i) for i in range(6)]
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8, 10]
    assert _batches == [4, 2]
    rows = [client.call_async("server", "total", np.full(5, i)) for i in range(3)]
    assert [int(future.result()) for future in rows] == [0, 5, 10]


def test_a_full_queue_refuses_more(pair: tuple[rpc.Node, rpc.Node]) -> None:
    from geartrain.rpc.batch import Batcher

    batcher = Batcher(lambda values: values, max_size=3, max_wait_us=None, max_queued=3, stack=False)
    for i in range(2):
        batcher.submit((i,), {})
    batcher._max_queued = 2
    with pytest.raises(BusyError):
        batcher.submit((9,), {})


def test_remote_objects_live_with_their_peer(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    one, other = client.remote("server", Counter, 5), client.remote("server", "Counter", 100)
    assert one.call("add", 2) == 7
    assert other.call_async("add", 1).result() == 101
    assert one.call("add", 1) == 8
    with pytest.raises(AttributeError, match="not for peers"):
        one.call("_hidden")
    one.close()
    with pytest.raises(KeyError):
        one.call("add", 1)
    with pytest.raises(LookupError):
        client.remote("server", "add", 1)


def test_a_topic_reaches_its_subscribers_in_order_and_late_ones_get_the_newest(pair: tuple[rpc.Node, rpc.Node]) -> None:
    server, client = pair
    topic = server.topic("weights", history=2)
    with pytest.raises(LookupError, match="no topic 'nonsense'"):
        client.subscribe("server", "nonsense", print)
    for version in range(3):
        assert topic.publish({"version": version}) == version
    got: list[int] = []
    enough = threading.Event()

    def take(number: int, value: dict[str, int]) -> None:
        assert value == {"version": number}
        got.append(number)
        if number == 49:
            enough.set()

    client.subscribe("server", "weights", take)
    assert topic.subscribers == ["client"]
    for version in range(3, 50):
        topic.publish({"version": version})
    assert enough.wait(10)
    assert got == list(range(1, 50))
    client.unsubscribe("server", "weights")
    assert topic.subscribers == []
    client.subscribe("server", "weights", take)
    client.close()
    for _ in range(3):
        topic.publish({"version": 0})
        time.sleep(0.02)
    assert topic.subscribers == []


def test_objects_and_functions_go_by_pickle_only_between_peers_with_the_secret() -> None:
    for pickle in (True, False):
        with rpc.Node("server", secret=b"s", pickle=pickle) as server:
            peers = {"server": server.address}
            with rpc.Node("client", peers=peers, secret=b"s", pickle=pickle) as client:
                if pickle:
                    assert client.call("server", unregistered, 1) == 1001
                    assert client.call("server", "add", np.datetime64("2026-01-01"), 1) == np.datetime64("2026-01-02")
                else:
                    with pytest.raises(UntrustedPeerError):
                        client.call("server", unregistered, 1)
                    with pytest.raises(MessageError):
                        client.call("server", "add", np.datetime64("2026-01-01"), 1)
            with rpc.Node("stranger", peers=peers, secret=b"other") as stranger:
                with pytest.raises(UntrustedPeerError):
                    stranger.call("server", "add", 1, 2)


def test_a_node_calls_itself_and_is_called_back(pair: tuple[rpc.Node, rpc.Node]) -> None:
    server, client = pair
    assert client.call("client", "add", 1, 2) == 3
    server.directory.known["client"] = client.address

    @rpc.function(name="ping-pong")
    def ping_pong(depth: int, names: list[str]) -> int:
        if depth == 0:
            return 0
        caller = server if names[0] == "server" else client
        return 1 + int(caller.call(names[1], "ping-pong", depth - 1, names[::-1]))

    assert client.call("server", "ping-pong", 12, ["server", "client"]) == 12


def test_a_forked_child_makes_a_node_of_its_own(
    pair: tuple[rpc.Node, rpc.Node], fork: Callable[[Callable[[], object]], int]
) -> None:
    server, client = pair
    assert client.call("server", "add", 1, 2) == 3

    def child() -> int:
        with pytest.raises(ConnectionClosedError, match="forked"):
            client.call("server", "add", 1, 2)
        with pytest.raises(ConnectionClosedError, match="forked"):
            client.call("client", "add", 1, 2)
        own = "tcp" if client.connections()["server"].startswith("tcp") else "shm"
        with rpc.Node("child", peers={"server": server.address}, transport=own) as mine:
            return 0 if own != server._options["transport"] or mine.call("server", "add", 1, 2) == 3 else 1

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    assert client.call("server", "add", 1, 2) == 3


def test_unknown_peers_are_named_errors_in_time() -> None:
    with rpc.Node("alone") as alone, pytest.raises(UnknownPeerError, match="nobody"):
        alone.call("nobody", "add", 1, 2)


def test_peers_find_each_other_in_a_store_and_late_ones_are_waited_for() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    with rpc.Node("early", store=store, timeout_s=5) as early:
        with pytest.raises(UnknownPeerError, match="before the deadline"):
            early.call("late", "add", 1, 2, timeout_s=0.2)
        late: list[rpc.Node] = []
        timer = threading.Timer(0.3, lambda: late.append(rpc.Node("late", store=store)))
        timer.start()
        assert early.call("late", "add", 1, 2) == 3
        timer.join()
        # It leaves and comes back: the next call finds it again.
        lost = threading.Event()
        early.on_peer_lost(lambda name, reason: name == "late" and lost.set())
        late[0].close()
        assert lost.wait(5)
        with rpc.Node("late", store=store):
            assert early.call("late", "add", 3, 4) == 7


# --- other processes ----------------------------------------------------------------------------------------------

PEER = """
import sys, time
from geartrain import rpc
import numpy as np

@rpc.function
def add(a, b):
    return a + b

@rpc.function
def big(n):
    return np.ones(n, np.uint8)

@rpc.function
def forever():
    time.sleep(1000)

node = rpc.Node(sys.argv[1], timeout_s=20, transport=None if sys.argv[2] == "auto" else sys.argv[2])
print(node.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a node in a process of its own; returns the process and the node's address."""
    running: list[subprocess.Popen[str]] = []

    def start(name: str, transport: str = "auto", prefix: tuple[str, ...] = ()) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", PEER, name, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in running:
        with_streams = process.poll()
        if with_streams is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_peer_fails_its_calls_at_once_and_memory_and_files_come_back(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]], transport: str
) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    lost: list[str] = []
    with rpc.Node("me", timeout_s=20, transport=transport) as me:
        me.on_peer_lost(lambda name, reason: lost.append(name))
        before = files()
        for round_ in range(4):
            process, address = spawn(f"peer-{round_}", transport)
            me.directory.known[f"peer-{round_}"] = address
            assert me.call(f"peer-{round_}", "add", 1, 2) == 3
            assert me.connections()[f"peer-{round_}"].startswith(transport)
            waiting = me.call_async(
                f"peer-{round_}", "forever" if round_ % 2 else "big", *([] if round_ % 2 else [2**30])
            )
            time.sleep(0.05 * round_)
            process.kill()
            began_s = time.monotonic()
            with contextlib.suppress(PeerLostError):
                waiting.result()
            assert time.monotonic() - began_s < 3
            with pytest.raises((PeerLostError, GeartrainError)):
                me.call(f"peer-{round_}", "add", 1, 2, timeout_s=3)
            process.communicate()
            del waiting
            me._peers.clear()
        until_s = time.monotonic() + 3
        while len(set(lost)) < 4 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert set(lost) == {f"peer-{i}" for i in range(4)}
        gc.collect()
        assert files() <= before + 6  # the last round's connection at most, not four


def test_a_stopped_peer_is_a_deadline(spawn: Callable[..., tuple[subprocess.Popen[str], str]]) -> None:
    process, address = spawn("stopped")
    with rpc.Node("me", peers={"stopped": address}) as me:
        assert me.call("stopped", "add", 1, 2) == 3
        process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)
        with pytest.raises(WaitTimeoutError):
            me.call("stopped", "add", 1, 2, timeout_s=0.2)
        process.send_signal(signal.SIGCONT)
        assert me.call("stopped", "add", 1, 2) == 3


def namespaces(*flags: str) -> tuple[str, ...]:
    prefix = ("unshare", *flags)
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no permission for {' '.join(prefix)}")
    return prefix


def test_containers_with_namespaces_of_their_own_share_memory(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    prefix = namespaces("--mount", "--ipc", "--pid", "--fork", "--uts")
    _, address = spawn(
        "contained", "auto", (*prefix, "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm; exec "$@"', "-")
    )
    with rpc.Node("me", peers={"contained": address}) as me:
        assert me.call("contained", "big", 200_000_000).nbytes == 200_000_000  # /dev/shm there holds 64 KB
        assert me.connections()["contained"].startswith("shm")


def test_a_peer_in_another_network_namespace_is_explained(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    _, address = spawn("elsewhere", "auto", namespaces("--net"))
    with rpc.Node("me", peers={"elsewhere": address}) as me:
        with pytest.raises(GeartrainError, match=r"shm: its socket is not there.*tcp: ") as caught:
            me.call("elsewhere", "add", 1, 2, timeout_s=5)
        assert "inproc: the peer is another process" in str(caught.value)


def test_ranks_join_through_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "rank.py"
    script.write_text(
        """
import sys
from geartrain import rpc

@rpc.function
def whoami():
    return rpc.node().name

rank = int(sys.argv[1])
rpc.init(f"worker{rank}", rank=rank, world_size=3, init_method=sys.argv[2], timeout_s=60)
for other in range(3):
    assert rpc.call(f"worker{other}", whoami) == f"worker{other}"
rpc.call("worker0", "whoami")
store = rpc.node().directory.store
store.add("done", 1)
import time
while store.add("done", 0) < 3:
    time.sleep(0.01)
rpc.shutdown()
print("fine")
"""
    )
    url = f"file://{tmp_path}/store"
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), url], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    for rank in ranks:
        assert rank.communicate(timeout=90)[0] == "fine\n"


def test_joining_says_who_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(WaitTimeoutError, match=r"ranks \[1, 2\]"):
        rpc.init("first", rank=0, world_size=3, init_method=f"file://{tmp_path}/store", timeout_s=0.5)
    with pytest.raises(GeartrainError, match="has not joined"):
        rpc.call("first", "add", 1, 2)
