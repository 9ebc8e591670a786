"""Store: a table of trajectories in shared memory. A process allocates rows, writes them in place and commits them.

Any process of the host opens a store by its name. Memory layout, locking and crash recovery are native
(native/segment/segment.h, native/store/store.h). This module adds fields by name, NumPy and torch views, context
managers and named errors. Claims and figures of tasks are in `TaskedRows`, which a `RemoteStore` has too.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
import geartrain.store.anonymous as anonymous
from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_function,
    check_keywords,
    check_real,
    check_whole,
    default_threads,
    leave_out,
    optional,
    timeout,
)
from geartrain.core.keys import Keys, check_keys
from geartrain.core.lifetime import on_error
from geartrain.core.schema import Field
from geartrain.core.shared_files import Trust, check_trust
from geartrain.core.tasks import Task
from geartrain.errors import (
    ArgumentError,
    CheckpointError,
    JournalError,
    SchemaError,
    StaleStoreError,
    StoreClosedError,
    StoreExistsError,
    StoreMissingError,
    WaitTimeoutError,
)
from geartrain.store.agents import AgentRecorder
from geartrain.store.claims import check_durable
from geartrain.store.columns import Columns, as_column, check_entry
from geartrain.store.insert import Casting, insert_rows
from geartrain.store.packed import PackedReader
from geartrain.store.priorities import set_priorities
from geartrain.store.rate_limiter import INSERT_TIMEOUT_S, RateLimiter
from geartrain.store.recorder import StepRecorder
from geartrain.store.rewrite import rewrite_rows
from geartrain.store.row import OPEN, UNDER_WAY, Row, Rows, keys_of_rows
from geartrain.store.segment import (
    CreateOptions,
    JournalFull,
    NewPriority,
    PriorityPer,
    Remover,
    attach,
    check_name,
    check_schema,
    create_segment,
    creation_options,
    peek,
    plan_of_segment,
    read_only,
    remove_left,
    remove_unused,
    remover_of,
    schema_of_segment,
)
from geartrain.store.tasked import Found, TaskedRows, lag_in_words, no_room_in_time, tasks_plan
from geartrain.store.waiting_claims import Asked, claim_later
from geartrain.store.writers import ExpectedWriters, Writers

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from geartrain.store.checkpoint_reader import Checkpoint
    from geartrain.store.checkpoint_writer import Saved
    from geartrain.store.journal import Journal, JournalOptions, JournalStatus

Create = Literal["never", "missing", "replace"]
Mode = Literal["rw", "r"]


class Store(TaskedRows):
    """A table of trajectories in shared memory, used by every process of one host.

    `Store.create` makes a store, `Store.open` joins one, and `Store.load` restores one from a checkpoint. A store is a
    context manager: leaving it closes the handle.

    A store's name is either a plain word, for a segment in /dev/shm (or GEARTRAIN_DIR), or a path with a slash, for a
    file. Use a file on an NVMe disk for data larger than memory. The last process to close a segment removes it. Files
    stay (`persist=True`, the default for paths). A segment whose processes were all killed stays too, and can be
    adopted with its rows.

    Any thread may use a handle, and any thread may close it. A forked child may use it as well, and joins the store
    with its first call. A pickled handle opens the store again in the process that unpickles it. After `close` every
    call raises `StoreClosedError`, but the name, the fields, the limits and views taken before remain readable. The
    interpreter closes open handles when it exits. The native store does all of this, so a handle is no `Lifetime`.

    Args:
        native, name, trust: set by `create`, `open` and `load`; do not call the class itself.

    Attributes:
        limiter: bounds the ratio of samples to inserts; off until it is set.
        native: the native store, for higher layers.
        plan: axes, tasks and who writes which field, for higher layers; None for a store with neither.
        columns: the fields' blocks and the code that copies into them, for higher layers.
        writers: the writers announced by `expect_writers`, for higher layers.
        kept: objects of higher layers that live as long as the handle, by their type. The end of `close()` closes each
            of them.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> with gt.Store.create("doc-store", {"obs": gt.Field((3,), "float32")}, max_length=100, capacity=10) as store:
        ...     with store.row() as row:
        ...         row["obs"][:5] = np.ones((5, 3))
        ...         row.length = 5
        ...     len(store)
        1
    """

    def __init__(self, native: _native.Store, name: str, trust: Trust = "user") -> None:
        self.native = native
        self._name = name
        self._trust: Trust = trust
        about = native.describe()
        self._about: dict[str, Any] = about
        self.plan = plan_of_segment(native)
        self._fields, max_length = schema_of_segment(native)
        self.columns = Columns(native, self._fields, max_length)
        self.limiter: RateLimiter = self.columns.limiter
        self.writers = Writers()
        self._origin: str | None = None
        self._joined = not self.read_only  # whether it is one of the store's processes
        self.kept: dict[type, Any] = {}
        self._journal: Journal | None = None
        self._one_row_writers: dict[tuple[int, bool], _native.OneRowWriter] = {}

    # --- creating and joining -------------------------------------------------------------------------------

    @overload
    @classmethod
    def create(
        cls, name: str | os.PathLike[str], fields: Mapping[str, Field], **options: Unpack[CreateOptions]
    ) -> Store: ...

    @overload
    @classmethod
    def create(cls, fields: Mapping[str, Field], /, **options: Unpack[CreateOptions]) -> Store: ...

    @classmethod
    def create(
        cls,
        name: str | os.PathLike[str] | Mapping[str, Field] | None = None,
        fields: Mapping[str, Field] | None = None,
        *,
        max_length: int | None = None,
        capacity: int | None = None,
        capacity_steps: int | None = None,
        capacity_bytes: int | None = None,
        max_rows: int | None = None,
        remover: Remover = "fifo",
        max_times_sampled: int | None = None,
        max_age_s: float | None = None,
        priority_fraction_bits: int = 16,
        priority_per: PriorityPer = "row",
        new_priority: NewPriority = "one",
        persist: bool | None = None,
        reserve: bool = True,
        trust: Trust = "user",
        timeout_s: float = 10.0,
        journal: str | os.PathLike[str] | None = None,
        journal_sync_s: float | None = None,
        journal_full: JournalFull | None = None,
        tasks: Mapping[str, Task] | None = None,
        span_bytes: int | None = None,
    ) -> Store:
        """Creates an empty store: `Store.create(name, fields, ...)`, or `Store.create(fields, ...)` without a name.

        Args:
            name: a word (a segment in /dev/shm, or GEARTRAIN_DIR) or a path with a slash (a file anywhere). A store
                without a name gets a random one (`store.name`), which other processes of the host receive by forking or
                pickling. Its last process removes it; if that was killed, the next process that creates a store without
                a name does.
            fields: the columns by name, at most 64. A `Field` is the shape and dtype of one step.
            max_length: steps of the longest row. Required unless every field is `per_row`.
            capacity: number of rows. Give exactly one of the three sizes.
            capacity_steps: number of steps. The store has `capacity_steps // max_length` rows; a shorter row occupies a
                whole block.
            capacity_bytes: largest size of the segment in bytes; the store has as many rows as fit. A row takes its
                fields' blocks, each padded to 64 bytes, and 57 bytes of metadata (61 with "lowest_priority"); the
                header takes about 60 KB. A row of one float32 therefore takes 121 bytes: put many such steps into one
                row.
            max_rows: largest number of committed rows. The rest of the capacity is headroom for rows being written. By
                default all of the capacity.
            remover: which row is evicted if none is free: the oldest ("fifo"), the newest ("lifo"), "lowest_priority",
                "least_recently_sampled" (the commit counts as a sample), "most_sampled", or the lowest or highest value
                of a scalar `per_row` field ("lowest:NAME", "highest:NAME"; NaN goes first). Among equal rows the oldest
                is evicted. The last four rank all rows and evict a 64th of them at a time, about 0.3 us an insert. For
                another order use `evict`.
            max_times_sampled: a row is removed after this many samples; no limit by default.
            max_age_s: a row is removed this many seconds after its commit; no limit by default.
            priority_fraction_bits: priorities are stored as round(priority * 2**bits) in 32 bits. The default of 16
                holds 1.5e-5 to 65535. Larger priorities saturate, smaller ones become the smallest; both are counted.
            priority_per: "row", or "step" for a priority of each step: `Prioritized` then draws steps
                (docs/selection.md). A new step gets the priority that its row is inserted with. This takes 8.6 bytes
                for each of `capacity * max_length` steps, at most 2**32 - 16.
            new_priority: priority of rows and steps that are stored without one. "one" is 1. "max" is the largest
                priority that any process has set in this store, by an update or an insert, and 1 until the first. Pick
                "max" for prioritized replay by TD errors: a new transition is then as likely as the worst known one,
                whatever the scale of the errors. `reset_max_priority` lowers it.
            persist: keep the segment after the last process closed it. True by default for paths only.
            reserve: allocate the memory or disk space now, so that a shortage raises here. With False it is allocated
                by the first write to it, and a writer on a full file system dies of SIGBUS.
            trust: who may use the store besides this user: nobody ("user"), a group of this user ("group"), or
                everybody on the host ("any"). Use the last two for trainers and actors that run as different users, and
                pass the same value to `open`. Whoever may use a store can also overwrite or truncate it. Only the
                creator's user may remove the file from /dev/shm, so the creator should leave last.
            timeout_s: longest wait for another process that holds the store's lock, in seconds.
            journal: a directory on a disk. Commits and removals are written to it and survive a power cut
                (docs/checkpoints.md). If it holds a journal already, its rows are restored; `fields`, `max_length`,
                `capacity` and `tasks` must then match it. With tasks, inserts and puts are written to it.
            journal_sync_s: longest time between a commit and its flush, 1 s by default; commits wait if the disk is
                slower. 0 flushes before a commit, a deletion or a rewrite returns.
            journal_full: what a commit does if the journal's disk is full: "wait" up to `timeout_s` for room (the
                default), or "error" at once (`NoSpaceError`). In both cases a commit that raises commits no row, and a
                put or an insert with tasks writes nothing, unless the error says that rows are in the store.
            tasks: the tasks that each row passes through, by name (docs/tasks.md). `fields` are then those of the
                insert. The one task without fields that comes after all others is the last; `max_times_sampled` is 1
                by default, so that a row is freed when it is drawn.
            span_bytes: bytes for the fields of different lengths, of all rows together: those with an axis, those of
                tasks, and strings. Required if there are any; there is no default, since only you know the lengths.
                A put takes its values, padded to 64 bytes a field, and 64 bytes.

        With axes, strings or tasks a store takes `capacity` alone of the sizes, no `max_length`, no limit by age or
        number, no remover and no priorities of steps.

        Returns:
            The store, open in this process.

        Raises:
            ArgumentError: a limit is out of range, or `max_length` is missing.
            SchemaError: the fields cannot be stored.
            StoreExistsError: the name is taken. The message says by which processes and what to do.
            NoSpaceError: the file system is too small. The message says how much is free.
            JournalError: the journal is in use, damaged, or of a store with other fields or limits.

        Cost: reserving takes as long as clearing the memory.
        """
        if isinstance(name, Mapping):
            leave_out("a store is created by (name, fields) or (fields)", fields=fields)
            name, fields = None, name
        timeout(timeout_s)
        wanted = _journal_options(journal, journal_sync_s, journal_full)
        if fields is None:
            raise ArgumentError("give the fields of the store: a mapping of names to geartrain.Field")
        if name is None:
            persists = optional(check_flag, "persist", persist)
            leave_out("a store without a name is removed with its last process", persist=persists)
            name = anonymous.new_name()
        else:
            name = check_name(name)
            if anonymous.is_anonymous(name):
                raise ArgumentError(f"names that begin with {anonymous.PREFIX!r} are those of stores without a name")
        native = create_segment(
            name,
            fields,
            max_length=max_length,
            capacity=capacity,
            capacity_steps=capacity_steps,
            capacity_bytes=capacity_bytes,
            max_rows=max_rows,
            remover=remover,
            max_times_sampled=max_times_sampled,
            max_age_s=max_age_s,
            priority_fraction_bits=priority_fraction_bits,
            priority_per=priority_per,
            new_priority=new_priority,
            persist=persist,
            reserve=reserve,
            trust=check_trust(trust),
            timeout_s=timeout_s,
            tasks=tasks,
            span_bytes=span_bytes,
        )
        store = cls(native, name, trust)
        if wanted is not None:
            with on_error(store.close), on_error(store.unlink):
                store.begin_journal(wanted)
        return store

    @classmethod
    def open(
        cls,
        name: str | os.PathLike[str],
        fields: Mapping[str, Field] | None = None,
        *,
        max_length: int | None = None,
        mode: Mode = "rw",
        create: Create = "never",
        adopt: bool = False,
        trust: Trust = "user",
        timeout_s: float = 10.0,
        tasks: Mapping[str, Task] | None = None,
        **options: Any,
    ) -> Store:
        """Joins a store that exists, or creates one if you ask for it.

        With mode="r" the store can only be read, as suits a data set. `Replay`, `fetch` and `save` accept it, also on a
        read-only file system. If a reader is killed, the store stays as it was. Draws are not counted, so
        `max_times_sampled`, a rate limiter and updates of priorities need mode="rw". Copies and pickles of the handle
        are read-only as well.

        Args:
            name: as in `create`.
            fields: fields that the store must have. Required if the store may be created.
            max_length: steps of the longest row that the store must have, given with `fields`. Required as in `create`
                if the store may be created.
            mode: "rw" to read and write, "r" to read only.
            create: "never" joins only, "missing" joins or creates, "replace" creates. "replace" first removes a segment
                that a dead run left, and raises if the segment is in use.
            adopt: join a segment whose processes were all killed, with the rows that they committed. If its lists are
                damaged and no process uses it, they are rebuilt from the rows. With mode="r": read such a segment as it
                is, also one whose import was killed half-way.
            trust: who may write to the file, as in `create`. A file that more users may write to is not opened.
            timeout_s: longest wait for another process that holds the store's lock, in seconds.
            tasks: tasks that the store must have, given with `fields`.
            options: passed to `create` if the store is created.

        Returns:
            The store, open in this process.

        Raises:
            ArgumentError: options contradict each other, or there is no name.
            StoreMissingError: there is no store of that name.
            StaleStoreError: the processes that wrote to the store died. Pass `adopt=True` to keep its rows.
            IncompatibleStoreError: another format, layout or schema than expected; or the file is truncated or not a
                store.
            UntrustedStoreError: another user owns the file, more users may write to it than `trust` says, or it is a
                symbolic link.
            CorruptStoreError: the store's lists are damaged.
        """
        if isinstance(name, Mapping):
            raise ArgumentError("Store.open needs the name of a store; Store.create(fields, ...) makes one without")
        name = check_name(name)
        check_choice("create", create, ("never", "missing", "replace"))
        adopt = check_flag("adopt", adopt)
        if check_choice("mode", mode, ("rw", "r")) == "r":
            leave_out("mode='r' reads a store that is there", create=create != "never" and create)
        if create != "never" and fields is None:
            raise ArgumentError(f"create={create!r} needs the fields of the store to create")
        check_keywords("Store.open", options, CreateOptions.__annotations__)
        if create == "never":
            leave_out("only create='missing' and 'replace' take options of the new store", **options)
        timeout_s, trust = timeout(timeout_s), check_trust(trust)
        if tasks is not None and fields is None:
            raise ArgumentError("tasks= is compared with the store's together with its fields: pass both or neither")
        given: dict[str, Any] = {
            "max_length": max_length, "trust": trust, "timeout_s": timeout_s, "tasks": tasks,
        }  # fmt: skip
        if create == "replace":
            remove_unused(name, trust)
            assert fields is not None
            return cls.create(name, fields, **given, **options)
        while True:
            try:
                if fields is not None:
                    # Before joining: a dead run's segment that was joined and left again would be removed.
                    check_schema(name, fields, max_length, peek(name, trust), tasks)
                if mode == "r":
                    return cls(read_only(name, adopt=adopt, timeout_s=timeout_s, trust=trust), name, trust)
                store = cls(attach(name, adopt=adopt, timeout_s=timeout_s, trust=trust), name, trust)
                break
            except StaleStoreError as error:
                raise StaleStoreError(
                    f"{error}. adopt=True keeps these rows: Store.open({name!r}, adopt=True) joins them, and with "
                    f"mode='r' they are only read. If nobody needs them, create='replace' or `geartrain remove {name}` "
                    f"deletes them"
                ) from None
            except StoreMissingError:
                if create == "never":
                    raise
                assert fields is not None
                try:
                    return cls.create(name, fields, **given, **options)
                except StoreExistsError:
                    continue  # another process created it meanwhile
        with on_error(store.close):
            if fields is not None:
                # The name may have passed to another segment meanwhile.
                check_schema(name, fields, max_length, store.native, tasks)
            store._join_journal()
        return store

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str] | Checkpoint,
        name: str | os.PathLike[str] | None = None,
        *,
        create: Literal["missing", "replace"] = "missing",
        progress: bool = False,
        journal: str | os.PathLike[str] | None = None,
        journal_sync_s: float | None = None,
        journal_full: JournalFull | None = None,
        **options: Any,
    ) -> Store:
        """Restores a checkpoint: rows in their places, priorities, order and counters.

        The checkpoint may be replaced or deleted while it is loaded.

        Args:
            directory: what was given to `save`, or an open `Checkpoint`, which stays open.
            name: name of the new store, as in `create`; by default it has none.
            create: "missing" raises if a store of that name exists. "replace" removes it first if no process uses it.
                With a journal, a store that a killed process left is removed in either case if it belongs to the
                journal or has no rows.
            progress: show a progress bar.
            journal, journal_sync_s, journal_full: as in `create`. A new journal begins with the rows of the checkpoint,
                and they are on its disk when `load` returns. If the journal began with this checkpoint or an earlier
                one, and was last written for the store that was saved here, its newer rows are restored instead. So a
                restarted job runs the same line.
            options: `trust`, `reserve` and `timeout_s` as in `create`; `persist` overrides the checkpoint's.

        Returns:
            The new store.

        Raises:
            CheckpointError: the checkpoint is absent, incomplete or damaged. The message names the file and its first
                bad block.
            StoreExistsError: the name is taken.
            JournalError: the journal is in use, is damaged, began with another store, or lacks rows of the checkpoint.
            ArgumentError: an option that `load` does not take.
        """
        from geartrain.store.checkpoint_reader import Checkpoint, read_newest

        check_choice("create", create, ("missing", "replace"))
        check_flag("progress", progress)
        named: Any = name if name is None else check_name(name)
        if named is None and (create == "replace" or journal is not None):
            raise ArgumentError("create='replace' and a journal need the name of the store")
        if not isinstance(directory, Checkpoint):
            given: dict[str, Any] = {
                "create": create,
                "journal": journal,
                "journal_sync_s": journal_sync_s,
                "journal_full": journal_full,
                **options,
            }
            return read_newest(directory, lambda found: cls.load(found, named, progress=progress, **given))
        found = directory
        known = {"persist", "reserve", "trust", "timeout_s"}
        check_keywords("Store.load", options, [*known, *CreateOptions.__annotations__])
        if unknown := set(options) - known:
            raise CheckpointError(
                f"fields and limits come from the checkpoint; {', '.join(sorted(unknown))} cannot be set. For others "
                f"load it as it is, create a store with them, and insert the rows that `fetch` gets from it"
            )
        wanted = _journal_options(journal, journal_sync_s, journal_full)
        trust = check_trust(options.get("trust", "user"))
        if create == "replace":
            remove_unused(named, trust)
        elif wanted is not None:
            remove_left(named, wanted.is_of, trust)
        limits = {key: value for key, value in found.options.items() if key != "persist"}
        if found.plan is None:
            store = cls.create(named, found.fields, max_length=found.max_length, **{**limits, **options})
        else:
            store = cls.create(named, **creation_options(found.plan, {**limits, **options}))
        with on_error(store.close), on_error(store.unlink):
            if wanted is None:
                found.fill(store.native, progress=progress)
            else:
                store.begin_journal(wanted, found, progress)
        store._origin = found.id
        return store

    # --- what it is -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name that the store was created or opened with; a random one if none was given."""
        return self._name

    @property
    def id(self) -> int:
        """The segment's id: a random 64-bit number, the same in every process. Keys carry it."""
        return self.columns.store_id

    @property
    def path(self) -> Path:
        """File of the segment."""
        return Path(self._about["path"])

    @property
    def trust(self) -> Trust:
        """Who may write to the segment besides this user: "user" (nobody), "group" or "any"."""
        return self._trust

    @property
    def read_only(self) -> bool:
        """Whether the handle is read-only: opened with mode="r", or of an imported data set."""
        return self.native.read_only

    def other_processes(self) -> int:
        """How many living processes have the store open for writing, by other handles than this."""
        return int(self.native.live_clients()) - self._joined

    @property
    def fields(self) -> dict[str, Field]:
        """The columns by name, in the order in which they were given."""
        return dict(self._fields)

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks that each row passes through, by name, the last one at the end. Empty if there are none."""
        return {} if self.plan is None else dict(self.plan.tasks)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes whose length differs from row to row."""
        return () if self.plan is None else tuple(axis.name for axis in self.plan.axes)

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return int(self._about["capacity"])

    @property
    def origin(self) -> str | None:
        """Id of the checkpoint that this handle was loaded from; None if there is none."""
        return self._origin

    @property
    def max_length(self) -> int:
        """Steps of the longest row."""
        return int(self._about["max_length"])

    @property
    def nbytes(self) -> int:
        """Size of the whole segment in bytes."""
        return int(self._about["nbytes"])

    @property
    def options(self) -> dict[str, Any]:
        """The limits that the store was created with, under the names of `Store.create`'s arguments."""
        about = self._about
        return {
            "capacity": about["capacity"],
            "max_rows": about["max_rows"],
            "remover": remover_of(about["remover"], list(self._fields)),
            "max_times_sampled": about["max_times_sampled"] or None,
            "max_age_s": about["max_age_ns"] / 1e9 or None,
            "priority_fraction_bits": about["priority_fraction_bits"],
            "priority_per": "step" if about["step_priorities"] else "row",
            "new_priority": "max" if about["max_priority"] else "one",
            "persist": about["persist"],
            **({} if self.plan is None else {"span_bytes": about["span_bytes"]}),
        }

    @property
    def per_step(self) -> bool:
        """Whether every step has a priority of its own (`priority_per="step"`)."""
        return bool(self._about["step_priorities"])

    @property
    def new_priority(self) -> float:
        """The priority that a row, or step, gets that is stored without one now; see `Store.create`."""
        return float(self.native.new_priority / 2.0 ** self._about["priority_fraction_bits"])

    def __len__(self) -> int:
        """Number of rows that can be sampled now."""
        return int(self.native.committed_count())

    @property
    def num_steps(self) -> int:
        """Number of steps that can be sampled now, over all rows.

        In a recorder's store this is the number of actions: the steps marked `last`, which have an observation only, do
        not count. A step that two rows have (`overlap`) counts once.

        Cost: a pass over the rows, about 2 ns each.
        """
        return int(self.native.step_count())

    def stats(self) -> dict[str, int]:
        """Counts of rows by state, and of events since the store was created.

        The counters live in the segment and cover all processes: inserted, evicted, expired, exhausted, deleted,
        abandoned, reclaimed, sampled, torn, stale_keys, priorities_updated, priorities_saturated,
        priorities_rounded_up, repairs.

        With tasks also rows that are under_way and in_flight (`RateLimiter.set`), those that batches have kept
        (`Replay.saved`), those that were dropped, given_up (dropped after three deaths) and stale (removed for their
        age), and the clock. With axes or tasks also how often a row was set_back to its insert and a claim revoked to
        make room, and span_bytes with those that are free, free_span_bytes. `task_stats` has the figures of each task.
        """
        counts = dict(self.native.counters())
        if self.plan is not None:
            counts.update({name: value for name, value in self.native.task_figures().items() if type(value) is int})
        return counts

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)}/{self.capacity} rows"
        fields = list(self._fields)
        return f"{type(self).__name__}({self._name!r}, {state}, fields={fields}, {self.nbytes / 1e6:.1f} MB)"

    # --- reading --------------------------------------------------------------------------------------------

    def keys(self) -> Keys:
        """Keys of all rows that can be sampled, oldest first."""
        rows, generations = self.native.keys()
        return Keys.of_rows(rows, generations, self.id)

    def keys_of(self, rows: ArrayLike) -> Keys:
        """Present keys of rows, by their row numbers. Use it to get keys for rows that you found through `column`.

        Args:
            rows: (n,) row numbers below the capacity, or a mask (capacity,).

        Raises:
            ArgumentError: a number is outside of the store, or its row holds no trajectory now.
        """
        return keys_of_rows(self.native, rows, self.capacity, self.id)

    def status(self, keys: Keys | ArrayLike | None = None) -> dict[str, NDArray[Any]]:
        """Metadata of rows: a dict of arrays (n,).

        | name | dtype | meaning |
        |---|---|---|
        | sequence | uint64 | order of commits |
        | version | int64 | version of the model that acted |
        | inserted_at_ns | uint64 | wall clock at the commit |
        | generation | uint32 | a key is stale if its generation differs |
        | priority | float64 | priority of the row, or of the key's step |
        | length | uint32 | steps |
        | times_sampled | uint32 | how often the row was sampled |
        | state | | one of ROW_STATES |

        With `priority_per="step"` the priority is 0 for a stale key, and the sum of the row's priorities for a key
        without a step.

        Args:
            keys: rows to report; by default all that can be sampled.

        Raises:
            ArgumentError: keys of another store.
            SchemaError: with `priority_per="step"`, a step beyond `max_length`.
        """
        keys = self.keys() if keys is None else check_keys(keys)
        keys.check_store(self.id, self._name)
        infos = dict(self.native.infos(keys.row))
        if self.plan is not None:  # a row under way has the key that it will be committed with
            infos["generation"] = infos["generation"] + (infos["state"] == UNDER_WAY).astype(np.uint32)
        if self.per_step and keys.step is not None:
            if (keys.step >= self.max_length).any():
                raise SchemaError(f"step {keys.step.max()} is beyond the {self.max_length} steps that a row can have")
            infos["priority"] = self.native.step_priorities(keys.row, keys.generation, keys.step)
        elif self.per_step:
            infos["priority"] = self.native.sums_of_steps(keys.row)
        infos["priority"] = infos["priority"] / 2.0 ** self._about["priority_fraction_bits"]
        return infos

    def column(self, name: str) -> NDArray[Any]:
        """All blocks of a field as a view of the shared memory: (capacity, max_length, *shape), or (capacity, *shape).

        The view includes free and half-written blocks. Use `geartrain.fetch` to read rows safely. Types that NumPy
        lacks appear as unsigned integers of the same size.

        Args:
            name: the field.

        Raises:
            FieldError: the store has no such field.
        """
        return self.columns.raw(name)

    # --- waiting --------------------------------------------------------------------------------------------

    def expect_writers(self) -> ExpectedWriters:
        """Announces writers that are about to start, so that a batch waits for their rows.

        Without it a replay waits for rows only while another process has the store open. `ActorPool` and `StoreServer`
        call this themselves. The batch waits for at most the replay's `timeout_s`.

        Examples:
            >>> import geartrain as gt
            >>> store = gt.Store.create({"x": gt.Field((), "float32", per_row=True)}, capacity=8)
            >>> replay = gt.Replay(store, gt.selection.Uniform(seed=0), 4, options=gt.ReplayOptions(timeout_s=0.1))
            >>> with store.expect_writers():  # start the processes here; they open the store a moment later
            ...     replay.sample()
            Traceback (most recent call last):
            geartrain.errors.WaitTimeoutError: too few rows within 0.1 s...
            >>> replay.close(); store.close()

        Returns:
            A context manager. The announcement ends when you leave it or call its `close()`.

        Raises:
            StoreClosedError: this handle was closed.
        """
        if self.closed:
            raise StoreClosedError(f"the store {self._name!r} was closed")
        return self.writers.expect()

    # --- writing --------------------------------------------------------------------------------------------

    def row(self, *, priority: float | None = None, version: int = 0, zeros: Sequence[str] = ()) -> Row:
        """Starts one row, which you write in place.

        Set `row.length` and write every field. Steps that you leave out are zeros. As a context manager the row commits
        on a clean exit and is abandoned on an exception. Without one, call `row.commit()` or `row.abandon()`. To make
        the row available while you write it, call `row.publish()`, then `row.extend(length)`. The commit waits if the
        store's `limiter` is set.

        Args:
            priority: priority of the row in prioritized replay; by default the store's `new_priority`.
                `update_priorities` changes it later.
            version: version of the model that acted; kept with the row.
            zeros: fields that you do not write; they are all zeros.

        Raises:
            StoreFullError: every block is being written by someone.
            ArgumentError: `zeros` is not a list of names, or the store has axes, strings or tasks.
            FieldError: the store has no field of a name in `zeros`.
        """
        self.check_plain("its rows have no blocks to write in place; use insert")
        priority, version = check_entry(priority, version)
        if zeros.__class__ is not tuple or zeros:
            zeros = self.columns.names("zeros", zeros)
        return Row(self.columns, self.native.allocate_one(), priority, version, zeros)

    def rows(self, n: int, *, priority: float | None = None, version: int = 0, zeros: Sequence[str] = ()) -> Rows:
        """Starts `n` rows, which you write in place and commit together.

        The commit is atomic: all rows or none, even if the process is killed in the middle.

        Args:
            n: number of rows.
            priority, version, zeros: of each row, as in `row`.

        Raises:
            StoreFullError: fewer than `n` blocks are available; the others are being written.
            ArgumentError: `zeros` is not a list of names, or the store has axes, strings or tasks.
            FieldError: the store has no field of a name in `zeros`.
        """
        check_whole("the number of rows", n, 1, 2**32 - 1)
        self.check_plain("its rows have no blocks to write in place; use insert")
        priority, version = check_entry(priority, version)
        zeros = self.columns.names("zeros", zeros)
        return Rows(self.columns, self.native.allocate(n), priority, version, zeros)

    def insert(
        self,
        fields: Mapping[str, Any],
        *,
        lengths: ArrayLike | Mapping[str, ArrayLike] | None = None,
        priorities: ArrayLike | None = None,
        versions: ArrayLike | None = None,
        threads: int | None = None,
        casting: Casting = "no",
        timeout_s: float | None = None,
        durable: bool = False,
    ) -> Keys:
        """Copies `n` rows into the store and returns their keys.

        In a store with axes, strings or tasks no row is evicted to make room: the insert waits until rows are freed.

        Args:
            fields: for every field of the store an array or tensor (n, t, ...) of its dtype, t up to `max_length`. A
                `per_row` field is (n, ...). With tasks, the fields of the insert. One with an axis takes a list of n
                arrays (m, ...), one for each row; or one array with the values of all rows, and `lengths`. `Text` and
                `Bytes` take lists of strings, and with an axis a list of strings for each row.
            lengths: (n,) steps of each row; t by default. In a store with axes: (n,) items of the insert's axis in each
                row, or a dict of such arrays by axis.
            priorities: (n,) finite and >= 0; by default the store's `new_priority`.
            versions: (n,) integers; 0 by default, and with tasks the store's clock.
            threads: threads that copy; by default up to 4 of the cores this process may use.
            casting: conversions to the fields' dtypes that are allowed, as in NumPy: "no", "safe" (int16 to float32) or
                "same_kind" (float64 to float32). Lists of Python's numbers are converted if they fit.
            timeout_s: longest wait for room in a store with axes or tasks, in seconds; 600 by default.
            durable: return once the rows are on the disk of the store's journal.

        Raises:
            SchemaError: an array has another shape or dtype than its field. Nothing is written.
            FieldError: a field is missing, or the store has no such field. Nothing is written.
            StoreFullError: too many blocks are being written, or more rows than `limiter.set(in_flight=)` allows.
            WaitTimeoutError: no room within `timeout_s`, or too many rows in flight. The message says how many rows are
                under way, due and kept.
            NoSpaceError: the rows are larger than all of `span_bytes`.
            ArgumentError: `timeout_s` for a store that evicts rows and does not wait; `durable` without a journal.
            LockTimeoutError: the journal's disk is behind for longer than the store's `timeout_s`. The message says
                whether rows are in the store.

        Cost: one copy, which bypasses the cache if it is large. A call takes about 2 us for C-contiguous NumPy arrays
        of the fields' dtypes without lengths, priorities and versions, and about 10 us otherwise. More than 1024 rows,
        or half the store's, or more than may be in flight at the moment, are inserted in several parts. Each part is
        atomic.
        """
        durable = check_durable(self.native, durable)
        if self.plan is None:
            if timeout_s is not None:
                leave_out("this store evicts rows instead of waiting for room", timeout_s=timeout_s)
            keys = insert_rows(
                self.columns,
                fields,
                lengths,  # type: ignore[arg-type]  # a mapping is refused there
                priorities,
                versions,
                threads,
                casting,
            )
            if durable:
                self.native.settle_journal("inserted", True)
            return keys
        within_s = INSERT_TIMEOUT_S if timeout_s is None else timeout(timeout_s)
        return self.insert_spans(
            self.plan, fields, lengths, priorities, versions, default_threads(threads), casting, within_s, durable
        )

    def recorder(
        self,
        n_envs: int = 1,
        *,
        obs: Sequence[str] | None = None,
        publish_every: int | None = None,
        overlap: int = 0,
        priority: float | None = None,
        autoreset: Any = None,
        share_rows: bool = False,
        zeros: Sequence[str] = (),
    ) -> StepRecorder:
        """A recorder of the steps of `n_envs` environments, which takes one native call a step for all of them.

        The store needs the fields of `geartrain.recorded_fields`, and at least twice as many rows as there are
        environments. If the store has these fields, the recorder fills them:

        - `truncated`: whether the step was truncated.
        - `step_version`: int64, the model's version at each step.
        - `episode_return`: float32 with `per_row=True`, the sum of the rewards in this row.

        Args:
            n_envs: environments that are stepped together; the leading axis of all arrays.
            obs: fields that are observations. By default those called "observation" or "obs", alone or before
                a dot.
            publish_every: make an unfinished row available for sampling every this many steps. By default only finished
                rows are.
            overlap: number of steps that the next row of a long episode repeats, so that frame stacks and n-step sums
                are complete there. `Transitions` needs frame_stack - 1 + n_step - 1 of them. Each step is drawn from
                one of its copies. The store needs the fields of `recorded_fields(..., overlap=True)`.
            priority: priority of new rows, or steps; by default the store's `new_priority`.
            autoreset: what the environments do when an episode ends: "next_step" (Gymnasium's default), "same_step" or
                "disabled", or `envs.metadata["autoreset_mode"]`.
            share_rows: the next episode of an environment continues in the same row while there is room. The row is
                published with the first episode that ends in it. Use it to draw steps with `geartrain.Transitions`,
                windows or whole episodes. It needs the fields of `recorded_fields(..., share_rows=True)` and a store
                without `max_times_sampled`.
            zeros: `per_row` fields that stay zero until you set them with `write(keys, ...)`. A recorder itself fills
                only `episode_return`.

        Returns:
            The recorder. Use it from one thread at a time.

        Raises:
            FieldError: a field that a recorder needs is missing or has another type, or a `per_row` field is neither
                filled by the recorder nor in `zeros`.
            ArgumentError: `n_envs`, `overlap` or `publish_every` does not fit the store, or it has axes or tasks.
            SchemaError: the priority is negative or not finite.
        """
        self.check_plain("its rows have no steps to record; use insert")
        return StepRecorder(
            self.columns,
            n_envs,
            obs=obs,
            publish_every=publish_every,
            overlap=overlap,
            priority=priority,
            autoreset=autoreset,
            share_rows=share_rows,
            zeros=zeros,
        )

    def agent_recorder(self, agents: int, **options: Any) -> AgentRecorder:
        """A recorder of agents that come and go, as in PettingZoo's parallel environments: dicts by agent.

        Args:
            agents: the largest number of agents in an episode at once. An agent that leaves in a step and one that
                arrives with it count both. Usually `len(env.possible_agents)`.
            options: arguments of `recorder`, except `autoreset`.

        Returns:
            The recorder. Use it from one thread at a time.

        Raises:
            FieldError, ArgumentError, SchemaError: as for `recorder`.
        """
        own = {name: name in options for name in ("autoreset", "n_envs")}
        leave_out("agents begin when they are observed", **own)
        check_keywords("agent_recorder", options, self.recorder)
        check_whole("agents", agents, 1, 2**32 - 1)
        return AgentRecorder(self.recorder(agents, autoreset="disabled", **options))

    # --- changing and removing ------------------------------------------------------------------------------

    def update_priorities(self, keys: Keys | ArrayLike, priorities: ArrayLike) -> int:
        """Sets the priorities of rows or steps by key, and returns how many keys were stale. Stale keys are skipped.

        Args:
            keys: keys of committed rows, or of steps with `priority_per="step"`. If a key occurs twice, its last
                priority counts. Numbers are accepted too, as `ReplayDataset` yields them.
            priorities: (n,) finite and >= 0. All are checked before any is set.

        Raises:
            ArgumentError: keys of another store (`Replay.update_priorities` accepts several stores); or keys of rows
                for a store with priorities of steps, or the reverse. No priority is set.
            SchemaError: a priority is negative or not finite, or a step is beyond `max_length`.

        Cost: a cache miss for each level of the tree. No lock is taken, except with `remover="lowest_priority"` or
        `max_times_sampled`.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        column = as_column(priorities, len(keys), np.float64, "priorities")
        if column is None:
            raise SchemaError("update_priorities needs priorities, found None")
        return set_priorities(self, keys, column)

    def raise_priorities(self, power: float) -> None:
        """Raises every priority to a power. Zero stays zero.

        Use it if alpha of prioritized replay changes: the power is the new alpha divided by the old one. Priorities
        that other processes set during the call may or may not be raised.

        Args:
            power: the exponent, finite and above zero.

        Raises:
            ArgumentError: the power is not finite or not above zero.

        The priority of new rows is raised with them (`Store.create(..., new_priority="max")`).

        Cost: one pass over the priorities, about 20 ns each. With new_priority="max" inserts and updates wait for it.
        """
        check_real("power", power, above=0)
        self.native.raise_priorities(power)

    def reset_max_priority(self) -> None:
        """Lowers the priority of new rows to the largest that a row, or step, of the store has now.

        For a store with new_priority="max" in which few very large priorities were set, or whose large ones have been
        updated since: the largest priority only rises by itself.

        Raises:
            SchemaError: the store was created without new_priority="max".

        Cost: a pass over the priorities, about 1 ns each, in which inserts and updates wait.
        """
        self.native.reset_max_priority()

    def write(
        self,
        keys: Keys | ArrayLike,
        fields: Mapping[str, Any],
        *,
        starts: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        casting: Casting = "no",
    ) -> int:
        """Rewrites fields of committed rows in place, and returns how many rows were skipped.

        Use it for recomputed advantages and returns, or for refreshed recurrent states. Keys, priorities, lengths and
        order do not change. A concurrent reader (`fetch`, a batch, a checkpoint) sees each row either before or after
        the write, never a mixture. If the process is killed during a write, the row being written is lost: it is
        reclaimed and counted in `stats()["reclaimed"]`.

        Args:
            keys: rows of this store. Stale keys, and rows that their writer still extends, are skipped.
            fields: some of the store's fields: an array or tensor (n, t, *shape) each, or (n, *shape) if the field is
                `per_row`.
            starts: (n,) step of the row that the first of the t steps goes to; 0 by default. For a batch of windows
                that are padded behind, pass `batch.start`.
            lengths: (n,) how many of the t steps are written; all by default. Steps beyond the row's end are ignored.
            casting: as in `insert`.

        Raises:
            ArgumentError: keys of another store, or the store has axes, strings or tasks. Nothing is written.
            SchemaError: arrays do not fit, or a step is beyond `max_length`; nothing is written. Also raised for a
                segment that an earlier build made: save it and load the checkpoint.
            FieldError: the store has no such field. Nothing is written.

        Cost: one copy. The store's lock is held for 64 KB or one row at a time.
        """
        self.check_plain("its rows are not rewritten in place; use put with a task of rewritable=True")
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        return rewrite_rows(self.columns, keys, fields, starts, lengths, casting)

    def delete(self, keys: Keys | ArrayLike) -> int:
        """Removes rows by key, and returns how many were gone already. With tasks also rows that are under way.

        Args:
            keys: rows of this store.

        Raises:
            ArgumentError: keys of another store. No row is removed.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        return int(self.native.remove(keys.row, keys.generation))

    def evict(self, n: int, by: Callable[[Keys], ArrayLike]) -> Keys:
        """Removes the `n` rows that your own order puts first, and returns their keys.

        Use it for orders that `remover` does not offer. Call it before the store is full: the next `n` inserts then
        find room, and the remover has nothing to do.

        Args:
            n: rows to remove; all rows if there are fewer.
            by: a function of the keys (m,) of all removable rows, oldest first, that returns one number for each. Rows
                with the lowest numbers are removed; among equal ones the oldest.

        Raises:
            ArgumentError: `n` is not a whole number above zero, or `by` is not a function.
            SchemaError: `by` did not return one number for each row, or returned NaN.

        Cost: one call of `by` and a sort. Rows that other processes insert or remove during the call are not
        considered.
        """
        check_whole("the number of rows", n, 1)
        check_function("the order", by)
        keys = self.keys()
        keys = keys[self.status(keys)["state"] != OPEN]
        scores = as_column(by(keys), len(keys), np.float64, "scores of rows")
        if scores is None or np.isnan(scores).any():
            raise SchemaError(f"the order must give a number for each of {len(keys)} rows, found {scores}")
        worst = keys[np.argsort(scores, kind="stable")[:n]]
        self.delete(worst)
        return worst

    def expire(self) -> int:
        """Removes rows older than `max_age_s`, and returns how many. Sampling and inserting do this as well."""
        return int(self.native.expire())

    def reap(self) -> int:
        """Reclaims blocks of dead processes, and returns how many dead processes were found.

        This also happens when a process joins, when no row is free, and when a draw needs exact priority sums.
        """
        return int(self.native.reap())

    def audit(self) -> list[str]:
        """Checks the store's metadata, and returns one sentence for each inconsistency.

        The list is empty for a sound store.
        """
        return list(self.native.audit())

    # --- journal and checkpoints ----------------------------------------------------------------------------

    @property
    def journal(self) -> JournalStatus | None:
        """Figures of the store's journal; None if it has none. Raises `StoreClosedError` once the store is closed."""
        return None if self._journal is None else self._journal.status()

    def sync_journal(self, timeout_s: float = 10.0) -> None:
        """Waits until all earlier commits and removals, of all processes, are on the journal's disk.

        Args:
            timeout_s: longest wait, in seconds.

        Raises:
            ArgumentError: the store has no journal.
            WaitTimeoutError: the journal is not on its disk within `timeout_s`, or the disk is full. The message says
                which.
        """
        if self._journal is None:
            raise ArgumentError(f"the store {self.name!r} has no journal: pass journal= to Store.create")
        if not self._journal.sync(timeout(timeout_s)):
            why = self._journal.status().error or "the disk is slow, or the process that writes it is stopped"
            raise WaitTimeoutError(f"the journal {self._journal.path} is not on its disk after {timeout_s} s: {why}")

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        incremental: bool = True,
        progress: bool = False,
    ) -> Saved:
        """Writes an atomic checkpoint of all committed rows, and returns its figures.

        The directory appears, or is replaced, in one step, after everything in it was checksummed and flushed. Other
        processes may use the store meanwhile. Rows that are overwritten during the save are left out and counted.

        With tasks, rows that are under way are saved as well, and those that batches keep until they are saved. Claims
        and appends are not: what is done is, and the rest is due again.

        An incremental checkpoint hard-links the files of the previous one and writes only new rows. Either of the two
        can be deleted. See docs/checkpoints.md. If the store has a journal, it also receives the priorities that
        changed.

        Args:
            directory: a new directory, or a checkpoint to replace.
            base: checkpoint whose files are linked; by default the one that is replaced.
            incremental: False writes everything and links nothing.
            progress: show a progress bar.

        Raises:
            ArgumentError: the store has axes, strings or tasks, and was opened with mode="r".
            CheckpointError: `directory` exists and is not a checkpoint, or is a dangling symbolic link; or `base` is
                not a checkpoint, or damaged.
            NoSpaceError: the file system or a quota is full, or a file would exceed RLIMIT_FSIZE.

        Cost: the bytes of new rows, 56 bytes for each row of the capacity, and a flush. It takes memory for two chunks
        of 32 MB, or of one row if that is larger, and frees it at the end.
        """
        check_flag("progress", progress)
        if not check_flag("incremental", incremental) and base is not None:
            raise CheckpointError("a save that is not incremental takes no base")
        from geartrain.store.checkpoint_writer import save

        saved = save(
            self.native,
            self.fields,
            self.max_length,
            self.options,
            directory,
            base=base,
            incremental=incremental,
            origin=self.origin,
            progress=progress,
            locks=not self.read_only,
        )
        if self.native.journal_state() is not None and not self.read_only:
            self.native.request_journal_priorities()
        return saved

    # --- leaving --------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this handle was closed."""
        return bool(self.native.closed)

    def close(self, *, keep: bool = False) -> None:
        """Closes the handle, after the journal has written all commits.

        Rows that are being written through this handle are abandoned. `close` waits for calls of other threads. Calls
        that wait for the rate limiter or for another process end with `StoreClosedError`. The last process to close a
        store in a file writes it to the disk.

        The last process to close a segment removes it, unless it persists. With `keep=True` the segment stays, and a
        later process joins it with `Store.open(name, adopt=True)`. Views taken before remain readable.

        Args:
            keep: leave the segment in place, even if this is the last process that uses it.

        Raises:
            ArgumentError: `keep=True` for a store without a name, which no process could adopt.
            LockTimeoutError: another process holds the store's lock and is stopped. The handle is closed, and other
                processes treat this one as dead.
            JournalError: the journal's disk did not take everything within the handle's `timeout_s`. The handle is
                closed.
        """
        if check_flag("keep", keep) and anonymous.is_anonymous(self._name):
            raise ArgumentError("keep=True needs a name: a store without one is removed with its last process")
        journal = self._journal
        done = journal is None or self.native.closed or journal.finish()
        try:
            self.native.close(bool(keep))
        finally:
            while self.kept:
                self.kept.popitem()[1].close()
        if not done and journal is not None:
            raise JournalError(
                f"the store {self.name!r} was closed, but its journal {journal.path} may lack the last commits"
            )

    def unlink(self) -> bool:
        """Removes the segment's name; returns False if it was gone already.

        The last process to close the segment frees the memory.
        """
        return bool(self.native.unlink())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- for other parts of the package ---------------------------------------------------------------------

    def one_row_writer(self, task: int, *, append: bool) -> _native.OneRowWriter:
        """Internal: writes single rows of a task.

        Args:
            task: its number.
            append: it appends; else it puts.
        """
        found = self._one_row_writers.get((task, append))
        if found is None:
            assert self.plan is not None
            names = self.plan.appendable[task][0] if append else list(self.plan.fields_of(task))
            axis = self.plan.appended_axis(task) if append else 0
            numbers = [self.plan.field_numbers[name] for name in names]
            found = _native.OneRowWriter(self.native, task, axis, names, numbers)
            self._one_row_writers[task, append] = found
        return found

    def packed_reader(self, names: Sequence[str], axes: Sequence[str] = (), threads: int = 0) -> PackedReader:
        """Internal: reads fields of rows of a store with axes or tasks.

        Args:
            names, axes, threads: as for `PackedReader`.
        """
        assert self.plan is not None
        return PackedReader(self.native, self.plan, names, axes, threads)

    def check_plain(self, what: str) -> None:
        """Internal: raises `ArgumentError` if the store has axes, strings or tasks, for which `what` does not exist.

        Args:
            what: the end of a sentence: "it cannot be saved".
        """
        if self.plan is not None:
            raise ArgumentError(f"the store {self._name!r} has {'tasks' if self.plan.tasks else 'axes'}: {what}")

    def field_number(self, name: str) -> int:
        """Internal: the field's position among the fields. Raises `FieldError` for an unknown one."""
        return self.columns.number(name)

    def insert_together(
        self, n: int, sources: Any, table: Any, of_rows: Any, threads: int, timeout_s: float, durable: bool
    ) -> Keys | int:
        """Internal: inserts rows, all or none; returns how many to insert first if fewer may be in flight now.

        The batch whose end makes places may need these, so the others alone wait.

        Args:
            n: number of rows.
            sources, table: their values and lengths, as `collect` returns them.
            of_rows: their priorities and versions.
            threads, timeout_s, durable: as for `insert`.
        """
        self.limiter.admit_inserts(n, timeout_s)
        try:
            priorities, versions = of_rows
            found = self.native.insert_with_spans(n, sources, table, priorities, versions, threads, timeout_s)
            if found is None:
                raise self.waited_for_room(n, timeout_s)
        except BaseException:
            self.limiter.give_back(inserts=n)
            raise
        if isinstance(found, int):
            self.limiter.give_back(inserts=n)
            return found
        self.native.settle_journal("inserted", durable)
        return Keys.of_rows(*found, self.id)

    def _claim_rows(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Found:
        return self.native.claim_rows(*asked, timeout_s, later), None

    async def _claim_rows_async(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Found:
        found = self.native.claim_rows(*asked, 0.0, later)
        if found is None and timeout_s > 0:
            found = await claim_later(self.native, asked, timeout_s, later)
        return found, None

    def oldest_claim(self, task: str) -> tuple[int, float] | None:
        """Internal: the process that has claimed the oldest row of a task, and seconds since that row's insert."""
        found = self.native.oldest_claim(tasks_plan(self).number(task))
        return None if found is None else (found[1], max(0.0, time.time() - found[2] / 1e9))

    def lag_before(self, number: int) -> str:
        """Internal: which task keeps rows from becoming due for a task, and who holds its oldest claim, in words.

        Args:
            number: of the task. The last one has no claims, and is waited for by replays.
        """
        return lag_in_words(self.native, tasks_plan(self), self.limiter, number)

    def waited_for_room(self, n: int, timeout_s: float) -> WaitTimeoutError:
        """Internal: the error of an insert that timed out: which limit it waited for, and by what that is reached.

        Args:
            n, timeout_s: of the insert.
        """
        assert self.plan is not None
        return no_room_in_time(self.native, self.plan, self.limiter, n, timeout_s)

    def begin_journal(
        self, options: JournalOptions, checkpoint: Checkpoint | None = None, progress: bool = False
    ) -> None:
        """Internal: restores a journal's contents into this new store and journals it from there on.

        Args:
            options, checkpoint, progress: see `JournalOptions.attach`.
        """
        starts = options.attach(self.native, self.fields, self.max_length, self.options, checkpoint, progress)
        self._follow(starts())

    def _join_journal(self) -> None:
        """Joins the journal of an opened store, if it has one."""
        if self.native.journal_state() is None:
            return
        from geartrain.store.journal import join

        found = join(self.native, self.fields, self.max_length)
        if found is not None:
            self._follow(found)

    def _follow(self, journal: Journal) -> None:
        self._journal = journal
        # A store that is dropped without being closed ends its journal's thread, which holds the native store.
        weakref.finalize(self.columns, journal.stop).atexit = False

    # --- pickling -------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.closed:
            raise StoreClosedError(f"the store {self.name!r} was closed: copy or pickle an open handle")
        if anonymous.is_anonymous(self.name):
            anonymous.check_may_pickle()
        return _opened_again, (self.name, self.trust, self.id, self.read_only)


def _opened_again(name: str, trust: Trust, store_id: int, read_only: bool) -> Store:
    """A copy of a handle: joins the store, or only reads it, as the handle does.

    Raises:
        StoreMissingError: it is gone, also where another store has its name now; or it is on another host.
    """
    try:
        store = Store.open(name, mode="r", adopt=True, trust=trust) if read_only else Store.open(name, trust=trust)
    except StoreMissingError:
        if not anonymous.is_anonymous(name):
            raise
        raise StoreMissingError(
            f"the store {name!r} is not on this host any more: created without a name, it was removed with its last "
            f"process. Create it with a name, or keep it open until this process has joined"
        ) from None
    if store.id != store_id:
        store.close()
        raise StoreMissingError(
            f"the store {name!r} that was pickled is gone, and another one has its name: Store.open joins that one"
        )
    return store


def _journal_options(
    path: str | os.PathLike[str] | None, sync_s: float | None, full: JournalFull | None
) -> JournalOptions | None:
    """The arguments of `Store.create`, checked; None where no journal was asked for."""
    given = {"journal_sync_s": sync_s, "journal_full": full}
    if path is None and (lone := [f"{name}={value!r}" for name, value in given.items() if value is not None]):
        raise ArgumentError(f"{lone[0]} is about a journal, and there is none: give its directory as journal=")
    if path is None:
        return None
    sync_s, full = 1.0 if sync_s is None else timeout(sync_s, "journal_sync_s"), "wait" if full is None else full
    check_choice("journal_full", full, ("wait", "error"))
    from geartrain.store.journal import JournalOptions

    return JournalOptions(path, sync_s, full)


__all__ = ["Store"]
