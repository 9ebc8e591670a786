"""Store handle: what a process can read from an open segment, and how it closes the segment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
import geartrain.store.anonymous as anonymous
from geartrain.core.arguments import check_flag
from geartrain.core.keys import Keys, check_keys
from geartrain.core.schema import Field
from geartrain.core.shared_files import Trust
from geartrain.core.tasks import Task
from geartrain.errors import ArgumentError, SchemaError, StoreClosedError
from geartrain.store.columns import Columns
from geartrain.store.rate_limiter import RateLimiter
from geartrain.store.segment import plan_of_segment, remover_of, schema_of_segment
from geartrain.store.writers import ExpectedWriters, Writers

if TYPE_CHECKING:
    from typing_extensions import Self

#: Named states of a row, as `Store.status` reports them.
ROW_STATES = ("free", "writing", "committed", "exhausted", "open", "under_way", "kept")
OPEN, UNDER_WAY = ROW_STATES.index("open"), ROW_STATES.index("under_way")
_SELECTABLE = (ROW_STATES.index("committed"), OPEN)


class StoreHandle:
    """An open segment in this process: its name, schema, limits, figures and keys. `close` ends it.

    `Store` is the handle that creates, joins, writes and changes.

    Attributes:
        limiter: bounds the ratio of samples to inserts; off until it is set.
        native: the native store, for higher layers.
        plan: axes, tasks and who writes which field, for higher layers; None for a store with neither.
        columns: the fields' blocks and the code that copies into them, for higher layers.
        writers: the writers announced by `expect_writers`, for higher layers.
        kept: objects of higher layers that live as long as the handle, by their type. The end of `close()` closes each
            of them.
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
        self._one_row_writers: dict[tuple[int, bool], _native.OneRowWriter] = {}

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

    def check_plain(self, what: str) -> None:
        """Internal: raises `ArgumentError` if the store has axes, strings or tasks, for which `what` does not exist.

        Args:
            what: the end of a sentence: "it cannot be saved".
        """
        if self.plan is not None:
            raise ArgumentError(f"the store {self._name!r} has {'tasks' if self.plan.tasks else 'axes'}: {what}")

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return int(self._about["capacity"])

    @property
    def origin(self) -> str | None:
        """Id of the checkpoint that this handle was loaded from; None if there is none."""
        return self._origin

    def note_origin(self, checkpoint: str | None) -> None:
        """Internal: notes which checkpoint this handle was loaded from."""
        self._origin = checkpoint

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
        try:
            numbers = np.asarray(rows)
        except (TypeError, ValueError):  # lists of several lengths
            numbers = np.zeros((), object)
        if numbers.dtype == bool and numbers.shape == (self.capacity,):
            numbers = np.flatnonzero(numbers)
        if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
            raise ArgumentError(
                f"rows are whole numbers (n,) or a mask ({self.capacity},), found {numbers.dtype} {numbers.shape}"
            )
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.capacity:
            raise ArgumentError(
                f"the store has rows 0 to {self.capacity - 1}, found {numbers.min()} to {numbers.max()}"
            )
        infos = self.native.infos(np.ascontiguousarray(numbers, np.uint32))
        selectable = (infos["generation"] & 1 == 1) & np.isin(infos["state"], _SELECTABLE)
        if not selectable.all():
            raise ArgumentError(
                f"row {numbers[~selectable][0]} holds no trajectory ({(~selectable).sum()} of {len(numbers)} rows); "
                f"store.keys().row are those that do"
            )
        return Keys.of_rows(np.ascontiguousarray(numbers, np.uint32), infos["generation"], self.id)

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

    def field_number(self, name: str) -> int:
        """Internal: the field's position among the fields. Raises `FieldError` for an unknown one."""
        return self.columns.number(name)

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

    # --- leaving --------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this handle was closed."""
        return bool(self.native.closed)

    def close(self, *, keep: bool = False) -> None:
        """Closes the handle and abandons rows that are being written through it.

        `close` waits for calls of other threads. Calls that wait for the rate limiter or for another process end with
        `StoreClosedError`. The last process to close a store in a file writes it to the disk.

        The last process to close a segment removes it, unless it persists. With `keep=True` the segment stays, and a
        later process joins it with `Store.open(name, adopt=True)`. Views taken before remain readable.

        Args:
            keep: leave the segment in place, even if this is the last process that uses it.

        Raises:
            ArgumentError: `keep=True` for a store without a name, which no process could adopt.
            LockTimeoutError: another process holds the store's lock and is stopped. The handle is closed, and other
                processes treat this one as dead.
        """
        self.check_may_keep(keep)
        try:
            self.native.close(bool(keep))
        finally:
            while self.kept:
                self.kept.popitem()[1].close()

    def check_may_keep(self, keep: bool) -> None:
        """Internal: raises `ArgumentError` if `close(keep=True)` would."""
        if check_flag("keep", keep) and anonymous.is_anonymous(self._name):
            raise ArgumentError("keep=True needs a name: a store without one is removed with its last process")

    def unlink(self) -> bool:
        """Removes the segment's name; returns False if it was gone already.

        The last process to close the segment frees the memory.
        """
        return bool(self.native.unlink())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


__all__ = ["OPEN", "ROW_STATES", "StoreHandle"]
