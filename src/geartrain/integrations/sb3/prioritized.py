"""Prioritized experience replay for Stable-Baselines3, which has none of its own: `PrioritizedReplayBuffer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import check_real
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError
from geartrain.integrations.sb3.n_step import NStepReplayBuffer
from geartrain.integrations.sb3.replay_buffer import ReplayBuffer
from geartrain.integrations.transitions.draws import DrawnWindows, TransitionDraws
from geartrain.replay.replay import Replay
from geartrain.selection.random import Prioritized, checked_beta
from geartrain.selection.strategy import Strategy
from geartrain.store.segment import PriorityPer
from geartrain.store.store import Store

# Beside a store's fields, windows have the key of the step that was drawn, its probability, and which of the draws of
# one batch it is from; of names that no observation has.
_ROW, _GENERATION, _STEP, _PROBABILITY = "drawn.row", "drawn.generation", "drawn.step", "drawn.probability"
_DRAW = "drawn.draw"


class PrioritizedReplayBufferSamples(NamedTuple):
    """`ReplayBufferSamples` of Stable-Baselines3 with importance weights and keys, also for dict observations."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor  # (B, 1) float32; the largest of a batch is 1
    keys: Keys  # of the transitions, for `update_priorities`


class PrioritizedReplayBuffer(NStepReplayBuffer):
    """Proportional prioritized experience replay (Schaul et al., 2016) over a store; see `ReplayBuffer`.

    A transition is drawn with a probability exactly proportional to (|td_error| + min_priority) ** alpha. The sum tree
    is in shared memory, so all processes see each other's priorities. A new transition gets the largest priority that
    any process has set so far, and 1 before the first.

    The algorithm must weight its loss and pass the TD errors back. Stable-Baselines3's algorithms do not;
    `PrioritizedDQN` does:

        batch = buffer.sample(256)
        loss = (batch.weights * elementwise_loss).mean()
        buffer.update_priorities(batch.keys, td_error)

    Args:
        alpha: how much priorities count: 0 for uniform draws.
        beta: exponent of the importance weights (N * probability) ** -beta; 1 corrects fully. It moves to `final_beta`
            as `update_priorities` learns the training progress.
        min_priority: number above 0 that is added to errors, so that every transition can be drawn again.
        n_steps: number of rewards to sum, as in `NStepReplayBuffer`. With 1, the default, a batch has no `discounts`.
        gamma: discount of a step, with n_steps above 1.

    Attributes:
        beta: current exponent of the weights; can be set.
        max_priority: the |td_error| that gives new transitions their priority.

    Raises:
        ArgumentError: numbers out of range.
    """

    priority_per: PriorityPer = "step"

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        final_beta: float = 1.0,
        min_priority: float = 1e-6,
        n_steps: int = 1,
        gamma: float = 0.99,
        **kwargs: Any,
    ) -> None:
        check_real("alpha", alpha, 0)
        check_real("min_priority", min_priority, above=0)
        self.alpha = float(alpha)
        self.initial_beta = self.beta = checked_beta(beta)
        self.final_beta = checked_beta(final_beta)
        self.min_priority = float(min_priority)
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)

    def _make_draws(self) -> PrioritizedDraws:
        return PrioritizedDraws(self.store, self.drawn_fields(), self.reach)

    def _stored(self, error: Any) -> Any:
        """Priorities of transitions, by the absolute values of their errors."""
        return (error + self.min_priority) ** self.alpha

    @property
    def max_priority(self) -> float:
        """Largest |td_error| so far, whose priority new transitions get."""
        return float(self.store.new_priority ** (1 / self.alpha)) - self.min_priority if self.alpha else 1.0

    def update_priorities(self, keys: Keys, td_errors: ArrayLike, progress_remaining: float | None = None) -> int:
        """Sets the priorities of transitions of earlier batches; returns how many of them are gone.

        Args:
            keys: of a batch.
            td_errors: (n,) or (n, 1), a tensor or an array, of any sign.
            progress_remaining: the algorithm's `_current_progress_remaining`, by which `beta` moves from its first
                value at 1 to `final_beta` at 0 (and below: algorithms may end late).

        Raises:
            ArgumentError: keys of another buffer, or progress out of range. SchemaError: an error that is not finite.
                No priority is set.
        """
        tensor: Any = td_errors
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.detach().to("cpu", torch.float64).numpy()  # NumPy has no bfloat16
        errors = np.asarray(tensor)
        if errors.size != len(keys):
            raise ArgumentError(f"{len(keys)} transitions have td_errors of shape {errors.shape}")
        if progress_remaining is not None and not progress_remaining <= 1:
            raise ArgumentError(f"progress_remaining goes from 1 to 0, found {progress_remaining}")
        errors = np.abs(errors.reshape(-1), dtype=np.float64)
        stale = self.store.update_priorities(keys, self._stored(errors))
        if progress_remaining is not None:
            self.beta = self.final_beta + max(0.0, float(progress_remaining)) * (self.initial_beta - self.final_beta)
        return stale

    def _drawn_by_number(self, batch_size: int) -> DrawnWindows:
        raise NotEnoughRowsError("no transition can be drawn: nothing was added yet, or all have priority 0")

    def windows_of(self, number: NDArray[np.int64]) -> DrawnWindows:
        """The windows of transitions by number, each drawn with the same probability."""
        keys, step = self.index.find(number)
        drawn = np.minimum(step + self.reach - 1, self.store.max_length - 1)
        extras: dict[str, NDArray[Any]] = {
            _ROW: keys.row,
            _GENERATION: keys.generation,
            _STEP: drawn.astype(np.uint32),
            _PROBABILITY: np.ones(len(number)),
        }
        return DrawnWindows(self.windows_at(keys, step, self.drawn_fields()).fields | extras)

    def samples_of(self, windows: DrawnWindows, env: Any) -> Any:
        """A batch with weights and keys."""
        make = ReplayBuffer.samples_of if self.n_steps == 1 else NStepReplayBuffer.samples_of
        fields = windows.fields
        probability = fields[_PROBABILITY]
        # The number of transitions cancels out where the largest is to be 1.
        weights = (probability.min() / probability) ** checked_beta(self.beta)
        keys = Keys.of_rows(fields[_ROW], fields[_GENERATION], self.store.id).of_steps(fields[_STEP])
        weight = self.tensor_of(weights.astype(np.float32).reshape(-1, 1))
        return PrioritizedReplayBufferSamples(**make(self, windows, env)._asdict(), weights=weight, keys=keys)


