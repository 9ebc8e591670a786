"""Stores of a peer with axes, strings and tasks: rows claimed, appended to, put and dropped there as here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpo
import numpy as np
import pytest
from deadlines import patience
from journals import SlowDisk, lose_power, slow_disk

import geartrain as gt
from geartrain import rpc
from geartrain.actors import RemoteStore, StoreServer
from geartrain.actors.served_tasks import NO_CLAIM, PeerCalls
from geartrain.actors.served_writes import PeerHandle
from geartrain.errors import (
    ArgumentError,
    FieldError,
    GeartrainError,
    PeerLostError,
    SchemaError,
    StaleClaimError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.transport.tls import TLS


class World:
    """A learner with a store, and hosts that reach it by TCP."""

    def __init__(self, store: gt.Store, **options: Any) -> None:
        self.store, self.options = store, options
        self.learner = rpc.Node("learner", transport="tcp", **options)
        self.server = StoreServer(self.learner, store, "replay")
        self.hosts: list[rpc.Node] = []

    def remote(self, timeout_s: float = 20, **options: Any) -> RemoteStore:
        host = rpc.Node(
            f"host-{len(self.hosts)}",
            peers={"learner": self.learner.address},
            transport="tcp",
            **{**self.options, **options},
        )
        self.hosts.append(host)
        return RemoteStore(host, "learner", "replay", timeout_s=patience(timeout_s))

    def restart(self, checkpoint: Path) -> None:
        """The store is lost, and an earlier checkpoint is loaded and served."""
        self.server.close()
        for host in self.hosts:
            self.learner.hang_up(host.name)
        self.store.close()
        self.store = gt.Store.load(checkpoint, reserve=False)
        self.server = StoreServer(self.learner, self.store, "replay")

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.learner.close()
        self.store.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(grpo.new_store())
    yield made
    assert made.store.closed or made.store.audit() == []
    made.close()


def comes(true: Callable[[], object]) -> None:
    until_s = time.monotonic() + patience(10)
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def open_calls(world: World) -> int:
    return sum(world.learner.server.scheduler.open_calls(each) for each in world.learner.server.sessions)


def figures(world: World, task: str = "answer") -> dict[str, int]:
    return world.store.task_stats()[task]


# --- as on this host ----------------------------------------------------------------------------------------------


def test_rows_pass_through_all_tasks_from_another_host(world: World) -> None:
    remote, other = world.remote(), world.remote()
    assert (remote.plan, remote.fields, remote.id) == (world.store.plan, world.store.fields, world.store.id)
    keys = grpo.insert(remote, range(12))
    assert keys == world.store.keys() or len(keys) == 12
    remote.finish()
    for task, at in (("answer", remote), ("reward", other), ("ref", remote), ("advantage", other)):
        for claim in at.claims(task, 5, output="numpy"):
            assert isinstance(claim, gt.Claim) and claim.keys.store == world.store.id
            grpo.work(at, task, claim)
    assert remote.task_stats() == world.store.task_stats() and len(remote) == 12
    assert (remote.fetch(keys, output="numpy")["ids"] == gt.fetch(world.store, keys, output="numpy")["ids"]).all()
    assert len(remote.put(keys[:2], "reward", {"reward": np.ones(6, np.float32)})) == 0
    remote.put(keys[:2], "reward", {"reward": [[float(grpo.answer_of(n, i).sum()) for i in range(3)] for n in (0, 1)]})
    with gt.Replay(world.store, gt.selection.Fifo(), 4, output="numpy") as replay:
        assert sorted(number for batch in replay for number in grpo.check(batch)) == list(range(12))


def test_a_claim_has_what_a_local_one_has(world: World) -> None:
    remote = world.remote()
    grpo.insert(remote, range(4))
    claim = remote.claim("answer", 3, fields=["id"], version=7)
    assert claim["id"].tolist() == [0, 1, 2] and not claim.stale.any()
    assert claim["prompt"].tolist() == np.concatenate([grpo.prompt_of(n) for n in range(3)]).tolist()  # read now
    assert claim.lengths("prompt").tolist() == [1, 2, 3] and claim.cu_seqlens_of("prompt").tolist() == [0, 1, 3, 6]
    first, second, third = claim
    assert not first.partial and first.length("prompt") == 1
    first.append(item=0, ids=[1, 2], log_prob=[0.5, 1.0])
    first.append(item=2, ids=[3], log_prob=[2.0], done=True)
    assert first.partial.lengths == {0: 2, 2: 1} and first.partial.done == {2}
    with pytest.raises(SchemaError, match="nothing was appended to number 1"):
        first.put()
    first.put(length=[2, 0, 1])
    assert second.release() and not second.release() and third.drop() and not third.drop()
    for lost in (first, second, third):
        with pytest.raises(StaleClaimError, match=f"row {lost.key.row[0]} is not claimed"):
            lost.put(ids=[1], log_prob=[1.0], length=[1])
        with pytest.raises(StaleClaimError):
            lost.append(ids=[1], log_prob=[1.0])
    assert world.store.status(claim.keys[:1])["version"].tolist() == [7]
    with remote.claim("answer", 8) as rest:
        assert rest["id"].tolist() == [1, 3]
        assert len(rest.put(ids=[[1], [2]], log_prob=[[1.0], [2.0]], length=[[1], [1]])) == 0
    assert figures(world)["done"] == 3 and world.store.stats()["dropped"] == 1
    assert (remote.clock, remote.advance(9), world.store.clock) == (0, 9, 9)
    assert not remote.claim("answer") and remote.stats()["inserted"] == 4


@pytest.mark.parametrize(
    ("does", "error", "match"),
    [
        (lambda r: r.claim("nothing"), SchemaError, "no task 'nothing'"),
        (lambda r: r.claim("train"), SchemaError, "the last task 'train' has no claims"),
        (lambda r: r.claim("answer", 0), ArgumentError, "must be at least 1"),
        (lambda r: r.claim("answer", fields=["reward"]), FieldError, "may not be there yet"),
        (lambda r: r.claims("answer", fields=["promt"]), FieldError, "did you mean 'prompt'"),
        (lambda r: r.insert({"prompt": [[1]]}), FieldError, "missing"),
        (lambda r: r.insert({"prompt": [[1]], "id": ["x"]}), SchemaError, "id"),
        (lambda r: next(r.claims("answer", timeout_s=0.05)), WaitTimeoutError, "no row is under way"),
        (lambda r: r.fetch(r.insert({"prompt": [[1]], "id": [1]}), window=2), ArgumentError, "whole"),
        (lambda r: r.fetch(r.insert({"prompt": [[1]], "id": [1]})), FieldError, "is not done for 1 of 1 rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_as_here(world: World, does: Any, error: type[Exception], match: str) -> None:
    for store in (world.store, world.remote()):
        with pytest.raises(error, match=match):
            does(_Both(store))


class _Both:
    """A store with `fetch`, of this host or another."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def fetch(self, keys: gt.Keys, **options: Any) -> Any:
        return gt.fetch(self._store, keys, **options)


