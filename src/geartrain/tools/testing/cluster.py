"""Emulated hosts on one machine: network namespaces joined by shaped links.

    with Hosts(4, rate_mbit=200) as hosts:
        workers = [hosts.popen(i, [sys.executable, "train.py"], env={"RANK": str(i)}) for i in range(4)]

A process in host i has this environment:

    eth0                10.77.0.(i + 1), a veth whose other end is on the bridge that joins all hosts
    lo                  up, its own; so every port is free in every host
    host0, host1, ...   the names of all hosts, in its /etc/hosts; its own is its hostname
    /dev/shm            its own, shared by the processes of one host only, as on real hosts

All hosts share the machine's files, processors and memory.

    host i                        machine
    eth0 [tbf, rate] ===veth=== NAME-i [tbf, rate] --- bridge NAME

Both token buckets have the host's rate. The one in the host limits what it sends, the other what it receives. Offloads
stay on, so a "packet" on these links has up to 64 KB and costs less CPU than on a real one.

Many kernels lack netem, which emulates delay and loss. If you request a round trip or losses, the hosts' eth0 are TAP
devices, and a user-space process is the switch (`native/testing/network_switch.h`). The switch delays and drops frames
between sites and limits the rate at which a host receives. Frames have 9,000 bytes:

    with Hosts(4, rate_mbit=200, rtt_ms=10, loss=0.0001, sites=[0, 0, 1, 1]) as hosts: ...

Two cores carry about 300 Mbit/s x 8 hosts, with either kind of link. Beyond that the machine is the bottleneck, not the
network. TCP in the hosts is reno, because bbr misestimates a token bucket's rate. Metrics of earlier connections are
not cached.

The module needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and the commands ip, tc, unshare and mount. If something is
missing, `Hosts.viable()` returns the reason.

Leaving the context, `close` and the end of the interpreter remove everything. If the creator was killed, the next
`Hosts` on the machine removes its resources, and so does `Hosts.remove_stale()`. All resources of some hosts carry one
name. The creator locks the directory of that name in /dev/shm. The kernel releases the lock when the creator dies.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import geartrain.tools.testing.namespaces as namespaces
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.tools.testing.namespaces import DEADLINE_S, HostsError
from geartrain.tools.testing.network_switch import MTU, QUEUE_FRAMES, Switch, SwitchError, address_of, open_tap

#: The interface's name in every host.
INTERFACE = "eth0"
MOST_HOSTS = 250
#: A full token bucket passes so many bytes at once: more than the largest packet, which would be split otherwise.
BURST_BYTES = 70_000
#: A packet that would wait longer than this in front of a bucket is dropped, as a switch with that much memory does.
QUEUE_MS = 100.0
CONGESTION = "reno"

# Runs in a mount and a UTS namespace of its own; $0 to $2 are the host's name, hosts file and memory.
_ENTER = (
    'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && mount --bind "$2" /dev/shm '
    '&& shift 2 && exec "$@"'
)
T = TypeVar("T")


class LinkTraffic(NamedTuple):
    """Bytes that went through a host's eth0, headers included, loopback not."""

    sent: int
    received: int


class HostFiles(NamedTuple):
    """What a process has to enter to be in a host, as `Hosts.popen` does by commands."""

    network: Path  # of its network namespace
    hostname: str
    hosts: Path  # to be mounted over /etc/hosts
    memory: Path  # to be mounted over /dev/shm


