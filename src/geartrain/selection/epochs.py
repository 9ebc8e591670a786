"""`Epochs`: visits every row, or every step, once a pass in shuffled order.

A pass covers one store, or the shards of many ranks. Its order is a keyed permutation of row slots
(native/selection/epochs.h). The permutation is computed and not stored, so the state of a pass is a few numbers for any
number of rows.

The pass looks at a slot when it reaches it. If the row was evicted by then, the pass skips it. If the row was inserted
during the pass, which its sequence number shows, it belongs to the next pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import FLAG, SEED, Options, check_choice, checked
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError, TurnoverError
from geartrain.selection.declared import check_n
from geartrain.selection.sharded import NO_ROW, Shard, ShardedDraw
from geartrain.selection.strategy import Candidates, Draw, Redraw, seed_of

#: Positions that one call looks at, at most.
_MOST_POSITIONS = 1 << 22


class Taken(NamedTuple):
    """The next rows of a pass, as arrays (n,): as many as requested, or fewer at the end of the pass.

    Attributes:
        shard: shard of each row, the same on all ranks.
        rows, generations, steps: for rows of this rank's shard only.
        state: state before the next rows; that of the next pass if this one is over.
        rest: state of this pass after these rows, to take further rows of it if any are left.
        over: whether the pass ends with these rows.
    """

    shard: NDArray[np.int64]
    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    steps: NDArray[np.uint32]
    state: dict[str, int]
    rest: dict[str, int]
    over: bool


@dataclass(frozen=True)
class Epochs(Options):
    """Draws every row, or step, once a pass, like a shuffling `DataLoader` or `DistributedSampler`.

    `for batch in replay` runs one pass, or `num_batches` if that ends first. The next `for` runs the next pass, in
    another order. `sample` continues from pass to pass. There is no `set_epoch` to call: `Replay.state_dict` holds the
    position.

    - Rows committed during a pass belong to the next one. A row that is still being extended when a pass begins belongs
      to a pass that begins after its end.
    - Rows that are removed before their turn are skipped. `Replay.stats()` has `epoch`, `skipped` and `dropped`.
    - Over several ranks (`group=`) all shards are one dataset, and each rank gets its part of every global batch. The
      parts of a pass's last batch differ by at most one row, so some may be empty.
    - In a `Mixture` each store continues from pass to pass, even within a batch, so that all batches have one size and
      the iteration does not end. `drop_last` then leaves out less than the store's rows of one batch.
    - Over several ranks batches are in host memory.

    Args:
        shuffle: draw in a random order, another one each pass; False draws in the order of the store's rows.
        drop_last: leave out the rows at the end of a pass that do not fill a batch; otherwise the last batch is
            smaller.
        over: "rows", or "steps" for windows that end, or transitions that begin, at each step once. With `Windows(...,
            at="episode")` "steps" draws each episode once.
        seed: seed of the order, 0 to 2**64 - 1; by default `Replay` derives it from its own.

    Raises:
        ArgumentError: an argument is out of range.

    Cost: about 30 ns and a row's cache misses for each place in the store, used or not; twice that with drop_last. A
    pass begins with one scan of the rows.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64", per_row=True)}, max_length=1, capacity=10)
        >>> _ = store.insert({"x": np.arange(10)})
        >>> with gt.Replay(store, gt.selection.Epochs(seed=0), batch_size=4, output="numpy") as replay:
        ...     passes = [[batch["x"].tolist() for batch in replay] for epoch in range(2)]
        >>> [[len(batch) for batch in one] for one in passes]
        [[4, 4, 2], [4, 4, 2]]
        >>> [sorted(sum(one, [])) == list(range(10)) for one in passes], passes[0] != passes[1]
        ([True, True], True)
        >>> store.close()
    """

    shuffle: bool = field(default=True, metadata=FLAG)
    drop_last: bool = field(default=False, metadata=FLAG)
    over: Literal["rows", "steps"] = field(default="rows", metadata=checked(check_choice, ("rows", "steps")))
    seed: int | None = field(default=None, metadata=SEED)

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        state: Mapping[str, int] | None = None,
        redraw: Redraw | None = None,
    ) -> Draw:
        """Chooses the next rows of the pass: fewer than `n` at its end, unless `drop_last` leaves them out.

        Args:
            candidates, n, step, state, redraw: as in `Strategy.select`.

        Raises:
            EmptyStoreError, NotEnoughRowsError: there are no rows, or less than a batch.
            TurnoverError: `redraw` was given. Another row in the place of a lost one would be in the pass twice.
        """
        taken = self._next(_alone(candidates), n, self._of_rows(state, redraw))
        return Draw(taken.rows, taken.generations, np.ones(len(taken.rows)), state=taken.state)

    def select_shards(self, shard: Shard, n: int, step: int, *, state: Mapping[str, int] | None) -> ShardedDraw:
        """Internal: the next n rows of the pass over all shards; see `geartrain.selection.sharded`."""
        taken = self._next(shard, n, self._of_rows(state, None))
        ones = np.where(taken.shard == shard.number, 1.0, 0.0)
        return ShardedDraw(taken.shard, taken.rows, taken.generations, ones, taken.state)

    def _of_rows(self, state: Mapping[str, int] | None, redraw: Redraw | None) -> Mapping[str, int] | None:
        if redraw is not None:
            raise TurnoverError(
                "a row was overwritten while a pass over ranks read it, and a replacement would be in the "
                "pass twice: let writers wait until the pass is over, or give the store more capacity"
            )
        if self.over == "steps":
            raise ArgumentError(
                "only a Replay can run passes over steps: it knows which steps of a row its windows need"
            )
        return state

    def _next(self, shard: Shard, n: int, state: Mapping[str, int] | None) -> Taken:
        taken = self.take(shard, n, state)
        while not len(taken.rows):  # the rest of the pass went since the batch before
            taken = self.take(shard, n, taken.state)
        return taken

    @staticmethod
    def joined(taken: Taken, kept: NDArray[np.intp], more: Taken) -> Taken:
        """Internal: some of the rows that were taken, and then more of the pass."""
        return Taken(
            np.concatenate([taken.shard[kept], more.shard]),
            np.concatenate([taken.rows[kept], more.rows]),
            np.concatenate([taken.generations[kept], more.generations]),
            np.concatenate([taken.steps[kept], more.steps]),
            more.state,
            more.rest,
            more.over,
        )

    def take(
        self,
        shard: Shard,
        n: int,
        state: Mapping[str, int] | None,
        *,
        row_steps: int = 0,
        need: int = 0,
        stride: int = 1,
        episodes: bool = False,
        needs: tuple[int, int, int] = (0, 0, 0),
        of_batch: int | None = None,
        same_n: bool = True,
    ) -> Taken:
        """Internal: takes the next n rows or steps of the pass; the first call of a pass begins it.

        Args:
            state: `Taken.state` of the call before; None at the very first.
            row_steps: the most steps of a row, if steps are taken; 0 for rows.
            need: steps at a row's end that do not count.
            stride: only every stride-th of the others counts, and `Taken.steps` are their numbers.
            episodes: only steps that begin an episode count.
            needs: steps needed before and after a step, and the distance from its number to it, if rows repeat steps
                of the row before; see `StepPlan`.
            of_batch: these replace some rows of a batch of this many; fewer than n are fine.
            same_n: the next batch takes as many. With drop_last the pass then ends as soon as fewer are left;
                otherwise, as in a mixture, when a batch finds too few.

        Raises:
            EmptyStoreError: the pass has no rows.
            NotEnoughRowsError: with drop_last, less than one batch.
            ArgumentError: the state is of other stores.
        """
        check_n(n)
        native = shard.candidates.native
        mine = native.rows() * max(row_steps, 1)
        now = dict(state or {})
        epoch, skipped, dropped = (now.get(name, 0) for name in ("epoch", "skipped", "dropped"))
        if any(not 0 <= value < 2**64 - 1 for value in now.values()):
            raise ArgumentError(f"the numbers of a pass are from 0 to 2**64 - 2, found {now}")
        names = [
            "position",
            "given",
            "count",
            *(f"{what}/{i}" for i in range(shard.count) for what in ("upto", "places")),
        ]
        if "position" in now and (lacking := [name for name in names if name not in now]):
            raise ArgumentError(f"this is no state of a pass over such stores: it has no {', '.join(lacking)}")
        if "position" not in now:
            all_shards = shard.gather(
                np.array([*native.begin_pass(row_steps, need, stride, episodes, needs), mine], np.uint64)
            )
            now |= {"position": 0, "given": 0, "count": int(all_shards[:, 1].sum())}
            for number, (upto, _, places) in enumerate(all_shards.tolist()):
                now |= {f"upto/{number}": upto, f"places/{number}": places}
        places = [now.get(f"places/{number}", -1) for number in range(shard.count)]
        if places[shard.number] != mine or f"places/{shard.count}" in now:
            raise ArgumentError("the state is of a pass over other stores: as many, of the same capacities")
        first, total = sum(places[: shard.number]), sum(places)
        if now["count"] == 0:
            raise EmptyStoreError("a pass needs at least one selectable row")
        ahead = (of_batch or n) if self.drop_last and same_n else 1  # with fewer left than these, the pass is over
        wanted = n + ahead
        found: list[NDArray[np.int64]] = []  # position, owner, row, generation, step
        position, have = now["position"], 0
        while have < wanted and position < total:
            span = min(
                total - position, int(1.1 * (wanted - have) * total / now["count"]) + 64, _MOST_POSITIONS
            )  # >= 1
            taken, rows, generations, steps = native.find_in_pass(
                seed_of(self),
                epoch,
                self.shuffle,
                first,
                total,
                now[f"upto/{shard.number}"],
                row_steps,
                need,
                position,
                span,
                stride,
                episodes,
                needs,
            )
            flags = np.unpackbits(shard.gather(np.packbits(taken)), axis=1, count=span)
            at = np.flatnonzero(flags.any(0))
            known = taken[at] != 0
            owner = flags[:, at].argmax(0)
            rows, generations = np.where(known, rows[at], NO_ROW), np.where(known, generations[at], 0)
            found.append(np.stack([at + position, owner, rows, generations, steps[at]]).astype(np.int64))
            have, position = have + len(at), position + span
        every = np.concatenate(found, axis=1) if found else np.empty((5, 0), np.int64)
        short = self.drop_last and of_batch is None and have < n
        if short and now["position"] == 0:
            raise NotEnoughRowsError(f"a pass has {have} rows, less than a batch of {n}, and drop_last leaves them out")
        chosen = every[:, : 0 if short else n]
        given, left = now["given"] + chosen.shape[1], have - chosen.shape[1]
        over = short or left < ahead
        rest = {**now, "given": given}
        if chosen.shape[1]:
            rest["position"] = int(chosen[0, -1]) + 1
        after = rest
        if over:
            gone = max(0, now["count"] - given - left)
            after = {"epoch": epoch + 1, "skipped": skipped + gone, "dropped": dropped + left}
        _, owner, rows, generations, steps = chosen
        keys = rows.astype(np.uint32), generations.astype(np.uint32), steps.astype(np.uint32)
        return Taken(owner, keys[0], keys[1], keys[2], after, rest, over)


def _alone(candidates: Candidates) -> Shard:
    return Shard(candidates, 0, 1, lambda array: array[None])


__all__ = ["Epochs", "Taken"]
