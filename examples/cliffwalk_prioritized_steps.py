"""Prioritized replay over steps against uniform replay, on the blind cliffwalk.

Learns the value of each state in a few seconds, once with each kind of replay, and prints the updates that each took.

    python examples/cliffwalk_prioritized_steps.py --states 8

In each state one action leads on and the other one over the cliff. Only the last step brings a reward, and random play
reaches it once in 2 ** states episodes. So a handful of thousands of recorded steps carry information, one after the
other, from the end. Uniform draws rarely hit them; draws by the last TD error find them (Schaul et al., 2016,
section 2).
"""

from __future__ import annotations

import argparse

import numpy as np

import geartrain as gt
from geartrain.selection import Prioritized, Strategy, Uniform

GAMMA = 0.9
LEARNING_RATE = 0.5
FIELDS = {"obs": gt.Field((1,), "float32"), "action": gt.Field((), "int64"), "reward": gt.Field((), "float32")}


def record(store: gt.Store, states: int, seed: int) -> None:
    """Episodes of random play, until two of them have reached the end."""
    rng = np.random.default_rng(seed)
    with store.recorder(autoreset="disabled") as recorder:
        solved = 0
        while solved < 2:
            recorder.reset(np.zeros(1))
            for state in range(states):
                action = int(rng.integers(2))
                right = action == state % 2
                last = state == states - 1
                ends = last or not right
                recorder.step(
                    np.full(1, state + 1), action=action, reward=float(right and last), terminated=ends, truncated=False
                )
                if ends:
                    solved += right
                    break


def updates_needed(store: gt.Store, strategy: Strategy, states: int, most: int = 100_000) -> int:
    """Updates of Q-learning from replayed transitions until its values are right to 5 %."""
    true = np.zeros((states + 1, 2))
    true[np.arange(states), np.arange(states) % 2] = GAMMA ** np.arange(states)[::-1]
    values = np.zeros_like(true)
    view = gt.Transitions(gamma=GAMMA)
    with gt.Replay(store, strategy, 8, view=view, prefetch=0, output="numpy") as replay:
        for update in range(most):
            batch = replay.sample()
            state, after = batch["obs"][:, 0].astype(int), batch["next_obs"][:, 0].astype(int)
            error = np.empty(len(batch))
            for i in range(len(batch)):
                target = batch["reward"][i] + batch["discount"][i] * values[after[i]].max()
                error[i] = target - values[state[i], batch["action"][i]]
                values[state[i], batch["action"][i]] += LEARNING_RATE * error[i]
            replay.update_priorities(batch.keys, np.abs(error) + 1e-3)
            if np.abs(values - true).max() < 0.05:
                return update + 1
    return most


def compare(states: int, seed: int) -> dict[str, int]:
    """Updates that each way of drawing needed, from the same episodes."""
    with gt.Store.create(
        FIELDS | gt.recorded_fields(FIELDS), max_length=states + 1, capacity=64 * 2**states, priority_per="step"
    ) as store:
        record(store, states, seed)
        uniform = updates_needed(store, Uniform(seed=seed, over="steps"), states)
        steps = store.keys()
        lengths = store.status(steps)["length"]
        for step in range(states + 1):  # as they were recorded
            there = steps[lengths > step]
            store.update_priorities(there.of_steps(step), np.ones(len(there)))
        return {"uniform": uniform, "prioritized": updates_needed(store, Prioritized(seed=seed), states)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for seed in range(given.seeds):
        print(f"seed {seed}: updates until the values are right:", compare(given.states, seed))


if __name__ == "__main__":
    main()
