"""Writing to a store: allocate, insert, record steps, set priorities, rewrite, delete and evict rows."""

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
    """A handle that also writes, changes and removes rows. Users have its subclass `Store`."""

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
        if not 1 <= check_whole("the number of rows", n) < 2**32:
            raise ArgumentError(f"at least one row must be asked for, and fewer than 2**32, found {shown(n)}")
        self.check_plain("its rows have no blocks to write in place; use insert")
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
        """Copies `n` rows into the store and returns their keys.

        Args:
            fields: for every field of the store an array or tensor (n, t, ...) of its dtype, t up to `max_length`. A
                `per_row` field is (n, ...).
            lengths: (n,) steps of each row; t by default.
            priorities: (n,) finite and >= 0; by default the store's `new_priority`.
            versions: (n,) integers; 0 by default.
            threads: threads that copy; by default up to 4 of the cores this process may use.
            casting: conversions to the fields' dtypes that are allowed, as in NumPy: "no", "safe" (int16 to float32) or
                "same_kind" (float64 to float32).

        Raises:
            SchemaError: an array has another shape or dtype than its field. Nothing is written.
            FieldError: a field is missing, or the store has no such field. Nothing is written.
            StoreFullError: too many blocks are being written.

        Cost: one copy, which bypasses the cache if it is large. A call takes about 2 us for C-contiguous NumPy arrays
        of the fields' dtypes without lengths, priorities and versions, and about 10 us otherwise. More than 1024 rows,
        or half the store's, are inserted in several parts. Each part is atomic.
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
        if "autoreset" in options or "n_envs" in options:
            raise ArgumentError("agents begin when they are observed: leave out autoreset and n_envs")
        check_keywords("agent_recorder", options, self.recorder)
        if not 1 <= check_whole("agents", agents) < 2**32:
            raise ArgumentError(f"agents must be at least 1, and below 2**32, found {shown(agents)}")
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