def test_strings_and_axes_without_tasks_are_served() -> None:
    store = gt.Store.create(
        {"question": gt.Text(), "parts": gt.Bytes("parts"), "image": gt.Field(("images", 2, 3), "uint8")},
        capacity=8,
        span_bytes=1 << 16,
        reserve=False,
    )
    made = World(store)
    remote = made.remote()
    rows = {
        "question": ["eins", "zwölf €"],
        "parts": [[b"a", b"\xff"], []],
        "image": [np.arange(6, dtype=np.uint8).reshape(1, 2, 3), np.zeros((0, 2, 3), np.uint8)],
    }
    keys = remote.insert(rows)
    batch = remote.fetch(keys, output="numpy")
    assert batch["question"] == rows["question"] and batch["parts"] == [b"a", b"\xff"]
    assert (batch["image"] == rows["image"][0]).all() and batch.lengths("parts").tolist() == [2, 0]
    assert remote.delete(keys) == 0
    with pytest.raises(ArgumentError, match="no tasks"):
        remote.claim("answer")
    made.close()


def test_tasks_are_served_over_tls_to_peers_with_the_secret(loopback: TLS) -> None:
    made = World(grpo.new_store(), secret=b"secret", tls=loopback)
    remote = made.remote()
    grpo.insert(remote, range(3))
    grpo.work(remote, "answer", remote.claim("answer", 3))
    assert figures(made)["done"] == 3 and "TLS" in str(made.hosts[0].connections())
    with pytest.raises(GeartrainError):
        made.remote(secret=b"another")
    made.close()


# --- lost connections ---------------------------------------------------------------------------------------------


def test_a_lost_connection_makes_rows_due_again_without_a_death(world: World) -> None:
    for _ in range(4):
        remote = world.remote()
        if not len(world.store.keys()) and figures(world)["remaining"] == 0:
            grpo.insert(remote, range(3))
        claim = remote.claim("answer", 3)
        assert len(claim) == 3 and figures(world)["due"] == 0
        world.hosts[-1].close()
        comes(lambda: figures(world)["due"] == 3)
    its = figures(world)
    assert (its["claimed"], its["deaths"], its["released"]) == (0, 0, 12)
    assert world.store.stats()["given_up"] == 0


def test_a_put_after_a_lost_connection_is_accepted_unless_another_has_claimed_the_row(world: World) -> None:
    remote, other = world.remote(), world.remote()
    grpo.insert(remote, range(5))
    claim = remote.claim("answer", 5, version=3)
    kept, taken, begun, appended, put = claim
    values = {"ids": [7], "log_prob": [1.0], "length": [1]}
    for row in (begun, appended):
        row.append(item=0, ids=[1], log_prob=[1.0])
    put.put(values)
    world.learner.hang_up("host-0")
    comes(lambda: figures(world)["due"] == 4)
    theirs = other.claim("answer", 2)
    assert theirs["id"].tolist() == [0, 1]
    next(iter(theirs)).release()
    comes(lambda: figures(world)["due"] == 3)
    for row in (kept, taken):
        with pytest.raises(StaleClaimError):
            row.put(values)
    begun.append(item=0, ids=[2], log_prob=[2.0])
    begun.put()
    assert appended.partial["ids"][0].tolist() == [1]
    appended.put(values)
    with pytest.raises(StaleClaimError):
        put.put(values)
    assert figures(world)["done"] == 3
    assert world.store.status(claim.keys[2:])["version"].tolist() == [3, 3, 3]
    assert gt.fetch(world.store, begun.key, fields=["ids"])["ids"].tolist() == [1, 2]


