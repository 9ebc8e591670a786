"""Parts of rows: what has changed is told once, copies are of one state, and a new store made of them goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tasked_stores import answer, contents, everything, in_all_states, insert, make_store, reward

import geartrain as gt
from geartrain.errors import NoSpaceError, SchemaError
from geartrain.store.saved_parts import (
    COMMITTED,
    DONE,
    FREE,
    NOT_DONE,
    PART,
    TAKEN,
    TAKEN_BY,
    UNDER_WAY,
    as_bytes,
    changed_parts,
)


def changed(store: gt.Store, since: int = 0) -> tuple[int, Any, Any]:
    return changed_parts(store.native, since)


def told(parts: Any) -> list[tuple[int, int]]:
    return sorted((int(part["row"]), int(part["task"])) for part in parts)


def load(saved: gt.Store, **options: Any) -> gt.Store:
    """A new store that is made of another's parts."""
    _, rows, parts = changed(saved)
    content, offsets, ok = saved.native.copy_parts(as_bytes(parts))
    assert ok.all()
    assert (np.diff(offsets.astype(np.int64)) == parts["bytes"]).all()
    store = make_store(**options)
    store.native.begin_load()
    store.native.load_parts(as_bytes(parts), content, offsets)
    there = rows["state"] != FREE
    order = np.argsort(rows["sequence"], kind="stable")
    store.native.finish_load(as_bytes(rows[order][there[order]]), saved.native.next_sequence())
    assert store.native.audit() == []
    return store


def test_each_change_of_a_row_is_told_once() -> None:
    with make_store() as store:
        since, rows, parts = changed(store)
        assert len(rows) == len(parts) == 0
        insert(store, 0, 1)
        since, rows, parts = changed(store, since)
        assert rows["state"].tolist() == [UNDER_WAY] * 2 and (rows["generation"] == 1).all()
        assert told(parts) == [(0, 0), (1, 0)]
        claim = store.claim("answer", 1)
        next(iter(claim)).append(item=0, ids=[1, 2])
        claim.release()
        assert [len(found) for found in changed(store, since)[1:]] == [0, 0]  # nothing that is kept
        answer(store, 1)
        since, rows, parts = changed(store, since)
        assert told(parts) == [(0, 1)] and parts["state"].tolist() == [DONE]
        reward(store, 1)
        since, rows, parts = changed(store, since)
        assert rows["state"].tolist() == [COMMITTED] and told(parts) == [(0, 2)]
        rows, generations = store.native.keys()
        store.native.count_samples(rows, generations, 7, np.zeros(1, np.uint32))
        since, rows, parts = changed(store, since)
        assert rows["state"].tolist() == [TAKEN]
        assert [(int(p["state"]), int(p["step"]), int(p["place"])) for p in parts] == [(TAKEN_BY, 7, 0)]
        store.native.untake(7)
        since, rows, parts = changed(store, since)
        assert rows["state"].tolist() == [COMMITTED] and parts["state"].tolist() == [NOT_DONE]
        store.delete(store.keys())
        since, rows, parts = changed(store, since)
        assert rows["state"].tolist() == [FREE] and len(parts) == 0
        assert changed(store, since)[0] == since


def test_a_row_that_is_set_back_is_told() -> None:
    with make_store(span_bytes=4096, capacity=4) as store:
        insert(store, 0, 1)
        claims = store.claim("answer", 1), store.claim("answer", 1)
        claims[1].put(ids=[list(range(600))], length=[[600]])
        since, _, _ = changed(store)
        claims[0].put(ids=[list(range(600))], length=[[600]])  # for which the newer row gives its room
        _, _, parts = changed(store, since)
        states = {(int(part["row"]), int(part["task"])): int(part["state"]) for part in parts}
        assert states == {(0, 1): DONE, (1, 1): NOT_DONE}


def test_a_store_that_is_made_of_parts_goes_on() -> None:
    with make_store() as store:
        insert(store, *range(6))
        answer(store, 4)
        reward(store, 3)
        rows, generations = store.native.keys()
        store.native.count_samples(rows[:1], generations[:1], 5, np.full(1, 3, np.uint32))
        store.claim("answer", 1)  # comes back
        with load(store) as loaded:
            assert loaded.keys() == store.keys()
            assert contents(loaded) == contents(store)
            assert told(changed(loaded)[2]) == told(changed(store)[2])
            assert set(changed(loaded)[2]["change"]) == set(changed(store)[2]["change"])
            assert [part.tolist() for part in loaded.native.taken(5)] == [
                part.tolist() for part in store.native.taken(5)
            ]
            claim = loaded.claim("reward", 8)
            assert [row["number"] for row in claim] == [3]
            assert claim["ids"].numpy().tolist() == [3, 4, 5]
            claim.release()
            assert [row["number"] for row in loaded.claim("answer", 8)] == [4, 5]
            insert(loaded, 6)
            assert loaded.native.audit() == []


def test_a_copy_of_a_part_that_changed_is_void() -> None:
    with make_store() as store:
        insert(store, 0)
        answer(store, 1)
        _, _, parts = changed(store)
        store.claim("reward", 1).drop()
        insert(store, 1)
        assert not store.native.copy_parts(as_bytes(parts))[2].any()


def test_a_repair_changes_nothing_that_is_saved() -> None:
    with in_all_states() as store:
        before = everything(store)
        since, _, _ = changed(store)
        store.native.rebuild()
        assert everything(store)["parts"] == before["parts"]
        assert [len(found) for found in changed(store, since)[1:]] == [0, 0]


def damages() -> list[tuple[str, Any]]:
    def flip(name: str, value: int) -> Any:
        def damage(rows: Any, parts: Any) -> None:
            (parts if name in PART.names and name != "generation" else rows)[name][-1] = value

        return damage

    def change_axis(rows: Any, parts: Any) -> None:
        parts["lengths"][parts["task"] == 2] += 1

    return [
        ("row", flip("row", 99)),
        ("task", flip("task", 9)),
        ("state", flip("state", 3)),
        ("bytes", flip("bytes", 3)),
        ("generation", flip("generation", 2)),
        ("sequence", flip("sequence", 0)),
        ("axis", change_axis),
        ("no insert", lambda rows, parts: parts["task"].__setitem__(0, 1)),
    ]


@pytest.mark.parametrize(("name", "damage"), damages(), ids=[name for name, _ in damages()])
def test_parts_that_contradict_themselves_are_refused(name: str, damage: Any) -> None:
    with make_store() as store:
        insert(store, 0, 1)
        answer(store, 1)
        reward(store, 1)
        _, rows, parts = changed(store)
        content, offsets, _ = store.native.copy_parts(as_bytes(parts))
        with make_store() as other:
            damage(rows, parts)
            other.native.begin_load()
            with pytest.raises(SchemaError, match="contradicts itself"):
                other.native.load_parts(as_bytes(parts), content, offsets)
                other.native.finish_load(as_bytes(rows), 3)


def test_parts_that_do_not_fit_are_refused() -> None:
    with make_store() as store:
        insert(store, *[400] * 4)
        with pytest.raises(NoSpaceError, match="larger span_bytes"):
            load(store, span_bytes=4096)


def test_what_is_beside_the_rows_comes_back() -> None:
    with make_store() as store:
        store.limiter.set(in_flight=7, max_stale=4)
        insert(store, 0, 1)
        store.advance(5)
        answer(store, 2)
        store.finish()
        state = store.native.task_state()
        with load(store) as loaded:
            loaded.native.restore_task_state(state)
            assert loaded.native.task_state() == state
            assert loaded.clock == 5
            assert loaded.limiter.state() == store.limiter.state()
