"""Peers in other processes: killed, stopped, silent, in containers, and ranks that join through a store."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from deadlines import patience, stop

from geartrain import rpc
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError, TransportError, WaitTimeoutError


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_peer_fails_its_calls_at_once_and_memory_and_files_come_back(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]], transport: str
) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    lost: list[str] = []
    with rpc.Node("me", timeout_s=patience(20), transport=transport) as me:
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
            assert time.monotonic() - began_s < patience(3)
            with pytest.raises((PeerLostError, GeartrainError)):
                me.call(f"peer-{round_}", "add", 1, 2, timeout_s=patience(3))
            process.communicate()
            del waiting
            me._clients.clear()
        until_s = time.monotonic() + patience(3)
        while len(set(lost)) < 4 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert set(lost) == {f"peer-{i}" for i in range(4)}
        until_s = time.monotonic() + patience(3)
        while gc.collect() is not None and files() > before + 6:  # the last round's connection at most, not four
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_stopped_peer_is_a_deadline(spawn: Callable[..., tuple[subprocess.Popen[str], str]]) -> None:
    process, address = spawn("stopped")
    with rpc.Node("me", peers={"stopped": address}) as me:
        assert me.call("stopped", "add", 1, 2) == 3
        stop(process.pid)
        with pytest.raises(WaitTimeoutError):
            me.call("stopped", "add", 1, 2, timeout_s=0.2)
        process.send_signal(signal.SIGCONT)
        assert me.call("stopped", "add", 1, 2) == 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_that_gives_no_sign_of_life_is_lost_in_time(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]], transport: str
) -> None:
    process, address = spawn("silent", transport)
    lost = threading.Event()
    why: list[str] = []

    def note(name: str, reason: str) -> None:
        why.append(f"{name}: {reason}")
        lost.set()

    options = {"transport": transport, "timeout_s": patience(30), "options": rpc.NodeOptions(peer_timeout_s=2)}
    with rpc.Node("me", peers={"silent": address}, **options) as me:
        me.on_peer_lost(note)
        assert me.call("silent", "add", 1, 2) == 3
        waiting = me.call_async("silent", "forever")
        stop(process.pid)
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"no heartbeat for 2(\.\d+)? s"):  # as it counted, and not sooner
            waiting.result()
        assert time.monotonic() - began_s < patience(5)
        assert lost.wait(patience(2))
        assert why[0].startswith("silent: ")
        process.send_signal(signal.SIGCONT)
        assert me.call("silent", "add", 1, 2) == 3  # it is found again


def test_a_caller_that_gives_no_sign_of_life_is_lost_too(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    lost = threading.Event()
    with rpc.Node("me", timeout_s=patience(30), options=rpc.NodeOptions(peer_timeout_s=2)) as me:
        process, address = spawn("caller")
        me.directory.known["caller"] = address
        me.on_peer_lost(lambda name, reason: name == "caller" and lost.set())
        assert process.stdin is not None
        me.call("caller", "call_back", me.address)
        until_s = time.monotonic() + patience(5)
        while "caller" not in {one.name for one in me.server.sessions} and time.monotonic() < until_s:
            time.sleep(0.01)
        me._clients["caller"].connection.close()  # this way round nobody asks it for anything
        lost.clear()
        stop(process.pid)
        assert lost.wait(patience(6))
        until_s = time.monotonic() + patience(5)  # callers are told of before they are forgotten
        while "caller" in {one.name for one in me.server.sessions}:
            assert time.monotonic() < until_s
            time.sleep(0.01)


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
            me.call("elsewhere", "add", 1, 2, timeout_s=patience(5))
        assert "inproc: the peer is another process" in str(caught.value)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_ranks_join_through_a_store_and_leave_in_silence(tmp_path: Path, scheme: str) -> None:
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
import os, time
from pathlib import Path
here = Path(sys.argv[0]).parent
(here / f"{rank}.here").write_text(str(os.getpid()))
(here / f"{rank}.here").rename(here / f"called-{rank}")
while len(list(here.glob("called-*"))) < 3:  # not by the store, which may go while another asks it
    time.sleep(0.01)
from ended import has_ended
while rank and not has_ended(int((here / f"called-{rank - 1}").read_text())):
    time.sleep(0.01)  # rank 0, which has the tcp store, goes first: one that asks it as it goes is told so by torch
rpc.shutdown()
print("fine")
"""
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{probe.getsockname()[1]}"}[scheme]
    ranks = [
        preloaded.Popen(
            [sys.executable, str(script), str(rank), url],
            env={**os.environ, "PYTHONPATH": str(Path(preloaded.__file__).parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        said, complained = rank.communicate(timeout=patience(240))
        assert said == "fine\n", complained
        assert "c10d" not in complained


def test_joining_says_who_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(WaitTimeoutError, match=r"ranks \[1, 2\]"):
        rpc.init("first", rank=0, world_size=3, init_method=f"file://{tmp_path}/store", timeout_s=0.5)
    with pytest.raises(GeartrainError, match="has not joined"):
        rpc.call("first", "add", 1, 2)


def test_a_rendezvous_that_nobody_serves_is_an_error_in_time(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        free = silent.getsockname()[1]
        for listens in (False, True):
            if listens:  # and says nothing
                silent.listen()
            for timeout_s in (0.2, 1.0):
                began_s = time.monotonic()
                with pytest.raises(WaitTimeoutError, match=f"no rendezvous at 127.0.0.1:{free} within {timeout_s} s"):
                    rpc.init("late", rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{free}", timeout_s=timeout_s)
                assert time.monotonic() - began_s < timeout_s + patience(1)
        with pytest.raises(TransportError, match=f"cannot serve the rendezvous at 127.0.0.1:{free}"):
            rpc.init("first", rank=0, world_size=2, init_method=f"tcp://127.0.0.1:{free}", timeout_s=1.0)
    with pytest.raises(ArgumentError, match="a folder that is there"):
        rpc.init("late", rank=1, world_size=2, init_method=f"file://{tmp_path}/no/store", timeout_s=1.0)
