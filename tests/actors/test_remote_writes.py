"""Writes of remote stores over connections that break: each takes effect once, or its error says that nobody knows."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience, until
from relay import CUTS, Relay

import geartrain as gt
from geartrain import rpc
from geartrain.actors import RemoteStore, StoreServer
from geartrain.actors.remote_calls import RemoteCalls
from geartrain.actors.served_writes import PeerWrites
from geartrain.errors import LockTimeoutError, PeerLostError, PeerUnreachableError, WaitTimeoutError

FIELDS = {"id": gt.Field((), "int64"), "x": gt.Field((64,), "float32")}
AXES = {"id": gt.Field((), "int64"), "x": gt.Field(("m",), "float32")}
N = 16


class World:
    """A learner with a store, and a host that reaches it through a relay."""

    def __init__(self, kind: str, timeout_s: float | None = None) -> None:
        self.kind = kind
        options = {"span_bytes": 1 << 20} if kind == "axes" else {"max_length": 1}
        self.store = gt.Store.create(AXES if kind == "axes" else FIELDS, capacity=1_024, **options)
        self.learner = rpc.Node("learner", transport="tcp")
        self.server = StoreServer(self.learner, self.store, "replay")
        self.relay = Relay(self.learner.address)
        self.host = rpc.Node("host", peers={"learner": self.relay.address}, transport="tcp")
        self.remote = RemoteStore(self.host, "learner", "replay", timeout_s=timeout_s or patience(20))
        self._inserted = 0

    def insert(self) -> gt.Keys:
        """Inserts rows with numbers of their own."""
        numbers = range(self._inserted, self._inserted + N)
        self._inserted += N
        return self.remote.insert(self.rows(numbers))

    def rows(self, numbers: range) -> dict[str, Any]:
        """Rows with these numbers."""
        if self.kind == "axes":
            return {"id": list(numbers), "x": [np.full(64, each, np.float32) for each in numbers]}
        x = np.repeat(np.array(numbers, np.float32)[:, None, None], 64, 2)
        return {"id": np.array(numbers)[:, None], "x": x}

    def numbers(self, keys: gt.Keys | None = None) -> list[int]:
        """Numbers of the rows that are there."""
        keys = self.store.keys() if keys is None else keys
        return [int(each) for each in np.ravel(gt.fetch(self.store, keys, fields=["id"], output="numpy")["id"])]

    def serve_again(self) -> None:
        """Another server of the same store, which knows nothing of the calls of the first one."""
        self.server.close()
        self.server = StoreServer(self.learner, self.store, "replay")

    def close(self) -> None:
        self.host.close()
        self.relay.close()
        self.learner.close()
        self.store.close()


@pytest.fixture(params=["rows", "axes"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    assert made.store.closed or made.store.audit() == []
    made.close()


@pytest.mark.parametrize("where", CUTS)
def test_an_insert_whose_connection_breaks_inserts_its_rows_once(world: World, where: str) -> None:
    first = world.insert()
    for _ in range(3):
        world.relay.cut_next(where)
        assert world.numbers(keys := world.insert()) == sorted(world.numbers(keys)) and len(keys) == N
    assert world.relay.cuts == 3 and world.store.keys()[:N] == first
    assert world.numbers() == list(range(4 * N)), "every row once, in the order of the inserts"


def updates(world: World, keys: gt.Keys) -> tuple[int, int]:
    """Updates priorities of keys of which some are stale, and removes the rows."""
    remote, many = world.remote, 40  # so many times, that a relay takes it for a request
    world.relay.cut_next(updates.where)  # type: ignore[attr-defined]
    stale = remote.update_priorities(gt.Keys.join([keys] * many), np.full(many * len(keys), 2.0))
    assert set(world.store.status(world.store.keys())["priority"]) == {2.0}
    world.relay.cut_next(updates.where)  # type: ignore[attr-defined]
    return stale, remote.delete(gt.Keys.join([keys] * many))


@pytest.mark.parametrize("where", CUTS)
def test_updates_and_deletions_say_what_their_first_sending_found(where: str) -> None:
    world = World("rows")
    keys = world.insert()
    world.store.delete(keys[:3])
    updates.where = where  # type: ignore[attr-defined]
    assert updates(world, keys) == (3 * 40, N * 40 - (N - 3))
    assert world.relay.cuts == 2 and len(world.store) == 0
    world.close()


def test_an_insert_that_still_waits_when_it_is_sent_again_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("rows")
    began, insert = [], PeerWrites.insert

    def counting(self: PeerWrites, *args: Any) -> Any:
        began.append(args[0])
        return insert(self, *args)

    monkeypatch.setattr(PeerWrites, "insert", counting)
    world.store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=N)
    world.insert()
    inserting = threading.Thread(target=world.insert)
    inserting.start()
    until(lambda: world.store.limiter.state().insert_wait_s > 0)
    for sendings in (3, 4, 5):  # with the first insert
        world.learner.hang_up("host")
        until(lambda sendings=sendings: len(began) == sendings)
    until(lambda: world.learner.server.scheduler._aside == 2)  # the first sending and the last, which waits for it
    assert len(set(began)) == 2 and world.numbers() == list(range(N))
    world.store.limiter.off()
    inserting.join(patience(20))
    assert world.numbers() == list(range(2 * N))
    world.insert()
    assert world.numbers() == list(range(3 * N))
    world.close()


def test_an_insert_that_fails_after_it_took_effect_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("rows")
    insert = world.store.insert

    def failing(*args: Any, **options: Any) -> gt.Keys:
        insert(*args, **options)
        raise LockTimeoutError("the journal's disk is behind. The rows are in the store")

    monkeypatch.setattr(world.store, "insert", failing)
    world.relay.cut_next("before the reply")
    with pytest.raises(LockTimeoutError, match="in the store"):
        world.insert()
    assert world.relay.cuts == 1 and world.numbers() == list(range(N))
    world.close()


@pytest.mark.parametrize("later", [0, 1], ids=["", "after another insert"])
def test_a_request_that_arrives_after_it_was_sent_again_inserts_nothing(world: World, later: int) -> None:
    world.relay.cut_next("late")
    for _ in range(1 + later):
        world.insert()
    world.relay.release()
    time.sleep(0.2)
    world.insert()
    assert world.relay.cuts == 1 and world.numbers() == list(range((2 + later) * N))


def test_inserts_of_many_threads_are_made_once_whatever_is_cut(world: World) -> None:
    done: list[gt.Keys] = []
    lock, over = threading.Lock(), threading.Event()

    def insert(first: int) -> None:
        for number in range(first, 800, 8):
            keys = world.remote.insert(world.rows(range(number, number + 1)))
            with lock:
                done.append(keys)

    def cut() -> None:
        choose = random.Random(0)
        while not over.wait(choose.uniform(0.005, 0.1)):
            world.learner.hang_up("host")

    threads = [threading.Thread(target=insert, args=(first,)) for first in range(8)]
    cutting = threading.Thread(target=cut)
    for each in (cutting, *threads):
        each.start()
    for each in threads:
        each.join(patience(60))
    over.set()
    cutting.join()
    keys = gt.Keys.join(done)
    assert sorted(world.numbers()) == sorted(world.numbers(keys)) == list(range(800))


@pytest.mark.parametrize("where", CUTS)
def test_after_another_server_began_an_insert_that_may_have_run_is_not_made_again(world: World, where: str) -> None:
    world.insert()
    there = len(world.store)
    refused: list[BaseException] = []

    def insert() -> None:
        try:
            world.insert()
        except PeerLostError as error:
            refused.append(error)

    world.relay.cut_next(where, stays=True)
    inserting = threading.Thread(target=insert)
    inserting.start()
    until(lambda: world.relay.cuts == 1)
    world.serve_again()
    world.relay.restore()
    inserting.join(patience(20))
    (error,) = refused
    assert "unknown whether" in str(error) and not isinstance(error, PeerUnreachableError)
    assert len(world.store) == there + (N if "reply" in where else 0)
    world.insert()
    assert len(world.store) == there + N + (N if "reply" in where else 0)


@pytest.mark.parametrize("kind", ["rows", "axes"])
def test_an_insert_whose_peer_does_not_come_back_says_that_its_end_is_unknown(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(kind, timeout_s=1)
    world.insert()
    world.relay.cut_next("before the reply", stays=True)
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match="unknown whether") as error:
        world.insert()
    assert 0.9 < time.monotonic() - began_s < patience(10) and not isinstance(error.value, PeerUnreachableError)
    with pytest.raises(PeerUnreachableError):  # this one was not sent
        world.insert()
    assert len(world.store) == 2 * N
    (said,) = caplog.messages  # once an outage
    assert "'learner' is lost" in said and "'replay'" in said and "for up to 1 s" in said
    world.close()


def test_calls_of_many_threads_end_together_if_the_peer_answers_nothing() -> None:
    world = World("rows", timeout_s=1)
    keys = world.insert()
    world.relay.close()
    with pytest.raises(PeerLostError):
        world.remote.delete(keys)
    world.relay.hang()
    lost = []

    def delete() -> None:
        with pytest.raises((PeerLostError, WaitTimeoutError)):
            world.remote.delete(keys)
        lost.append(time.monotonic())

    threads = [threading.Thread(target=delete) for _ in range(12)]
    began_s = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join(patience(30))
    assert len(lost) == 12 and max(lost) - began_s < 6  # and not one after the other
    world.close()


def test_an_insert_in_parts_says_how_many_rows_are_there_when_its_peer_is_lost() -> None:
    world = World("axes", timeout_s=1)
    insert, parts = RemoteCalls.write, []

    def cutting(self: RemoteCalls, what: str, *args: Any, **options: Any) -> Any:
        parts.append(what)
        if len(parts) == 2:
            world.relay.cut_next("before the request", stays=True)
        return insert(self, what, *args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PeerLostError, match="first 512 of 600 rows"):
        patch.setattr(RemoteCalls, "write", cutting)
        world.remote.insert(world.rows(range(600)))
    assert world.numbers() == list(range(512))
    world.close()


def test_an_insert_that_gets_no_reply_in_time_says_that_its_end_is_unknown() -> None:
    world = World("rows", timeout_s=0.5)
    world.store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=N)
    world.insert()
    with pytest.raises(WaitTimeoutError, match="unknown whether"):
        world.insert()
    world.close()