def test_a_host_that_connects_again_has_its_rows_though_the_server_misses_the_end_of_its_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, other = world.remote(), world.remote()
    grpo.insert(remote, range(2))
    row, another = remote.claim("answer", 2)
    row.append(item=0, ids=[1], log_prob=[1.0])
    kept: list[PeerCalls] = []
    monkeypatch.setattr(PeerHandle, "__del__", lambda self: kept.append(self._calls))
    world.learner.hang_up("host-0")
    row.append(item=0, ids=[2], log_prob=[2.0])
    row.put()
    assert other.claim("answer")["id"].tolist() == [1]
    with pytest.raises(StaleClaimError):
        another.put(VALUES)
    assert gt.fetch(world.store, row.key, fields=["ids"])["ids"].tolist() == [1, 2]


def test_what_was_appended_and_not_kept_is_not_put_without_it() -> None:
    tasks = {"work": gt.Task({"y": gt.Field(("m",), "float32")}), "train": gt.Task(after="work")}
    made = World(gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, capacity=4, span_bytes=1 << 16))
    remote = made.remote()
    remote.insert({"x": [1, 2]})
    first, second = remote.claim("work", 2)
    first.append(y=[1.0])
    made.learner.hang_up("host-0")
    comes(lambda: figures(made, "work")["due"] == 2)
    with pytest.raises(StaleClaimError):
        _ = first.partial  # whoever reads that nothing is there may have forgotten what was
    with pytest.raises(StaleClaimError):
        first.append(y=[2.0])
    with pytest.raises(StaleClaimError):
        first.put()
    second.put(y=[1.0, 2.0])
    assert figures(made, "work")["due"] == 1 and made.store.audit() == []
    made.close()


@pytest.mark.parametrize("call", ["put", "append", "drop"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_whose_reply_is_lost_takes_effect_once(
    world: World, call: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = world.remote()
    grpo.insert(remote, range(2))
    row, last = remote.claim("answer", 2)
    row.append(item=0, ids=[5], log_prob=[0.5])
    name: str = "drop" if call == "drop" else "write"
    write, cut = getattr(PeerCalls, name), []

    def cutting(self: PeerCalls, *args: Any) -> Any:
        if cut:
            return write(self, *args)
        cut.append(1)
        found = write(self, *args) if when == "after" else None
        world.learner.hang_up("host-0")
        return found

    monkeypatch.setattr(PeerCalls, name, cutting)
    if call == "drop":
        assert row.drop() and not row.drop() and world.store.stats()["under_way"] == 1
        return
    if call == "put":
        row.put()
        last.put(ids=[1], log_prob=[1.0], length=[1])
    else:
        row.append(item=0, ids=[6], log_prob=[0.6])
        assert row.partial["ids"][0].tolist() == [5, 6]
        row.put()
    assert cut and figures(world)["done"] == (2 if call == "put" else 1)
    with pytest.raises(StaleClaimError):
        row.put()


@pytest.mark.parametrize(("call", "last_check"), [("put", "_mine"), ("append", "_appended_before")])
def test_a_write_that_still_runs_when_it_is_sent_again_takes_effect_once(
    world: World, call: str, last_check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = world.remote()
    grpo.insert(remote, range(1))
    (row,) = remote.claim("answer")
    check, write, began = getattr(PeerCalls, last_check), PeerCalls.write, itertools.count(1)
    second_goes_on, one_ended = threading.Event(), threading.Event()

    def pausing(self: PeerCalls, *args: Any) -> Any:
        found = check(self, *args)
        number = next(began)
        if number == 1:
            world.learner.hang_up("host-0")
            comes(lambda: figures(world)["due"] == 1)
            second_goes_on.wait(0.5)
        elif number == 2:
            second_goes_on.set()
            one_ended.wait(patience(10))
        return found

    def ending(self: PeerCalls, *args: Any) -> Any:
        try:
            return write(self, *args)
        finally:
            one_ended.set()

    monkeypatch.setattr(PeerCalls, last_check, pausing)
    monkeypatch.setattr(PeerCalls, "write", ending)
    if call == "append":
        row.append(item=0, ids=[6], log_prob=[0.6])
        assert row.partial["ids"][0].tolist() == [6]
        row.put()
    else:
        row.put(ids=[6], log_prob=[0.6], length=[1])
    assert figures(world)["done"] == 1
    assert gt.fetch(world.store, row.key, fields=["ids"])["ids"].tolist() == [6]


def test_after_an_append_whose_end_is_unknown_a_row_goes_on_with_what_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = world.remote()
    grpo.insert(remote, range(1))
    (row,) = remote.claim("answer")
    write = PeerCalls.write

    def cutting(self: PeerCalls, *args: Any) -> Any:
        found = write(self, *args)
        world.learner.hang_up("host-0")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PeerCalls, "write", cutting)
        patch.setattr(remote._rows, "timeout_s", 0.0)
        with pytest.raises(PeerLostError):
            row.append(item=0, ids=[5], log_prob=[0.5])
    comes(lambda: figures(world)["due"] == 1)
    assert row.partial["ids"][0].tolist() == [5]
    world.learner.hang_up("host-0")
    comes(lambda: figures(world)["due"] == 1)
    row.append(item=0, ids=[6], log_prob=[0.6])
    row.put()
    assert gt.fetch(world.store, row.key, fields=["ids"])["ids"].tolist() == [5, 6]


SERVE = """
import sys, time
sys.path.insert(0, sys.argv[2])
import grpo
from geartrain import rpc
from geartrain.actors import StoreServer

store = grpo.new_store(sys.argv[1])
node = rpc.Node("learner", transport="tcp")
if not store.stats()["inserted"]:
    grpo.insert(store, range(4))
with StoreServer(node, store, "replay"):
    print(node.address, flush=True)
    time.sleep(600)
"""


def test_a_restarted_server_takes_puts_of_rows_that_nobody_has_claimed_since(name: str) -> None:
    support = str(grpo.__file__).rpartition("/")[0]

    def serve() -> tuple[subprocess.Popen[str], str]:
        its = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVE), name, support], stdout=subprocess.PIPE, text=True
        )
        assert its.stdout is not None
        return its, its.stdout.readline().strip()

    server, address = serve()
    host = rpc.Node("host", peers={"learner": address}, transport="tcp")
    try:
        remote = RemoteStore(host, "learner", "replay", timeout_s=patience(30))
        first, second, third, fourth = remote.claim("answer", 4)
        first.append(item=0, ids=[1], log_prob=[1.0])
        fourth.put(ids=[4], log_prob=[1.0], length=[1])
        for _ in range(4):  # more deaths than a claimer may have
            server.send_signal(signal.SIGKILL)
            server.wait()
            server, host.directory.known["learner"] = serve()
        first.append(item=0, ids=[2], log_prob=[1.0])
        first.put()
        second.put(ids=[2], log_prob=[1.0], length=[1])
        with remote.claim("answer") as claim:
            assert claim["id"].tolist() == [2]
            with pytest.raises(StaleClaimError):
                fourth.put(ids=[4], log_prob=[1.0], length=[1])
        with pytest.raises(StaleClaimError):
            third.put(ids=[3], log_prob=[1.0], length=[1])
        its = remote.task_stats()["answer"]
        assert (its["done"], its["due"], its["deaths"]) == (3, 1, 0)
    finally:
        server.kill()
        server.wait()
        host.close()
    with grpo.new_store(name) as store:
        assert store.audit() == []
        found = gt.fetch(store, first.key + second.key + fourth.key, fields=["ids"])
        assert found["ids"].tolist() == [1, 2, 2, 4]


