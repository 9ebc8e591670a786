"""Store: a table of trajectories in shared memory; allocate, write in place, commit; any process attaches by name.

Memory layout, locking and crash recovery are native (native/segment/segment.h, native/store/store.h). This module adds
fields by name, NumPy and torch views, context managers and named errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import geartrain.store.anonymous as anonymous
from geartrain.core.arguments import check_choice, check_flag, check_keywords, timeout
from geartrain.core.schema import Field
from geartrain.core.shared_files import Trust, check_trust
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
    """A table of trajectories shared by every process of this host.

    Create one with `Store.create`, join one with `Store.open`, restore one with `Store.load`. A store is a
    context manager; leaving it closes the handle.

    A name is a plain word for a segment in /dev/shm (or in GEARTRAIN_DIR), or a path (anything with a slash) for a
    file, such as one on an NVMe disk for sets larger than memory. The segment lives until the last attached process
    closes it; with `persist=True` (the default for paths) the file stays. A segment whose processes were all killed
    stays too, so that its rows can be adopted.

    A handle may be used by many threads, one of which may close it; in forked children, which become processes of the
    store of their own when they first use it; and pickled to other processes of the host. A copy or a pickle opens the
    store again, with the same rights. A handle that was closed refuses everything (`StoreClosedError`), copies too, but
    what it was: its name, fields, limits and views already taken. Handles that are open when the interpreter ends are
    closed, daemon threads in calls included.

    Example:
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
    ) -> Store:
        """Creates an empty store: `Store.create(name, fields, ...)`, or `Store.create(fields, ...)` without a name.

        Args:
            name: a word (a segment in /dev/shm, or GEARTRAIN_DIR) or a path with a slash (a file anywhere). Without one
                the store gets a random one (`store.name`), is shared by forking and pickling within the host, and is
                removed with its last process; what killed processes leave, by the next store without a name.
            fields: the columns, by name; a `Field` is the shape and dtype of one step. At most 64.
            max_length: the longest row, in steps. Required where a field has time, that is, is not `per_row`.
            capacity: rows. Give one of the three sizes.
            capacity_steps: steps, in rows of `max_length`: there is room for `capacity_steps // max_length` rows,
                and shorter rows fill a block each.
            capacity_bytes: bytes that the store may take of its file system, `nbytes` at most: as many rows as fit
                into them. A row takes its fields' blocks, each padded up to 64 bytes, and 57 bytes of metadata (61 with
                "lowest_priority"); the head and page rounding take about 60 KB. So a row of one float32 takes 121
                bytes: collect such rows in longer ones, of many steps.
            max_rows: committed rows kept at most; the rest of the capacity is headroom for rows being
                written. All of the capacity by default.
            remover: which row makes room when none is free: the oldest ("fifo"), the newest ("lifo"), the one with
                the lowest priority ("lowest_priority"), the "least_recently_sampled" (a row counts as sampled when it
                is committed), the "most_sampled", or the one with the lowest or highest value of a field of one number
                a row ("lowest:NAME", "highest:NAME"; NaN goes first). Of equals the older. The last four rank all rows
                and evict a 64th of them at a time: about 0.3 us an insert. Other orders: `evict`.
            max_times_sampled: a row is removed once it has been sampled so often. No limit by default.
            max_age_s: a row is removed once it is older, in seconds since its commit. No limit by default.
            priority_fraction_bits: priorities are kept as round(priority * 2**bits) in 32 bits. The default of 16
                holds 1.5e-5 to 65535; larger priorities saturate, smaller ones become the smallest, both counted.
            priority_per: "row", or "step": every step has a priority of its own, and `Prioritized` draws steps in
                proportion to theirs (docs/selection.md). New steps get the priority that their row is inserted with. It
                takes 8.6 bytes for each of `capacity * max_length` steps, of which there may be 2**32 - 16.
            new_priority: what rows and steps get that are stored without a priority. "one" is 1. "max" is the largest
                priority that any process has given in this store, by an update or an insert, and 1 until the first.
                Pick "max" for prioritized replay by TD errors: a new transition is then as likely as the worst one
                known, whatever the scale of the errors. `reset_max_priority` lowers it.
            persist: keep the segment after the last process has closed it. By default for paths only.
            reserve: allocate the memory or disk space now, so that a lack of it is an error here. With False it is
                allocated when it is first written to, and once the file system is full the writer dies of SIGBUS.
            trust: who may use the store besides this process's user: nobody ("user"), a group of this user ("group"),
                everybody on the host ("any"), for trainers and actors of different users. Each of them passes the same
                to `open`, and is trusted not to overwrite or truncate the file. The creator leaves last: only its user
                may remove the file from /dev/shm.
            timeout_s: longest wait for another process that holds the store's lock.
            journal: a directory on a disk that committed rows and removals are written to, so that they survive a power
                cut (docs/checkpoints.md). Where it holds a journal already, its rows are restored: the fields,
                `max_length` and `capacity` must be those of the journal.
            journal_sync_s: the bound: what was committed so long ago is on the disk, and commits wait where it is not;
                0: before a commit, a deletion or a rewrite returns.
            journal_full: what a full disk does to commits: they "wait" for room, as long as `timeout_s`, or get an
                "error" at once (`NoSpaceError`). Either way no row is committed by a call that raises.

        Raises:
            ArgumentError: limits that make no store, or `max_length` absent; SchemaError: fields that make none.
            StoreExistsError: the name is taken; says by whom, and what to do.
            NoSpaceError: the file system is too small; says how much there is.
            JournalError: the journal is in use, damaged, or of a store with other fields or limits.

        Cost: reserving runs at the speed of clearing memory.
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
        **options: Any,
    ) -> Store:
        """Joins a store that other processes use, or makes it, as asked; never joins a dead run's data unasked.

        With mode="r" the store is read and nothing else, as suits a data set: a `Replay` draws from it, `fetch` reads
        it and `save` saves it. It may be on a read-only file system. The reader is no process of the store: when it is
        killed, the store is as it was. Draws are not counted, so `max_times_sampled`, a rate limiter and updates of
        priorities need mode="rw". Copies and pickles of the handle are read-only as well.

        Args:
            name: as in `create`.
            fields: what the store must hold; required when it may have to be created.
            max_length: steps of its longest row, with `fields`: what the store must have where it is given, and
                required as in `create` when it may have to be created.
            mode: "rw" to read and write, "r" to read only.
            create: "never" (join only), "missing" (join, or create when there is none), or "replace" (create;
                a segment left by a dead run is removed first, one in use is an error).
            adopt: join a segment whose processes were all killed, with the rows they committed; or one whose lists are
                damaged and that no process uses: they are rebuilt from the rows. With mode="r": read such a segment as
                it is, also where an import was killed half-way.
            trust: who may write to the file, as in `create`: one that others may write to as well is not opened.
            timeout_s: longest wait for another process that holds the store's lock.
            options: passed to `create` when the store is created.

        Raises:
            ArgumentError: options that contradict each other, or no name.
            StoreMissingError: there is none.
            StaleStoreError: the processes that wrote to it died, and `adopt` was not given.
            IncompatibleStoreError: another format, layout or schema than expected; or the file is something else, or
                was cut.
            UntrustedStoreError: the file is another user's, or its mode lets others write to it than `trust` says, or
                it is a symbolic link.
            CorruptStoreError: its lists are damaged.
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
        if create == "replace":
            remove_unused(name, trust)
            assert fields is not None
            return cls.create(name, fields, max_length=max_length, trust=trust, timeout_s=timeout_s, **options)
        while True:
            try:
                if fields is not None:
                    # Before joining: a dead run's segment that was joined and left again would be removed.
                    check_schema(name, fields, max_length, peek(name, trust))
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
                    return cls.create(name, fields, max_length=max_length, trust=trust, timeout_s=timeout_s, **options)
                except StoreExistsError:
                    continue  # another process created it meanwhile
        try:
            if fields is not None:
                check_schema(
                    name, fields, max_length, store.native
                )  # the name may have passed to another segment meanwhile
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
        """Restores what `save` wrote: rows in their places, priorities, order and counters.

        What is saved to the same path, or removed there, meanwhile makes no difference.

        Args:
            directory: what was given to `save`; or an open `Checkpoint`, which stays open.
            name: of the new store, as in `create`; by default it has none.
            create: "missing" (a store of that name is an error), or "replace": one that no process uses is removed
                first, as by `open`. With a journal one that a killed process has left is removed anyhow, where it is
                the journal's or has no rows.
            progress: show a progress bar.
            journal, journal_sync_s, journal_full: as in `create`. A new journal begins with the rows of the checkpoint,
                all of which are on its disk when this returns. One that began with this checkpoint, or with an
                earlier one and was written last for the store that this was saved from, has what came after, and is
                what is restored: a job that is started again runs the same line.
            options: `trust`, `reserve` and `timeout_s` as in `create`, and `persist` instead of the checkpoint's.

        Raises:
            CheckpointError: absent, incomplete, or damaged; names the file and its first bad block.
            StoreExistsError: the name is taken.
            JournalError: the journal is in use, damaged, began with something else, or lacks rows of the checkpoint.
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
        store = cls.create(named, found.fields, max_length=found.max_length, **{**limits, **options})
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
        """Writes a checkpoint of all committed rows, complete or not at all; returns its figures.

        The directory appears (or is replaced) in one step, after everything in it was checksummed and
        flushed. Other processes may go on using the store; rows that are overwritten while saving are left
        out, and counted.

        Incremental: rows of the previous checkpoint are not written again, its files are hard-linked. The two share
        disk space, and either can be removed. See docs/checkpoints.md.

        A journal gets the priorities that have changed as well, with its next pass.

        Args:
            directory: a new one, or a checkpoint that is to be replaced.
            base: the checkpoint to link to; the one that is replaced by default.
            incremental: with False everything is written, and nothing shared.
            progress: show a progress bar.

        Raises:
            CheckpointError: `directory` exists and is not a checkpoint, or is a symbolic link to nothing; or `base` is
                none or damaged.
            NoSpaceError: the file system, or a quota on it, is full, or files may not be so large (RLIMIT_FSIZE).

        Cost: the bytes of new rows, 56 bytes for each row of the capacity, and a flush. Memory for two chunks of 32
        MB, or of one row where that is larger, which is given back.
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