class Hosts(Lifetime, error=HostsError, at_exit=True, elsewhere="they belong to the process that made them"):
    """`n` hosts on this machine, joined by links of `rate_mbit` megabits a second in each direction.

    A context manager; leaving it kills what runs in the hosts and removes them.

    Args:
        n: hosts, 1 to 250.
        rate_mbit: of every link, each way, or one for each host; None for unshaped links.
        rtt_ms: a round trip between hosts of different sites.
        loss: loss probability of a frame between sites.
        sites: the site of each host; every host is a site of its own by default.
        queue_ms: packets that would wait longer than this in front of a link are dropped.
        switched: True for the switch that `rtt_ms` and `loss` need, even without them.

    Raises:
        HostsError: they cannot be created; names the command that failed, and its output.

    Cost: some 50 ms a host, and as much to remove it.
    """

    def __init__(
        self,
        n: int,
        *,
        rate_mbit: float | Sequence[float | None] | None = None,
        rtt_ms: float = 0.0,
        loss: float = 0.0,
        sites: Sequence[int] | None = None,
        queue_ms: float = QUEUE_MS,
        switched: bool = False,
    ) -> None:
        if not 1 <= n <= MOST_HOSTS:
            raise HostsError(f"hosts must be from 1 to {MOST_HOSTS}, found {n}")
        rates = tuple(rate_mbit) if isinstance(rate_mbit, Sequence) else (rate_mbit,) * n
        if len(rates) != n:
            raise HostsError(f"rate_mbit must be one for all, or one for each of {n} hosts, found {len(rates)}")
        for rate in rates:
            if rate is not None and not 0.1 <= rate <= 100_000:
                raise HostsError(f"rate_mbit must be from 0.1 to 100000, or None for no limit, found {rate}")
        if not 0 <= rtt_ms <= 10_000 or not 0 <= loss < 1 or not 1 <= queue_ms <= 10_000:
            raise HostsError(
                f"rtt_ms is from 0 to 10000, loss from 0 to below 1, queue_ms from 1 to 10000, found {rtt_ms}, {loss} "
                f"and {queue_ms}"
            )
        if sites is not None and len(sites) != n:
            raise HostsError(f"sites must be one for each of {n} hosts, found {len(sites)}")
        self.switched = switched or rtt_ms > 0 or loss > 0
        reason = namespaces.missing_tools(self.switched)
        if reason is not None:
            raise HostsError(reason)
        super().__init__(f"the group of {n} hosts")
        self.n = n
        self.rates_mbit = rates
        self.rtt_ms = rtt_ms
        self.loss = loss
        self.sites = tuple(sites) if sites is not None else tuple(range(n))
        self.queue_ms = queue_ms
        self._switch: Switch | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        Hosts.remove_stale()
        self.name, self._lock = namespaces.new_name()
        self._begin()
        with on_error(self.close):
            self._make()
            if n > 1:
                self._check_path()

    @staticmethod
    @functools.cache
    def viable() -> str | None:
        """None where hosts can be created, or the reason why not. Tried once a process; takes 0.3 s."""
        try:
            with Hosts(2, rate_mbit=1000) as hosts:
                hosts.run(1, ["true"])
        except (HostsError, OSError) as error:  # a full /dev/shm, for one
            return str(error)
        return None

    @staticmethod
    def remove_stale() -> list[str]:
        """Removes hosts whose creator was killed, with their processes; returns their names."""
        return namespaces.remove_stale()

    # --- the hosts ------------------------------------------------------------------------------------------

    def address(self, i: int) -> str:
        """The IPv4 address of host i."""
        return f"10.77.0.{self._checked(i) + 1}"

    def hostname(self, i: int) -> str:
        """Hostname of host i; all hosts resolve each other by these names."""
        return f"host{self._checked(i)}"

    def env(self, i: int) -> dict[str, str]:
        """Variables that `popen` adds to the environment in host i: interface and address for torch."""
        self._checked(i)
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",  # free in every host: nobody else is there
        }

    def popen(
        self, i: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a process in host i; `env` is added to this process's environment and to `env(i)`.

        `options` go to `subprocess.Popen`. The process leads a session of its own. It is killed, with all that runs
        in its host, when the hosts are closed. A command that does not exist ends with code 127.

        torchrun needs `--local-addr` where its rendezvous is not static:

            torchrun --nnodes 2 --node-rank I --nproc-per-node 2 --master-addr host0 --master-port 29500 train.py
            torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29400 --local-addr hostI train.py
        """
        process: subprocess.Popen[Any] = subprocess.Popen(
            self._inside(i, argv),
            env={**os.environ, **self.env(i), **(env or {})},
            **{"start_new_session": True, **options},
        )
        self._processes.append(process)
        return process

    def run(
        self, i: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = DEADLINE_S
    ) -> str:
        """Runs a command in host i to its end and returns what it printed.

        Raises:
            HostsError: it failed, or did not end in time; carries its output.
        """
        inside = self._inside(i, argv)
        return namespaces.run(inside, env={**os.environ, **self.env(i), **(env or {})}, timeout_s=timeout_s, shown=argv)

    def files(self, i: int) -> HostFiles:
        """What a process enters that another way than `popen` starts in host i."""
        home = namespaces.SHM / self.name
        return HostFiles(namespaces.NETWORKS / self._space(i), self.hostname(i), home / "hosts", home / str(i))

    def socket(self, i: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A new IPv4 socket of this process in host i's network: it binds and connects there."""
        return self._in_network(i, lambda: socket.socket(socket.AF_INET, kind))

    # --- the links ------------------------------------------------------------------------------------------

    def bytes(self, i: int) -> LinkTraffic:
        """What host i's eth0 has sent and received since it was made, by the kernel's count.

        Packets dropped by the host's own queue are in neither; packets lost later count as sent.
        """
        shown = namespaces.run(
            ["ip", "-netns", self._space(i), "-json", "-statistics", "link", "show", "dev", INTERFACE]
        )
        counted = json.loads(shown)[0]["stats64"]
        return LinkTraffic(int(counted["tx"]["bytes"]), int(counted["rx"]["bytes"]))

    def switch_counters(self) -> dict[str, int]:
        """Frames that the switch has forwarded, dropped and lost; see `Switch.counters`."""
        if self._switch is None:
            raise HostsError("these hosts are joined by a bridge, which counts nothing; ask for switched=True")
        return self._switch.counters()

    def change_rate(self, i: int, rate_mbit: float) -> None:
        """Gives host i's link another rate, each way; what waits in its buckets is lost, so nothing should."""
        if self.switched:
            raise HostsError("the rates of switched hosts are fixed")
        if not 0.1 <= rate_mbit <= 100_000:
            raise HostsError(f"rate_mbit must be from 0.1 to 100000, found {rate_mbit}")
        namespaces.run(["tc", "qdisc", "replace", "dev", self._space(i), *self._bucket(rate_mbit)])
        namespaces.run(["tc", "-netns", self._space(i), "qdisc", "replace", "dev", INTERFACE, *self._bucket(rate_mbit)])
        self.rates_mbit = (*self.rates_mbit[:i], rate_mbit, *self.rates_mbit[i + 1 :])

    def change_rtt(self, rtt_ms: float) -> None:
        """Another round trip between sites, for switched hosts."""
        if self._switch is None:
            raise HostsError("hosts on a bridge have no round trip to be changed; ask for switched=True")
        if not 0 <= rtt_ms <= 10_000:
            raise HostsError(f"rtt_ms is from 0 to 10000, found {rtt_ms}")
        self._switch.delay(rtt_ms / 2e3)
        self.rtt_ms = rtt_ms

    def unplug(self, i: int) -> None:
        """Takes host i off the network, without a FIN or RST, like a pulled cable."""
        if self._switch is not None:
            self._switch.unplug(self._checked(i))
        else:
            namespaces.run(["ip", "link", "set", "dev", self._space(i), "down"])

    def plug(self, i: int) -> None:
        """Joins host i to the network again."""
        if self._switch is not None:
            self._switch.plug(self._checked(i))
        else:
            namespaces.run(["ip", "link", "set", "dev", self._space(i), "up"])

    # --- leaving --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kills the hosts' processes and removes the hosts. Idempotent; a no-op in a forked child."""
        if self._forked or not self._end():
            return
        try:
            namespaces.remove(self.name)
        finally:
            os.close(self._lock)
            if self._switch is not None:
                self._switch.close()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):  # killed above; only collected here
                    process.wait(DEADLINE_S)

    def __repr__(self) -> str:
        speeds = ["no limit" if rate is None else f"{rate:g}" for rate in dict.fromkeys(self.rates_mbit)]
        far = f", rtt_ms={self.rtt_ms:g}, loss={self.loss:g}" if self.switched else ""
        words = f"rate_mbit={'/'.join(speeds)}{far}, {self.name!r}"
        return f"Hosts({self.n}, {words}{'' if self._unended else ', closed'})"

    # --- making ---------------------------------------------------------------------------------------------

    def _make(self) -> None:
        home = namespaces.SHM / self.name
        names = [f"{self.address(i)} {self.hostname(i)}\n" for i in range(self.n)]
        (home / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        for i in range(self.n):
            (home / str(i)).mkdir(mode=0o1777)
        self._batch([f"netns add {self._space(i)}" for i in range(self.n)])
        if self.switched:
            self._make_switch()
        else:
            self._make_bridge()
        for i in range(self.n):
            self._batch(
                [
                    "link set dev lo up",
                    f"link set dev {INTERFACE} addrgenmode none",
                    f"addr add {self.address(i)}/24 dev {INTERFACE}",
                    f"link set dev {INTERFACE} up",
                ],
                i,
            )
            self._in_network(i, _set_up_tcp)
        for i, rate in enumerate(self.rates_mbit):
            if rate is not None:
                namespaces.run(["tc", "-netns", self._space(i), "qdisc", "add", "dev", INTERFACE, *self._bucket(rate)])

    def _make_bridge(self) -> None:
        lines = [
            f"link add {self.name} type bridge",
            # Without addresses the machine's ends send nothing, so that the counters have the hosts' bytes only.
            f"link set dev {self.name} addrgenmode none",
            f"link set dev {self.name} up",
        ]
        for i in range(self.n):
            veth = self._space(i)
            lines += [
                f"link add {veth} type veth peer name {INTERFACE} netns {veth}",
                f"link set dev {veth} master {self.name} addrgenmode none",
                f"link set dev {veth} up",
            ]
        self._batch(lines)
        for i, rate in enumerate(self.rates_mbit):
            if rate is not None:
                namespaces.run(["tc", "qdisc", "add", "dev", self._space(i), *self._bucket(rate)])

    def _bucket(self, rate_mbit: float) -> list[str]:
        bits = round(rate_mbit * 1e6)
        # The bucket must cover the interval between two timer ticks of a busy machine.
        burst = max(BURST_BYTES, bits // 8 // 1000)
        return ["root", "tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", f"{self.queue_ms:g}ms"]

    def _make_switch(self) -> None:
        ports: list[int] = []
        with on_error(lambda: list(map(os.close, ports))):
            for i in range(self.n):
                ports.append(self._in_network(i, lambda: open_tap(INTERFACE)))
                self._batch(
                    [f"link set dev {INTERFACE} address {address_of(i)} mtu {MTU} txqueuelen {QUEUE_FRAMES}"], i
                )
        try:
            self._switch = Switch(
                ports,
                rates=[0.0 if rate is None else rate * 1e6 / 8 for rate in self.rates_mbit],
                sites=self.sites,
                delay_s=self.rtt_ms / 2e3,
                loss=self.loss,
                queue_s=self.queue_ms / 1e3,
                burst_bytes=BURST_BYTES,
            )
        except SwitchError as error:
            raise HostsError(str(error)) from None

    def _batch(self, lines: Sequence[str], i: int | None = None) -> None:
        """Lines for `ip`, on the machine or in host i."""
        where = [] if i is None else ["-netns", self._space(i)]
        namespaces.run(["ip", *where, "-batch", "-"], stdin="\n".join(lines) + "\n")

    def _check_path(self) -> None:
        """Connects the last host to the first, to detect a packet filter in between."""
        with self.socket(0) as listening, self.socket(self.n - 1) as calling:
            listening.bind((self.address(0), 0))
            listening.listen(1)
            calling.settimeout(5.0)
            try:
                calling.connect(listening.getsockname())
            except OSError as error:
                raise HostsError(
                    f"{self.hostname(self.n - 1)} cannot reach host0 over the bridge ({error}); a packet filter may "
                    f"stop bridged packets: sysctl net.bridge.bridge-nf-call-iptables"
                ) from None

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise HostsError(f"there are hosts 0 to {self.n - 1}, found {i}")
        return i

    def _space(self, i: int) -> str:
        self._check_open()
        return f"{self.name}-{self._checked(i)}"

    def _inside(self, i: int, argv: Sequence[str]) -> list[str]:
        files = self.files(i)
        enter = ["ip", "netns", "exec", files.network.name, "unshare", "--uts", "sh", "-c", _ENTER]
        return [*enter, files.hostname, str(files.hosts), str(files.memory), *argv]

    def _in_network(self, i: int, make: Callable[[], T]) -> T:
        """Calls `make` on a thread that is in host i's network; a thread may be, its process need not."""
        return namespaces.call_in(self._space(i), self.hostname(i), make)


def _set_up_tcp() -> bool:
    """In a host's network: the congestion control that shaped links need, and no memory of earlier connections."""
    settings = Path("/proc/sys/net/ipv4")
    (settings / "tcp_congestion_control").write_text(CONGESTION)
    (settings / "tcp_no_metrics_save").write_text("1")
    return True
