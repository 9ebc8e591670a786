"""Stores of a job by key: rows of this host's store and of others, in one batch and one update."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain import rpc
from geartrain.actors import JobStores, RemoteStore, StoreServer
from geartrain.errors import ArgumentError, PeerLostError, SchemaError, StaleKeyError

FIELDS = {"x": gt.Field((2,), "float32"), "tag": gt.Field((), "int64", per_row=True)}


class World:
    """Three stores: one of this process, two of peers reached by TCP."""

    def __init__(self) -> None:
        self.stores = [gt.Store.create(FIELDS, max_length=3, capacity=16) for _ in range(3)]
        self.peers = [rpc.Node(f"store-{i}", transport="tcp") for i in (1, 2)]
        self.servers = [StoreServer(p, s, "job") for p, s in zip(self.peers, self.stores[1:], strict=True)]
        self.node = rpc.Node("mine", peers={peer.name: peer.address for peer in self.peers}, transport="tcp")
        served = {p.name: RemoteStore(self.node, p.name, "job", timeout_s=patience(30)) for p in self.peers}
        self.job = JobStores({"store-0": self.stores[0], **served})

    def fill(self) -> gt.Keys:
        """Four rows in each; row i of store s has the tag 10 s + i. The keys, mixed."""
        keys = []
        for number, name in enumerate(self.job):
            tags = np.arange(4) + 10 * number
            x = np.broadcast_to(tags[:, None, None], (4, 3, 2)).astype(np.float32) + np.arange(3)[:, None] / 10
            keys.append(self.job[name].insert({"x": x.astype(np.float32), "tag": tags}, lengths=[1, 2, 3, 3]))
        return gt.Keys.join(keys)[[8, 0, 5, 5, 3, 11, 1, 6]]

    def close(self) -> None:
        for each in (self.node, *self.peers, *self.stores):
            each.close()


TAGS = [20, 0, 11, 11, 3, 23, 1, 12]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_rows_of_all_stores_are_one_batch_in_the_keys_order(world: World, output: str) -> None:
    if output == "torch":
        pytest.importorskip("torch")
    keys = world.fill()
    assert world.job["store-2"].id == world.stores[2].id and len(world.job) == 3
    for asked in ({}, {"window": 2}, {"window": 2, "ends": [0] * 8, "pad": "right"}, {"fields": ["tag"]}):
        found = gt.fetch(world.job, keys, output=output, **asked)
        known = gt.fetch(world.stores, keys, output=output, **asked)  # the same by the stores themselves
        assert found["tag"].tolist() == known["tag"].tolist() == TAGS
        assert found.keys == keys and (found.keys.store == keys.store).all()
        for name in found.fields:
            assert (np.asarray(found[name]) == np.asarray(known[name])).all(), (name, asked)
        for name in ("mask", "start", "length", "version"):
            assert (np.asarray(getattr(found, name)) == np.asarray(getattr(known, name))).all(), (name, asked)
    one = gt.fetch(world.job["store-1"], keys[[2, 7]], output=output)
    assert one["tag"].tolist() == [11, 12]
    assert len(gt.fetch(world.job, keys[:0], output=output).keys) == 0


def test_priorities_and_removals_reach_each_row_in_its_store(world: World) -> None:
    keys = world.fill()
    assert world.job.update_priorities(keys, np.array([2.0, 3, 4, 4, 5, 6, 7, 8])) == 0
    for store, wanted in zip(world.stores, ([3, 7, 1, 5], [1, 4, 8, 1], [2, 1, 1, 6]), strict=True):
        assert store.status(store.keys())["priority"].tolist() == wanted
    assert world.job.delete(keys[[0, 2]]) == 0
    assert world.job.update_priorities(keys, np.ones(8)) == 3, "the row of key 2 is also that of key 3"
    with pytest.raises(StaleKeyError):
        gt.fetch(world.job, keys, output="numpy")
    kept = gt.fetch(world.job, keys, window=1, output="numpy", on_stale="drop")
    assert kept["tag"].tolist() == [0, 3, 23, 1, 12] == kept["x"][:, 0, 0].astype(int).tolist()
    assert kept.keys == keys[[1, 4, 5, 6, 7]]


def test_what_does_not_go_together_is_refused(world: World) -> None:
    keys = world.fill()
    with pytest.raises(ArgumentError, match="without a store"):
        world.job.fetch(gt.Keys(np.zeros(1, np.uint32), np.ones(1, np.uint32)))
    with pytest.raises(ArgumentError, match="priorities are numbers, one for each of 8 keys"):
        world.job.update_priorities(keys, np.ones(7))
    before = world.stores[0].status()["priority"].tolist()
    with pytest.raises(SchemaError, match="priority 7 of 8 is nan"):
        world.job.update_priorities(keys, [*np.full(7, 9.0), np.nan])
    assert world.stores[0].status()["priority"].tolist() == before, "no store is changed"
    for wrong in (3, {"x": 1}, "x"):
        with pytest.raises(ArgumentError, match="fields is a list of names"):
            world.job.fetch(keys, fields=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="one for each of 8 keys"):
        world.job.fetch(keys, ends=[0])
    with pytest.raises(ArgumentError, match="supports only fields, window"):
        gt.fetch(world.job, keys, threads=1)
    with pytest.raises(ArgumentError, match="several of the names"):
        JobStores({"a": world.stores[0], "b": world.stores[0]})
    with pytest.raises(ArgumentError, match="stores by name"):
        JobStores([world.stores[0]])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at least one"):
        JobStores({})
    with gt.Store.create({"y": gt.Field((), "float32")}, max_length=3, capacity=4) as other:
        with pytest.raises(ArgumentError, match="'a' and 'b' differ in their fields"):
            JobStores({"a": world.stores[0], "b": other})
        with pytest.raises(ArgumentError):
            world.job.fetch(other.insert({"y": np.zeros((1, 3), np.float32)}))
    longer = gt.Store.create(FIELDS, max_length=4, capacity=4)
    both = JobStores({"a": world.stores[0], "b": longer})
    some = longer.insert({"x": np.zeros((1, 4, 2), np.float32), "tag": np.zeros(1, np.int64)}) + keys[[1]]
    with pytest.raises(ArgumentError, match="give window="):
        both.fetch(some)
    assert len(both.fetch(some, window=3, output="numpy").keys) == 2
    longer.close()


def test_a_lost_peer_is_named_and_others_go_on(world: World) -> None:
    keys = world.fill()
    world.peers[1].close()
    with pytest.raises(PeerLostError, match="store-2"):
        gt.fetch(world.job, keys, output="numpy")
    here = keys[np.flatnonzero(keys.store != np.uint64(world.stores[2].id))]
    assert gt.fetch(world.job, here, output="numpy")["tag"].tolist() == [0, 11, 11, 3, 1, 12]
