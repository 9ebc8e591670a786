"""Store handle: what any process that has a segment open can read of it, and how it leaves."""

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
from geartrain.errors import ArgumentError, SchemaError, StoreClosedError
from geartrain.store.columns import Columns
from geartrain.store.rate_limiter import RateLimiter
from geartrain.store.segment import remover_of, schema_of_segment
from geartrain.store.writers import ExpectedWriters, Writers

if TYPE_CHECKING:
    from typing_extensions import Self

#: Named states of a row, as `Store.status` reports them.
ROW_STATES = ("free", "writing", "committed", "exhausted", "open")
OPEN = ROW_STATES.index("open")
_SELECTABLE = (ROW_STATES.index("committed"), OPEN)


class StoreHandle:
    """A segment that this process has open: its name, schema, limits, figures, and keys; closing it.

    `Store` is the handle that creates, joins, writes and changes.

    Attributes:
        limiter: bounds the ratio of samples to inserts; off until it is set.
        native: the native store, for the layers above.
        columns: the fields' blocks and what copies into them, likewise.
        writers: those that `expect_writers` has told of, likewise.
        kept: what the layers above keep as long as the handle is open, by its type; `close()` of each is called at the
            end of the handle's own.
    """

    def __init__(self, native: _native.Store, name: str, trust: Trust = "user") -> None:
        self.native = native
        self._name = name
        self._trust: Trust = trust
        about = native.describe()
        self._about: dict[str, Any] = about
        self._fields, max_length = schema_of_segment(native)
        self.columns = Columns(native, self._fields, max_length)
        self.limiter: RateLimiter = self.columns.limiter
        self.writers = Writers()
        self._origin: str | None = None
        self._joined = not self.read_only  # whether it is one of the store's processes
        self.kept: dict[type, Any] = {}

    # --- what it is -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name it was created or opened with; a random one where none was given."""
        return self._name

    @property
    def id(self) -> int:
        """The segment's id, a random number of 64 bits, which its keys carry: the same for all who have it open."""
        return self.columns.store_id

    @property
    def path(self) -> Path:
        """The file that the segment is."""
        return Path(self._about["path"])

    @property
    def trust(self) -> Trust:
        """Who may write to the segment, as it was created or opened with."""
        return self._trust

    @property
    def read_only(self) -> bool:
        """Whether it changes nothing: it was opened with mode="r", or is that of an imported data set."""
        return self.native.read_only

    def other_processes(self) -> int:
        """How many living processes have the store open for writing, by other handles than this."""
        return int(self.native.live_clients()) - self._joined

    @property
    def fields(self) -> dict[str, Field]:
        """The columns, in the order they were given."""
        return dict(self._fields)

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return int(self._about["capacity"])

    @property
    def origin(self) -> str | None:
        """The id of the checkpoint that this handle was loaded from, whose files the next one can link; or None."""
        return self._origin

    def note_origin(self, checkpoint: str | None) -> None:
        """Notes which checkpoint this handle was loaded from."""
        self._origin = checkpoint

    @property
    def max_length(self) -> int:
        """The longest row, in steps."""
        return int(self._about["max_length"])

    @property
    def nbytes(self) -> int:
        """Size of the whole segment in bytes."""
        return int(self._about["nbytes"])

    @property
    def options(self) -> dict[str, Any]:
        """The limits it was created with, under the names `create` has for them."""
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
        }

    @property
    def per_step(self) -> bool:
        """Whether it keeps a priority for every step (`priority_per="step"`)."""
        return bool(self._about["step_priorities"])

    @property
    def new_priority(self) -> float:
        """The priority that a row, or step, gets that is stored without one now; see `Store.create`."""
        return float(self.native.new_priority / 2.0 ** self._about["priority_fraction_bits"])

    def __len__(self) -> int:
        """Rows that can be selected now."""
        return int(self.native.committed_count())

    def stats(self) -> dict[str, int]:
        """How many rows are in which state, and counts of everything that happened since the store was created.

        The counters live in the segment, so they cover all processes: inserted, evicted, expired, exhausted,
        deleted, abandoned, reclaimed, sampled, torn, stale_keys, priorities_updated, priorities_saturated,
        priorities_rounded_up, repairs.
        """
        return dict(self.native.counters())

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)}/{self.capacity} rows"
        fields = list(self._fields)
        return f"{type(self).__name__}({self._name!r}, {state}, fields={fields}, {self.nbytes / 1e6:.1f} MB)"

    # --- reading --------------------------------------------------------------------------------------------

    def keys(self) -> Keys:
        """The keys of all selectable rows, oldest first."""
        rows, generations = self.native.keys()
        return Keys.of_rows(rows, generations, self.id)

    def keys_of(self, rows: ArrayLike) -> Keys:
        """The keys that rows have now, by their numbers: where they were found by looking through `column`.

        Args:
            rows: (n,) numbers below the capacity, or a mask (capacity,).

        Raises:
            ArgumentError: numbers of no row, or of rows that hold no trajectory now.
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
        """Metadata of some rows (of all selectable ones by default), an array (n,) each.

        sequence (uint64, order of commits), version (int64), inserted_at_ns (uint64, wall clock), generation
        (uint32), priority (float64), length (uint32, steps), times_sampled (uint32), state (see ROW_STATES). A key is
        stale where `generation` is not the key's. With `priority_per="step"` a priority is that of the step that a key
        names, 0 for a stale key, or the sum of the row's for a key without a step.

        Raises:
            ArgumentError: keys of another store.
            SchemaError: with `priority_per="step"`, a step that no row can have.
        """
        keys = self.keys() if keys is None else check_keys(keys)
        keys.check_store(self.id, self._name)
        infos = dict(self.native.infos(keys.row))
        if self.per_step and keys.step is not None:
            if (keys.step >= self.max_length).any():
                raise SchemaError(f"step {keys.step.max()} is beyond the {self.max_length} steps that a row can have")
            infos["priority"] = self.native.step_priorities(keys.row, keys.generation, keys.step)
        elif self.per_step:
            infos["priority"] = self.native.sums_of_steps(keys.row)
        infos["priority"] = infos["priority"] / 2.0 ** self._about["priority_fraction_bits"]
        return infos

    def column(self, name: str) -> NDArray[Any]:
        """All blocks of a field, (capacity, max_length, *shape) or (capacity, *shape), a view of the shared memory.

        Free and half-written blocks are in it as well; to read rows safely use `geartrain.replay.fetch`.
        The types NumPy lacks are shown as unsigned integers of their size.
        """
        return self.columns.raw(name)

    def field_number(self, name: str) -> int:
        """A field's place among the fields. Raises `FieldError` for an unknown one."""
        return self.columns.number(name)

    # --- waiting --------------------------------------------------------------------------------------------

    def expect_writers(self) -> ExpectedWriters:
        """Tells this handle's replays that writers are starting: a batch waits for rows, up to its `timeout_s`.

        Without it a replay waits only while another process has the store open. `ActorPool` and `StoreServer` call it
        by themselves.

        Example:
            >>> import geartrain as gt
            >>> store = gt.Store.create({"x": gt.Field((), "float32", per_row=True)}, capacity=8)
            >>> replay = gt.Replay(store, gt.selection.Uniform(seed=0), 4, timeout_s=0.1)
            >>> with store.expect_writers():  # processes are started here, and open the store in a moment
            ...     replay.sample()
            Traceback (most recent call last):
            geartrain.errors.WaitTimeoutError: too few rows within 0.1 s...
            >>> replay.close(); store.close()

        Returns:
            A context manager; leaving it, or `close()`, ends this.

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
        """Closes the handle: rows it is writing are abandoned.

        Calls of other threads are waited for; those that wait for the rate limiter or for another process end with
        `StoreClosedError`. A store in a file is written to its disk by the last process to leave.

        The last process to leave removes the segment, unless it persists. With `keep=True` it stays, and a later
        process joins it with `Store.open(name, adopt=True)`. Views already taken stay readable.

        Raises:
            ArgumentError: `keep=True` for a store without a name, which nobody could adopt.
            LockTimeoutError: another process that holds the store's lock is stopped. The handle is closed, and others
                take this process for dead.
        """
        self.check_may_keep(keep)
        try:
            self.native.close(bool(keep))
        finally:
            while self.kept:
                self.kept.popitem()[1].close()

    def check_may_keep(self, keep: bool) -> None:
        """Raises `ArgumentError` where `close(keep=True)` would."""
        if check_flag("keep", keep) and anonymous.is_anonymous(self._name):
            raise ArgumentError("keep=True needs a name: a store without one is removed with its last process")

    def unlink(self) -> bool:
        """Removes the segment's name; the memory is freed when the last process unmaps it. False if already gone."""
        return bool(self.native.unlink())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


__all__ = ["OPEN", "ROW_STATES", "StoreHandle"]