# --- journals and checkpoints -------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {"ids": [7], "log_prob": [1.0], "length": [1]}
NEVER_S = 1e6


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return slow_disk(monkeypatch)


def journaled(path: Path, sync_s: float = NEVER_S, **options: Any) -> World:
    return World(grpo.new_store(journal=path, journal_sync_s=sync_s), **options)


def _insert(remote: RemoteStore, **options: Any) -> None:
    remote.insert({"prompt": [[1]], "id": [7]}, **options)


def _put_claim(remote: RemoteStore, **options: Any) -> None:
    remote.claim("answer").put({name: [value] for name, value in VALUES.items()}, **options)


def _put_appended(remote: RemoteStore, **options: Any) -> None:
    (row,) = remote.claim("answer")
    row.append(item=0, ids=[1], log_prob=[1.0])
    row.put(**options)


def _put_row(remote: RemoteStore, **options: Any) -> None:
    (row,) = remote.claim("answer")
    row.put(VALUES, **options)


def _put_key(remote: RemoteStore, **options: Any) -> None:
    key = gt.Keys(np.array([0], np.uint32), np.array([1], np.uint32))
    assert len(remote.put(key, "reward", {"reward": [np.ones(1, np.float32)]}, **options)) == 0


WRITES = [_insert, _put_claim, _put_appended, _put_row, _put_key]


@pytest.mark.parametrize("sync_s", [0.0, NEVER_S], ids=["bound-0", "durable"])
@pytest.mark.parametrize("write", WRITES)
def test_a_durable_write_of_a_peer_is_on_the_disk_when_it_returns_and_holds_up_nobody(
    tmp_path: Path, disk: SlowDisk, write: Callable[..., None], sync_s: float
) -> None:
    made = journaled(tmp_path, sync_s, options=rpc.NodeOptions(max_threads=1))
    remote = made.remote()
    grpo.insert(remote, range(2))
    (row,) = remote.claim("answer")
    row.put(VALUES)
    remote.claim("reward").put(reward=np.zeros(1, np.float32))
    made.store.sync_journal(patience(10))
    disk.go.clear()
    options = {"durable": True} if sync_s else {}
    writes = threading.Thread(target=write, args=(remote,), kwargs=options)
    writes.start()
    time.sleep(0.1)
    assert made.remote().clock == 0 and writes.is_alive()
    disk.go.set()
    writes.join(patience(10))
    assert not writes.is_alive() and disk.unsynced_pages(512) == []
    made.close()


