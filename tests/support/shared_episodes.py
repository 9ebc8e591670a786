"""Episodes whose every step follows from its recorder, environment and number; proof of the rows that they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain as gt
from geartrain.store.recorder import EPISODES, recorded_fields

FIELDS = recorded_fields(
    {"obs": gt.Field((4,), "uint64"), "action": gt.Field((), "uint64")},
    share_rows=True,
    truncated=gt.Field((), "bool"),
)
#: Steps of a row, of which the longest episodes have more.
ROW, LONGEST, ENVIRONMENTS = 24, 40, 3
_MASK = (1 << 64) - 1

#: Of a recorder, an environment of it, and its episode.
Episode = tuple[int, int, int]


def mixed(*numbers: int) -> int:
    """A number that follows from these."""
    found = 0x9E3779B97F4A7C15
    for number in numbers:
        found = ((found ^ number) * 0xD6E8FEB86659FD93) & _MASK
        found ^= found >> 32
    return found


def length_of(episode: Episode) -> int:
    """Actions of an episode: mostly few, and now and then more than a row has steps."""
    drawn = mixed(*episode)
    return 1 + drawn % (LONGEST if drawn % 11 == 0 else 6)


def observation(episode: Episode, step: int) -> list[int]:
    """What is seen before the action of that number."""
    return [episode[0] << 8 | episode[1], episode[2], step, mixed(*episode, step)]


class Environments:
    """Environments that a recorder's steps come from.

    Attributes:
        at: of each environment, its episode and the number of its next action.
    """

    def __init__(self, recorder: int) -> None:
        self.at = [((recorder, environment, 0), 0) for environment in range(ENVIRONMENTS)]

    def seen(self) -> NDArray[np.uint64]:
        """The observations that are acted on next."""
        return np.array([observation(*each) for each in self.at], np.uint64)

    def step(self, record: Callable[..., Any]) -> list[Episode]:
        """One step of all environments, given to `StepRecorder.step`; returns the episodes that it ends."""
        ends = np.array([step + 1 == length_of(episode) for episode, step in self.at])
        final = np.array([observation(episode, step + 1) for episode, step in self.at], np.uint64)
        after = [
            ((episode[0], episode[1], episode[2] + 1), 0) if end else (episode, step + 1)
            for (episode, step), end in zip(self.at, ends, strict=True)
        ]
        record(
            np.array([observation(*each) for each in after], np.uint64),
            action=np.array([mixed(*episode, step, 1) for episode, step in self.at], np.uint64),
            terminated=ends,
            truncated=np.zeros(ENVIRONMENTS, bool),
            final_obs=final,
        )
        ended = [episode for (episode, _), end in zip(self.at, ends, strict=True) if end]
        self.at = after
        return ended


def prove(store: gt.Store, ended: Iterable[Episode]) -> list[str]:
    """What is wrong with the rows of recorders without overlap.

    Every step is one that was taken and is there once; an episode is there from its first step on without a gap, and
    wholly where the call that ended it has returned; marks are where episodes or pieces of them end; and a row's number
    of episodes is that of those whose steps it has.

    Args:
        ended: episodes whose last call has returned.
    """
    found: list[str] = []
    taken: Counter[tuple[Episode, int]] = Counter()
    status = store.status()
    columns = {name: store.column(name) for name in FIELDS}
    for row, length in zip(store.keys().row.tolist(), status["length"].tolist(), strict=True):
        at = {name: columns[name][row][:length] for name in FIELDS if name != EPISODES}
        pieces = _steps_of_row(at, length, taken, f"row {row}", found)
        number = int(columns[EPISODES][row])
        if number != pieces:
            found.append(f"row {row} says that it has {number} episodes, and has {pieces}")
    found += [f"{episode} step {step} is there {n} times" for (episode, step), n in taken.items() if n != 1]
    steps: dict[Episode, list[int]] = {}
    for episode, step in sorted(taken):
        steps.setdefault(episode, []).append(step)
    found += [f"{each} has steps {has}" for each, has in steps.items() if has != list(range(len(has)))]
    lost = [each for each in ended if len(steps.get(each, [])) != length_of(each)]
    return found + [f"{each}, which has ended, has steps {steps.get(each)} of {length_of(each)}" for each in lost]


def _steps_of_row(
    at: dict[str, NDArray[Any]], length: int, taken: Counter[tuple[Episode, int]], name: str, found: list[str]
) -> int:
    """Notes the actions of one row; returns how many episodes, or pieces of them, it has."""
    pieces = 0
    expected: tuple[Episode, int] | None = None
    for i in range(length):
        who, number, step, check = (int(each) for each in at["obs"][i])
        episode = (who >> 8, who & 255, number)
        if check != mixed(*episode, step):
            found.append(f"{name} step {i} is torn: {at['obs'][i]}")
            return pieces
        if expected is not None and (episode, step) != expected:
            found.append(f"{name} step {i} is {episode} step {step}, and should be {expected}")
        pieces += expected is None or expected[1] == 0
        if at["last"][i]:
            if at["action"][i] or at["terminated"][i]:
                found.append(f"{name} step {i} is marked, and has an action or an end")
            if step == length_of(episode):
                expected = ((*episode[:2], number + 1), 0)
            elif i + 1 != length:
                found.append(f"{name} step {i} is marked in the middle of {episode}")
            continue
        taken[episode, step] += 1
        if int(at["action"][i]) != mixed(*episode, step, 1):
            found.append(f"{name} step {i} has another action than was taken")
        if bool(at["terminated"][i]) != (step + 1 == length_of(episode)):
            found.append(f"{name} step {i} has terminated={at['terminated'][i]}, and is step {step} of {episode}")
        expected = (episode, step + 1)
    return pieces
