"""Replay: an iterator of training batches, drawn and fetched ahead of the consumer.

A builder (builder.py) draws rows, places their windows, copies them and redraws what was lost, on a thread of its own:
on the host, on a device (device/builder.py), or together with other ranks (distributed/builder.py).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, overload

from numpy.typing import ArrayLike

import geartrain.core.trace as trace
from geartrain._native import forks
from geartrain.core.arguments import refuse_copies
from geartrain.core.keys import Keys
from geartrain.core.process_report import register
from geartrain.core.threads import held, owns
from geartrain.errors import CallCancelledError, ReplayError, StoreClosedError
from geartrain.replay.batch import Batch
from geartrain.replay.batch_loader import LEAVE_S, BatchLoader, close_here
from geartrain.replay.builder import given_priorities
from geartrain.replay.builder_choice import open_builder
from geartrain.replay.config import DATASET, ReplayConfig, ReplayOptions, seeded_selection, stores_of
from geartrain.replay.device import DeviceOptions
from geartrain.replay.distributed.assignment import Assignment
from geartrain.replay.distributed.rank_group import RankGroup
from geartrain.replay.distributed.topology import Mesh
from geartrain.replay.fetch_plan import As, Pad
from geartrain.replay.figures import ConsumerFigures, figures_of_passes
from geartrain.replay.state import checked_state
from geartrain.replay.transitions import Transitions
from geartrain.replay.windows import Windows, as_windows, with_room_for
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Mixture, Selection
from geartrain.selection.strategy import Strategy
from geartrain.store.store import Store

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

_CLOSED_MEANWHILE = "closed while a batch was waited for"


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
            later. Or `geartrain.Windows`: whole ones, at a row's start or end, every k-th, or where a function says.
            Whole rows by default; of rows that hold several episodes, the drawn step's whole episode.
        pad: side on which windows are padded at the start of a row.
        prefetch: batches prepared ahead, on a thread. They are made when they are asked for as long as that saves less
            than a handoff from one thread to another costs (50 us): where they take less time, or the consumer asks
            for the next one at once and they take less than a millisecond. With 0 each batch is, and sees every
            priority updated before; with more, a batch may have been drawn up to so many steps earlier.
        output: "torch" tensors or "numpy" arrays.
        num_batches: batches per iteration; endless by default.
        min_rows: least number of selectable rows that batches are drawn from; over several ranks, of all of them. With
            fewer rows a batch waits, up to `timeout_s`, where another process may insert some: one that has the store
            open, or a writer that is starting (`Store.expect_writers`, which `ActorPool` calls). Over several ranks
            only the latter count, of any rank. Otherwise `NotEnoughRowsError` is raised at once. A thread of this
            process that inserts cannot be seen: use the store's rate limiter then
            (`store.limiter.set(min_size_to_sample=...)`). 1 by default; for a store with `max_times_sampled` the batch
            size, lest half a batch use up rows that nobody gets to see.
        threads: threads that copy; up to 4 of the process's cores by default.
        timeout_s: longest wait for a batch, and for another rank. A batch that is built on the consumer's own thread
            waits so long for rows and rate limiters of all stores; a strategy's own code or transform is not cut short.
        update_lag: after how many batches priority updates take effect, the same on one rank and on many: batch t is
            drawn with those that were given before batch `t - update_lag` was asked for, and no others. At least
            `prefetch`, which it is over several ranks by default; without a group the default is at once. With more
            than `prefetch`, for independent draws, ranks draw without waiting for each other's updates, which hides
            the delay between hosts (docs/ranks.md); a batch that is drawn again, where a shard lost rows, sees those
            of one batch more. A replay without a group is that of a group of one then.
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
        view: `geartrain.Transitions`, for batches of transitions instead of windows; in host memory. Over several ranks
            they are gathered where the rows are, and only transitions travel.
        transform: called with each batch where it is built, on the prefetch thread while there is one; the replay gives
            what it returns. What it raises is raised by `sample`, which draws the same batch again the next time. It
            counts to what decides on the thread. In host memory, of this process's stores.

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
        **options: Unpack[ReplayOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        store: Sequence[Store],
        selection: Mixture,
        batch_size: int,
        **options: Unpack[ReplayOptions],
    ) -> None: ...

    def __init__(
        self,
        store: Store | Sequence[Store],
        selection: Selection,
        batch_size: int,
        *,
        fields: Sequence[str] | None = None,
        window: int | Windows | None = None,
        pad: Pad = "left",
        prefetch: int = 2,
        output: As = "torch",
        num_batches: int | None = None,
        min_rows: int | None = None,
        threads: int | None = None,
        timeout_s: float = 60.0,
        update_lag: int | None = None,
        group: ProcessGroup | RankGroup | None = None,
        mesh: Mesh | None = None,
        inputs: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        assignment: Assignment = "local_first",
        device: str | torch.device | DeviceOptions | None = None,
        seed: int = 0,
        view: Transitions | None = None,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        self.stores = stores = stores_of(store)
        self.selection = with_room_for(as_windows(window), seeded_selection(stores, selection, seed))
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
            transform=transform,
            update_lag=update_lag,
        )
        self._builder, release = open_builder(stores, self.selection, config, group, mesh)
        self._loader = BatchLoader(self._builder, config, self.stores)
        if release is not None:  # one that is dropped unpins its memory, leaves its group; its thread ends before that
            weakref.finalize(self._loader, close_here, os.getpid(), release)
        self._forks = forks()
        self._one_process = self._builder.collective or config.device is not None  # not shared by a fork
        self._make_locks()
        self._iteration = 0
        self._closed = False  # from the beginning of `close` on
        self._released = False  # at its end
        self._consumed = ConsumerFigures()
        self._passes_end = isinstance(self.selection, Epochs) and not self.selection.drop_last
        _replays.add(self)
        try:
            register(self, "replay", _figures)
        except BaseException as error:  # a setting that cannot be used
            if self._builder.collective:
                self._builder.abort(str(error))
            self.close()
            raise

    def _make_locks(self) -> None:
        self._turn = threading.RLock()  # of whoever uses the loader; held while a batch is waited for
        self._closing = threading.RLock()  # a signal's handler may close while its thread does

    def after_fork(self) -> None:
        """In a forked child: locks that threads of the parent held are free; those threads are not here."""
        self._make_locks()
        self._loader.after_fork()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this replay was closed")
        if self._one_process and self._forks != forks():  # `_foreign`, which this is too often called to call
            raise ReplayError(
                "this replay belongs to the process that this one was forked from: one over several ranks, or with a "
                "device, is not shared by a fork; make one here"
            )

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the replay: both draw the same batches."""
        return self._forks != forks()

    @property
    def _foreign(self) -> bool:
        return self._one_process and self.forked

    # --- batches --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current step on; with `Epochs` those of one pass.

        One iteration at a time: a new one ends the one before.
        """
        with self._turn:
            self._check_open()
            self._loader.restart()
            self._iteration += 1
            stop = None if self.num_batches is None else self.step + self.num_batches
            self._loader.begin(stop)
            return self._iterate(self._iteration, stop)

    def _iterate(self, iteration: int, stop: int | None) -> Iterator[Batch]:
        epoch = self._epoch()
        while iteration == self._iteration and (stop is None or self.step < stop) and epoch == self._epoch():
            step = self.step
            batch = self.sample()
            begun = self._begun_after(epoch)
            if begun is not None:  # nothing was left of the pass: this is the next one's, and made again when it begins
                with self._turn:
                    self._loader.put_back(step, [begun])
                return
            yield batch

    def _epoch(self) -> int:
        """The pass that the next batch is of, with `Epochs`; 0 without, and in a mixture, whose passes end apart."""
        if not isinstance(self.selection, Epochs):
            return 0
        return self._loader.state[0].get("epoch", 0)

    def _begun_after(self, epoch: int) -> dict[str, int] | None:
        """The state in which the newest batch's pass began, where that is another one; None where it is not."""
        if not isinstance(self.selection, Epochs):
            return None
        state = self._loader.state[0]
        of_batch = state.get("epoch", 0) - ("position" not in state)
        if of_batch == epoch:
            return None
        return {"epoch": of_batch, **{name: state.get(name, 0) for name in ("skipped", "dropped")}}

    def sample(self) -> Batch:
        """The next batch, or what `transform` made of it.

        Raises:
            EmptyStoreError, NotEnoughRowsError: too few rows are selectable.
            WaitTimeoutError: no batch within `timeout_s`.
            StoreClosedError: the replay was closed, perhaps while this waited.
        """
        with self._turn:
            if self._closed or self._one_process:
                self._check_open()
            try:
                return self._sample()
            except CallCancelledError:  # by `close`, which alone does not wait for its turn
                self._check_open()
                raise

    def _sample(self) -> Batch:
        consumed = self._consumed
        consumed.asked_s = asked_s = time.perf_counter()
        if consumed.started_s is None:
            consumed.started_s = asked_s
        built = self._loader.next(asked_s - (consumed.last_s or asked_s))
        batch = built.batch
        consumed.last_s = last_s = time.perf_counter()
        consumed.wait_s += last_s - asked_s
        consumed.batches += 1
        if self._passes_end:
            consumed.short += self._builder.rows - len(batch)
        consumed.nbytes += batch.nbytes
        if trace.on:
            trace.slice_of("batch", "replay", asked_s, last_s, flow_in=built.flow, step=self.step - 1, rows=len(batch))
        made: Batch = batch if built.transformed is None else built.transformed[0]
        return made

    def __len__(self) -> int:
        """Batches per iteration. Raises TypeError for an endless replay."""
        if self.num_batches is None:
            raise TypeError(f"this replay is endless and has no length; give it num_batches=... {DATASET}")
        return self.num_batches

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(f"batches of a replay have no index: iterate over it, or call sample(). {DATASET}")

    def update_priorities(self, rows: Keys | ArrayLike, priorities: ArrayLike) -> int:
        """Sets the priorities of rows of earlier batches to |priority| ** alpha; returns how many were gone.

        The alpha is the strategy's, 1 unless it is `Prioritized(alpha=...)`. Where it follows a schedule, all
        priorities of the store are raised to its new value each time that has moved by 1 %, so that they always speak
        of one alpha; let one process of a job do this.

        Over several ranks the priorities go where the rows are together with the next request for a batch, so that all
        ranks draw from the same; each rank gives those of its own batch. Rows that are gone by then are counted as
        `stale_keys` by their store, and 0 is returned here.

        Each key's row is reached in the store that it is of, whichever of this replay's stores, or over several ranks
        of the job's shards, that is: keys of batches, and those that `Store.insert` and `Store.keys` returned. Keys as
        numbers, as `ReplayDataset` yields them, will do as well.

        Raises:
            ArgumentError: a priority that is not finite, or keys of a store not in this replay; none is set.
        """
        self._check_open()
        return self._loader.submit_updates(given_priorities(rows, priorities))

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
            self._loader.restart()
            self._builder.settle(self.step, self._loader.take_updates())

    @property
    def field_names(self) -> list[str]:
        """Names of the fields of a batch; over a pipeline's stages those of all of them."""
        return list(self._builder.samplers[0].plan.names)

    @property
    def step(self) -> int:
        """The number of the next batch."""
        return self._loader.step

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on with the same batches, given the same rows, as a few numbers for JSON.

        Where priorities are updated, call `settle` first: it brings the rows' priorities to where this state is.
        """
        return {
            "seed": self.selection.seed,
            "step": self.step,
            "state": [dict(state) for state in self._loader.state],
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
        state = checked_state(state, self.selection.seed, self._identities(), len(self.stores))
        with self._turn:
            self._check_open()
            self._loader.restart()
            self._loader.take_updates()  # and dropped
            self._loader.step = int(state["step"])
            self._loader.state = [{name: int(value) for name, value in each.items()} for each in state["state"]]
            for sampler, alpha in zip(self._builder.samplers, state["exponents"], strict=True):
                sampler.alpha = float(alpha)
            self._builder.rewind()

    def stats(self) -> dict[str, Any]:
        """Figures since the first batch.

        batches, rows, bytes (delivered); wait_s (the consumer's), elapsed_s (from the first request to the last batch,
        the consumer's own pauses included), wait_share; make_s (the time spent selecting and fetching, on whichever
        thread), gb_per_s and samples_per_s of that time; redrawn (rows lost between their draw and their copy); path, a
        text: "native" where a batch is one native call, and "native, calls Own.select, Windows.at" where that call asks
        Python code, which is named.

        With `Epochs` epoch (the pass of the next batch), and over all passes that have ended skipped (rows that went
        before their turn) and dropped (by `drop_last`), in a mixture lists with one of each for each store.

        Over several ranks rows and bytes are this rank's, and there are: local_bytes (read from the shard of this
        host), received_bytes and sent_bytes (fields, from and for other ranks), local_share, selection_bytes (sent
        to agree on batches), select_s, fetch_s, exchange_s; peers_by_shm, peers_by_tcp, peers_by_nixl, peers_by_gloo
        (ranks that this one exchanges messages with).
        """
        more = self._builder.stats()
        built, make_s, redrawn = more.pop("built"), more.pop("make_s"), more.pop("redrawn")
        return {
            **self._consumed.summary(self._builder.rows, built, make_s),
            "redrawn": redrawn,
            **figures_of_passes(self.selection, self._loader.state),
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
        with held(self._closing, 0.0) as first:
            if first:
                self._close()
                return
        # A second caller returns when the first one is done, which may wait for the call that this one is in.
        if not owns(self._turn):
            with self._closing:
                self._close()

    def _close(self) -> None:
        if self._released:
            return
        self._closed = True
        self._loader.shut()
        within = owns(self._turn)  # the thread that waits, in a signal's handler
        with held(self._turn, 0.0) as free:
            self._loader.interrupt(StoreClosedError("this replay was closed while a batch was waited for"))
            if free:
                self._release(within)
                return
        if self._builder.collective:
            with held(self._turn, LEAVE_S) as free:
                if free:
                    self._release(True)
                    return
            self._builder.abort(_CLOSED_MEANWHILE)
        with self._turn:
            self._release(True)

    def _release(self, waited: bool) -> None:
        if waited and self._builder.collective:
            self._loader.leave(_CLOSED_MEANWHILE)
        self._loader.restart()
        released, self._released = self._released, True
        if not released and not self._foreign:
            self._builder.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copies(self, "its store can be pickled; make a replay there, and give it this one's state_dict()")

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stores = self.stores[0] if len(self.stores) == 1 else self.stores
        return f"Replay({stores!r}, {self.selection!r}, batch_size={self.batch_size}, step={self.step})"


def _figures(replay: Replay) -> dict[str, Any]:
    """For the process's report; `waiting_s`: how long its consumer has waited for a batch by now, 0 if it does not."""
    replay._check_open()
    return {
        "name": ", ".join(store.name for store in replay.stores),
        "stores": [store.name for store in replay.stores],
        "selection": type(replay.selection).__name__,
        "batch_size": replay.batch_size,
        "waiting_s": replay._consumed.waiting_s(),
        **replay.stats(),
    }


_replays: weakref.WeakSet[Replay] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_replays):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