def test_rows_of_a_plain_store_of_a_peer_are_inserted_durably(tmp_path: Path, disk: SlowDisk) -> None:
    store = gt.Store.create({"x": gt.Field((), "int64")}, max_length=1, capacity=8, journal=tmp_path, journal_sync_s=60)
    made = World(store)
    made.remote().insert({"x": np.zeros((2, 1), np.int64)}, durable=True)
    assert disk.unsynced_pages(512) == [] and store.journal is not None and store.journal.rows == 2
    made.close()


@pytest.mark.parametrize("write", WRITES[:3])
def test_without_a_journal_a_durable_write_of_a_peer_is_refused(world: World, write: Callable[..., None]) -> None:
    remote = world.remote()
    grpo.insert(remote, range(1))
    with pytest.raises(ArgumentError, match="it has none: pass journal="):
        write(remote, durable=True)
    assert len(world.store.keys()) == 0 and world.store.stats()["inserted"] == 1 and figures(world)["done"] == 0


def test_a_durable_put_that_is_sent_again_returns_once_it_is_on_the_disk(tmp_path: Path, disk: SlowDisk) -> None:
    made = journaled(tmp_path)
    remote = made.remote()
    grpo.insert(remote, range(1), durable=True)
    disk.go.clear()
    puts = threading.Thread(target=_put_row, args=(remote,), kwargs={"durable": True})
    puts.start()
    comes(lambda: figures(made)["done"] == 1)
    made.learner.hang_up("host-0")
    puts.join(0.5)
    assert puts.is_alive()
    disk.go.set()
    puts.join(patience(10))
    assert not puts.is_alive() and disk.unsynced_pages(512) == []
    made.close()


def test_a_server_that_loaded_its_store_takes_puts_of_rows_that_nobody_has_claimed_since(
    world: World, tmp_path: Path
) -> None:
    remote, other = world.remote(), world.remote()
    keys = grpo.insert(remote, range(6))
    world.store.save(tmp_path / "checkpoint")
    keys = keys + grpo.insert(remote, [6])  # is not in it
    claim = remote.claim("answer", 7, version=3, fields=["id"])
    released, held, good, appended, put, other_good, lost = claim
    appended.append(item=0, ids=[1], log_prob=[1.0])
    put.put(VALUES)
    world.restart(tmp_path / "checkpoint")
    theirs, _ = other.claim("answer", 2), grpo.insert(other, [99])
    assert theirs["id"].tolist() == [0, 1]
    assert next(iter(theirs)).release()
    prompts = [number if number in (2, 5) else 0 for number in range(7) for _ in grpo.prompt_of(number)]
    assert claim["prompt"].tolist() == prompts
    for row in (released, held, appended, put, lost):
        with pytest.raises(StaleClaimError):
            row.put(VALUES)
    good.put(VALUES)
    other_good.append(item=0, ids=[5], log_prob=[5.0])
    other_good.put()
    assert figures(world)["done"] == 2 and figures(world)["claimed"] == 1
    assert remote.id == world.store.id != keys.store
    for refused in (remote.fetch, remote.delete, lambda its: remote.put(its, "reward", {"reward": [[1.0]] * 7})):
        with pytest.raises(ArgumentError, match="store"):
            refused(keys)
    with remote.claim("answer", 8) as again:
        assert again["id"].tolist() == [0, 3, 4, 99] and again.keys.store == world.store.id
        assert world.store.status(again.keys)["version"].tolist() == [0] * 4
        assert again.keys[3:].row == lost.key.row and again.keys[3:].generation == lost.key.generation
        assert len(again.put({name: [value] * 4 for name, value in VALUES.items()})) == 0


