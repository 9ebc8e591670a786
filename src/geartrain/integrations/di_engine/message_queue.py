"""DI-engine's message queue interface on a `Bus`, and the methods of DI-engine's `Parallel` that it replaces.

DI-engine has a fixed table of two queue types inside `Parallel.runner`, and it passes pickled bytes to them. So this
module replaces five methods of `Parallel`:

- `runner` accepts the new queue type.
- `emit` passes values instead of pickles.
- `on` and `once` add the listener before peers get the subscription.
- `listen` handles events on the threads of the connections.

For any other queue type, each method behaves as before.
"""

from __future__ import annotations

import atexit
import contextvars
import copy
import functools
import importlib
import inspect
import logging
import os
import queue
import secrets
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Work
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import geartrain.integrations.di_engine.options as queue_options
from geartrain.core.arguments import check_choice, check_whole, leave_out
from geartrain.core.lifetime import Uncopied
from geartrain.core.threads import ReentrantEvent
from geartrain.errors import ArgumentError, GeartrainError, MissingDependencyError
from geartrain.integrations.di_engine.bus import Bus
from geartrain.integrations.di_engine.discovery import Publication, StoreRegister, contacts_of
from geartrain.integrations.di_engine.options import MQ_TYPES, QueueOptions

_log = logging.getLogger("geartrain.di_engine")

#: Versions of DI-engine with which the replaced methods were tested.
KNOWN_VERSIONS = ("0.5.3",)
#: Emitted locally on `Parallel`, with a node id and a reason, when a peer joins or is lost.
PEER_JOINED, PEER_LOST = "geartrain.peer_joined", "geartrain.peer_lost"
#: Options of `ditask` that DI-engine's own does not pass on; `Parallel.runner` takes them from here.
further: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("further")

_RUNNER = [
    "n_parallel_workers",
    "mq_type",
    "attach_to",
    "protocol",
    "address",
    "ports",
    "topology",
    "labels",
    "node_ids",
    "auto_recover",
    "max_retries",
    "redis_host",
    "redis_port",
    "startup_interval",
]


