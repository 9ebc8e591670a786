"""Public classes under misuse: the process ends by itself and in time; a refused call is an error of geartrain's."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator

import deadlines
import hostile.groups
import hostile.jobs
import hostile.lerobot
import hostile.peers
import hostile.public as public
import hostile.race_counts as race_counts
import hostile.rlinf
import hostile.sb3
import hostile.stores  # the factories
import hostile.tasks  # noqa: F401
import pytest
from hostile.open_defects import OPEN
from hostile.scenarios import RACES, SCENARIOS, applies
from hostile.server import Server
from hostile.subject import FACTORIES

from geartrain.errors import ArgumentError

# Short tests try every class; the races of those that import torch, or that start processes, are for `make test-all`.
SHORT = ("use_after_close", "alive_at_exit", "close_beside_a_blocked_call")
SLOW_SUBJECTS = (
    "ActorPool",
    "Group: hierarchical",
    "Hosts",
    "Replay: of two ranks",
    "Replay: on a device",
    "ReplayDataset",
    "Store: with a journal that begins with a checkpoint",
)
#: What a server imports before its forks, by module of factories.
MODULES_OF_SERVERS = dict.fromkeys(
    ("hostile.sb3", "hostile.lerobot", "hostile.rlinf"), ("stable_baselines3", "geartrain.integrations.sb3")
)
LIMIT_S = 20.0
OPEN_TRIES = 20
#: Of each race in long tests, `make races ROUNDS=...`: in all, where they are counted, else of this run.
ROUNDS = int(os.environ.get("GEARTRAIN_TEST_ROUNDS", "1000"))


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.fixture(scope="module")
def sb3_server() -> Iterator[Server]:
    """Of subjects that import torch and Stable-Baselines3, two seconds of a core in each process."""
    one = Server(*MODULES_OF_SERVERS["hostile.sb3"])
    yield one
    one.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, subject: str) -> Server:
    with_torch = FACTORIES[subject].make.__module__ in MODULES_OF_SERVERS
    wanted = "sb3_server" if with_torch else "plain_server"
    found: Server = request.getfixturevalue(wanted)
    return found


@pytest.fixture(scope="module")
def small_servers() -> Iterator[dict[str, Server]]:
    """By module of factories; each has imported that one alone, so that its forks cost less."""
    made: dict[str, Server] = {}
    yield made
    for one in made.values():
        one.close()


@functools.cache
def cases() -> list[tuple[str, str]]:
    """(subject, scenario), for all that apply."""
    return [
        (subject, scenario)
        for subject, factory in FACTORIES.items()
        for scenario in SCENARIOS
        if applies(scenario, factory)
    ]


def parameters(*, short: bool | None = None) -> list[object]:
    found = []
    for subject, scenario in cases():
        marks = []
        is_short = scenario in SHORT and subject not in SLOW_SUBJECTS
        if short is not None and not is_short:
            marks.append(pytest.mark.slow)
        if (subject, scenario) in OPEN:
            marks.append(pytest.mark.xfail(strict=True, reason=OPEN[subject, scenario]))
        found.append(pytest.param(subject, scenario, marks=marks, id=f"{subject}-{scenario}"))
    return found


def check(
    server: Server, subject: str, scenario: str, rounds: int | None, limit_s: float, tries: int = 1, seed: int = 0
) -> None:
    for further in range(tries):
        factor = deadlines.factor()
        found = server.run(
            subject, scenario, factor=factor, limit_s=limit_s * factor, seed=seed + further, rounds=rounds
        )
        if found["skipped"] is not None:
            pytest.skip(found["skipped"])
        assert not found["findings"], "\n".join([*found["findings"], found["output"]])


@pytest.mark.parametrize(("subject", "scenario"), parameters(short=True))
def test_a_public_class_stands_misuse(server, subject, scenario):
    # What is known to be lost at some instants only is tried until it is, or it would look mended now and then.
    check(server, subject, scenario, None, LIMIT_S, OPEN_TRIES if (subject, scenario) in OPEN else 1)


def races() -> list[object]:
    """Those with the fewest rounds first, where they are counted."""
    found = [each for each in parameters() if each.values[1] in RACES]
    sanitizer = race_counts.under()
    return found if sanitizer is None else sorted(found, key=lambda each: race_counts.rounds(each.id, sanitizer))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("subject", "scenario"), races())
def test_a_thousand_rounds_of_each_race(small_servers, subject, scenario):
    case, sanitizer = f"{subject}-{scenario}", race_counts.under()
    before = race_counts.rounds(case, sanitizer) if sanitizer is not None else 0
    if before >= ROUNDS:
        pytest.skip(f"had {before} rounds")
    module = FACTORIES[subject].make.__module__
    if module not in small_servers:
        small_servers[module] = Server(*MODULES_OF_SERVERS.get(module, ()), factories=[module])
    for rounds in race_counts.slices(ROUNDS - before):
        check(small_servers[module], subject, scenario, rounds, LIMIT_S + 0.5 * rounds, seed=before)
        before += rounds
        if sanitizer is not None:
            race_counts.add(case, sanitizer, rounds)


def test_the_counts_of_races_are_of_cases_that_there_are():
    assert set(race_counts.read()) <= {f"{subject}-{scenario}" for subject, scenario in cases()}


def test_every_public_class_has_a_factory_or_a_reason_why_it_needs_none():
    made = {factory.of for factory in FACTORIES.values()}
    missing = {
        name: one for name, one in public.classes().items() if name not in made and public.why_no_lifetime(one) is None
    }
    assert not missing, (
        f"{missing}: add a factory to tests/support/hostile, or to NO_LIFETIME there why nobody can misuse it"
    )


@pytest.mark.parametrize("of", sorted({factory.of for factory in FACTORIES.values()} - set(public.COPIED)))
def test_what_there_is_once_can_be_neither_copied_nor_pickled(of):
    one = public.classes()[of]
    with pytest.raises(ArgumentError, match=f"a {of} cannot be copied or pickled"):
        pickle.dumps(one.__new__(one))  # as copy.copy and copy.deepcopy, which call __reduce_ex__ too


def test_factories_and_reasons_are_of_public_classes():
    classes = set(public.classes())
    assert set(public.COPIED) <= classes
    assert {factory.of for factory in FACTORIES.values()} <= classes
    assert set(public.NO_LIFETIME) <= classes
    assert not {factory.of for factory in FACTORIES.values()} & set(public.NO_LIFETIME)


def test_open_defects_are_of_cases_that_are_tried():
    assert set(OPEN) <= set(cases())
