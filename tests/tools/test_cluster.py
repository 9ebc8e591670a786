"""Emulated hosts are hosts: their own network, names and memory, links as slow as asked, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts, HostsError

reason = Hosts.viable()
needs_hosts = pytest.mark.skipif(reason is not None, reason=str(reason))
no_tap = reason or (None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun")
needs_tap = pytest.mark.skipif(no_tap is not None, reason=str(no_tap))

ECHO = "import os, sys; print(os.environ[{name!r}])"
REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{int(total)} of {dist.get_world_size()} at {os.uname().nodename}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3, rate_mbit=400) as made:
        yield made


def connected(hosts: Hosts, i: int, j: int) -> tuple[socket.socket, socket.socket]:
    """A connection from host i to host j: both ends."""
    with hosts.socket(j) as listening:
        listening.bind((hosts.address(j), 0))
        listening.listen(1)
        calling = hosts.socket(i)
        calling.settimeout(10)
        calling.connect(listening.getsockname())
        answering, _ = listening.accept()
        answering.settimeout(10)
        return calling, answering


def send(n: int, source: socket.socket, sink: socket.socket) -> float:
    """Seconds that n bytes take."""
    sender = threading.Thread(target=source.sendall, args=(bytes(n),))
    began_s = time.perf_counter()
    sender.start()
    left = n
    while left:
        got = len(sink.recv(1 << 20))
        assert got, "the connection broke"
        left -= got
    seconds = time.perf_counter() - began_s
    sender.join(patience(10))
    return seconds


def traces(name: str) -> list[str]:
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    spaces = [path.name for path in Path("/run/netns").iterdir()]
    return [found for found in links + spaces + os.listdir("/dev/shm") if found.startswith(name)]


@needs_hosts
def test_a_full_dev_shm_is_a_reason_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Hosts) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Hosts, "_make", full)
    assert "No space left" in str(Hosts.viable.__wrapped__())


@needs_hosts
def test_a_link_carries_what_was_asked_and_no_more(hosts: Hosts) -> None:
    source, sink = connected(hosts, 0, 1)
    with source, sink:
        send(2_000_000, source, sink)  # the buckets start full, and TCP starts slowly
        n = 10_000_000
        mbit_per_s = n * 8 / send(n, source, sink) / 1e6
    # Headers take 5 %; the buckets and buffers may be ahead by a little. A busy machine is slower, never faster.
    assert 400 * 0.6 < mbit_per_s < 400 * 1.1


@needs_hosts
def test_the_counters_hold_every_byte_that_crossed_the_link_and_none_of_loopback(hosts: Hosts) -> None:
    source, sink = connected(hosts, 0, 2)
    with source, sink:
        before = [hosts.bytes(i) for i in range(3)]
        send(3_000_000, source, sink)
        after = [hosts.bytes(i) for i in range(3)]
    sent, received = after[0].sent - before[0].sent, after[2].received - before[2].received
    assert 3_000_000 < sent < 3_200_000
    assert 3_000_000 < received < 3_200_000
    assert after[1].received - before[1].received < 10_000
    with hosts.socket(0) as listening, hosts.socket(0) as calling:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        calling.connect(listening.getsockname())
        answering, _ = listening.accept()
        with answering:
            before_loopback = hosts.bytes(0)
            send(1_000_000, calling, answering)
            assert hosts.bytes(0).sent - before_loopback.sent < 10_000


@needs_hosts
def test_hosts_know_each_other_by_name_and_share_no_memory(hosts: Hosts) -> None:
    assert hosts.run(1, ["sh", "-c", "cat /proc/sys/kernel/hostname"]).strip() == "host1"
    found = hosts.run(2, [sys.executable, "-c", "import socket; print(socket.gethostbyname('host0'))"])
    assert found.strip() == hosts.address(0)
    hosts.run(0, ["sh", "-c", "echo of-host0 > /dev/shm/mine"])
    assert hosts.run(0, ["cat", "/dev/shm/mine"]).strip() == "of-host0", "processes of one host share it"
    assert hosts.run(1, ["ls", "/dev/shm"]).strip() == ""
    assert not Path("/dev/shm/mine").exists()


@needs_hosts
def test_a_process_gets_the_environment_that_torch_needs(hosts: Hosts) -> None:
    process = hosts.popen(
        1, [sys.executable, "-c", ECHO.format(name="MINE")], env={"MINE": "x"}, stdout=subprocess.PIPE, text=True
    )
    assert process.communicate(timeout=patience(20))[0].strip() == "x"
    assert hosts.run(1, [sys.executable, "-c", ECHO.format(name="GLOO_SOCKET_IFNAME")]).strip() == "eth0"
    assert hosts.run(1, [sys.executable, "-c", ECHO.format(name="MASTER_ADDR")]).strip() == hosts.address(0)


@needs_hosts
def test_an_unplugged_host_is_silent_until_it_is_plugged_in_again(hosts: Hosts) -> None:
    source, sink = connected(hosts, 0, 2)
    with source, sink:
        hosts.unplug(2)
        source.sendall(b"lost?")
        sink.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sink.recv(5)
        hosts.plug(2)
        sink.settimeout(20)
        assert sink.recv(5) == b"lost?", "TCP sends it again"


@needs_hosts
def test_every_host_may_have_a_rate_of_its_own_and_tcp_is_renos() -> None:
    with Hosts(2, rate_mbit=[50, None]) as hosts:
        source, sink = connected(hosts, 1, 0)
        with source, sink:
            assert source.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
            send(500_000, source, sink)
            assert 50 * 0.5 < 2_000_000 * 8 / send(2_000_000, source, sink) / 1e6 < 50 * 1.1
        assert "'gt" in repr(hosts) and "50/no limit" in repr(hosts)
        with pytest.raises(HostsError, match="switched=True"):
            hosts.switch_counters()


def round_trips_ms(hosts: Hosts, i: int, j: int) -> list[float]:
    source, sink = connected(hosts, i, j)
    took = []
    with source, sink:
        for end in (source, sink):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            began_s = time.perf_counter()
            source.sendall(b"?")
            sink.sendall(sink.recv(1))
            source.recv(1)
            took.append(1e3 * (time.perf_counter() - began_s))
    return took


@needs_tap
def test_a_round_trip_takes_what_was_asked_between_sites_and_nothing_within() -> None:
    with Hosts(3, rate_mbit=200, rtt_ms=30, sites=[0, 0, 1]) as hosts:
        between, within = min(round_trips_ms(hosts, 0, 2)), min(round_trips_ms(hosts, 0, 1))
        assert 30 <= between < 30 + patience(10)
        assert within < min(patience(10), between - 10)  # what the machine adds, it adds to both
        source, sink = connected(hosts, 2, 0)
        with source, sink:
            before = [hosts.bytes(i) for i in range(3)]
            send(2_000_000, source, sink)
            assert 2_000_000 < hosts.bytes(2).sent - before[2].sent < 2_300_000
            assert hosts.bytes(1).received - before[1].received < 10_000
            hosts.unplug(0)
            source.sendall(b"lost?")
            sink.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sink.recv(5)
            hosts.plug(0)
            sink.settimeout(patience(20))
            assert sink.recv(5) == b"lost?"
        name = hosts.name
    assert traces(name) == []


@needs_tap
def test_a_switched_link_is_slow_both_ways_and_loses_what_was_asked() -> None:
    with Hosts(2, rate_mbit=[100, None], loss=0.02) as hosts:
        for i, j in ((0, 1), (1, 0)):
            source, sink = connected(hosts, i, j)
            with source, sink:
                send(1_000_000, source, sink)
                assert 4_000_000 * 8 / send(4_000_000, source, sink) / 1e6 < 100 * 1.15
        counted = hosts.switch_counters()
        assert counted["delivered_bytes"] > 10_000_000 and counted["lost_frames"] > 5


@needs_hosts
def test_leaving_kills_what_runs_and_removes_everything() -> None:
    with Hosts(2) as hosts:
        name = hosts.name
        assert traces(name)
        # A process that has a session of its own, and a child that has left it.
        process = hosts.popen(1, ["sh", "-c", "setsid sleep 600 & exec sleep 600"])
        pids = []
        while len(pids) < 2:  # until both are there
            found = subprocess.run(["ip", "netns", "pids", f"{name}-1"], capture_output=True, text=True, check=True)
            pids = found.stdout.split()
    assert process.poll() == -signal.SIGKILL
    assert traces(name) == []
    hosts.close()  # again is harmless
    with pytest.raises(HostsError, match="closed"):
        hosts.bytes(0)


@needs_hosts
def test_what_a_killed_maker_left_is_removed_and_the_living_are_spared(hosts: Hosts) -> None:
    script = (
        "import os, signal, subprocess\n"
        "from geartrain.tools.testing.cluster import Hosts\n"
        "made = Hosts(2, rate_mbit=100)\n"
        "made.popen(0, ['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(made.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(60), check=False
    )
    left = done.stdout.strip()
    assert done.returncode == -signal.SIGKILL and traces(left), done.stderr
    assert left in Hosts.remove_stale()
    assert traces(left) == []
    assert traces(hosts.name) and hosts.run(0, ["true"]) == ""


@needs_hosts
def test_bad_input_is_refused_with_what_was_found(hosts: Hosts) -> None:
    with pytest.raises(HostsError, match="1 to 250, found 0"):
        Hosts(0)
    with pytest.raises(HostsError, match=r"rate_mbit .* found -1"):
        Hosts(1, rate_mbit=-1)
    for options, said in (
        ({"rate_mbit": [1.0]}, "each of 2 hosts, found 1"),
        ({"rtt_ms": -1}, "rtt_ms is from 0 .* found -1"),
        ({"loss": 1.0}, "found 0.0, 1.0"),
        ({"sites": [0]}, "sites must be one for each of 2 hosts, found 1"),
    ):
        with pytest.raises(HostsError, match=said):
            Hosts(2, **options)  # type: ignore[arg-type]
    with pytest.raises(HostsError, match="hosts 0 to 2, found 3"):
        hosts.address(3)
    with pytest.raises(HostsError, match="`false` failed with 1: it said nothing"):
        hosts.run(0, ["false"])
    with pytest.raises(HostsError, match=r"did not end within 0\.1 s"):
        hosts.run(0, ["sleep", "60"], timeout_s=0.1)


def test_without_the_commands_the_reason_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsError, match="need root"):
        Hosts(1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsError, match="need ip, tc, unshare, mount, sh"):
        Hosts(1)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("rendezvous", "processes"), [("static", 1), ("c10d", 2)])
def test_torchrun_starts_a_job_over_two_hosts(hosts: Hosts, rendezvous: str, processes: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)

    def arguments(i: int) -> list[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={processes}"]
        if rendezvous == "static":
            start += [f"--node-rank={i}", "--master-addr=host0", "--master-port=29500"]
        else:
            start += ["--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", f"--local-addr={hosts.address(i)}"]
        return [*start, str(script), str(tmp_path / "said-")]

    before = hosts.bytes(1).sent
    agents = [
        hosts.popen(i, arguments(i), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(2)
    ]
    for agent in agents:
        said = agent.communicate(timeout=patience(100))[0]
        assert agent.returncode == 0, said
    world = 2 * processes
    total = sum(range(world))
    said = sorted((tmp_path / f"said-{rank}").read_text() for rank in range(world))
    assert said == [f"{total} of {world} at host{i}" for i in range(2) for _ in range(processes)]
    assert hosts.bytes(1).sent - before > 1000, "they met over the link"