class Queue(Uncopied, elsewhere="make another one there, which attaches to this one"):
    """DI-engine's message queue interface on a `Bus`. `install` derives the class that DI-engine uses.

    It is no `Lifetime`: DI-engine calls its end `stop`, expects nothing of a stopped queue to raise, and subclasses it.
    """

    def __init__(
        self,
        listen_to: str = "",
        attach_to: Sequence[str] | None = None,
        options: QueueOptions | None = None,
        **_: Any,
    ) -> None:
        """Starts a node. An address that is in use is an error here, in the user's thread.

        Args:
            listen_to: "tcp://host:port" or "ipc:///path"; with an init_method, a host and port 0.
            attach_to: nodes to join: addresses, or node ids with an init_method.
            options: of `Parallel.runner`.
        """
        self.options = options or QueueOptions(secret=queue_options.cluster_secret())
        self.attach_to: list[str] = list(attach_to or [])
        self.listen_to = listen_to
        self._inbox: queue.SimpleQueue[tuple[str, Any, Work[None]] | None] = queue.SimpleQueue()
        self._stopped = ReentrantEvent()
        self._stopping = threading.RLock()  # a signal's handler may stop it while its thread does
        self._pid = os.getpid()
        self._on_change: Callable[[str, int, str], object] | None = None
        self._publication: Publication | None = None
        wanted = queue_options.check_mq_type(self.options.mq_type)
        map_ = self.options.device_map
        visible = queue_options.visible_devices() if wanted or map_ or self.options.devices else 0
        queue_options.check_devices(wanted, self.options.devices, map_, visible)
        host, port = _host_and_port(listen_to)
        self._bus = Bus(
            f"node-{self.options.node_id}-{secrets.token_hex(4)}",
            self.options.node_id,
            secret=self.options.secret,
            host=host,
            port=port,
            device_map=",".join(f"{one.node_id}_{one.local}_{one.peer}" for one in map_) or None,
            by_cpu=wanted is False,
            timeout_s=self.options.timeout_s,
            on_change=self._changed,
        )
        if not self.options.secret:
            _log.warning(
                "node %d has no secret (GEARTRAIN_SECRET or GEARTRAIN_SECRET_FILE): only tensors, arrays and plain "
                "containers can be emitted, and not DI-engine's own objects, which need pickle",
                self.options.node_id,
            )

    # --- what DI-engine calls ---------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Joins the nodes that it attaches to. Returns when each was tried once; others are retried."""
        if self._stopped.is_set():
            return
        register = None
        if self.options.init_method is not None:
            register = StoreRegister(self.options.init_method, self.options.node_id, self.options.timeout_s)
        url = urlparse(self.listen_to)
        if url.scheme == "ipc":
            self._publication = Publication(Path(url.path), self._bus.address)
        found = contacts_of(self.attach_to, self.options.topology, self.options.node_id, self._bus.address, register)
        self.attach_to = [contact.text for contact in found]
        _log.info("node %d listens on %s, attaches to %s", self.options.node_id, self.listen_to, self.attach_to)
        self._bus.connect(found)

    def publish(self, topic: str, data: bytes) -> None:
        """Sends bytes to the nodes that subscribe to the topic."""
        self._bus.emit(topic, (data,), {})

    def subscribe(self, topic: str) -> None:
        """Subscribes to a topic."""
        self._bus.subscribe(topic)

    def unsubscribe(self, topic: str) -> None:
        """Ends a subscription; a pattern, such as "task.*", ends all that match."""
        self._bus.unsubscribe(one for one in self._bus.topics if fnmatchcase(one, topic))

    def recv(self) -> tuple[str, Any] | None:
        """The next topic and its bytes; None once stopped, and in a forked child. For use without `Parallel`."""
        if self._pid != os.getpid():
            return None

        def keep(topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Work[None]]:
            taken: Work[None] = Work()
            self._inbox.put((topic, args[0] if len(args) == 1 and not kwargs else {"a": args, "k": kwargs}, taken))
            return [taken]

        if not self._stopped.is_set():
            self._bus.set_handler(keep)
        found = self._inbox.get()
        if found is None:
            self._inbox.put(None)  # for other threads that wait
            return None
        found[2].set_result(None)
        return found[:2]

    def stop(self) -> None:
        """Leaves its peers. What was emitted is still delivered. In a forked child it does nothing."""
        if self._pid != os.getpid():
            return
        with self._stopping:  # a second caller returns when the first one is done
            if self._stopped.is_set():
                return
            self._stopped.set()
            self._inbox.put(None)
            if self._publication is not None:
                self._publication.close()
            self._bus.close()

    # --- what the replaced methods of Parallel call -------------------------------------------------------------------

    def emit(self, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sends values to the nodes that subscribe to the topic. Raises as `Bus.emit`."""
        self._bus.emit(topic, args, kwargs)

    def serve(self, parallel: Any) -> None:
        """Calls `Parallel`'s listeners, until stopped."""
        dispatch = Dispatch(parallel)
        self._on_change = dispatch.changed
        self._bus.set_handler(dispatch)
        self.listen()
        self._stopped.wait()

    def _changed(self, what: str, node_id: int, reason: str) -> None:
        if self._on_change is not None:
            self._on_change(what, node_id, reason)


class Dispatch:
    """Calls the listeners of an event on DI-engine's threads, two for each of its event loops."""

    def __init__(self, parallel: Any) -> None:
        self._parallel = parallel
        self._emit = importlib.import_module("ding.framework.event_loop").EventLoop.emit
        self._logged: BaseException | None = None

    def __call__(self, event: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Work[Any]]:
        """Submits the event; returns the work. Raises when a listener of each loop has raised before."""
        loop = self._parallel._event_loop
        if not loop.listened(event):
            return []
        work: list[Work[Any]] = []
        failed: BaseException | None = None
        own = False
        for listener in copy.copy(loop._listeners[event]):
            # A task hangs its own loop's `emit` into this one; then the task's threads take it, and no others before.
            # A task that failed may have left its loop there: it must not keep the event from the one after it.
            if isinstance(listener, types.MethodType) and listener.__func__ is self._emit:
                of_task: Any = listener.__self__
                failed = of_task._exception or failed
                work += self._submit(of_task, *args, **kwargs)
            else:
                own = True
        if own:
            failed = loop._exception or failed
            work += self._submit(loop, event, *args, **kwargs)
        if failed is not None and failed is not self._logged:
            self._logged = failed
            _log.error("a listener raised, and its loop takes no more events, such as %r", event, exc_info=failed)
        if failed is not None and not work:
            raise GeartrainError(f"node {self._parallel.node_id} takes no events: a listener raised {failed!r}")
        return work

    @staticmethod
    def _submit(loop: Any, event: str, *args: Any, **kwargs: Any) -> list[Work[Any]]:
        if loop._exception is not None or not loop._active:
            return []
        try:
            return [loop._thread_pool.submit(loop._trigger, event, *args, **kwargs)]
        except RuntimeError:
            if loop._active:
                raise
            return []  # it was stopped meanwhile

    def changed(self, what: str, node_id: int, reason: str) -> None:
        """A peer has joined or is lost: calls the local listeners of that."""
        loop = self._parallel._event_loop
        event = PEER_JOINED if what == "joined" else PEER_LOST
        if loop.listened(event):
            self._submit(loop, event, node_id, reason)


# --- DI-engine's side -----------------------------------------------------------------------------------------------


def install() -> None:
    """Registers the queue with DI-engine, once; `import geartrain.integrations.di_engine` does it.

    Raises:
        MissingDependencyError: DI-engine is not installed, or of a version that was not tested.
    """
    ding, parallel, registry, mq = _check_engine()
    if "geartrain" in registry:
        return
    made = type("GeartrainMQ", (Queue, mq), {"__doc__": Queue.__doc__, "__module__": __name__})
    globals()["GeartrainMQ"] = made
    for name in MQ_TYPES:
        registry.register(name, made)
    for method in (_emit, _on, _once, _listen):
        name = method.__name__.removeprefix("_")
        setattr(parallel, name, _either(made, method, getattr(parallel, name)))
    parallel.runner = classmethod(functools.partial(_runner, parallel.runner.__func__))
    _log.debug("DI-engine %s knows geartrain's message queue", ding.__version__)


def _check_engine() -> tuple[Any, Any, Any, Any]:
    try:
        ding = importlib.import_module("ding")
        parallel = importlib.import_module("ding.framework.parallel").Parallel
        registry = importlib.import_module("ding.utils.registry_factory").MQ_REGISTRY
        mq = importlib.import_module("ding.framework.message_queue").MQ
    except ImportError as error:
        raise MissingDependencyError(
            f"this needs DI-engine: pip install --no-deps DI-engine=={KNOWN_VERSIONS[-1]} and what it requires, as "
            f"geartrain's docs/di-engine.md says. {error}"
        ) from error
    version = str(ding.__version__).removeprefix("v")
    if version not in KNOWN_VERSIONS:
        raise MissingDependencyError(
            f"this is DI-engine {version}, and the queue was made for {', '.join(KNOWN_VERSIONS)}: it replaces parts "
            f"of ding.framework.parallel. Install DI-engine {KNOWN_VERSIONS[-1]}"
        )
    runner = getattr(parallel.runner, "__func__", None)
    if "geartrain" not in registry and (
        runner is None or [name for name in inspect.signature(runner).parameters if name != "cls"] != _RUNNER
    ):
        raise MissingDependencyError(f"ding.framework.parallel.Parallel.runner of DI-engine {version} is not known")
    return ding, parallel, registry, mq


def _either(made: type, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `ours` for a `Parallel` with our queue, and `theirs` for any other."""

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_ours = isinstance(getattr(self, "_mq", None), made)
        return (ours if of_ours else theirs)(self, *args, **kwargs)

    return method


def _emit(self: Any, event: str, *args: Any, **kwargs: Any) -> None:
    if self.is_active:
        self._mq.emit(event, args, kwargs)


def _on(self: Any, event: str, fn: Callable[..., Any]) -> None:
    self._event_loop.on(event, fn)
    if self.is_active:
        self._mq.subscribe(event)


def _once(self: Any, event: str, fn: Callable[..., Any]) -> None:
    self._event_loop.once(event, fn)
    if self.is_active:
        self._mq.subscribe(event)


def _listen(self: Any) -> None:
    self._mq.serve(self)


# --- Parallel.runner --------------------------------------------------------------------------------------------------


def _runner(
    theirs: Callable[..., Any],
    cls: Any,
    n_parallel_workers: int,
    mq_type: str = "nng",
    *args: Any,
    init_method: str | None = None,
    local_cuda_devices: str | None = None,
    cuda_device_map: str | None = None,
    **kwargs: Any,
) -> Callable[..., None]:
    """`Parallel.runner`, with the kinds of queue in `MQ_TYPES` and three more arguments for these.

    Args:
        init_method: "tcp://host:port", "env://" or "file:///path", as for `torch.distributed`: the rendezvous of the
            nodes. Node 0 starts a tcp store. Without it they join by addresses, as with nng.
        local_cuda_devices: the GPUs of this process, such as "0,1".
        cuda_device_map: which of them goes with which of a peer's, as `<peer's node id>_<local>_<peer's>,...`.
    """
    given = {
        "init_method": init_method,
        "local_cuda_devices": local_cuda_devices,
        "cuda_device_map": cuda_device_map,
        **further.get({}),
    }
    if mq_type not in MQ_TYPES:
        ours = {name: given[name] for name in ("init_method", "local_cuda_devices", "cuda_device_map")}
        leave_out(f"mq_type={mq_type!r} is no queue of geartrain", **ours)
        return cast("Callable[..., None]", theirs(cls, n_parallel_workers, mq_type, *args, **kwargs))
    named = dict(zip(_RUNNER[2:], args, strict=False)) | kwargs
    bound = inspect.signature(theirs).bind(cls, n_parallel_workers, mq_type, **named)
    bound.apply_defaults()
    check_whole("n_parallel_workers", n_parallel_workers, 1)
    workers = list(_workers(cls, bound.arguments, given))

    def run(main_process: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if len(workers) == 1:
            cls._subprocess_runner(workers[0], (main_process, args, kwargs))
            return
        pool_of = importlib.import_module("mpire.pool").WorkerPool
        work = [(worker, (main_process, args, kwargs)) for worker in workers]
        with pool_of(n_jobs=len(workers), start_method="spawn", daemon=False) as pool:
            atexit.register(pool.__exit__)  # should this process fail
            try:
                pool.map(_run_worker, work)
            finally:
                atexit.unregister(pool.__exit__)
                for worker in workers:  # of workers that were killed
                    url = urlparse(worker["listen_to"])
                    if url.scheme == "ipc":
                        Path(url.path).unlink(missing_ok=True)

    return run


def _run_worker(worker: dict[str, Any], main: tuple[Any, ...]) -> None:
    """Runs a spawned worker. To unpickle this function it imports this module, and then registers the queue."""
    install()
    importlib.import_module("ding.framework.parallel").Parallel._subprocess_runner(worker, main)


def _workers(cls: Any, arguments: dict[str, Any], given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments of each worker."""
    count, topology, init_method = arguments["n_parallel_workers"], arguments["topology"], given["init_method"]
    check_choice("topology", topology, queue_options.TOPOLOGIES)
    attach_to = [text for text in arguments["attach_to"] or [] if text]
    wanted = queue_options.check_mq_type(arguments["mq_type"])
    devices = queue_options.parse_devices(given["local_cuda_devices"])
    device_map = queue_options.parse_device_map(given["cuda_device_map"])
    if wanted or devices or device_map:  # before any process is started
        queue_options.check_devices(wanted, devices, device_map, queue_options.visible_devices())
    secret = queue_options.cluster_secret()
    shared = bool(secret)
    if not secret and count > 1:
        secret = secrets.token_bytes(32)  # of these workers, which get it from this process
    common = QueueOptions(arguments["mq_type"], 0, topology, init_method, devices, device_map, secret)
    nodes = _listening_addresses(cls, arguments, init_method, shared, given)
    node_ids = cls.padding_param(arguments["node_ids"], count, 0)
    passed_on = ("labels", "auto_recover", "max_retries", "mq_type", "startup_interval")
    for i in range(count):
        before = [] if init_method else {"mesh": nodes[:i], "star": nodes[: min(1, i)], "alone": []}[topology]
        yield {
            **{name: arguments[name] for name in passed_on},
            "n_parallel_workers": count,
            "node_id": node_ids[i],
            "local_id": i,
            "listen_to": nodes[i],
            "attach_to": before + attach_to,
            "options": replace(common, node_id=node_ids[i]),
        }


def _listening_addresses(
    cls: Any, arguments: dict[str, Any], init_method: str | None, shared: bool, given: dict[str, Any]
) -> list[str]:
    """Address on which each worker listens: loopback, unless other hosts can have the secret."""
    address = arguments["address"] or (cls.get_ip() if shared else "127.0.0.1")
    count, ports = arguments["n_parallel_workers"], arguments["ports"]
    if init_method is not None and (ports is None or given.get("any_port")):
        return [f"tcp://{address}:0"] * count  # the others get it from the store
    places: list[str] = cls.get_node_addrs(count, protocol=arguments["protocol"], address=address, ports=ports)
    return places


def _host_and_port(listen_to: str) -> tuple[str, int]:
    url = urlparse(listen_to)
    if url.scheme == "tcp" and url.hostname:
        return url.hostname, url.port or 0
    if url.scheme in ("", "ipc"):
        return "127.0.0.1", 0
    raise ArgumentError(f"a node listens on tcp://host:port or ipc:///path, found {listen_to!r}")
