"""`Replay`: an iterator of training batches that are sampled and copied ahead of the consumer.

A batch builder (builder.py) runs on a background thread. For each batch it takes four steps:

1. draw rows,
2. place their windows,
3. copy them,
4. redraw rows that were overwritten or evicted meanwhile.

The rows come from a source: the stores of this process (local_rows.py), the same read by a device
(device/device_rows.py), or the shards of many ranks (distributed/rank_rows.py).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

from numpy.typing import ArrayLike

import geartrain.core.trace as trace
from geartrain._native import forks
from geartrain.core.arguments import check_type, check_whole
from geartrain.core.keys import Keys
from geartrain.core.lifetime import Lifetime
from geartrain.core.process_report import register
from geartrain.core.threads import held, owns
from geartrain.errors import ArgumentError, CallCancelledError, ReadOnlyStoreError, ReplayError, StoreClosedError
from geartrain.ranks.rank_group import RankGroup
from geartrain.replay.batch import Batch
from geartrain.replay.batch_loader import LEAVE_S, BatchLoader, close_here
from geartrain.replay.builder import given_priorities
from geartrain.replay.builder_choice import open_builder
from geartrain.replay.config import DATASET, ReplayConfig, ReplayKeywords, seeded_selection, stores_of
from geartrain.replay.device import DeviceOptions
from geartrain.replay.fetch_plan import As
from geartrain.replay.figures import ConsumerFigures, figures_of_passes
from geartrain.replay.options import RankOptions, ReplayOptions
from geartrain.replay.state import checked_state, described
from geartrain.replay.store_waits import NoMoreRowsError
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


class Replay(Lifetime, elsewhere="its store can be pickled; make a replay there, and give it this one's state_dict()"):
    """Batches drawn from a store: an endless sequence, or one of `num_batches`.

    Batches follow from the store's contents, the strategy's seed and the step number. `state_dict` holds the step, so a
    resumed run draws the same batches as one that was never interrupted.

    The store may have axes or tasks (docs/tasks.md). Its batches are packed: values of rows one behind the other,
    without a mask. Iteration then ends when `store.finish()` was called and fewer rows than a batch needs are left.
    Such a replay takes no window, view, device or update_lag.

    Any thread may ask for a batch; they take turns. `update_priorities` and `close` may be called at any time from any
    thread. `close` ends a `sample` that waits with `StoreClosedError`. After a fork the child has its own replay, at
    the same step. A replay over several ranks, with a device or with `keep` works only in the process that made it.

    Args:
        store: store of the rows; a list of stores for a `Mixture`.
        selection: the strategy, such as `geartrain.selection.Prioritized(beta=0.4)`.
        batch_size: rows of a batch; over several ranks, of the global batch that they divide.
        fields: names of the fields to read; all by default.
        window: steps of each row. A window ends at a step that is drawn uniformly, and holds nothing later. Pass
            `geartrain.Windows` for windows at a row's start or end, with a stride, where a function says, or with
            offsets of steps for each field. By default whole rows; in rows with several episodes, the drawn step's
            whole episode.
        view: `geartrain.Transitions`, for batches of transitions instead of windows. In host memory only. Over several
            ranks each rank builds the transitions of its own rows and sends only these.
        prefetch: number of batches to prepare ahead on a background thread. 0 builds each batch when you ask for it, so
            it sees every earlier priority update. With n, a batch may have been drawn up to n steps ago. Batches that
            take less than about 50 us are built on demand in any case, because waking the thread would cost more. So
            are batches below a millisecond if you ask for the next one at once.
        output: "torch" tensors or "numpy" arrays.
        num_batches: batches of one iteration; endless by default.
        group: the ranks that train together, each with its host's shard as `store`: a `torch.distributed` process group
            (data parallel), a `RankGroup`, or `geartrain.RankOptions` for pipeline and tensor parallelism. Every rank
            makes the replay and requests batches alike, and gets its part of one global batch (docs/ranks.md).
        device: where batches go: host memory by default, "cuda", "cuda:1", or `geartrain.DeviceOptions`. The tensors
            are ready for the current stream; the host does not wait for the copy (docs/gpu.md).
        options: `geartrain.ReplayOptions`: fewest rows, timeouts, update lag, transforms and the like.

    Raises:
        FieldError: the store has no such field.
        ArgumentError: an argument is out of range, or does not fit the store or the strategy.
        PinError: `DeviceOptions(path="gather")`, and the segment cannot be pinned.
        ReplayError: `keep="saved"`, and another replay keeps rows of the store.
        RanksDisagreeError: the ranks have different arguments.
        PeerLostError: a rank did not join, or is lost.

    Examples:
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
        **options: Unpack[ReplayKeywords],
    ) -> None: ...

    @overload
    def __init__(
        self,
        store: Sequence[Store],
        selection: Mixture,
        batch_size: int,
        **options: Unpack[ReplayKeywords],
    ) -> None: ...

    def __init__(
        self,
        store: Store | Sequence[Store],
        selection: Selection,
        batch_size: int,
        *,
        fields: Sequence[str] | None = None,
        window: int | Windows | None = None,
        view: Transitions | None = None,
        prefetch: int = 2,
        output: As = "torch",
        num_batches: int | None = None,
        group: ProcessGroup | RankGroup | RankOptions | None = None,
        device: str | torch.device | DeviceOptions | None = None,
        options: ReplayOptions | None = None,
    ) -> None:
        self.stores = stores = stores_of(store)
        self._read_only = next((each.name for each in stores if each.read_only), None)
        rare = ReplayOptions() if options is None else options
        check_type("options are geartrain.ReplayOptions", rare, ReplayOptions)
        ranks = group if isinstance(group, RankOptions) else RankOptions(group)
        self.selection = with_room_for(as_windows(window), seeded_selection(stores, selection, rare.seed))
        self.batch_size = batch_size
        self.num_batches = num_batches
        self._config = config = ReplayConfig(
            batch_size=batch_size,
            fields=fields,
            window=window,
            view=view,
            prefetch=prefetch,
            output=output,
            num_batches=num_batches,
            device=device if device is None or isinstance(device, DeviceOptions) else DeviceOptions(device),
            inputs=ranks.inputs,
            targets=ranks.targets,
            assignment=ranks.assignment,
            balance=ranks.balance,
            **vars(rare),
        )
        self._description = described(self.selection, config)
        self._builder, release = open_builder(stores, self.selection, config, ranks.group, ranks.mesh)
        self._loader = BatchLoader(self._builder, config, self.stores)
        if release is not None:  # one that is dropped unpins its memory, leaves its group; its thread ends before that
            weakref.finalize(self._loader, close_here, os.getpid(), release)
        super().__init__("this replay")
        self._of_job = not (ranks.group is None and ranks.mesh is None and rare.update_lag is None)
        # Not shared by a fork.
        self._one_process = self._of_job or config.device is not None or rare.keep is not None
        self._make_locks()
        self._iteration = 0
        self._released = False  # at the end of `close`
        self._consumed = ConsumerFigures()
        # Whether batches of this rank may have other numbers of rows than `rows` of the builder.
        self._differs = isinstance(self.selection, Epochs) and not self.selection.drop_last
        self._differs |= ranks.balance is not None
        self._begin()
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

    def _after_fork(self) -> None:
        self._make_locks()
        self._loader.after_fork()

    def _check_open(self) -> None:
        if not self._unended:
            raise StoreClosedError("this replay was closed")
        if self._one_process and self._forks != forks():  # `_foreign`, which this is too often called to call
            raise ReplayError(
                "this replay belongs to the process that this one was forked from: a replay over several "
                "ranks, with a device or with keep='saved' does not work in a forked child. Make one here"
            )

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the replay.

        Parent and child then draw the same batches.
        """
        return self._forked

    @property
    def _foreign(self) -> bool:
        return self._one_process and self._forked

    # --- batches --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current step on; with `Epochs` those of one pass. A new iteration ends the one before."""
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
            try:
                batch = self.sample()
            except NoMoreRowsError:
                return
            begun = self._begun_after(epoch)
            if begun is not None:  # nothing was left of the pass: this is the next one's, and made again when it begins
                with self._turn:
                    self._loader.put_back(step, [begun])
                return
            yield batch
        with self._turn:
            if iteration == self._iteration:
                self._loader.finish_batch()

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
        """The next batch, or what `transform` returned for it.

        Raises:
            EmptyStoreError, NotEnoughRowsError: the store has too few rows.
            WaitTimeoutError: no batch within `timeout_s`.
            StoreClosedError: the replay was closed, perhaps during this call.
        """
        with self._turn:
            if not self._unended or self._one_process:
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
        if self._differs:
            consumed.short += self._builder.rows - len(batch)
        consumed.nbytes += batch.nbytes
        if trace.on:
            trace.slice_of("batch", "replay", asked_s, last_s, flow_in=built.flow, step=self.step - 1, rows=len(batch))
        made: Batch = batch if built.transformed is None else built.transformed[0]
        return made

    def __len__(self) -> int:
        """Batches of one iteration. Raises `TypeError` for an endless replay."""
        if self.num_batches is None:
            raise TypeError(f"this replay is endless and has no length; give it num_batches=... {DATASET}")
        return self.num_batches

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(f"batches of a replay have no index: iterate over it, or call sample(). {DATASET}")

    def update_priorities(self, rows: Keys | ArrayLike, priorities: ArrayLike) -> int:
        """Sets the priorities of sampled rows to |priority| ** alpha; returns how many keys were stale.

        Alpha is the strategy's: 1 unless it is `Prioritized(alpha=...)`. If it follows a schedule, all priorities of
        the store are raised to the new value each time it moved by 1 %; let only one process of a job do this.

        Over several ranks each rank passes the rows of its own batch. The updates travel with the next request for a
        batch, so that all ranks draw from the same priorities. Stale keys are then counted as `stale_keys` by their
        store, and 0 is returned here.

        Args:
            rows: keys of batches, or keys that `Store.insert` or `Store.keys` returned, of any store or shard of this
                replay. Keys as numbers are accepted too, as `ReplayDataset` yields them.
            priorities: (n,) finite; usually the absolute TD errors.

        Raises:
            ArgumentError: a priority is not finite, or a key is of a store that is not in this replay. No priority is
                set.
            ReadOnlyStoreError: a store of this replay was opened with mode="r".
        """
        self._check_open()
        if self._read_only:
            raise ReadOnlyStoreError(
                f"the store {self._read_only!r} is open with mode='r', and priorities cannot be updated: "
                f"Store.open({self._read_only!r}) opens it for writing"
            )
        return self._loader.submit_updates(given_priorities(rows, priorities))

    # --- state and figures ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Applies pending priority updates and drops prefetched batches. Call it before a checkpoint, on every rank.

        The dropped batches are drawn again: from the present contents, or with `keep="saved"` with the same rows. So
        this run continues exactly like one that is resumed from the checkpoint.

        Raises:
            PeerLostError: a rank is lost.
        """
        with self._turn:
            self._check_open()
            self._loader.restart()
            self._builder.settle(self.step, self._loader.take_updates())

    def saved(self, step: int) -> None:
        """Frees the rows of all batches up to a step. Call it once a checkpoint that includes the step is complete.

        Any thread may call it, also while a batch is waited for. Over several ranks every rank calls it, and the rows
        are freed with the next batch or `settle`.

        Args:
            step: number of a delivered batch (`batch.step`).

        Raises:
            ArgumentError: the batch of this step was not delivered yet, or the replay keeps no rows (`keep="saved"`).

        Examples:
            >>> import geartrain as gt
            >>> tasks = {"train": gt.Task()}
            >>> store = gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, capacity=4, span_bytes=4096)
            >>> _ = store.insert({"x": [1, 2, 3, 4]})
            >>> kept = gt.ReplayOptions(keep="saved")
            >>> with gt.Replay(store, gt.selection.Fifo(), 2, prefetch=0, options=kept) as replay:
            ...     batch = replay.sample()
            ...     kept = store.stats()["kept"]
            ...     replay.saved(batch.step)  # after the checkpoint
            ...     kept, store.stats()["kept"]
            (2, 0)
            >>> store.close()
        """
        self._check_open()
        check_whole("step", step)
        kept = self._builder.samplers[0].kept
        if kept is None:
            raise ArgumentError("this replay keeps no rows: make it with options=ReplayOptions(keep='saved')")
        if not 0 <= step < self.step:
            raise ArgumentError(
                f"step {step} was not delivered yet; this replay's next batch is step {self.step}: pass `batch.step` "
                "of the last batch that the checkpoint includes"
            )
        kept.saved(int(step))

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of its batches stay in the store until `saved` is called (`keep="saved"`)."""
        return self._builder.samplers[0].kept is not None

    @property
    def field_names(self) -> list[str]:
        """Names of the fields of a batch; with a pipeline, those of all stages."""
        return list(self._builder.samplers[0].plan.names)

    @property
    def step(self) -> int:
        """Number of the next batch."""
        return self._loader.step

    def state_dict(self) -> dict[str, Any]:
        """The replay's position, as a few numbers and texts for JSON.

        With the same rows, a replay that loads it draws the same batches. Of a store with tasks it has the clock.

        Call `settle` first if you update priorities.
        """
        clocks = {} if (store := self._with_tasks()) is None else {"clock": store.clock}
        return {
            "seed": self.selection.seed,
            "step": self.step,
            "state": [dict(state) for state in self._loader.state],
            "exponents": [sampler.alpha for sampler in self._builder.samplers],
            **clocks,
            **self._description,
            **self._identities(),
        }

    def _with_tasks(self) -> Store | None:
        """The store, if it has tasks; no mixture has such a store."""
        return self.stores[0] if self.stores[0].tasks else None

    def _identities(self) -> dict[str, list[str]]:
        """Identities of the stores, in their order. Names may differ between ranks, which save one state."""
        found = {"stores": [f"{store:016x}" for store in self._builder.store_ids]}
        return found if self._of_job else {**found, "names": [store.name for store in self.stores]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from where `state_dict` was taken. A store with tasks gets the clock of then.

        Args:
            state: what `state_dict` returned. Its entries "strategy", "batch_size" and "view" must be this replay's. To
                go on with another batch size, for example, remove that entry.

        Raises:
            ArgumentError: the strategy, its seed, the batch size or the view is another, the number or order of the
                stores differs, or this is not such a state.
        """
        identities = self._identities()
        state = checked_state(state, self.selection.seed, self._description, identities, len(self.stores))
        with self._turn:
            self._check_open()
            self._loader.restart()
            self._loader.take_updates()  # and dropped
            self._loader.step = int(state["step"])
            self._loader.state = [{name: int(value) for name, value in each.items()} for each in state["state"]]
            for sampler, alpha in zip(self._builder.samplers, state["exponents"], strict=True):
                sampler.alpha = float(alpha)
            self._builder.rewind()
            store = self._with_tasks()
            if store is not None and "clock" in state and not store.read_only:
                store.native.set_clock(int(state["clock"]))
            kept = self._builder.samplers[0].kept
            if kept is not None:
                kept.warn_of_another_store(int(state["step"]))

    def stats(self) -> dict[str, Any]:
        """Figures since the first batch, as a dict.

        | key | meaning |
        |---|---|
        | batches, rows, bytes | delivered; over several ranks, to this rank |
        | wait_s, wait_share | time that the consumer waited for batches, and its share of elapsed_s |
        | elapsed_s | from the first request to the last batch, pauses included |
        | make_s | time spent on selecting and copying, on whichever thread |
        | gb_per_s, samples_per_s | rates during make_s |
        | redrawn | rows that were overwritten between their draw and their copy |
        | path | "native", or "native, calls ..." with the Python code that a batch calls |
        | epoch | with `Epochs`: the next batch's pass; a list in a mixture, as the next two |
        | skipped | with `Epochs`: rows that were removed before their turn, in all passes that ended |
        | dropped | with `Epochs`: rows that `drop_last` left out, in all passes that ended |
        | local_bytes, local_share | over ranks: bytes read from this host's shard, and their share |
        | received_bytes, sent_bytes | over ranks: fields from and for other ranks |
        | selection_bytes | over ranks: bytes sent to agree on batches |
        | select_s, fetch_s, exchange_s | over ranks: time by stage |
        | balance, balance_newest | over ranks, packed batches: largest cost of a rank over the mean; of the newest |
        | peers_by_shm, peers_by_tcp, peers_by_gloo, ... | over ranks: ranks reached by each transport |
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
        """How the rows of each store reach the device: path and reason, where rows are drawn, pinned bytes.

        The list is empty for batches in host memory.

        Examples:
            >>> import numpy as np
            >>> import geartrain as gt
            >>> store = gt.Store.create({"x": gt.Field((2,), "float32")}, max_length=4, capacity=8)
            >>> options = gt.DeviceOptions("cuda", path="staged")  # for Replay(..., device=options)
            >>> with gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=3) as replay:
            ...     replay.describe()
            []
            >>> store.close()
        """
        return self._builder.describe()

    # --- leaving --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops the prefetch thread and leaves the group. The store stays open.

        Any thread may call it. A thread that waits for a batch gets `StoreClosedError`. Other ranks, which wait for
        this one's part of that batch, get `PeerLostError`.
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
        self._end()
        self._loader.shut()
        within = owns(self._turn)  # the thread that waits, in a signal's handler
        with held(self._turn, 0.0) as free:
            self._loader.interrupt(StoreClosedError("this replay was closed while it waited for a batch"))
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
        self._loader.finish_batch()
        released, self._released = self._released, True
        if not released and not self._foreign:
            self._builder.close()

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
