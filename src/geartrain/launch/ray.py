"""Runs jobs on Ray: each node runs a launcher in a Ray actor, which has the resources of everything that runs there.

    from geartrain import launch
    from geartrain.launch.ray import run

    run(launch.load("walk.toml"), hosts=2)      # on the cluster that ray.init or RAY_ADDRESS has; else `address`

`geartrain launch walk.toml --ray auto --hosts 2` does the same.

Ray finds the nodes by a placement group, one node for each host. The launchers then start, watch and restart the
processes as anywhere else. The ranks of a node see all of its accelerators. Each node has a store in its shared memory.

Rows, weights and calls use geartrain's own transports. Only a job's description, a launcher's summary and one line of
error go through Ray. They are too small for its object store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import geartrain.errors as errors
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    JobInterruptedError,
    MissingDependencyError,
    PeerLostError,
    WaitTimeoutError,
)
from geartrain.launch.hosts import HostPosition
from geartrain.launch.job import Job
from geartrain.launch.resources import HostResources, host_resources
from geartrain.launch.summary import Summary

#: Longest time for Ray to find the nodes, and to start launchers on them.
PLACE_S = 300.0
#: Time for launchers to end after a failure or interrupt, added to the job's `stop_s`. Losses are noticed within 11 s.
END_S = 45.0
#: Time for a cluster's port to answer, before Ray joins the cluster.
ANSWER_S = 5.0
_POLL_S = 0.2


def run(
    job: Job,
    *,
    hosts: int = 1,
    address: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    directory: str | None = None,
    fresh: bool = False,
    every_s: float = 10.0,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    place_s: float = PLACE_S,
) -> list[Summary]:
    """Runs a job to its end on nodes of a Ray cluster, one node a host.

    Args:
        job: a `Job`, or one that `load` returned. The nodes need its code in the same directory, and geartrain.
        hosts: number of nodes.
        address: address of the cluster, as for `ray.init`: "auto", "host:port", or "local" for one on this machine
            until this process ends. Not needed if Ray is initialized.
        folder: folder of the logs on each node, followed by -hostN for several; by default runs/NAME-TIME.
        directory: directory of the job's code on the nodes, instead of the job's; "." is that of Ray's runtime
            environment.
        fresh, every_s, metrics_port, metrics_host: as for `launch.run`. Ray shows the lines that the launchers print.
        place_s: longest wait for Ray to find the nodes, in seconds.

    Returns:
        The summaries of the hosts, in order.

    Raises:
        ArgumentError: the job cannot be placed on so many hosts.
        MissingDependencyError: ray is not installed.
        WaitTimeoutError: Ray did not find so many nodes with the resources of the hosts (`Role.cpus`, `gpus`,
            `memory_gb`, `Job.shared_memory_gb`) in time.
        GeartrainError: there is no cluster at the address.
        ProcessDiedError, JobTimeoutError, JobInterruptedError, PeerLostError, StoreExistsError: as for `launch.run`, on
            any host.

    Examples:
        >>> def train(job):  # a launch.Job
        ...     return run(job, hosts=2, address="auto")
    """
    needed = host_resources(job, hosts)
    if address == "local" and hosts > 1:
        raise ArgumentError(f"a Ray cluster that is started here has one node, but the job needs {hosts}")
    ray = _connected(address, needed[0])
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    logs = Path(folder) if folder is not None else Path("runs") / name
    options: dict[str, Any] = {"fresh": fresh, "live": False, "every_s": every_s}
    options |= {"metrics_port": metrics_port, "metrics_host": metrics_host}
    bundles = [_bundle(each) for each in needed]
    signals: list[int] = []
    # On one node each: a store is a node's, and so are the ranks' devices.
    group = placement_group(bundles, strategy="STRICT_SPREAD", name=f"geartrain-{job.name}")
    actors: list[Any] = []
    try:
        with _recording(signals):
            _wait_for_group(group, bundles, place_s, signals)
            actors = [_make_launcher(ray, group, number, needed[number]) for number in range(hosts)]
            first = ray.get(actors[0].addresses.remote(), timeout=place_s)
            secret = os.environ.get("GEARTRAIN_SECRET", "") or secrets.token_hex(16)
            threads = os.environ.get("OMP_NUM_THREADS")
            runs = []
            for number, actor in enumerate(actors):
                position = HostPosition() if hosts == 1 else HostPosition(number, hosts, *first)
                where = logs.resolve() if hosts == 1 else logs.resolve().with_name(f"{logs.name}-host{number}")
                told = {"GEARTRAIN_SECRET": secret, "OMP_NUM_THREADS": threads}
                runs.append(actor.run.remote(job, directory, position, str(where), options, told))
            ended = _wait_for_hosts(ray, job, actors, runs, signals)
    finally:
        for actor in actors:
            ray.kill(actor)  # and the kernel kills what it has started
        remove_placement_group(group)
    _raise_first(ended, signals)
    return [Summary(**each) for _, _, each in ended]


class _HostLauncher:
    """The Ray actor of a node. `run` occupies one of its threads; `interrupt` arrives on another."""

    def __init__(self) -> None:
        self._launcher: Any = None
        self._interrupts: list[int] = []
        self._lock = threading.Lock()

    def addresses(self) -> tuple[str, int, int]:
        """Of this node: its address, and free ports for the ranks' rendezvous and for the launchers."""
        import ray

        with socket.socket() as one, socket.socket() as other:
            one.bind(("0.0.0.0", 0))
            other.bind(("0.0.0.0", 0))
            return ray.util.get_node_ip_address(), one.getsockname()[1], other.getsockname()[1]

    def run(
        self,
        job: Job,
        directory: str | None,
        position: HostPosition,
        folder: str,
        options: dict[str, Any],
        told: dict[str, str | None],
    ) -> tuple[str, str, dict[str, Any]]:
        """The class of the error, its text, and the summary: of the job on this host."""
        from geartrain.launch.launcher import Launcher

        for variable, value in told.items():  # Ray has set the number of threads to that of the actor's processors
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        launcher = None
        try:
            if directory is not None:
                job = dataclasses.replace(job, directory=directory)
            Path(folder).mkdir(parents=True, exist_ok=True)
            launcher = Launcher(job, position, Path(folder), **options)
            with self._lock:
                self._launcher = launcher
                for number in self._interrupts:
                    launcher.interrupt(number)
            launcher.run()
        except (GeartrainError, OSError) as error:
            kind = type(error).__name__ if isinstance(error, GeartrainError) else "GeartrainError"
            return kind, str(error), dataclasses.asdict(launcher.summary if launcher else Summary("failed"))
        return "", "", dataclasses.asdict(launcher.summary)

    def interrupt(self, number: int) -> None:
        """Ends the job as the signal would; the second one kills."""
        with self._lock:
            self._interrupts.append(number)
            if self._launcher is not None:
                self._launcher.interrupt(number)


