"""Rows of a store, written and changed: allocate, insert, record steps, set priorities, rewrite, delete, evict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from geartrain.core.arguments import check_function, check_keywords, check_real, check_whole, default_threads, shown
from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError, SchemaError
from geartrain.store.agents import AgentRecorder
from geartrain.store.columns import as_column, check_entry
from geartrain.store.handle import OPEN, StoreHandle
from geartrain.store.insert import CASTINGS, Casting, insert_rows
from geartrain.store.priorities import set_priorities
from geartrain.store.recorder import StepRecorder
from geartrain.store.rewrite import rewrite_rows
from geartrain.store.row import Row, Rows

_CASTINGS = frozenset(CASTINGS)


class WritableStore(StoreHandle):
    """A handle that also writes, changes and removes rows. `Store` is the one that users have: it adds the segment."""

    # --- writing --------------------------------------------------------------------------------------------

    def row(self, *, priority: float | None = None, version: int = 0, zeros: Sequence[str] = ()) -> Row:
        """One block in every column, to be written in place.

        Set `row.length` and write every field; steps that you leave out are zeros. As a context manager the row
        commits on a clean exit and abandons the block on an exception. By hand: `row.commit()` or `row.abandon()`. An
        open row can be sampled while it is written: `row.publish()`, then `row.extend(length)`. Where the store's
        `limiter` is set, committing waits for it.

        Args:
            priority: the row's priority in prioritized selection; by default the store's `new_priority`. Can be changed
                later.
            version: of the model that acted, kept with the row.
            zeros: fields that may be left unwritten; they are all zeros then.

        Raises:
            StoreFullError: every block is being written.
            ArgumentError: `zeros` is no list of names. FieldError: the store has no field of such a name.
        """
        priority, version = check_entry(priority, version)
        if zeros.__class__ is not tuple or zeros:
            zeros = self.columns.names("zeros", zeros)
        return Row(self.columns, self.native.allocate_one(), priority, version, zeros)

    def rows(self, n: int, *, priority: float | None = None, version: int = 0, zeros: Sequence[str] = ()) -> Rows:
        """`n` blocks at once, to be written in place and committed together.

        All or nothing, also when the process is killed in the middle of the commit.

        Args:
            n: rows.
            priority, version, zeros: of each row, as in `row`.

        Raises:
            StoreFullError: fewer than `n` blocks are not being written. ArgumentError, FieldError: as of `row`.
        """
        if not 1 <= check_whole("the number of rows", n) < 2**32:
            raise ArgumentError(f"at least one row must be asked for, and fewer than 2**32, found {shown(n)}")
        priority, version = check_entry(priority, version)
        zeros = self.columns.names("zeros", zeros)
        return Rows(self.columns, self.native.allocate(n), priority, version, zeros)

    def insert(
        self,
        fields: Mapping[str, Any],
        *,
        lengths: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
        versions: ArrayLike | None = None,
        threads: int | None = None,
        casting: Casting = "no",
    ) -> Keys:
        """Copies `n` rows in and returns their keys.

        Args:
            fields: for every field of the store an array or tensor (n, t, ...) of its dtype, t up to
                `max_length` (fields without time: (n, ...)).
            lengths: (n,) steps of each row; by default t.
            priorities: (n,) finite and >= 0; by default the store's `new_priority`.
            versions: (n,) integers; by default 0.
            threads: threads that copy; by default up to 4 of the cores this process may use.
            casting: which conversions to the fields' dtypes are made, as in NumPy: "no" (other dtypes are refused),
                "safe" (int16 to float32) or "same_kind" (float64 to float32).

        Raises:
            SchemaError, FieldError: with what was asked and what was found, before anything is written.
            StoreFullError: too many blocks are being written.

        Cost: one copy, streamed past the cache when large, and about two microseconds a call for NumPy arrays of the
        fields' dtypes in C order, without lengths, priorities or versions; about ten otherwise. More than 1024 rows (or
        half the store's) go in pieces of so many, each all or nothing.
        """
        try:
            if lengths is None and priorities is None and versions is None and casting in _CASTINGS:
                raw = self.columns.inserter.insert(fields, 0 if threads is None else default_threads(threads))
                if raw is not None:
                    return Keys.packed(raw, self.id)
        except TypeError:  # no fields, or a casting that is no text, which are told below
            pass
        return insert_rows(self.columns, fields, lengths, priorities, versions, default_threads(threads), casting)

    def recorder(
        self,
        n_envs: int = 1,
        *,
        observations: Sequence[str] | None = None,
        publish_every: int | None = None,
        overlap: int = 0,
        priority: float | None = None,
        autoreset: Any = None,
        share_rows: bool = False,
        zeros: Sequence[str] = (),
    ) -> StepRecorder:
        """A recorder of the steps of `n_envs` environments: one native call a step for all of them.

        The store needs the fields of `geartrain.recorded_fields`, and twice as many rows as there are
        environments; `truncated`, `step_version` (int64: the model's version at each step) and `episode_return`
        (float32, per_row: of the steps in this row) are filled where the store has them.

        Args:
            n_envs: environments that are stepped together; arrays have them as their leading axis.
            observations: fields that are observations; by default those called "observation" or "obs", alone or before
                a dot.
            publish_every: publish an unfinished row every so many steps, so that it can be sampled while its episode
                goes on. By default only finished rows can be.
            overlap: steps that the next row of a long episode repeats.
            priority: of new rows or steps; by default the store's `new_priority`.
            autoreset: what happens where an episode ends: "next_step" (Gymnasium's default), "same_step" or
                "disabled", or `envs.metadata["autoreset_mode"]`.
            share_rows: the next episode of an environment goes on in the row of the one before, where that has room.
                A row is published with the first episode that ends in it. Needs the fields of
                `recorded_fields(..., share_rows=True)` and a store without max_times_sampled; of its rows steps are
                drawn, for `geartrain.Transitions`, windows or whole episodes.
            zeros: `per_row` fields that stay zero. A recorder fills no other one than `episode_return`;
                `write(keys, ...)` sets them in completed rows.

        Raises:
            FieldError: a field that a recorder needs is missing or is something else, or it does not fill a `per_row`
                field that `zeros` leaves out. ArgumentError, SchemaError: numbers that do not fit the store.
        """
        return StepRecorder(
            self.columns,
            n_envs,
            observations=observations,
            publish_every=publish_every,
            overlap=overlap,
            priority=priority,
            autoreset=autoreset,
            share_rows=share_rows,
            zeros=zeros,
        )

    def agent_recorder(self, agents: int, **options: Any) -> AgentRecorder:
        """A recorder of agents that come and go, as PettingZoo's parallel environments have them: dicts by agent.

        Args:
            agents: that can be in an episode at once, those that end in a step and those that begin with it together:
                `len(env.possible_agents)`.
            options: of `recorder`, but for `autoreset`.

        Raises:
            FieldError, ArgumentError, SchemaError: as for `recorder`.
        """
        if "autoreset" in options or "n_envs" in options:
            raise ArgumentError("agents begin when they are observed: leave out autoreset and n_envs")
        check_keywords("agent_recorder", options, self.recorder)
        if not 1 <= check_whole("agents", agents) < 2**32:
            raise ArgumentError(f"agents must be at least 1, and below 2**32, found {shown(agents)}")
        return AgentRecorder(self.recorder(agents, autoreset="disabled", **options))

    # --- changing and removing ------------------------------------------------------------------------------

    def update_priorities(self, keys: Keys | ArrayLike, priorities: ArrayLike) -> int:
        """Sets the priorities of rows, or of steps, by key; returns how many keys were stale and skipped.

        Args:
            keys: of committed rows; with `priority_per="step"` those of steps, as batches have them. A key given twice
                gets the last of its priorities. Also their numbers, as `ReplayDataset` yields them.
            priorities: (n,) finite and >= 0. All are checked before any is set.

        Raises:
            ArgumentError: keys of another store (`geartrain.Replay.update_priorities` takes those of several), or of
                rows where priorities are of steps, or the other way round. None of the priorities is set.
            SchemaError: a priority that is none, or a step that no row can have.

        Cost: no lock (one with the lowest_priority remover or max_times_sampled); a cache miss per level of the tree.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        column = as_column(priorities, len(keys), np.float64, "priorities")
        if column is None:
            raise SchemaError("update_priorities needs priorities, found None")
        return set_priorities(self, keys, column)

    def raise_priorities(self, power: float) -> None:
        """Raises the priorities of all rows, or steps, to a power; zero stays zero.

        For prioritized replay whose alpha changes: the power is the new alpha divided by the old one. Priorities
        that other processes set meanwhile are raised or not.

        Raises:
            ArgumentError: the power is not above zero and finite.

        The priority of new rows is raised with them (`Store.create(..., new_priority="max")`).

        Cost: a pass over the priorities, about 20 ns each. With new_priority="max" inserts and updates wait meanwhile.
        """
        if not check_real("power", power) > 0:
            raise ArgumentError(f"priorities are raised to a finite power above zero, found {power}")
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
        """Writes fields of committed rows in place, by key; returns how many rows were skipped.

        For advantages and returns that are computed again, or states of a recurrent network. Keys, priorities, lengths
        and places stay as they are. Who reads such a row meanwhile (`fetch`, batches, a checkpoint) gets it as it was
        before or as it is afterwards, never a mix of both. A process that is killed inside costs the row that it was
        writing: it is reclaimed, and counted in `stats()["reclaimed"]`.

        Args:
            keys: rows of this store. Those that are stale, or that their writer still extends, are skipped.
            fields: some of the store's: an array or tensor (n, t, *shape) each, or (n, *shape) of fields without time.
            starts: (n,) the row's step that the first of the t is written to; by default 0. `batch.start` of a batch
                of windows that are padded behind.
            lengths: (n,) how many of the t are written; by default all. What would lie behind a row's last step is
                padding, and left out.
            casting: as in `insert`.

        Raises:
            ArgumentError: keys of another store. SchemaError, FieldError: arrays that do not fit, or steps behind the
                longest row. Nothing is written.
            SchemaError: an earlier build made the segment; save it, and load the checkpoint.

        Cost: a copy under the store's lock, which is held for 64 KB or one row at a time.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        return rewrite_rows(self.columns, keys, fields, starts, lengths, casting)

    def delete(self, keys: Keys | ArrayLike) -> int:
        """Removes rows, by key; returns how many were already gone.

        Raises:
            ArgumentError: keys of another store. No row is removed.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        return int(self.native.remove(keys.row, keys.generation))

    def evict(self, n: int, by: Callable[[Keys], ArrayLike]) -> Keys:
        """Removes the n rows that an order of one's own puts first; returns their keys.

        For orders that no `remover` has. Called before the store is full it makes room for the next n rows in one
        batch, so that the remover finds nothing to do.

        Args:
            n: rows to remove; all where there are fewer.
            by: gets the keys of all rows that can be removed, oldest first, and returns a number for each, (m,). The
                lowest go; of equals the oldest.

        Raises:
            ArgumentError: n is no whole number above zero, or `by` is no function; SchemaError: `by` returned no number
                for each row, or NaN.

        Cost: that of `by`, and a sort. Rows that others remove or commit meanwhile are not counted.
        """
        if check_whole("the number of rows", n) < 1:
            raise ArgumentError(f"at least one row must be evicted, found {n}")
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
        """Removes the rows older than `max_age_s`; returns how many. Sampling and inserting do it as well."""
        return int(self.native.expire())

    def reap(self) -> int:
        """Reclaims the blocks of dead processes; returns how many processes were found dead.

        Also done when a process joins, when free rows run out, and, where sums of priorities are concerned, by whoever
        draws.
        """
        return int(self.native.reap())

    def audit(self) -> list[str]:
        """Everything in the store's metadata that is inconsistent, a sentence each; empty for a sound store."""
        return list(self.native.audit())