@pytest.mark.parametrize("done_by", ["it", "another"])
def test_a_put_whose_reply_is_lost_with_the_store_is_accepted_if_the_row_has_its_values(
    world: World, tmp_path: Path, done_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = world.remote()
    grpo.insert(remote, range(3))
    claim = remote.claim("answer", 3)
    write, saved = PeerCalls.write, threading.Event()

    def cutting(self: PeerCalls, *args: Any) -> Any:
        if saved.is_set():
            return write(self, *args)
        if done_by == "it":
            write(self, *args)
        else:
            self.end()
            world.store.claim("answer", 3).put(
                ids=[[7], [8], [9, 9]], log_prob=[[1], [2], [3, 3]], length=[[1], [1], [2]]
            )
        world.server.close()
        world.store.save(tmp_path / "checkpoint")
        saved.set()
        world.learner.hang_up("host-0")
        return None

    monkeypatch.setattr(PeerCalls, "write", cutting)
    skipped: list[gt.Keys] = []
    puts = threading.Thread(
        target=lambda: skipped.append(
            claim.put(ids=[[7], [8], [9, 8]], log_prob=[[1.0], [2.0], [3.0, 3.0]], length=[[1], [1], [2]])
        )
    )
    puts.start()
    assert saved.wait(patience(10))
    world.restart(tmp_path / "checkpoint")
    puts.join(patience(20))
    (its,) = skipped
    assert its.row.tolist() == ([] if done_by == "it" else [2])
    assert figures(world)["done"] == 3


JOURNALED = """
import sys, time
sys.path.insert(0, sys.argv[2])
import grpo
import geartrain as gt
from geartrain import rpc
from geartrain.actors import StoreServer

given = {"capacity": 64, "span_bytes": 1 << 20, "reserve": False, "journal": sys.argv[3], "journal_sync_s": 1e6}
store = gt.Store.create(sys.argv[1], grpo.FIELDS, tasks=grpo.TASKS, **given)
node = rpc.Node("learner", transport="tcp")
with StoreServer(node, store, "replay"):
    print(node.address, flush=True)
    time.sleep(600)
"""


def test_no_durable_put_is_lost_or_done_twice_when_servers_are_killed_and_load_their_journal(
    name: str, tmp_path: Path
) -> None:
    support, n, servers = str(grpo.__file__).rpartition("/")[0], 24, 0

    def serve() -> tuple[subprocess.Popen[str], str]:
        nonlocal servers
        servers += 1
        if servers > 1:
            lose_power(f"{name}-{servers - 1}")
        given = [f"{name}-{servers}", support, str(tmp_path / "journal")]
        its = subprocess.Popen([sys.executable, "-c", JOURNALED, *given], stdout=subprocess.PIPE, text=True)
        assert its.stdout is not None
        return its, its.stdout.readline().strip()

    server, address = serve()
    host = rpc.Node("host", peers={"learner": address}, transport="tcp")
    acknowledged: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for claim in remote.claims("answer", 2, output="numpy"):
                for row, number in zip(claim, claim["id"].tolist(), strict=True):
                    with contextlib.suppress(StaleClaimError):
                        row.put(ids=[number], log_prob=[1.0], length=[1], durable=True)
                        acknowledged.append(number)
        except BaseException as error:
            errors.append(error)

    try:
        remote = RemoteStore(host, "learner", "replay", timeout_s=patience(30))
        grpo.insert(remote, range(n), durable=True)
        remote.finish()
        worker = threading.Thread(target=work)
        worker.start()
        for killed_at in (5, 13):
            comes(lambda at=killed_at: len(acknowledged) >= at or errors)  # type: ignore[misc]
            server.kill()
            server.wait()
            server, host.directory.known["learner"] = serve()
            remote.finish()
        worker.join(patience(30))
        assert not worker.is_alive() and errors == []
        assert sorted(acknowledged) == list(range(n))
        its = remote.task_stats()["answer"]
        assert (its["remaining"], its["due"], its["claimed"]) == (0, 0, 0)
        with remote.claim("reward", n, fields=["id", "ids"], output="numpy") as claim:
            assert claim["ids"].tolist() == claim["id"].tolist() and len(claim) == n
    finally:
        server.kill()
        server.wait()
        host.close()
        lose_power(f"{name}-{servers}")


# --- lost peers ---------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_come_back_is_lost_after_the_time_of_the_store(world: World) -> None:
    remote = world.remote(timeout_s=1)
    grpo.insert(remote, range(1))
    with remote.claim("answer") as claim:
        world.learner.close()
        began_s = time.monotonic()
        with pytest.raises(PeerLostError):
            claim.put(ids=[[1]], log_prob=[[1.0]], length=[[1]])
        assert 0.9 < time.monotonic() - began_s < patience(10)


# --- waits --------------------------------------------------------------------------------------------------------


def test_thousands_of_claims_wait_on_a_server_and_a_put_is_not_delayed(world: World) -> None:
    n, hosts = 2000, 4
    remotes = [world.remote(options=rpc.NodeOptions(max_open=n)) for _ in range(hosts)]
    worker = world.remote()
    grpo.insert(worker, range(8))
    claim = worker.claim("answer", 8)
    threads = threading.active_count()
    got: list[int] = []

    async def wait(remote: RemoteStore) -> None:
        with await remote.claim_async("reward") as mine:
            got.extend(mine["id"].tolist())
            mine.put(reward=[[1.0] * grpo.ANSWERS] * len(mine))

    async def all_of(remote: RemoteStore) -> None:
        await asyncio.gather(*(wait(remote) for _ in range(n // hosts)))

    loops = [threading.Thread(target=asyncio.run, args=(all_of(remote),)) for remote in remotes]
    for loop in loops:
        loop.start()
    comes(lambda: open_calls(world) == n)
    assert threading.active_count() - threads < 30
    took_s = []
    for row, number in zip(claim, claim["id"].tolist(), strict=True):
        grpo.append(row, number)
        began_s = time.monotonic()
        row.put()
        took_s.append(time.monotonic() - began_s)
    assert sorted(took_s)[4] < patience(0.1)
    comes(lambda: len(got) == 8)
    world.store.finish()  # none can become due any more
    for loop in loops:
        loop.join(patience(20))
        assert not loop.is_alive()
    assert sorted(got) == list(range(8)) and figures(world, "reward")["done"] == 8


@pytest.mark.parametrize("closes", ["server", "store"])
def test_the_end_of_the_server_and_of_the_store_end_the_waits(world: World, closes: str) -> None:
    remote = world.remote()
    said: list[object] = []

    def wait() -> None:
        try:
            remote.claim("answer", timeout_s=patience(60))
        except StoreClosedError as error:
            said.append(error)

    threads = [
        threading.Thread(target=lambda: said.append(list(remote.claims("answer")))),
        threading.Thread(target=wait),
    ]
    for thread in threads:
        thread.start()
    comes(lambda: open_calls(world) == 2)
    getattr(world, closes).close()
    for thread in threads:
        thread.join(patience(10))
        assert not thread.is_alive()
    assert [] in said and len(said) == 2


def test_a_wait_that_is_given_up_keeps_no_row(world: World) -> None:
    remote = world.remote()

    async def give_up() -> None:
        waits = [asyncio.create_task(remote.claim_async("answer")) for _ in range(3)]
        while open_calls(world) < 3:
            await asyncio.sleep(0.01)
        grpo.insert(world.store, range(3))
        for each in waits:
            each.cancel()
        for each in waits:
            with contextlib.suppress(asyncio.CancelledError):
                (await each).release()

    asyncio.run(give_up())
    comes(lambda: figures(world)["due"] == 3)
    assert not remote.claim("reward", timeout_s=0.05)


# --- backpressure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["insert", "append"])
def test_who_finds_no_room_waits_and_holds_up_nobody(what: str) -> None:
    tasks = {
        "work": gt.Task({"y": gt.Field(("m",), "uint8")}, keep_partial=True),
        "train": gt.Task(after="work"),
    }
    store = gt.Store.create({"x": gt.Field(("n",), "uint8")}, tasks=tasks, capacity=64, span_bytes=1 << 16)
    made = World(store, options=rpc.NodeOptions(max_threads=2))
    remote = made.remote()
    big = np.zeros(25_000, np.uint8)
    first, row = remote.insert({"x": [[1], [2]]}) and remote.claim("work", 2)
    first.put(y=np.zeros(50_000, np.uint8))

    def act(timeout_s: float) -> Any:
        if what == "insert":
            return remote.insert({"x": [big]}, timeout_s=timeout_s)
        return row.append(y=big, timeout_s=timeout_s)

    def act_on() -> None:
        with contextlib.suppress(GeartrainError):
            act(patience(60))

    with pytest.raises(WaitTimeoutError, match=r"within 0.2 s: (.|\n)*Raise capacity= or span_bytes="):
        act(0.2)
    waiting = [threading.Thread(target=act_on) for _ in range(3 if what == "insert" else 2)]
    for each in waiting:
        each.start()
    time.sleep(0.3)
    assert all(each.is_alive() for each in waiting)
    assert remote.clock == 0 and made.remote().task_stats()["work"]["claimed"] == 1  # served meanwhile
    store.delete(first.key)
    comes(lambda: sum(not each.is_alive() for each in waiting) == 2)
    made.hosts[0].close()
    for each in waiting:
        each.join(patience(10))
        assert not each.is_alive()
    comes(lambda: store.task_stats()["work"]["claimed"] == 0)
    time.sleep(0.7)  # an insert looks every half second whether its client is there
    for each in store.claim("work", 8):
        each.drop()
    time.sleep(0.7)
    assert store.stats()["inserted"] == (4 if what == "insert" else 2) and store.audit() == []
    made.close()


@pytest.mark.parametrize("way", ["claim", "claim_async"])
def test_a_claim_outlasts_several_losses_of_its_peer_and_waits_no_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch, world: World, way: str
) -> None:
    remote = world.remote()
    remote._calls.timeout_s = 0.3
    grpo.insert(remote, range(1))
    claim, waits = PeerCalls.claim, []

    def losing(self: PeerCalls, *args: Any) -> Any:
        waits.append(args[-1])
        if len(waits) < 4:
            time.sleep(0.2)
            raise PeerLostError("the connection of the client is lost")
        return claim(self, *args)

    monkeypatch.setattr(PeerCalls, "claim", losing)
    found = getattr(remote, way)("answer", timeout_s=20)
    assert len(asyncio.run(found) if way == "claim_async" else found) == 1
    assert waits[3] < waits[0] - 0.5


# --- hostile peers ------------------------------------------------------------------------------------------------


def raw(world: World, remote: RemoteStore) -> Callable[..., Any]:
    """Calls of the protocol itself."""
    handle, _ = remote._calls.opened(10)
    return lambda what, *args: handle.call(what, *args, timeout_s=patience(10))


def test_a_peer_cannot_touch_rows_that_another_has_claimed(world: World) -> None:
    remote, other = world.remote(), world.remote()
    grpo.insert(remote, range(2))
    mine, local = remote.claim("answer"), world.store.claim("answer")
    call, number = raw(world, other), 0
    for theirs in (mine, local):
        columns = theirs.keys.row, theirs.keys.generation, theirs._claims
        none = np.zeros(1, np.int64)
        sources = [(2, np.ones(1, np.int32), None), (3, np.ones(1, np.float32), None), (4, np.ones(1, np.int32), None)]
        lengths = np.array([[1, 1, 1]], np.uint32)
        lengths[:, [axis.owner == 0 for axis in world.store.plan.axes]] = 0
        written = (0, 1, 0, *columns, sources, lengths, 0, False, None), none, 0, 0.0, False
        for again in (False, True):
            assert call("write", (1, 1), again, *written).tolist() == [1]
        assert call("drop", (0, number := number + 1), 1, *columns, none) == 1 and call("release", 1, *columns) == 1
        call("say_version", 1, *columns, 5)
        times = world.store.native.infos(columns[0])["inserted_at_ns"]
        assert call("claim_loaded", 1, *columns[:2], np.zeros(1, np.uint16), none, times).tolist() == [NO_CLAIM]
        with pytest.raises(StaleClaimError):
            call("appended", 1, *(int(each[0]) for each in columns), 0, 0, [2])
        call("give_back", 1)
    assert figures(world)["claimed"] == 2
    next(iter(mine)).put(ids=[1], log_prob=[1.0], length=[1])
    next(iter(local)).put(ids=[1], log_prob=[1.0], length=[1])


HOSTILE: list[Any] = [
    None, -1, 0, 1, 2, 2**31, 2**40, 2**70, 1.5, float("nan"), "", "x" * 1000, b"\xff", [], [None], (), {}, {"a": 1},
    np.zeros(0, np.uint32), np.zeros(1, np.uint32), np.full(3, 2**32 - 1, np.uint32), np.zeros((2, 2), np.int64),
    np.ones(1, np.uint16), np.full(1, -1, np.int64), np.zeros(5, np.float32), [(0, np.zeros(1), None)],
    [(2, b"x" * 8, np.full(2, 2**31, np.uint32))], [(2**31, [], None)], True,
]  # fmt: skip


def test_any_arguments_of_a_peer_are_an_error_and_no_damage(world: World) -> None:
    remote = world.remote(pickle=False)
    grpo.insert(remote, range(4))
    call, claim = raw(world, remote), remote.claim("answer", 2)
    columns = (claim.keys.row, claim.keys.generation, claim._claims)
    lengths = np.array([[0, 1, 1]] * 2, np.uint32)
    sources = [(2, np.ones(2, np.int32), None), (3, np.ones(2, np.float32), None), (4, np.ones(2, np.int32), None)]
    good: dict[str, tuple[Any, ...]] = {
        "claim": (1, 1, 1, 0, 0, False, ["id"], 0.0),
        "give_back": (1,),
        "release": (1, *columns),
        "drop": ((2, 1), 1, *columns, np.zeros(2, np.int64)),
        "say_version": (1, *columns, 1),
        "write": (
            *((1, 1), False, (0, 1, 0, *columns, sources, lengths, 0, False, None), np.zeros(2, np.int64), 0, 0.0),
            False,
        ),
        "insert_packed": (
            *(
                (3, 1),
                1,
                [(0, np.zeros(1, np.int32), None), (1, np.zeros(1, np.int64), None)],
                lengths[:1],
                None,
                None,
                0,
            ),
            False,
        ),
        "claim_loaded": (1, *columns, np.zeros(2, np.int64), np.zeros(2, np.uint64)),
        "read": (["id"], [], *columns[:2]),
        "appended": (1, *(int(each[0]) for each in columns), 0, 0, [2]),
        "stale": columns[:2],
        "lengths": columns[:2],
        "ask": ("advance", 0),
        "lag": (1,),
    }
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(600):
        what = list(good)[random.integers(len(good))]
        given = list(good[what])
        for _ in range(random.integers(1, 3)):
            i, other = random.integers(len(given)), HOSTILE[random.integers(len(HOSTILE))]
            if isinstance(given[i], tuple) and len(given[i]) > 2:  # of a write, one value rather than all
                j = random.integers(len(given[i]))
                other = (*given[i][:j], other, *given[i][j + 1 :])
            given[i] = other
        if random.random() < 0.05:
            given = given[: random.integers(len(given))]
        try:
            call(what, *given)
        except (GeartrainError, TypeError, ValueError, OverflowError, LookupError, RuntimeError):
            refused += 1
    assert refused > 300
    for name in ("end", "_native", "_mine", "__init__", "nothing"):
        with pytest.raises((AttributeError, GeartrainError)):
            call(name)
    with pytest.raises(GeartrainError, match="not asked"):
        call("ask", "unlink")
    assert world.store.audit() == []
    del claim
    gc.collect()


def test_a_put_fails_once_its_store_is_not_served_and_takes_effect_where_it_is_served_again(world: World) -> None:
    remote = world.remote()
    grpo.insert(remote, range(1))
    claim = remote.claim("answer")
    world.server.close()
    with pytest.raises(LookupError, match="serves no store"):
        claim.put(ids=[[1]], log_prob=[[1.0]], length=[[1]])
    with StoreServer(world.learner, world.store, "replay"):
        claim.put(ids=[[1]], log_prob=[[1.0]], length=[[1]])
    assert world.store.task_stats()["answer"]["done"] == 1
