"""Strategies, mixtures and replays refuse every value that is none at the door, by an ArgumentError that names it.

Every parameter of every constructor gets every value of a list of awkward ones. What is allowed stands here once more,
as simply as it can be said, so a value that slips through fails as well as one that is refused by some other error.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from hostile.values import flag, number, whole
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, GeartrainError
from geartrain.selection import (
    Fifo,
    GroupSampling,
    Lifo,
    Limits,
    Linear,
    Mixture,
    Prioritized,
    TopK,
    Traits,
    Uniform,
)

VALUES: list[Any] = [
    None, True, False, np.True_, 0, 1, -1, 2, 8, 2**31, 2**32, 2**63, 2**64, 2**200, -(2**63) - 1,
    0.0, 0.5, 1.0, 2.5, -0.5, 1e300, -1e300, math.nan, math.inf, -math.inf, 10**400,
    np.int64(3), np.uint8(2), np.float32(0.5), np.float64("nan"), np.float32("inf"),
    "", "x", "1", "nan", b"1", [], [1], [0.5, 0.5], ["x"], [["x"]], [None], (), {}, {"x": 1}, set(), object(),
    Exception, 1j, Fraction(1, 2), np.array(1.0), np.array([1, 2]), np.array([[0.5]]), range(3),
    Uniform(), [Uniform()], Limits(),
]  # fmt: skip


def scalar(least: float, **options: Any) -> Callable[[Any], bool]:
    """Real numbers, of which the float is kept."""
    takes = number(least, **options)
    return lambda value: takes(float(value) if isinstance(value, Fraction) else value)


def limits(value: Any) -> bool:
    return value is None or isinstance(value, Limits)


SEED = whole(0, 2**64 - 1, none=True)
COMMON = {"seed": SEED, "limits": limits}
RANDOM = {**COMMON, "replacement": flag, "stratified": flag}
# Of each parameter what is allowed; functions are, where a schedule or a version is.
ALLOWED: dict[Any, dict[str, Callable[[Any], bool]]] = {
    Uniform: {**RANDOM, "over": lambda value: isinstance(value, str) and value in ("rows", "steps")},
    Prioritized: {
        **RANDOM,
        "alpha": lambda value: callable(value) or scalar(0, above=True)(value),
        "beta": lambda value: callable(value) or scalar(0, none=True)(value),
    },
    TopK: COMMON,
    Lifo: COMMON,
    Fifo: {**COMMON, "strict": flag},
    GroupSampling: {
        **COMMON, "by": lambda value: isinstance(value, str) and value != "",
        "size": whole(1, 2**31 - 1), "prioritized": flag,
        "attempt": lambda value: value is None or (isinstance(value, str) and value not in ("", "x")),
    },
    Limits: {
        "min_version": lambda value: callable(value) or whole(-(2**63), 2**63 - 1, none=True)(value),
        "max_age_s": scalar(0, above=True, none=True),
        "min_length": whole(0, 2**32 - 1),
    },
    Linear: {"start": scalar(-1e308), "end": scalar(-1e308), "steps": scalar(0)},
    Traits: {
        "form": lambda value: value == "custom" if isinstance(value, str) else False,
        "atom": whole(1, 2**31 - 1),
        **dict.fromkeys(("by_priority", "over_steps", "replacement", "stratified"), flag),
        **dict.fromkeys(("cursor", "strict", "stateless", "importance"), flag),
        "alpha": lambda value: callable(value) or scalar(0, above=True)(value),
        "limits": limits,
    },
}  # fmt: skip
GIVEN: dict[Any, dict[str, Any]] = {
    GroupSampling: {"by": "x", "size": 3},
    Linear: {"start": 0.5, "end": 1.0, "steps": 10},
    # With these no pair of flags contradicts another.
    Traits: {"form": "oldest"},
}


def test_no_parameter_is_left_out() -> None:
    for made, allowed in ALLOWED.items():
        assert set(inspect.signature(made).parameters) == set(allowed), made
    signatures = [inspect.signature(made).parameters for made in (gt.Replay, gt.ReplayOptions, gt.RankOptions)]
    given = set().union(*signatures) - {"store", "selection", "device", "options"}
    assert given == {*REPLAY, "group", "mesh"}


@pytest.mark.parametrize(
    ("made", "parameter"), [(made, name) for made, allowed in ALLOWED.items() for name in allowed], ids=str
)
def test_a_strategy_takes_what_is_allowed_and_refuses_the_rest(made: Any, parameter: str) -> None:
    for value in VALUES:
        arguments = {**GIVEN.get(made, {}), parameter: value}
        if parameter == "stratified" and made is not Traits:
            arguments["replacement"] = True
        if ALLOWED[made][parameter](value):
            if not contradictory(made, parameter, value):
                made(**arguments)
            continue
        with pytest.raises(ArgumentError) as refused:
            made(**arguments)
        assert len(str(refused.value)) < 500, value


def contradictory(made: Any, parameter: str, value: Any) -> bool:
    return made is Traits and (parameter == "form" or (parameter in ("stratified", "over_steps") and bool(value)))


REPLAY: dict[str, Callable[[Any], bool]] = {
    "batch_size": whole(1, 2**31 - 1),
    "fields": lambda value: value is None or value == ["x"],
    "window": whole(1, 2**31 - 1, none=True),
    "pad": lambda value: isinstance(value, str) and value in ("left", "right"),
    "first_only": lambda value: isinstance(value, (list, tuple)) and list(value) in ([], ["x"]),
    "prefetch": whole(0, 1024),
    "output": lambda value: isinstance(value, str) and value in ("torch", "numpy"),
    "num_batches": whole(0, 2**63 - 1, none=True),
    "min_rows": whole(1, 8, none=True),
    "min_steps": whole(1, 32, none=True),
    "threads": whole(1, 4096, none=True),
    "timeout_s": scalar(0, most=1e9),
    "update_lag": whole(2, 2048, none=True),  # and `prefetch` is 2
    "inputs": lambda value: value is None or value == ["x"],
    "targets": lambda value: value is None or value == ["x"],
    "assignment": lambda value: isinstance(value, str) and value in ("local_first", "ordered"),
    "seed": whole(0, 2**64 - 1),
    "view": lambda value: value is None,
    "transform": lambda value: value is None or callable(value),
    "balance": lambda value: value is None,  # and no axes
    "keep": lambda value: value is None,  # the store has no tasks
}


@pytest.fixture
def store(store_name: Callable[[], str]) -> Any:
    with gt.Store.create(store_name(), {"x": gt.Field((), "int64")}, max_length=4, capacity=8) as made:
        made.insert({"x": np.zeros((8, 4), np.int64)})
        yield made


@pytest.mark.parametrize("parameter", REPLAY)
def test_a_replay_takes_what_is_allowed_and_refuses_the_rest(store: gt.Store, parameter: str) -> None:
    for value in VALUES:
        arguments = {"batch_size": 2, "output": "numpy", parameter: value}
        try:
            is_allowed = bool(REPLAY[parameter](value))
        except ValueError:  # an array, compared with a list
            is_allowed = False
        if is_allowed:
            replay_of(store, Uniform(), **arguments).close()
            continue
        with pytest.raises(ArgumentError) as refused:
            replay_of(store, Uniform(), **arguments)
        assert len(str(refused.value)) < 500, value


def test_a_replay_is_of_stores_and_strategies(store: gt.Store) -> None:
    for value in [*VALUES, store, [store], [store, 1], (store,)]:
        if isinstance(value, (Uniform, gt.Store)) or (isinstance(value, (list, tuple)) and value == [store]):
            continue
        with pytest.raises(ArgumentError):
            if isinstance(value, tuple) and value and value[0] is store:
                gt.Replay(value, 3, 2)  # type: ignore[call-overload]
            else:
                gt.Replay(value, Uniform(), 2)
    for value in VALUES:
        if not isinstance(value, Uniform):
            with pytest.raises(ArgumentError):
                gt.Replay(store, value, 2)
        with pytest.raises(ArgumentError):
            replay_of(store, Uniform(), 2, mesh=object() if value is None else value)
        if value is not None:
            with pytest.raises(ArgumentError):
                gt.Replay(store, Uniform(), 2, group=value)


def test_a_mixture_is_of_shares_and_strategies(store: gt.Store) -> None:
    two = [Uniform(), Prioritized()]
    share = scalar(0)
    for value in VALUES:
        for shares in ([value, 1], [1, value]):
            if share(value):
                quotas = Mixture(shares, two, seed=1).quotas(1000, 3)
                assert sum(quotas) == 1000 and min(quotas) >= 0
            else:
                with pytest.raises(ArgumentError):
                    Mixture(shares, two)
        with pytest.raises(ArgumentError):
            Mixture([0, 0], [Uniform(), value])
        if np.shape(value) != (2,) if isinstance(value, (list, tuple, np.ndarray, range)) else True:
            with pytest.raises(ArgumentError):
                Mixture(value, two)
        if not isinstance(value, Uniform):
            with pytest.raises(ArgumentError):
                Mixture([1, 1], [Uniform(), value])
        with pytest.raises(ArgumentError):
            Mixture([1, 1], value)
        if SEED(value):
            Mixture([1, 1], two, value)
        else:
            with pytest.raises(ArgumentError):
                Mixture([1, 1], two, value)
    with pytest.raises(ArgumentError):
        Mixture([1, 1], [Uniform(), Mixture([1], [Uniform()])])  # type: ignore[list-item]


def test_shares_of_any_size_are_shares() -> None:
    two = [Uniform(), Uniform()]
    assert Mixture([3e-9, 1e-9], two).quotas(400, 0) == Mixture([3, 1], two).quotas(400, 0)
    assert Mixture([1e300, 1e300], two).quotas(400, 0) == [200, 200]
    assert Mixture(np.array([0.25, 0.75]), two).quotas(400, 0) == [100, 300]
    assert Mixture([1e-12, 1], two).quotas(400, 0) == [0, 400]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, "x", None, [1], 0.0])
def test_a_schedule_or_a_version_that_returns_nonsense_is_told_by_its_value(store: gt.Store, bad: Any) -> None:
    with pytest.raises(ArgumentError):
        gt.Replay(store, Prioritized(alpha=lambda step: bad), 2)
    if bad != 0.0:
        with (
            gt.Replay(store, Prioritized(beta=lambda step: bad), 2, prefetch=0) as replay,
            pytest.raises(ArgumentError),
        ):
            replay.sample()
    with gt.Replay(store, Uniform(limits=Limits(min_version=lambda: bad)), 2, prefetch=0) as replay:
        with pytest.raises(ArgumentError):
            replay.sample()


def test_priorities_that_are_none_are_refused_and_change_nothing(store: gt.Store) -> None:
    with gt.Replay(store, Prioritized(), 2, prefetch=0, output="numpy") as replay:
        keys = replay.sample().keys
        real = scalar(-1e308)
        for value in VALUES:
            array = None
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                array = np.asarray(value, np.float64)
            if (
                real(value)
                or flag(value)
                or (array is not None and array.shape in ((), (2,)) and np.isfinite(array).all())
            ):
                continue
            with pytest.raises(ArgumentError):
                replay.update_priorities(keys, value)
            with pytest.raises(ArgumentError):
                replay.update_priorities(value, 1.0)
        assert store.status()["priority"].tolist() == [1.0] * 8


def test_a_state_that_is_none_is_refused_and_the_replay_goes_on(store: gt.Store) -> None:
    with gt.Replay(store, Fifo(seed=1), 2, prefetch=0, output="numpy") as replay:
        replay.sample()
        state = replay.state_dict()
        expected = replay.sample().keys
        for value in VALUES:
            bad = [value]
            bad += [{**state, name: value} for name in state]
            bad += [
                {**state, "state": [{"after": value}]},
                {**state, "exponents": [value]},
                {**state, "state": [value]},
            ]
            bad += [{name: each for name, each in state.items() if name != gone} for gone in ("seed", "step", "state")]
            for each in bad:
                try:
                    replay.load_state_dict(each)
                except ArgumentError:
                    continue
                taken = replay.state_dict()
                assert all(isinstance(v, int) for v in taken["state"][0].values()), each
                assert math.isfinite(taken["exponents"][0]) and taken["step"] >= 0, each
                with contextlib.suppress(GeartrainError):
                    replay.sample()
            replay.load_state_dict(state)
            assert replay.sample().keys == expected


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"selection": Uniform(seed=1)}, r"strategy=Fifo\(.*this replay has strategy=Uniform\("),
        ({"selection": Fifo(seed=1, limits=Limits(min_length=2))}, "strategy"),
        ({"batch_size": 3}, "batch_size=2, this replay has batch_size=3"),
        ({"window": 2}, r"view=None, this replay has view=Windows\("),
    ],
)
def test_a_state_of_a_replay_that_drew_other_batches_is_refused(store: gt.Store, changed: Any, says: str) -> None:
    with gt.Replay(store, Fifo(seed=1), 2, prefetch=0) as replay:
        replay.sample()
        state = json.loads(json.dumps(replay.state_dict()))
    with gt.Replay(store, **{"selection": Fifo(seed=1), "batch_size": 2, "prefetch": 0, **changed}) as replay:
        with pytest.raises(ArgumentError, match=says) as refused:
            replay.load_state_dict(state)
        assert "remove '" in str(refused.value) and replay.step == 0
        for what in ("strategy", "batch_size", "view"):
            if f"remove {what!r} from the state" in str(refused.value):
                del state[what]
        replay.load_state_dict(state)
        assert replay.step == 1


def test_a_strategys_description_is_equal_in_every_process() -> None:
    """Texts have other hashes there, and objects and functions other addresses."""
    program = """if True:
        from dataclasses import dataclass
        from typing import Any
        import numpy as np
        from geartrain.replay.state import describe_strategy

        class Model:
            pass

        @dataclass
        class Mine:
            settings: Any

        kinds = {"b", "a", "c", "d"}
        print(describe_strategy(Mine([kinds, {"at": lambda row: row}, Model(), np.random.default_rng(1)])))
        print(describe_strategy(Mine((np.float32(0.5), {"k": np.int64(3)}, np.arange(2000), np.arange(9), Model))))
    """
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=patience(60),
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert "0x" not in said[0] and "float32" not in said[0] and "int64" not in said[0] and "7, 8" in said[0]


def test_a_state_of_the_same_stores_in_another_order_is_refused(store: gt.Store, store_name: Callable[[], str]) -> None:
    with gt.Store.create(store_name(), {"x": gt.Field((), "int64")}, max_length=4, capacity=8) as other:
        other.insert({"x": np.ones((8, 4), np.int64)})
        mixture = Mixture([1, 1], [Fifo(), Fifo()])
        with gt.Replay([store, other], mixture, 4, prefetch=0) as replay:
            replay.sample()
            state = replay.state_dict()
        with gt.Replay([other, store], mixture, 4, prefetch=0) as replay:
            with pytest.raises(ArgumentError, match="the same stores in another order"):
                replay.load_state_dict(state)
            # After a restore from disk the ids are new, and the names are what is left.
            with pytest.raises(ArgumentError, match="the same stores in another order"):
                replay.load_state_dict({**state, "stores": ["1", "2"]})
            replay.load_state_dict({name: value for name, value in state.items() if name not in ("stores", "names")})
        with gt.Replay([store, other], mixture, 4, prefetch=0) as replay:
            replay.load_state_dict(state)
            assert replay.step == 1


def test_calls_with_nonsense_are_refused_and_change_nothing(store: gt.Store) -> None:
    keys, x = store.keys(), np.zeros((8, 4), np.int64)
    numbers = gt.selection.Candidates([1, 2, 3])
    # Each with what it may take, by which values are left out; all others are refused.
    version, on_stale = whole(-(2**63), 2**63 - 1, none=True), ("raise", "drop")
    calls: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
        "update_priorities": (lambda value: store.update_priorities(keys, value), scalar(0)),
        "insert priorities": (lambda value: store.insert({"x": x}, priorities=value), scalar(0, none=True)),
        "insert lengths": (lambda value: store.insert({"x": x}, lengths=value), whole(1, 4, none=True)),
        "insert versions": (lambda value: store.insert({"x": x}, versions=value), version),
        "raise_priorities": (store.raise_priorities, scalar(0, above=True)),
        "rows": (lambda value: store.rows(value).abandon(), whole(1, 8)),
        "fetch window": (lambda value: gt.fetch(store, keys, window=value), whole(1, 2**20, none=True)),
        "fetch ends": (lambda value: gt.fetch(store, keys, window=2, ends=value), lambda value: value is None),
        "fetch fields": (lambda value: gt.fetch(store, keys, fields=value), lambda value: value in (None, ["x"])),
        "fetch out": (lambda value: gt.fetch(store, keys, out=value), lambda value: value is None),
        "fetch threads": (lambda value: gt.fetch(store, keys, threads=value), whole(1, 4096, none=True)),
        "fetch pad": (lambda value: gt.fetch(store, keys, pad=value), lambda value: value in ("left", "right")),
        "fetch output": (lambda value: gt.fetch(store, keys, output=value), lambda value: value in ("torch", "numpy")),
        "fetch path": (lambda value: gt.fetch(store, keys, path=value), lambda value: value == "auto"),
        "fetch on_stale": (lambda value: gt.fetch(store, keys, on_stale=value), lambda value: value in on_stale),
        "samples_per_insert": (
            lambda value: store.limiter.set(samples_per_insert=value), scalar(0, above=True, none=True)
        ),
        "min_size_to_sample": (
                lambda value: store.limiter.set(min_size_to_sample=value), whole(1, 8, none=True)
            ),
        "select n": (lambda value: Uniform().select(numbers, value, 0), whole(1, 8)),
        "select step": (lambda value: Uniform().select(numbers, 2, value), whole(0, 2**64 - 1)),
    }  # fmt: skip
    for name, (call, allowed) in calls.items():
        for value in VALUES:
            try:
                is_allowed = bool(allowed(value))
            except ValueError:  # an array, compared with a text
                is_allowed = False
            if is_allowed or isinstance(value, Fraction) or (isinstance(value, np.ndarray) and value.ndim == 0):
                continue
            if name in ("rows", "select n", "fetch window") and whole(1, 2**31 - 1)(value):
                continue  # possible, but for what is there, or large
            with pytest.raises((ArgumentError, gt.errors.StoreFullError)) as refused:
                call(value)
                pytest.fail(f"{name} takes {value!r}")
            assert len(str(refused.value)) < 600, (name, value)
    assert store.status(keys)["priority"].tolist() == [1.0] * 8 and not store.limiter.state().enabled
    assert store.keys() == keys