def _connected(address: str | None, needed: HostResources) -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependencyError("jobs on Ray need ray: pip install 'geartrain[ray]'") from None
    if not ray.is_initialized():
        check_answers(address or os.environ.get("RAY_ADDRESS") or "auto")
        try:
            options: dict[str, Any] = {}
            if (
                address == "local"
            ):  # a cluster of its own, where nothing is taken from anybody: as much as the job wants
                cpus = max(os.cpu_count() or 1, math.ceil(needed.cpus))
                options = {"include_dashboard": False, "num_cpus": cpus}
                if needed.all_memory_gb is not None:
                    options["_memory"] = int(needed.all_memory_gb * (1 << 30))
            ray.init(address=address or os.environ.get("RAY_ADDRESS") or "auto", logging_level="ERROR", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise GeartrainError(
                f"there is no Ray cluster at {address or 'auto'!r} (ray start --head): {reason}"
            ) from None
    return ray


def check_answers(address: str) -> None:
    """Connects to host:port and ends that at once: Ray itself tries for a minute, and prints each of its tries.

    Raises:
        GeartrainError: nothing answers there within `ANSWER_S`. Other addresses are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not port.isascii():
        return
    try:
        if not 0 < int(port) < 1 << 16:
            raise OSError("there is no such port")
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, UnicodeError) as error:
        raise GeartrainError(f"there is no Ray cluster at {address!r} (ray start --head): {error}") from None


def _bundle(needed: HostResources) -> dict[str, float]:
    """The resources that Ray must find on one node."""
    found = {"CPU": float(needed.cpus)}
    if needed.gpus:
        found["GPU"] = float(needed.gpus)
    if needed.all_memory_gb is not None:
        found["memory"] = needed.all_memory_gb * (1 << 30)
    return found


def _wait_for_group(group: Any, bundles: list[dict[str, float]], place_s: float, signals: list[int]) -> None:
    until_s = time.monotonic() + place_s
    while not group.wait(_POLL_S):
        if signals:
            raise JobInterruptedError(f"stopped by {signal.Signals(signals[0]).name}")
        if time.monotonic() > until_s:
            most = max(bundles, key=lambda bundle: sum(bundle.values()))
            each = ", ".join(
                f"{amount / (1 << 30):g} GiB" if name == "memory" else f"{amount:g} {name}"
                for name, amount in most.items()
            )
            nodes = "a node" if len(bundles) == 1 else f"{len(bundles)} nodes"
            raise WaitTimeoutError(
                f"Ray did not find {nodes} with up to {each} free within {place_s:g} s: see ray status"
            )


def _make_launcher(ray: Any, group: Any, number: int, needed: HostResources) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = _bundle(needed)
    return (
        ray.remote(_HostLauncher)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            max_concurrency=3,  # `interrupt` beside `run`
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote()
    )


def _wait_for_hosts(
    ray: Any, job: Job, actors: list[Any], runs: list[Any], signals: list[int]
) -> list[tuple[str, str, dict[str, Any]]]:
    """The result of `run` on each host; for a lost host, the fact that it is lost."""
    found: dict[int, tuple[str, str, dict[str, Any]]] = {}
    sent, until_s = 0, None
    while len(found) < len(runs):
        left = [number for number in range(len(runs)) if number not in found]
        ready, _ = ray.wait([runs[number] for number in left], num_returns=1, timeout=_POLL_S)
        for number in left:
            if runs[number] in ready:
                found[number] = _result(ray, runs[number], number)
        while sent < len(signals):
            sent += 1
            for actor in actors:
                with contextlib.suppress(ray.exceptions.RayError):
                    actor.interrupt.remote(signals[sent - 1])
        if until_s is None and (sent or any(kind for kind, _, _ in found.values())):
            until_s = time.monotonic() + job.stop_s + END_S
        if until_s is not None and time.monotonic() > until_s:
            for number in set(range(len(runs))) - set(found):
                text = f"the launcher of host {number} has not ended within {job.stop_s + END_S:g} s, and is killed"
                found[number] = (_LOST, text, dataclasses.asdict(Summary("failed", error=text)))
    return [found[number] for number in range(len(runs))]


#: Stands for the name of an error's class if Ray has lost or abandoned the launcher.
_LOST = "lost"


def _result(ray: Any, one: Any, number: int) -> tuple[str, str, dict[str, Any]]:
    try:
        returned: tuple[str, str, dict[str, Any]] = ray.get(one)
    except ray.exceptions.RayTaskError:
        raise  # a defect: with the launcher's traceback
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())
        text = f"the launcher of host {number} is lost: Ray says that {reason}"
        return _LOST, text, dataclasses.asdict(Summary("failed", error=text))
    return returned


def _raise_first(ended: list[tuple[str, str, dict[str, Any]]], signals: list[int]) -> None:
    """The error of the job: the first that a launcher has said, and Ray's only where none has."""
    if signals and any(kind in ("JobInterruptedError", _LOST) for kind, _, _ in ended):
        raise JobInterruptedError(f"stopped by {signal.Signals(signals[0]).name}")
    for kind, text, _ in sorted(ended, key=lambda each: each[0] == _LOST):
        if kind == _LOST:
            raise PeerLostError(text)
        if kind:
            raise getattr(errors, kind)(text)


@contextlib.contextmanager
def _recording(signals: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM end the job; only the main thread can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda given, _: signals.append(given)) for number in both}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["ANSWER_S", "END_S", "PLACE_S", "check_answers", "run"]
