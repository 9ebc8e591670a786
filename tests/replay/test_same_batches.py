"""One process and any ranks draw the same batches to the bit, whatever strategy, windows, view and rows they have.

Each strategy is tried with a few views, and each such case in a few ways, in turn: no product of all of them. What the
batches of one process are to be is shown elsewhere, against slow references.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from recorded_shards import Episodes, alone, over_ranks, same
from window_reference import middle

import geartrain as gt
from geartrain.selection import Epochs, Fifo, Lifo, Limits, Linear, Mixture, Prioritized, TopK, Uniform

B = 30


def goal_reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return np.abs(achieved - desired).sum(-1) + 0.25


#: Shards, ranks and options. Of the shards the second of several is empty.
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "three": (3, 3, {}),
    "three of one shard": (1, 3, {}),
    "two in order": (2, 2, {"assignment": "ordered"}),
    "one": (1, 1, {}),
    "one host": (3, 3, {"one_host": True, "assignment": "ordered"}),
    "five": (5, 5, {}),
    "six of two": (2, 6, {"prefetch": 1}),
}
#: Of any strategy.
VIEWS: dict[str, dict[str, Any]] = {
    "n-step": {"view": gt.Transitions(n_step=3, gamma=0.9)},
    "padded": {"window": 7, "pad": "right"},
    "stack": {"view": gt.Transitions(frame_stack=3, obs=["obs.state"])},
    "whole": {"window": gt.Windows(4, whole=True)},
    "both": {"view": gt.Transitions(n_step=2, frame_stack=2, obs=["obs.state"]), "fields": ["obs.state"]},
    "first": {"window": gt.Windows(4, whole=True, anchor="first")},
    "goals": {"view": gt.Transitions(hindsight=gt.Hindsight(k=2, reward=goal_reward))},
    "window": {"window": 4},
    "stacked goals": {"view": gt.Transitions(frame_stack=2, hindsight=gt.Hindsight("episode", reward=goal_reward))},
}
#: Of strategies that choose rows.
PLACED: dict[str, dict[str, Any]] = {
    "at the start": {"window": gt.Windows(4, at="start")},
    "at the end": {"window": gt.Windows(4, at="end")},
    "every third": {"window": gt.Windows(4, anchor="first", stride=3)},
    "by a function": {"window": gt.Windows(4, at=middle)},
}
#: Of rows of several episodes.
OF_EPISODES: dict[str, dict[str, Any]] = {
    **{name: VIEWS[name] for name in ("n-step", "window", "stack", "whole", "first", "padded")},
    "rows": {},
    "episodes": {"window": gt.Windows(4, at="episode")},
}
FEW = Limits(min_version=57)  # 3 of 60 rows: most draws are refused 63 times
ROWS: dict[str, Any] = {
    "uniform": Uniform(seed=3),
    "stratified": Uniform(seed=4, stratified=True),
    "distinct": Uniform(seed=7, replacement=False, limits=Limits(min_length=3)),
    "prioritized": Prioritized(seed=6, beta=Linear(0.4, 1.0, 10)),
    "prioritized distinct": Prioritized(seed=8, replacement=False),
    "recent": Prioritized(seed=1, limits=Limits(min_version=40)),
    "few": Uniform(seed=6, limits=FEW),
    "top-k": TopK(),
    "oldest": Fifo(),
    "newest": Lifo(),
    "mixture": Mixture([0.7, 0.3], [Uniform(seed=1), Prioritized(seed=2, beta=0.5)], seed=3),
    "mixture without replacement": Mixture([0.7, 0.3], [Uniform(seed=1, replacement=False), Uniform()], seed=3),
}
STEPS: dict[str, tuple[str, Any]] = {
    "over steps": ("row", Uniform(seed=1, over="steps")),
    "by step": ("step", Prioritized(seed=2, beta=0.5)),
    "strata": ("step", Prioritized(seed=3, stratified=True, limits=Limits(min_version=20, min_length=4))),
    "few by step": ("step", Prioritized(seed=4, limits=FEW)),
    "uniform of steps": ("step", Uniform(seed=8, over="steps")),
    "newest with steps": ("step", Lifo()),
    "passes": ("row", Epochs(seed=9, over="steps")),
    "mixture of steps": ("step", Mixture([0.7, 0.3], [Prioritized(beta=0.5), Prioritized(beta=0.5)], seed=3)),
}
MARKED: dict[str, tuple[str, Any]] = {
    name: STEPS[name] for name in ("over steps", "by step", "uniform of steps", "passes")
}


def cases(each: int) -> list[Any]:
    """`each` views of every strategy, another one first for each."""
    found = []
    for rows, strategies, views in (
        ("rows", {name: ("row", one) for name, one in ROWS.items()}, {**PLACED, **VIEWS}),
        ("rows", STEPS, VIEWS),
        ("shared rows", MARKED, OF_EPISODES),
    ):
        names = itertools.cycle(views)
        for strategy, (per, selection) in strategies.items():
            for view in itertools.islice(names, each if each < len(views) else len(views)):
                if "episode" in view and per == "step" and isinstance(selection, Prioritized):
                    continue  # episodes have no priority
                if not views[view] and per == "step" and isinstance(selection, Prioritized):
                    continue  # nor have whole rows
                marks = 0.25 if rows == "shared rows" else 0.0
                given = (len(found), marks, per, selection, views[view])
                found.append(pytest.param(*given, id=f"{rows}-{strategy}-{view}"))
    return found


def check_ways(ways: list[str], marks: float, per: str, selection: Any, options: dict[str, Any], seed: int = 0) -> None:
    passes = isinstance(selection, Epochs)
    least = 4 if marks or "oldest" in str(options) or isinstance(selection, Fifo) else 1
    some = [Episodes(60, seed=seed, least=least, marks=marks)]
    some += [Episodes(50, seed=seed + 2)] * isinstance(selection, Mixture)

    def batches(shards: int, draw: Any) -> Any:
        """What is drawn from those shards."""
        with (
            some[0].stores(shards, full=passes, priority_per=per) as stores,
            some[-1].stores(shards, part=7, priority_per=per) as others,
        ):
            return draw([list(pair) for pair in zip(stores, others, strict=True)] if len(some) > 1 else stores)

    expected = batches(1, lambda stores: alone(stores[0], selection, B, 2, **options))
    for name in ways:
        shards, ranks, more = WAYS[name]
        settings = {**options, **more}
        found, figures = batches(
            shards, lambda stores, r=ranks, s=settings: over_ranks(stores, selection, B, 2, ranks=r, **s)
        )
        differ = [
            field
            for one, other in zip(found, expected, strict=True)
            for field in one.keys() | other.keys()
            if field not in one or field not in other or one[field].tobytes() != other[field].tobytes()
        ]
        assert all(map(same, found, expected)), f"{name}: other {differ}"
        assert not marks or sum(each["redrawn"] for each in figures) == 0, "steps are refused by the draws"


def turn(number: int, ways: int) -> list[str]:
    """The ways whose turn it is with a case of that number."""
    every = list(WAYS)
    return [every[(number * ways + i) % len(every)] for i in range(ways)]


@pytest.mark.parametrize(("number", "marks", "per", "selection", "options"), cases(2))
def test_ranks_draw_what_one_process_draws(
    number: int, marks: float, per: str, selection: Any, options: dict[str, Any]
) -> None:
    check_ways(turn(number, 3), marks, per, selection, options)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "marks", "per", "selection", "options"), cases(20))
def test_every_strategy_with_every_view(
    number: int, marks: float, per: str, selection: Any, options: dict[str, Any]
) -> None:
    check_ways(turn(number, 2), marks, per, selection, options, seed=1)