class PrioritizedDraws(TransitionDraws):
    """Draws transitions by the priorities of their windows' last steps.

    A window that does not begin with a transition never will later. Its step loses its priority when it is first drawn.
    """

    def __init__(self, store: Store, fields: Sequence[str], reach: int) -> None:
        super().__init__(store, fields, reach)
        self._store = store
        self._draw = 0  # of the batch that is being made

    def sample(self, n: int) -> DrawnWindows | None:
        """n windows whose first transition is drawn by its priority; None where none has any."""
        self._draw = 0
        try:
            windows = super().sample(n)
        except EmptyStoreError:
            return None
        if windows is not None and self._draw > 1:
            self._equalize(windows.fields)
        return windows

    def _equalize(self, fields: dict[str, NDArray[Any]]) -> None:
        """Makes the probabilities of several draws comparable: steps that lost their priorities between two of them
        have changed the total, so each draw's are multiplied by its own total."""
        keys = Keys.of_rows(fields[_ROW], fields[_GENERATION], self._store.id).of_steps(fields[_STEP])
        probability, draw = fields[_PROBABILITY], fields[_DRAW]
        totals = self._store.status(keys)["priority"] / probability
        there = totals > 0  # not those of rows that are gone
        if not there.any():
            return
        total = np.full(self._draw, np.median(totals[there]))
        for each in np.unique(draw[there]):
            # The median, since another process may have set a few of the priorities anew.
            total[each] = np.median(totals[there & (draw == each)])
        probability *= total[draw]

    def _batch(self, replay: Replay) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        arrays, real, batch = self.gathered(replay)
        keys = batch.keys
        if not real.all():
            without = keys[~real]
            self._store.update_priorities(without, np.zeros(len(without)))
        extras = {_ROW: keys.row, _GENERATION: keys.generation, _STEP: keys.step, _PROBABILITY: batch.probability}
        extras[_DRAW] = np.full(len(keys), self._draw)
        self._draw += 1
        return arrays | extras, real

    def _strategy(self, seed: int) -> Strategy:
        return Prioritized(seed=seed)


__all__ = ["PrioritizedReplayBuffer", "PrioritizedReplayBufferSamples"]
