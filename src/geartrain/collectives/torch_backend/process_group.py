"""The process group of the `torch.distributed` backend "geartrain".

    import torch.distributed as dist
    import geartrain.collectives.torch_backend.process_group        # registers the backend
    dist.init_process_group("geartrain")

To use it without editing the script, run `torchrun -m geartrain_autoload train.py` (src/geartrain_autoload).

`geartrain.collectives.Group` runs the collectives of tensors on the CPU (tensor_exchange.py). On GPUs it runs only
all-reduce, through pinned memory (staging.py). Gloo (CPU) and NCCL (CUDA) run everything else: send and receive, other
collectives on GPUs, and sums of sparse tensors. They are registered as backends of the process group, where torch's own
code finds them, also from C++. `ProcessGroup.counters` counts the operations of each.

Connections. Gloo connects when the process group is made, as with `init_process_group("gloo")`. A send involves two
ranks only, so it must not wait for the others to connect. A Group connects in its first operation. If all-reduces use
reducers or unequal shares, the other collectives use a second Group with equal shares. A group of one rank sends
nothing.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from geartrain._native import forks
from geartrain.collectives.torch_backend.device_groups import CLOSE_TIMEOUT_S, DeviceGroups
from geartrain.collectives.torch_backend.options import BackendOptions
from geartrain.collectives.torch_backend.tensor_exchange import FORMS, TensorExchange, begin, timeout_of
from geartrain.collectives.torch_backend.tensors import DTYPES, as_list, as_options, devices_of, flat_of, op_of
from geartrain.collectives.torch_backend.work import Finisher, TorchWork, backend_error, uncompiled
from geartrain.core.lifetime import living

BACKEND = "geartrain"

# Methods that torch's C++ base of Python groups looks up in Python and, without one, runs itself while it holds the
# GIL. Gloo's threads take the GIL to drop a tensor while they hold a lock that the call needs: an occasional deadlock.
# So all are defined in Python, and forwarded to a group without such a base.
FORWARDED = ("send", "recv", "recv_anysource")
BackendType = dist.ProcessGroup.BackendType


class ProcessGroup(dist.ProcessGroup):
    """A torch process group whose collectives run on geartrain.

    Made by `init_process_group("geartrain")`, `new_group` and `init_device_mesh`, not by hand.

    Args:
        store: of torch's kind, used by this group alone.
        rank, size: within the group.
        timeout: for every wait, unless a call has its own.
        name: of the group, the same on all its ranks and no other group's of the job.
        options: see `BackendOptions`.
        nccl_options: of the NCCL group within, where there is one; torch's own `ProcessGroupNCCL.Options`.

    Raises:
        RuntimeError: Gloo's, when the other ranks do not join.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str = "default",
        options: BackendOptions | None = None,
        nccl_options: Any = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        options = options or BackendOptions()
        # A job that destroys its groups and makes them again has the same store and the same names. The epoch, and how
        # often each rank has made this group in it, tell apart what ranks leave there.
        counts, made = store, f"made/{options.epoch}/{rank}"
        self._store = store = dist.PrefixStore(f"{options.epoch}/{counts.add(made, 1)}/", counts)  # type: ignore[attr-defined]
        self._name = name
        self._groups = DeviceGroups(store, rank, size, name, timeout.total_seconds(), options)
        self._finisher = Finisher(f"geartrain-{name}")
        self._counts: Counter[str] = Counter()
        self._ours: Counter[str] = Counter()
        self._inner: Counter[str] = Counter()
        self._forks = forks()
        try:
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)  # type: ignore[attr-defined]
        except RuntimeError:
            counts.add(made, -1)  # not made: who tries again meets those that were late
            raise
        self._register_backend(torch.device("cpu"), BackendType.GLOO, self._gloo)
        self._set_default_backend(BackendType.GLOO)
        self._nccl: Any = None
        if torch.cuda.is_available() and dist.is_nccl_available():
            options_of_nccl = nccl_options or dist.ProcessGroupNCCL.Options()
            options_of_nccl._timeout = timeout
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options_of_nccl)  # type: ignore[attr-defined]
            self._register_backend(torch.device("cuda"), BackendType.NCCL, self._nccl)
        self._plain = dist.ProcessGroup(dist.PrefixStore("plain/", store), rank, size)  # type: ignore[attr-defined]
        self._plain._set_default_backend(BackendType.GLOO)
        for device, kind, inner in (("cpu", BackendType.GLOO, self._gloo), ("cuda", BackendType.NCCL, self._nccl)):
            if inner is not None:
                self._plain._register_backend(torch.device(device), kind, inner)
        _alive.add(self)

    def getBackendName(self) -> str:  # noqa: N802
        """The name in DDP's log and `name()`."""
        return BACKEND

    def get_group_store(self) -> Any:
        """The group's store."""
        return self._store

    @property
    def options(self) -> BackendOptions:
        """Options of the groups that this one makes."""
        return self._groups.options

    # -- all-reduce

    @uncompiled
    def allreduce(self, tensors: Any = None, opts: Any = None, timeout: Any = None, **names: Any) -> Any:  # type: ignore[override]
        """torch's three forms: tensors and AllreduceOptions; tensors, op, timeout; tensor, op, timeout."""
        tensors = names.pop("tensor", tensors)
        opts = names.pop("op", opts)
        if names:
            raise TypeError(f"allreduce() got unexpected arguments {sorted(names)}")
        return self._all_reduce("allreduce", as_list(tensors), as_options(opts, timeout, dist.AllreduceOptions))

    @uncompiled
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Several tensors of one dtype as one operation."""
        options = as_options(opts, None, dist.AllreduceCoalescedOptions)
        return self._all_reduce("allreduce_coalesced", as_list(tensors), options)

    def _all_reduce(self, method: str, tensors: list[torch.Tensor], opts: Any) -> Any:
        op = op_of(opts.reduceOp, tensors)
        if (
            op is None
            or (tensors[0].is_cuda and self.options.cuda != "staged")
            or (method == "allreduce" and len(tensors) != 1)
            or getattr(opts, "sparseIndices", None) is not None
        ):
            self._counts["inner_operations"] += 1
            return self._forward(method, tensors, opts)
        self._counts["operations"] += 1
        self._ours[method] += 1
        self._counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
        if self.size() == 1 or not any(tensor.numel() for tensor in tensors):
            return TorchWork(lambda _: None, lambda: True, tensors, self._finisher, devices=devices_of(tensors))
        timeout_s = opts.timeout.total_seconds()
        timeout_s = timeout_s if timeout_s > 0 else self._groups.timeout_s
        if tensors[0].is_cuda:
            return self._on_device(tensors, op, timeout_s)
        return self._on_host(tensors, op, timeout_s, soon=_waits(opts))

    def _on_host(self, tensors: list[torch.Tensor], op: str, timeout_s: float, soon: bool = False) -> TorchWork:
        flat, copy_back = flat_of(tensors)
        try:
            work = self._groups.start("cpu", flat, op, timeout_s, soon)
        except Exception as error:
            raise backend_error(error) from error  # a RuntimeError, which DDP passes on
        if copy_back is None:
            return TorchWork(work.wait, work.done, tensors, self._finisher)

        def wait(limit_s: float | None) -> None:
            work.wait(limit_s)
            copy_back()

        return TorchWork(wait, work.done, tensors, self._finisher)

    def _on_device(self, tensors: list[torch.Tensor], op: str, timeout_s: float) -> TorchWork:
        device = tensors[0].device
        staging = self._groups.staging(device)
        flat, copy_back = flat_of(tensors)  # on the caller's stream
        if copy_back is not None:
            for tensor in (*tensors, flat):
                staging.record_streams(tensor)
        name = self._groups.place(device)
        try:
            staged = staging.submit(
                flat, lambda chunk: self._groups.start(name, chunk, op, timeout_s), copy_back, timeout_s
            )
        except Exception as error:
            raise backend_error(error) from error
        return TorchWork(
            staged.wait,
            staged.finished.is_set,
            tensors,
            self._finisher,
            devices=[device],
            join=lambda: staging.join(staged),
            around=staging.on_result_stream,
        )

    # -- every other collective

    @uncompiled
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        """torch's forms: BarrierOptions; timeout. An all-reduce of one number."""
        limit = timeout_of((opts, timeout), {})
        self._ours["barrier"] += 1
        number = torch.zeros(1, dtype=torch.int8)
        if self.size() == 1:
            return TorchWork(lambda _: None, lambda: True, [number], self._finisher)
        timeout_s = self._groups.timeout_s if limit is None else limit.total_seconds()
        return self._on_host([number], "sum", timeout_s, soon=_waits(opts))

    @uncompiled
    def reduce(  # type: ignore[override]
        self, tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, **names: Any
    ) -> Any:
        """Forms: tensors and ReduceOptions; tensor, root, op, timeout. An all-reduce; of a copy off the root."""
        tensors = names.pop("tensor", tensors)
        opts = names.pop("root", opts)
        given = as_list(tensors)
        root = int(getattr(opts, "rootRank", opts))
        asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM if op is None else op)
        name = op_of(asked if isinstance(asked, dist.ReduceOp) else dist.ReduceOp(asked), given)
        if name is None or len(given) != 1 or given[0].is_cuda:
            return self._forward("reduce", tensors, opts, *(one for one in (op, timeout) if one is not None))
        self._ours["reduce"] += 1
        self._counts["bytes"] += given[0].nbytes
        if self.size() == 1 or not given[0].numel():
            return TorchWork(lambda _: None, lambda: True, given, self._finisher)
        limit = timeout_of((opts, timeout), {})
        scratch = given if self.rank() == root else [given[0].detach().clone()]
        timeout_s = self._groups.timeout_s if limit is None else limit.total_seconds()
        return self._on_host(scratch, name, timeout_s, soon=_waits(opts))

    def _exchange(self, method: str, arguments: tuple[Any, ...], names: dict[str, Any]) -> Any:
        try:
            calls = FORMS[method](self.rank(), self.size(), *arguments, **names)
            kinds = [self._kind_of(call) for call in calls]
        except (ValueError, TypeError) as error:
            raise backend_error(error) from error
        if self.options.algorithm == "ring" or not all(kinds):
            return self._forward(method, *arguments, **names)
        self._ours[method] += 1
        outputs = [tensor for call in calls for tensor in (call.outputs if call.results is None else call.results)]
        self._counts["bytes"] += sum(tensor.nbytes for call in calls for tensor in call.inputs)
        limit = timeout_of(arguments, names)
        timeout_s = self._groups.timeout_s if limit is None else limit.total_seconds()
        if self.size() == 1:
            try:
                for call in calls:
                    call.alone()
            except ValueError as error:
                raise backend_error(error) from error
            return TorchWork(lambda _: None, lambda: True, outputs, self._finisher)
        try:
            group = self._groups.of_ranks()
            soon = _waits(*arguments, *names.values())
            begun = [
                begin(lambda one, keep: group.exchange_memory(one, timeout_s, keep, soon), call, self.rank(), *kind)
                for call, kind in zip(calls, kinds, strict=True)
                if kind is not None
            ]
        except Exception as error:
            raise backend_error(error) from error

        def wait(limit_s: float | None) -> None:
            until_s = None if limit_s is None else time.monotonic() + limit_s
            for wait_one, _, _ in begun:
                wait_one(None if until_s is None else max(0.0, until_s - time.monotonic()))

        work = TorchWork(wait, lambda: all(done() for _, done, _ in begun), outputs, self._finisher)
        if any(copies for _, _, copies in begun):
            self._finisher.add(work)  # nobody may ever wait for it
        return work

    def _kind_of(self, call: TensorExchange) -> tuple[str, str] | None:
        """The names of dtype and operation; None: not for a Group. Raises `ValueError` for several dtypes."""
        tensors = call.tensors()
        if any(tensor.layout != torch.strided or tensor.device.type != "cpu" for tensor in tensors):
            return None
        if len({tensor.dtype for tensor in tensors}) != 1:
            raise ValueError(
                f"tensors of one collective have one dtype, found {sorted({str(t.dtype) for t in tensors})}"
            )
        if call.collective == "reduce_scatter":
            op = op_of(call.op if isinstance(call.op, dist.ReduceOp) else dist.ReduceOp(call.op), tensors)
            return None if op is None else (DTYPES[tensors[0].dtype], op)
        return DTYPES.get(tensors[0].dtype, "uint8"), "sum"

    def _forward(self, method: str, *arguments: Any, **names: Any) -> Any:
        self._inner[method] += 1
        return getattr(self._plain, method)(*arguments, **names)

    # -- lifecycle

    def counters(self) -> dict[str, Any]:
        """Counters of this process group.

        `operations`: all-reduces by geartrain. `inner_operations`: all-reduces forwarded to Gloo or NCCL. `ours`,
        `inner`: the same for every collective, send and receive, by the name of torch's method. `bytes`: size of the
        tensors that geartrain was given. `groups`: per device, the counters of `geartrain.collectives.Group`.
        """
        counts = {key: self._counts[key] for key in ("operations", "bytes", "inner_operations")}
        by_name = {"ours": dict(self._ours), "inner": dict(self._inner)}
        return {**counts, **by_name, "groups": self._groups.counters()}

    def set_timeout(self, timeout: timedelta) -> None:
        """For all operations from now on."""
        self._groups.timeout_s = timeout.total_seconds()
        for inner in self._inners():
            inner._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Closes all connections; called by `destroy_process_group`.

        It first sends the data that other ranks still need. Operations whose futures were requested have some seconds
        to end. Other operations in progress fail.
        """
        if self._forks != forks():  # a fork of the process that owns the connections
            return
        if not self._groups.close():
            return
        self._disconnect(None)
        for inner in self._inners():
            inner.shutdown()

    def abort(self) -> None:
        """Closes all connections; operations in progress fail, here and on the other ranks."""
        self._groups.close()
        self._disconnect("the process group was aborted")
        for inner in self._inners():
            with suppress(RuntimeError):  # a Gloo without support for it
                inner.abort()

    def _inners(self) -> list[Any]:
        return [inner for inner in (self._gloo, self._nccl) if inner is not None]

    def _disconnect(self, reason: str | None) -> None:
        self._groups.disconnect(reason, lambda: self._finisher.close(CLOSE_TIMEOUT_S))


def _forward(name: str) -> Any:
    def method(self: ProcessGroup, *arguments: Any, **names: Any) -> Any:
        return self._forward(name, *arguments, **names)

    method.__name__, method.__doc__ = name, "Gloo's, or NCCL's."
    return uncompiled(method)


def _exchanged(name: str) -> Any:
    def method(self: ProcessGroup, *arguments: Any, **names: Any) -> Any:
        return self._exchange(name, arguments, names)

    method.__name__, method.__doc__ = name, "torch's, made by a Group where it can be (tensor_exchange.py)."
    return uncompiled(method)


for _names, _made in ((FORWARDED, _forward), (FORMS, _exchanged)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):  # which exist depends on the version of torch
            setattr(ProcessGroup, _name, _made(_name))


# Ends the threads of groups that were not destroyed.
_alive: weakref.WeakSet[ProcessGroup] = living(at_exit=ProcessGroup.shutdown)


def _waits(*arguments: Any) -> bool:
    """Whether these are of a call that waits for its result: torch's options say so."""
    return any(getattr(one, "asyncOp", True) is False for one in arguments)


def create(backend_options: Any, options: Any = None) -> ProcessGroup:
    """Factory that torch calls with a group's store, ranks and timeout, and the caller's `pg_options` if any."""
    of_nccl = None
    if isinstance(options, getattr(dist.ProcessGroupNCCL, "Options", ()) if dist.is_nccl_available() else ()):
        of_nccl, options = options, None  # of a job that names NCCL, and takes part by GEARTRAIN_ALLREDUCE_CUDA
    if options is not None and not isinstance(options, BackendOptions):
        raise TypeError(
            f"pg_options of the backend {BACKEND!r} are geartrain's BackendOptions, found {type(options).__name__}"
        )
    ranks = list(backend_options.global_ranks_in_group) or list(range(backend_options.group_size))
    of_world = len(ranks) if not dist.is_initialized() else dist.get_world_size()
    chosen = (options or BackendOptions.from_environment()).of_ranks(ranks, of_world)
    return ProcessGroup(
        backend_options.store,
        backend_options.group_rank,
        backend_options.group_size,
        backend_options.timeout,
        name=backend_options.group_id,
        options=chosen,
        nccl_options=of_nccl,
    )


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
