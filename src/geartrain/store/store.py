"""Store: a table of trajectories in shared memory. A process allocates rows, writes them in place and commits them.

Any process of the host opens a store by its name. Memory layout, locking and crash recovery are native
(native/segment/segment.h, native/store/store.h). This module adds fields by name, NumPy and torch views, context
managers and named errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import geartrain.store.anonymous as anonymous
from geartrain.core.arguments import check_choice, check_flag, check_keywords, timeout
from geartrain.core.schema import Field
from geartrain.core.shared_files import Trust, check_trust
from geartrain.core.tasks import Task
from geartrain.errors import (
    ArgumentError,
    CheckpointError,
    StaleStoreError,
    StoreClosedError,
    StoreExistsError,
    StoreMissingError,
)
from geartrain.store.journaled import JournaledStore, begin_journal, join_journal, journal_asked_for
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
    read_only,
    remove_journaled,
    remove_unused,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from geartrain.store.checkpoint_reader import Checkpoint
    from geartrain.store.checkpoint_writer import Saved

Create = Literal["never", "missing", "replace"]
Mode = Literal["rw", "r"]


class Store(JournaledStore):
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
    interpreter closes open handles when it exits.

    Args:
        native, name, trust: set by `create`, `open` and `load`; do not call the class itself.

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

    # --- creating and joining ---------------------------------------------------------------------------------

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
        journal_sync_s: float = 1.0,
        journal_full: JournalFull = "wait",
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
            journal_sync_s: longest time between a commit and its flush, in seconds; commits wait if the disk is slower.
                0 flushes before a commit, a deletion or a rewrite returns.
            journal_full: what a commit does if the journal's disk is full: "wait" up to `timeout_s` for room, or
                "error" at once (`NoSpaceError`). In both cases a commit that raises commits no row, and a put or an
                insert with tasks writes nothing, unless the error says that rows are in the store.
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
            if fields is not None:
                raise ArgumentError("the fields were given twice; a store is created by (name, fields) or (fields)")
            name, fields = None, name
        timeout(timeout_s)
        wanted = journal_asked_for(journal, journal_sync_s, journal_full)
        if fields is None:
            raise ArgumentError("give the fields of the store: a mapping of names to geartrain.Field")
        if name is None:
            if persist is not None and check_flag("persist", persist):
                raise ArgumentError("persist=True needs a name: a store without one is removed with its last process")
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
            try:
                begin_journal(store, wanted)
            except BaseException:
                store.unlink()
                store.close()
                raise
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
        if check_choice("mode", mode, ("rw", "r")) == "r" and create != "never":
            raise ArgumentError(f"mode='r' reads a store that is there, and create={create!r} makes one")
        if create != "never" and fields is None:
            raise ArgumentError(f"create={create!r} needs the fields of the store to create")
        check_keywords("Store.open", options, CreateOptions.__annotations__)
        if create == "never" and options:
            raise ArgumentError(f"{', '.join(options)} only mean something with create='missing' or 'replace'")
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
        try:
            if fields is not None:
                # The name may have passed to another segment meanwhile.
                check_schema(name, fields, max_length, store.native, tasks)
            join_journal(store)
        except BaseException:
            store.close()
            raise
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
        journal_sync_s: float = 1.0,
        journal_full: JournalFull = "wait",
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
        wanted = journal_asked_for(journal, journal_sync_s, journal_full)
        trust = check_trust(options.get("trust", "user"))
        if create == "replace":
            remove_unused(named, trust)
        elif wanted is not None:
            remove_journaled(named, wanted.path, trust)
        limits = {key: value for key, value in found.options.items() if key != "persist"}
        if found.plan is None:
            store = cls.create(named, found.fields, max_length=found.max_length, **{**limits, **options})
        else:
            store = cls.create(named, **creation_options(found.plan, {**limits, **options}))
        try:
            if wanted is None:
                found.fill(store.native, progress=progress)
            else:
                begin_journal(store, wanted, found, progress)
        except BaseException:
            store.unlink()
            store.close()
            raise
        store.note_origin(found.id)
        return store

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


__all__ = ["Store"]
