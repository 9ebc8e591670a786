"""Replay: an iterator of training batches, drawn and fetched ahead of the consumer.

A builder (builder.py) draws rows, places their windows, copies them and redraws what was lost, on a thread of its own:
on the host, on a device (device/builder.py), or together with other ranks (distributed/builder.py).
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike

from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError, CallCancelledError, ReplayError, StoreClosedError, WaitTimeoutError
from geartrain.replay.batch import Batch
from geartrain.replay.builder import BatchBuilder, BuiltBatch, HostBatchBuilder, PriorityUpdate, State
from geartrain.replay.config import ReplayConfig, checked_state, make_samplers, seeded_selection, stores_of
from geartrain.replay.device import DeviceOptions
from geartrain.replay.distributed.assignment import Assignment
from geartrain.replay.distributed.rank_group import NOTE_S, RankGroup, as_rank_group, run_on_all_ranks
from geartrain.replay.distributed.topology import Mesh, topology_of
from geartrain.replay.fetch import As, Pad
from geartrain.replay.prefetch import BuildPlacement, Prefetcher, StillBuildingError
from geartrain.replay.transitions import Transitions
from geartrain.selection.mixture import Mixture, Selection, strategies_of
from geartrain.selection.strategy import Strategy, traits_of
from geartrain.store.store import Store

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

#: How long `close` waits for a batch that other ranks take part in, before it leaves them without it.
LEAVE_S = 0.5


class Replay:
    """An endless (or `num_batches` long) sequence of batches drawn from a store.

    Batches are a function of the store's contents, the strategy's seed and the step number. `state_dict` holds
    the step, so a resumed run goes on with the batches that the uninterrupted one would have drawn.

    Threads take turns: one that asks for a batch, settles or loads a state waits for another that does. Any thread may
    call `update_priorities` and `close` meanwhile; `close` ends a `sample` that waits, with `StoreClosedError`, and a
    closed replay refuses whatever could change it or the store. A forked child has a replay of its own, from the same
    step on; one over several ranks, or with a device, belongs to the process that made it, and is refused there.

    Args:
        store: where the rows are; a list of stores for a `Mixture`.
        selection: the strategy, e.g. `geartrain.selection.Prioritized(beta=0.4)`.
        batch_size: rows per batch; over several ranks, of the global batch that they share out.
        fields: names of the fields wanted; all by default.
        window: steps per row. Each window ends at a step drawn uniformly from the row's steps and holds nothing
            later. Whole rows by default.
        pad: side on which windows are padded at the start of a row.
        prefetch: batches prepared ahead, on a thread. Those that take less time than handing them from one thread to
            another (50 us) are made when they are asked for. With 0 each batch is, and sees every priority updated
            before; with more, a batch may have been drawn up to so many steps earlier.
        output: "torch" tensors or "numpy" arrays.
        num_batches: batches per iteration; endless by default.
        min_rows: least number of selectable rows; fewer are not drawn from. Where another process has the store open,
            and so may insert some, a batch waits for them, up to `timeout_s`; where none has, `NotEnoughRowsError` is
            raised at once, and over several ranks too. An actor in a thread of this process is none: with one, set the
            store's rate limiter (`store.limiter.set(min_size_to_sample=...)`). 1 by default; for a store with
            `max_times_sampled` the batch size, lest half a batch use up rows that nobody gets to see.
        threads: threads that copy; up to 4 of the process's cores by default.
        timeout_s: longest wait for a batch, and for another rank.
        group: the ranks of a job that train together, each with the shard of its host as `store`: a process group of
            `torch.distributed` (data parallel), or a `RankGroup` (geartrain.replay.distributed.rank_group). Every rank
            makes the replay and asks for batches alike; each gets its part of one global batch (docs/ranks.md).
        mesh: the same with pipeline and tensor parallelism: a `DeviceMesh` with dimensions named among dp, pp and tp,
            a DeepSpeed grid or topology, or an object with the usual mpu methods.
        inputs, targets: fields for the first and for the last stage of a pipeline, instead of `fields`; where one
            rank is both, it gets both.
        device: where batches go: host memory by default; "cuda", "cuda:1", or a `geartrain.DeviceOptions`, which says
            how (gathered by the GPU or staged, converted on the way, packed). Their tensors are ready for the stream
            that is current where the batch is taken; the host does not wait for the copy (docs/gpu.md).
        assignment: "local_first" gives each rank rows of its own host as far as there are any, "ordered" gives
            replica i the i-th slice of the global batch.
        seed: for strategies that name none. A strategy alone takes it as it is; in a mixture each store's strategy
            gets one of its own, derived from it and the store's place.
        view: `geartrain.Transitions`, for batches of transitions instead of windows; in host memory, of this process's
            stores.

    Raises:
        FieldError, ArgumentError: what was asked for does not fit the store.
        PinError: `DeviceOptions(path="gather")`, and the segment cannot be pinned.
        RanksDisagreeError: the ranks were set up differently.
        PeerLostError: a rank did not come, or is gone.

    Example:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create("doc-replay", {"x": gt.Field((2,), "float32")}, max_length=10, capacity=4)
        >>> _ = store.insert({"x": np.zeros((4, 10, 2), np.float32)})
        >>> with gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=3, window=5, num_batches=2) as replay:
        ...     [tuple(batch["x"].shape) for batch in replay]
        [(3, 5, 2), (3, 5, 2)]
        >>> store.close()
    """

    @overload
    def __init__(
        self,
        store: Store,
        selection: Strategy,
        batch_size: int,
        *,
        fields: Sequence[str] | None = ...,
        window: int | None = ...,
        pad: Pad = ...,
        prefetch: int = ...,
        output: As = ...,
        num_batches: int | None = ...,
        min_rows: int | None = ...,
        threads: int | None = ...,
        timeout_s: float = ...,
        group: ProcessGroup | RankGroup | None = ...,
        mesh: Mesh | None = ...,
        inputs: Sequence[str] | None = ...,
        targets: Sequence[str] | None = ...,
        assignment: Assignment = ...,
        device: str | torch.device | DeviceOptions | None = ...,
        seed: int = ...,
        view: Transitions | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        store: Sequence[Store],
        selection: Mixture,
        batch_size: int,
        *,
        fields: Sequence[str] | None = ...,
        window: int | None = ...,
        pad: Pad = ...,
        prefetch: int = ...,
        output: As = ...,
        num_batches: int | None = ...,
        min_rows: int | None = ...,
        threads: int | None = ...,
        timeout_s: float = ...,
        group: ProcessGroup | RankGroup | None = ...,
        mesh: Mesh | None = ...,
        inputs: Sequence[str] | None = ...,
        targets: Sequence[str] | None = ...,
        assignment: Assignment = ...,
        device: str | torch.device | DeviceOptions | None = ...,
        seed: int = ...,
        view: Transitions | None = ...,
    ) -> None: ...

    def __init__(
        self,
        store: Store | Sequence[Store],
        selection: Selection,
        batch_size: int,
        *,
        fields: Sequence[str] | None = None,
        window: int | None = None,
        pad: Pad = "left",
        prefetch: int = 2,
        output: As = "torch",
        num_batches: int | None = None,
        min_rows: int | None = None,
        threads: int | None = None,
        timeout_s: float = 60.0,
        group: ProcessGroup | RankGroup | None = None,
        mesh: Mesh | None = None,
        inputs: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        assignment: Assignment = "local_first",
        device: str | torch.device | DeviceOptions | None = None,
        seed: int = 0,
        view: Transitions | None = None,
    ) -> None:
        stores = stores_of(store)
        self.stores = stores
        self.selection = seeded_selection(stores, selection, seed)
        self.batch_size = batch_size
        self.num_batches = num_batches
        self._config = config = ReplayConfig(
            batch_size=batch_size,
            fields=fields,
            window=window,
            pad=pad,
            prefetch=prefetch,
            output=output,
            num_batches=num_batches,
            min_rows=min_rows,
            threads=threads,
            timeout_s=timeout_s,
            inputs=inputs,
            targets=targets,
            assignment=assignment,
            device=device if device is None or isinstance(device, DeviceOptions) else DeviceOptions(device),
            seed=seed,
            view=view,
        )
        self._builder = self._open_builder(config, group, mesh)
        # Over ranks and on devices batches are always built on the prefetch thread.
        local = config.prefetch > 0 and isinstance(self._builder, HostBatchBuilder)
        self._placement = BuildPlacement() if local else None
        self._pid = os.getpid()
        self._make_locks()
        self._state: State = [{} for _ in stores]
        self._updates: list[PriorityUpdate] = []
        self._step = 0
        self._asked = -1  # the last step that the thread has leave to build
        self._iteration = 0
        self._stop: int | None = None
        self._ahead: Prefetcher[BuiltBatch] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._closed = False  # from the beginning of `close` on
        self._released = False  # at its end
        self._batches = 0
        self._bytes = 0
        self._wait_s = 0.0
        self._started_s: float | None = None
        self._last_s = 0.0
        _replays.add(self)

    def _make_locks(self) -> None:
        self._turn = threading.RLock()  # of whoever uses the thread that makes batches; held while it is waited for
        self._updates_lock = threading.Lock()
        self._closing = threading.Lock()
        self._halt = halt = threading.Event()  # ends a wait for rows and for the stores' rate limiters
        self._shut = shut = threading.Event()  # the same, for good
        if not self._builder.collective:  # other ranks need what was asked for
            for sampler in self._builder.samplers:
                sampler.stopping = lambda: halt.is_set() or shut.is_set()

    def after_fork(self) -> None:
        """In a forked child: locks that threads of the parent held are free; those threads are not here."""
        self._make_locks()
        if self._closed:
            self._shut.set()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this replay was closed")
        if self._foreign:
            raise ReplayError(
                "this replay belongs to the process that this one was forked from: one over several ranks, or with a "
                "device, is not shared by a fork; make one here"
            )

    @property
    def _foreign(self) -> bool:
        shared = self._builder.collective or self._config.device is not None
        return shared and self._pid != os.getpid()

    def _open_builder(
        self, config: ReplayConfig, group: ProcessGroup | RankGroup | None, mesh: Mesh | None
    ) -> BatchBuilder[Any]:
        alone = group is None and mesh is None
        over_steps = any(traits_of(each).over_steps for each in strategies_of(self.selection))
        if (config.view is not None and not alone) or (over_steps and not (alone and config.device is None)):
            raise ArgumentError(
                "views and draws over steps are of this process's stores, in host memory: leave out group, mesh and "
                "device"
            )
        make = functools.partial(make_samplers, self.stores, self.selection, config)
        if alone:
            if config.device is None:
                return HostBatchBuilder(make(), self.selection, config.batch_size, config.view)
            from geartrain.replay.device.builder import DeviceBatchBuilder

            on_device = DeviceBatchBuilder(make(), self.selection, config.batch_size, config.device)
            weakref.finalize(self, _close_here, os.getpid(), on_device.close)  # one that is dropped unpins its memory
            return on_device
        from geartrain.replay.distributed.builder import DistributedBatchBuilder

        topology = topology_of(group, mesh)
        ranks = as_rank_group(group, topology.members, config.timeout_s)
        members = None if ranks is group else topology.members
        try:
            samplers = run_on_all_ranks(ranks, make)
            builder = DistributedBatchBuilder(samplers, self.selection, config, ranks, topology.position, members)
        except BaseException:
            if ranks is not group:
                ranks.close()
            raise
        weakref.finalize(self, _close_here, os.getpid(), builder.assembler.close)
        return builder

    # --- batches --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current step on. One iteration at a time: a new one ends the one before."""
        with self._turn:
            self._check_open()
            self._restart()
            self._iteration += 1
            self._stop = None if self.num_batches is None else self._step + self.num_batches
            if self._builder.collective and self._config.prefetch and self._stop != self._step:
                # All ranks have to ask before any of them gets a batch, and engines may ask one after the other.
                self._ask(self._taken_updates())
            return self._iterate(self._iteration, self._stop)

    def _iterate(self, iteration: int, stop: int | None) -> Iterator[Batch]:
        while iteration == self._iteration and (stop is None or self._step < stop):
            yield self.sample()

    def sample(self) -> Batch:
        """The next batch.

        Raises:
            EmptyStoreError, NotEnoughRowsError: too few rows are selectable.
            WaitTimeoutError: no batch within `timeout_s`.
            StoreClosedError: the replay was closed, perhaps while this waited.
        """
        with self._turn:
            self._check_open()
            try:
                return self._sample()
            except CallCancelledError:  # by `close`, which alone does not wait for its turn
                self._check_open()
                raise

    def _sample(self) -> Batch:
        asked_s = time.perf_counter()
        if self._started_s is None:
            self._started_s = asked_s
        if self._builds_here():
            built = self._builder.finish(self._builder.start(self._step, self._state, []))
        else:
            if self._ahead is not None and not self._ahead.is_mine():
                self._restart()  # a forked child has none of its parent's threads
            try:
                # Over ranks, and of a rate limiter, the thread has an answer in time, if only that there is none.
                told = self._builder.collective or any(
                    store.native.limited or store.native.live_clients() > 1 for store in self.stores
                )
                patience_s = self._config.timeout_s + (2 * NOTE_S if told else 0)
                ahead = self._ask(self._taken_updates())
                self._check_open()  # `close` interrupts the thread that it finds, and it may have come before this one
                built = ahead.get(patience_s)
            except StillBuildingError:  # the next call may have it
                waits = "; ".join(sampler.describe_wait() for sampler in self._builder.samplers)
                raise WaitTimeoutError(f"no batch was ready within {patience_s:g} s: {waits}") from None
            except KeyboardInterrupt:
                self._give_up("interrupted")
                raise
            except BaseException:
                if not self._closed:  # else `close` does
                    self._restart()
                raise
        if self._placement is not None:
            self._placement.note(built.make_s)
        built.deliver()
        batch = built.batch
        self._last_s = time.perf_counter()
        self._wait_s += self._last_s - asked_s
        self._batches += 1
        self._bytes += batch.nbytes
        self._step += 1
        self._state = built.state
        return batch

    def _builds_here(self) -> bool:
        """Whether this thread builds the next batch; the prefetch thread is ended once its batches are used up."""
        if self._placement is None:
            return self._config.prefetch == 0 and not self._builder.collective
        if not self._placement.here:
            return False
        if self._ahead is not None and self._ahead.is_mine() and self._asked >= self._step:
            return False
        self._restart()
        return True

    def _ask(self, updates: list[PriorityUpdate]) -> Prefetcher[BuiltBatch]:
        """The thread that makes batches, with leave to make the one that is `prefetch` ahead of the next."""
        last = self._step + self._config.prefetch
        if self._placement is not None and self._placement.here:
            last = self._step  # those that are ready already are used up
        if self._stop is not None and self._step < self._stop:
            last = min(last, self._stop - 1)  # nobody will ask for more
        if self._ahead is None:
            step, state, builder = self._step, self._state, self._builder

            def start_next(updates: list[PriorityUpdate]) -> Any:
                nonlocal step, state
                started = builder.start(step, state, updates)
                step, state = step + 1, started.state
                return started

            self._ahead = Prefetcher(
                start_next, "geartrain-prefetch", builder.finish, builder.enter, overlaps=builder.overlaps
            )
            self._finalizer = weakref.finalize(
                self, _stop, self._ahead, self._halt, self._config.timeout_s, self._builder.collective
            )
            self._asked = self._step - 1
        while self._asked < last:
            self._asked += 1
            self._ahead.ask(updates)
            updates = []
        self._return_updates(updates)  # with the next request, when this one asked for nothing
        return self._ahead

    def _taken_updates(self) -> list[PriorityUpdate]:
        with self._updates_lock:
            updates, self._updates = self._updates, []
        return updates

    def _return_updates(self, updates: list[PriorityUpdate]) -> None:
        with self._updates_lock:
            self._updates = [*updates, *self._updates]

    def __len__(self) -> int:
        """Batches per iteration. Raises TypeError for an endless replay."""
        if self.num_batches is None:
            raise TypeError("this replay is endless and has no length; give it num_batches=...")
        return self.num_batches

    def update_priorities(self, rows: Keys, priorities: ArrayLike) -> int:
        """Sets the priorities of rows of earlier batches to |priority| ** alpha; returns how many were gone.

        The alpha is the strategy's, 1 unless it is `Prioritized(alpha=...)`. Where it follows a schedule, all
        priorities of the store are raised to its new value each time that has moved by 1 %, so that they always speak
        of one alpha; let one process of a job do this.

        Over several ranks the priorities go where the rows are together with the next request for a batch, so that all
        ranks draw from the same; each rank gives those of its own batch. Rows that are gone by then are counted as
        `stale_keys` by their store, and 0 is returned here.

        Each key's row is reached in the store that it is of, whichever of this replay's stores, or over several ranks
        of the job's shards, that is: keys of batches, and those that `Store.insert` and `Store.keys` returned.

        Raises:
            ArgumentError: a priority that is not finite, or keys of a store that is not in this replay. None of the
                priorities is set.
        """
        self._check_open()
        check_keys(rows)
        if hasattr(priorities, "detach"):
            priorities = priorities.detach().cpu()
        try:
            array = np.asarray(priorities, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ArgumentError(f"priorities are numbers, found {type(priorities).__name__}") from None
        values = np.broadcast_to(array, (len(rows),)) if array.ndim == 0 else array
        if values.shape != (len(rows),):
            raise ArgumentError(f"{len(rows)} rows were given with priorities of shape {values.shape}")
        update = PriorityUpdate(rows, np.array(values))
        with self._updates_lock:  # alpha is followed, and used, by one thread at a time
            gone = self._builder.submit_updates(update, self._step)
            if gone is None:
                self._updates.append(update)
        return 0 if gone is None else gone

    # --- state and figures ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Brings the stores to where this replay stands, before they are saved. Every rank calls it.

        Priorities that were given are set, and batches that were prepared are dropped and will be drawn again, from the
        stores as they are now. So this run goes on as one does that is resumed from what is saved now.

        Raises:
            PeerLostError: a rank is gone.
        """
        with self._turn:
            self._check_open()
            self._restart()
            self._builder.settle(self._step, self._taken_updates())

    @property
    def field_names(self) -> list[str]:
        """Names of the fields of a batch; over a pipeline's stages those of all of them."""
        return list(self._builder.samplers[0].plan.names)

    @property
    def step(self) -> int:
        """The number of the next batch."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on with the same batches, given the same rows, as a few numbers for JSON.

        Where priorities are updated, call `settle` first: it brings the rows' priorities to where this state is.
        """
        return {
            "seed": self.selection.seed,
            "step": self._step,
            "state": [dict(state) for state in self._state],
            "exponents": [sampler.alpha for sampler in self._builder.samplers],
            **self._identities(),
        }

    def _identities(self) -> dict[str, list[str]]:
        """What the stores are known by, in their order. Names may differ between ranks, which save one state."""
        found = {"stores": [f"{store:016x}" for store in self._builder.store_ids]}
        return found if self._builder.collective else {**found, "names": [store.name for store in self.stores]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken.

        Raises:
            ArgumentError: the strategy has another seed; there are more or fewer stores, or the same ones in another
                order; or this is no state.
        """
        state = checked_state(state)
        if state["seed"] != self.selection.seed:
            raise ArgumentError(
                f"the state was taken with seed {state['seed']}, the strategy has {self.selection.seed}"
            )
        if len(state["state"]) != len(self.stores):
            raise ArgumentError(f"the state was taken with {len(state['state'])} stores, there are {len(self.stores)}")
        for what, now in self._identities().items():  # cursors and alphas are by place
            then = list(state.get(what, now))
            if then != now and sorted(then) == sorted(now):
                raise ArgumentError(f"the state was taken with the same stores in another order: {then}, found {now}")
        with self._turn:
            self._check_open()
            self._restart()
            self._taken_updates()  # and dropped
            self._step = int(state["step"])
            self._state = [{name: int(value) for name, value in each.items()} for each in state["state"]]
            for sampler, alpha in zip(self._builder.samplers, state["exponents"], strict=True):
                sampler.alpha = float(alpha)
            self._builder.rewind()

    def stats(self) -> dict[str, Any]:
        """Figures since the first batch.

        batches, rows, bytes (delivered); wait_s (the consumer's), elapsed_s (from the first request to the last batch,
        the consumer's own pauses included), wait_share; make_s (the time spent
        selecting and fetching, on whichever thread), gb_per_s and samples_per_s of that time; redrawn (rows
        lost between their draw and their copy); in host memory path, a text: "native" where a batch is one native call,
        else what the strategies' own code does.

        Over several ranks rows and bytes are this rank's, and there are: local_bytes (read from the shard of this
        host), received_bytes and sent_bytes (fields, from and for other ranks), local_share, selection_bytes (sent
        to agree on batches), select_s, fetch_s, exchange_s.
        """
        elapsed_s = 0.0 if self._started_s is None else self._last_s - self._started_s
        more = self._builder.stats()
        built, make_s, redrawn = more.pop("built"), more.pop("make_s"), more.pop("redrawn")
        rows = self._builder.rows
        bytes_per_batch = self._bytes / self._batches if self._batches else 0.0
        return {
            "batches": self._batches,
            "rows": self._batches * rows,
            "bytes": self._bytes,
            "wait_s": self._wait_s,
            "elapsed_s": elapsed_s,
            "wait_share": self._wait_s / elapsed_s if elapsed_s else 0.0,
            "make_s": make_s,
            "gb_per_s": built * bytes_per_batch / make_s / 1e9 if make_s else 0.0,
            "samples_per_s": built * rows / make_s if make_s else 0.0,
            "redrawn": redrawn,
            **more,
        }

    def describe(self) -> list[dict[str, Any]]:
        """For each store, how its rows come to the device: path and why, where rows are chosen, pinned bytes.

        Empty for batches in host memory.
        """
        return self._builder.describe()

    # --- leaving --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops preparing batches, and leaves the group. The store stays open; it is the caller's.

        Any thread may call it. A thread that waits for a batch gets `StoreClosedError`; over several ranks the others
        then learn that this one has left (`PeerLostError`), for they wait for its part of that batch.
        """
        with self._closing:  # a second caller returns when the first one is done
            if self._released:
                return
            self._closed = True
            self._shut.set()
            if not self._turn.acquire(blocking=False):
                if self._ahead is not None:
                    self._ahead.interrupt(StoreClosedError("this replay was closed while a batch was waited for"))
                if self._builder.collective and not self._turn.acquire(timeout=LEAVE_S):
                    self._builder.abort("closed while a batch was waited for")
                    self._turn.acquire()
                elif not self._builder.collective:
                    self._turn.acquire()
            try:
                self._restart()
                self._released = True
                if not self._foreign:
                    self._builder.close()
            finally:
                self._turn.release()

    def _restart(self) -> None:
        if self._ahead is not None:
            # Other ranks make what was asked for as well, and need this one for it.
            left = _stop(self._ahead, self._halt, self._config.timeout_s, self._builder.collective)
            self._return_updates([update for updates in left for update in updates])
            self._ahead = None
        if self._finalizer is not None:
            self._finalizer.detach()  # or it would keep every prefetcher there ever was
            self._finalizer = None

    def _give_up(self, reason: str) -> None:
        self._builder.abort(reason)
        if self._ahead is not None:
            _stop(self._ahead, self._halt, 0.5, False)  # a wait looks at it every 10 ms
            self._ahead = None

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stores = self.stores[0] if len(self.stores) == 1 else self.stores
        return f"Replay({stores!r}, {self.selection!r}, batch_size={self.batch_size}, step={self._step})"


_replays: weakref.WeakSet[Replay] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_replays):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _close_here(pid: int, close: Callable[[], object]) -> None:
    """Closes what belongs to a process, unless this is one that was forked from it."""
    if pid == os.getpid():
        close()


def _stop(ahead: Prefetcher[Any], halt: threading.Event, timeout_s: float, finish: bool) -> list[Any]:
    if not ahead.is_mine():
        return []  # in a forked child, where a thread of the parent may hold the event's lock for ever
    halt.set()
    try:
        return ahead.stop(timeout_s, finish=finish)
    finally:
        halt.clear()
