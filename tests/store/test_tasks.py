"""Tasks of a store, in one process: inserts, claims, puts, appends, drops, releases, waits."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpo
import numpy as np
import pytest
import torch
from deadlines import patience

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    FieldError,
    NoSpaceError,
    SchemaError,
    StaleClaimError,
    StoreClosedError,
    WaitTimeoutError,
)


@pytest.fixture
def store() -> Iterator[gt.Store]:
    with grpo.new_store() as made:
        yield made
        assert made.closed or made.audit() == []


def answered(store: gt.Store, n: int, first: int = 0) -> None:
    """Rows that were inserted and answered."""
    grpo.insert(store, range(first, first + n))
    grpo.work(store, "answer", store.claim("answer", n))


def simple(**options: Any) -> gt.Store:
    tasks = {"work": gt.Task({"y": gt.Field(("m",), "float32")}, keep_partial=True), "train": gt.Task(after="work")}
    given = {"capacity": 16, "span_bytes": 1 << 16, "reserve": False, **options}
    return gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, **given)


# --- inserts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": [np.array([1, 2], np.int32), np.array([3], np.int32)], "id": np.array([5, 6])},
        {"prompt": [[1, 2], [3]], "id": [5, 6]},
        {"prompt": torch.tensor([1, 2, 3], dtype=torch.int32), "id": torch.tensor([5, 6]), "lengths": [2, 1]},
        {"prompt": np.array([1, 2, 3], np.int32), "id": [5, 6], "lengths": {"prompt": np.array([2, 1])}},
    ],
    ids=["arrays", "numbers", "flat tensor", "flat array"],
)
def test_rows_are_inserted_from_lists_and_from_flat_arrays(store: gt.Store, values: dict[str, Any]) -> None:
    lengths = values.pop("lengths", None) if "lengths" in values else None
    keys = store.insert(values, lengths=lengths)
    assert len(keys) == 2 and len(store) == 0 and store.stats()["under_way"] == 2
    claim = store.claim("answer", 2)
    assert claim.keys == keys
    assert claim["prompt"].tolist() == [1, 2, 3] and claim["id"].tolist() == [5, 6]
    assert [row["prompt"].tolist() for row in claim] == [[1, 2], [3]]
    assert claim.lengths("prompt").tolist() == [2, 1]


def test_strings_and_wide_items_come_back_as_they_went_in() -> None:
    fields = {"text": gt.Text(), "raw": gt.Bytes("files"), "pixels": gt.Field(("images", 2, 3), "bfloat16")}
    tasks = {"look": gt.Task({"words": gt.Text("files")}), "train": gt.Task(after="look")}
    pixels = [torch.arange(6 * n).reshape(n, 2, 3).to(torch.bfloat16) for n in (2, 0, 1)]
    with gt.Store.create(fields, tasks=tasks, capacity=4, span_bytes=1 << 16) as store:
        store.insert({"text": ["ä", "", "b" * 100], "raw": [[b"1", b""], [], [b"\0\xff"]], "pixels": pixels})
        claim = store.claim("look", 3)
        assert claim["text"] == ["ä", "", "b" * 100] and claim["raw"] == [b"1", b"", b"\0\xff"]
        assert torch.equal(claim["pixels"], torch.cat(pixels))
        rows = list(claim)
        assert rows[2]["text"] == "b" * 100 and rows[0]["raw"] == [b"1", b""] and rows[1]["pixels"].shape == (0, 2, 3)
        assert len(claim.put(words=["x", "yy", "zzz"])) == 0


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({"prompt": [[1]]}, {}, FieldError, "missing \\['id'\\]"),
        ({"prompt": [[1]], "id": [1], "ids": [[1]]}, {}, FieldError, "unknown \\['ids'\\]"),
        ([[1]], {}, SchemaError, "a dict of values by field"),
        ({"prompt": [[1], [2]], "id": [1]}, {}, SchemaError, "has 1 rows, expected 2"),
        ({"prompt": np.zeros(3, np.int32), "id": [1]}, {}, SchemaError, "or lengths="),
        ({"prompt": np.zeros(3, np.int32), "id": [1]}, {"lengths": [2]}, SchemaError, "3 items, the 1 rows have 2"),
        ({"prompt": [np.zeros(3, np.int64)], "id": [1]}, {}, SchemaError, "holds int32, found int64"),
        ({"prompt": [[2**31]], "id": [1]}, {}, SchemaError, "from -2147483648 to 2147483647"),
        ({"prompt": [[0.5]], "id": [1]}, {}, SchemaError, "holds int32, found float64"),
        ({"prompt": [np.zeros((3, 2), np.int32)], "id": [1]}, {}, SchemaError, r"takes \(m\) for each row"),
        ({"prompt": "ab", "id": [1]}, {}, SchemaError, "prompt"),
        ({"prompt": None, "id": [1]}, {}, SchemaError, "found None"),
        ({"prompt": [[1], None], "id": [1, 2]}, {}, SchemaError, "takes an array for each row, found None for row 1"),
        ({"prompt": [[1]], "id": ["a"]}, {}, SchemaError, "'id' holds .*, found 'a', which is no number"),
        ({"prompt": [[1]], "id": [1]}, {"lengths": {"tokens": [1]}}, SchemaError, "lengths= has the axis 'tokens'"),
        ({"prompt": [[1]], "id": [1]}, {"priorities": [-1.0]}, SchemaError, "priorit"),
        ({"prompt": [[1]], "id": [1]}, {"timeout_s": -1}, ArgumentError, "timeout_s"),
        ({"prompt": [[1]], "id": [1]}, {"casting": "wild"}, ArgumentError, "casting"),
    ],
)
def test_bad_values_of_an_insert_are_refused_and_nothing_is_written(
    store: gt.Store, fields: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        store.insert(fields, **options)
    assert store.stats()["free"] == 64 and store.stats()["inserted"] == 0


@pytest.mark.parametrize("flat", [False, True])
def test_many_rows_are_inserted_in_parts(flat: bool) -> None:
    with grpo.new_store(capacity=100) as store:
        prompts = [grpo.prompt_of(each) for each in range(90)]
        lengths = [len(each) for each in prompts]
        keys = store.insert(
            {"prompt": np.concatenate(prompts) if flat else prompts, "id": np.arange(90)},
            lengths=lengths if flat else None,
        )
        assert store.status(keys)["generation"].tolist() == keys.generation.tolist()
        assert len(set(keys.row.tolist())) == 90
        claim = store.claim("answer", 100)
        assert claim["id"].tolist() == list(range(90))
        assert claim["prompt"].tolist() == np.concatenate([grpo.prompt_of(i) for i in range(90)]).tolist()


def test_an_insert_waits_for_a_row_and_says_what_fills_the_store() -> None:
    with grpo.new_store(capacity=2) as store:
        grpo.insert(store, range(2))
        claim = store.claim("answer")
        with pytest.raises(WaitTimeoutError, match=r"of 2 rows 2 are under way.*'answer' has 1 due and 1 claimed"):
            store.insert({"prompt": [[1]], "id": [1]}, timeout_s=0.05)
        later = threading.Timer(0.1, claim.drop)
        later.start()
        assert len(store.insert({"prompt": [[1]], "id": [7]}, timeout_s=patience(10))) == 1
        later.join()
        assert store.stats()["dropped"] == 1


def test_a_put_that_has_no_time_writes_where_a_newer_row_was_set_back_for_it() -> None:
    with simple(span_bytes=1 << 12) as store:
        store.insert({"x": [1, 2]})
        older = store.claim("work")
        older_key = older.keys
        next(iter(newer := store.claim("work"))).append(y=np.zeros(500, np.float32))
        newer.release()
        assert len(older.put(y=[np.zeros(700, np.float32)], timeout_s=0)) == 0
        assert store.keys() == older_key and store.stats()["set_back"] == 1


def test_a_put_of_rows_that_has_no_time_makes_room_for_each_of_them() -> None:
    with simple(span_bytes=1 << 12) as store:
        store.insert({"x": [1, 2, 3, 4]})
        older = store.claim("work", 2)
        newer = store.claim("work", 2)
        for row, size in zip(newer, (500, 300), strict=True):  # the newest one is enough for the first row
            row.append(y=np.zeros(size, np.float32))
        newer.release()
        assert len(older.put(y=[np.zeros(430, np.float32)] * 2, timeout_s=0)) == 0
        assert len(store.keys()) == 2 and store.stats()["set_back"] == 2


def test_an_insert_larger_than_all_spans_is_refused_at_once(store: gt.Store) -> None:
    with pytest.raises(NoSpaceError, match="larger span_bytes"):
        store.insert({"prompt": [np.zeros(1 << 20, np.int32)], "id": [1]})


def test_inserts_are_counted_by_the_limiter_and_given_back_where_they_fail() -> None:
    with grpo.new_store(capacity=2) as store:
        store.limiter.set(min_size_to_sample=2)
        grpo.insert(store, range(2))
        with pytest.raises(WaitTimeoutError):
            store.insert({"prompt": [[1]], "id": [1]}, timeout_s=0.01)
        assert store.limiter.state().inserts == 2


# --- claims -------------------------------------------------------------------------------------------------------


def test_max_items_bounds_a_claim_but_never_below_one_row(store: gt.Store) -> None:
    grpo.insert(store, [3, 4, 4, 0])  # prompts of 4, 5, 5 and 1 tokens
    assert len(store.claim("answer", max_items=9)) == 2
    assert len(store.claim("answer", max_items=3)) == 1
    assert len(store.claim("answer", 5, max_items=3, of="prompt")) == 1


def test_leaving_the_turn_of_a_loop_releases_what_is_left(store: gt.Store) -> None:
    grpo.insert(store, range(4))
    store.finish()
    for claim in store.claims("answer", 4):
        next(iter(claim)).drop()
        break
    assert store.task_stats()["answer"] == {
        "due": 3, "claimed": 0, "remaining": 3, "done": 0, "released": 3, "deaths": 0, "set_back": 0,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="of the body"):
        for _ in store.claims("answer", 4):
            raise RuntimeError("of the body")
    assert store.task_stats()["answer"]["claimed"] == 0
    with store.claim("answer") as claim:
        assert claim["prompt"].tolist() != []
    assert store.task_stats()["answer"]["due"] == 3


def test_partial_answers_of_a_release_are_gone_on_with(store: gt.Store) -> None:
    grpo.insert(store, range(1))
    with store.claim("answer") as claim:
        row = next(iter(claim))
        assert not row.partial
        row.append(item=1, ids=[1, 2], log_prob=[1.0, 2.0])
        row.append(item=0, ids=[7], log_prob=[7.0], done=True)
        row.append(item=1, ids=[3], log_prob=[3.0])
    row = next(iter(store.claim("answer")))
    assert row.partial.lengths == {0: 1, 1: 3} and row.partial.items == (0, 1) and row.partial.done == {0}
    assert {item: values.tolist() for item, values in row.partial["ids"].items()} == {0: [7], 1: [1, 2, 3]}
    with pytest.raises(FieldError, match="'length' was not appended"):
        row.partial["length"]
    row.append(item=2, ids=[4], log_prob=[4.0])
    row.put()
    claim = store.claim("reward")
    assert claim["ids"].tolist() == [7, 1, 2, 3, 4] and claim["length"].tolist() == [1, 3, 1]


def test_an_item_without_an_append_needs_its_length(store: gt.Store) -> None:
    grpo.insert(store, range(1))
    row = next(iter(store.claim("answer")))
    row.append(item=2, ids=[4], log_prob=[4.0])
    with pytest.raises(SchemaError, match="nothing was appended to number 0 of the answers"):
        row.put()
    with pytest.raises(SchemaError, match="says that number 2 of the answers has 2"):
        row.put(length=[0, 0, 2])
    row.put(length=[0, 0, 1, 0])
    assert store.claim("reward")["length"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("task", "values", "error", "message"),
    [
        ("answer", {"ids": [[1]], "log_prob": [[1.0]]}, FieldError, r"missing \['length'\]"),
        ("answer", {"ids": [[1]], "log_prob": [[1.0]], "length": [[2]]}, SchemaError, "length"),
        ("answer", {"ids": [[1]], "log_prob": [[1.0, 2.0]], "length": [[1]]}, SchemaError, "2 tokens in row 0"),
        ("answer", {"ids": [[1, 1]], "log_prob": [[1.0, 1]], "length": [[3, -1]]}, SchemaError, "length"),
        (
            "answer",
            {"ids": np.zeros(2, np.int32), "log_prob": np.zeros(2, np.float32), "length": np.full(1, 2, np.int32)},
            SchemaError,
            "list with one array for each row of the claim",
        ),
        ("reward", {"reward": np.zeros(2, np.float32)}, SchemaError, "2 items, the 1 rows have 3 answers"),
        ("reward", {"reward": [np.zeros(2, np.float32)]}, SchemaError, "2 answers in row 0 of 1, the row has 3"),
        ("reward", {"ids": np.zeros(3, np.int32)}, FieldError, "takes reward"),
        ("reward", {}, FieldError, "missing"),
        ("reward", {"reward": np.zeros(3, np.float64)}, SchemaError, "holds float32, found float64"),
    ],
)
def test_bad_values_of_a_put_are_refused_and_the_claim_stays(
    store: gt.Store, task: str, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    answered(store, 1)
    grpo.insert(store, [1])
    claim = store.claim(task)
    with pytest.raises(error, match=message):
        claim.put(**values)
    assert store.task_stats()[task]["claimed"] == 1
    grpo.work(store, task, claim)


def test_fields_that_may_not_be_there_yet_are_not_read(store: gt.Store) -> None:
    answered(store, 1)
    claim = store.claim("reward")
    with pytest.raises(FieldError, match="'reward' does not come after 'ref', which writes it"):
        claim["ref"]
    with pytest.raises(FieldError, match="did you mean 'prompt'"):
        claim["promt"]
    with pytest.raises(FieldError, match=r"not 0. Iterate over its rows: .*or \(row,\) = claim"):
        claim[0]
    assert store.claim("ref").lengths("tokens").tolist() == [sum(grpo.lengths_of(0))]


def test_items_of_rows_without_an_axis_are_not_counted() -> None:
    tasks = {"answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}), "train": gt.Task(after="answer")}
    with gt.Store.create({"prompt": gt.Text()}, tasks=tasks, capacity=4, span_bytes=1 << 14) as store:
        with pytest.raises(ArgumentError, match=r"max_items=3 counts .* due for 'answer' have none yet: leave it out"):
            store.claim("answer", max_items=3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda store: store.claim("train"), SchemaError, "draw its rows with Replay"),
        (lambda store: store.claims("anser"), SchemaError, "did you mean 'answer'"),
        (lambda store: store.claim("answer", 0), ArgumentError, "n must be at least 1"),
        (lambda store: store.claim("answer", 1.5), ArgumentError, "whole number"),
        (lambda store: store.claim("ref", max_items=0, of="tokens"), ArgumentError, "max_items must be at least 1"),
        (lambda store: store.claim("ref", max_items=5), ArgumentError, "pass of= as one of prompt, tokens, answers"),
        (lambda store: store.claim("answer", of="prompt"), ArgumentError, "max_items= counts"),
        (lambda store: store.claim("answer", max_items=3, of="tokens"), ArgumentError, "not known before 'answer'"),
        (lambda store: store.claim("ref", max_items=3, of="tonkens"), SchemaError, "no axis 'tonkens'"),
        (lambda store: store.claims("answer", timeout_s=-1), ArgumentError, "timeout_s"),
        (lambda store: store.claim("answer", output="jax"), ArgumentError, "output"),
        (lambda store: store.put(store.keys(), "ref", {"ref": []}), SchemaError, "not rewritable"),
        (lambda store: store.put(gt.Keys([0], [1], store=5), "reward", {"reward": []}), ArgumentError, "another store"),
    ],
)
def test_bad_arguments_are_refused(
    store: gt.Store, call: Callable[[gt.Store], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(store)


def test_a_task_that_takes_no_appends_refuses_them(store: gt.Store) -> None:
    answered(store, 1)
    row = next(iter(store.claim("reward")))
    with pytest.raises(ArgumentError, match="'reward' takes no appends"):
        row.append(reward=[1.0])
    with simple() as other:
        other.insert({"x": [1]})
        row = next(iter(other.claim("work")))
        with pytest.raises(ArgumentError, match="divides an axis"):
            row.append(item=1, y=[1.0])
        row.append(y=[1.0])
        row.append(y=[2.0, 3.0])
        assert row.partial["y"][0].tolist() == [1, 2, 3]
        row.put()
        assert len(other) == 1


def test_a_field_may_have_the_name_of_a_keyword() -> None:
    tasks = {"work": gt.Task({"item": gt.Field((), "int8"), "a.b": gt.Text()}), "train": gt.Task(after="work")}
    with gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, capacity=4, span_bytes=1 << 14) as store:
        store.insert({"x": [1, 2]})
        rows = list(store.claim("work", 2))
        rows[0].put({"item": 3, "a.b": "text"})
        rows[1]._claim.put({"item": [0, 4], "a.b": ["", "two"]})
        assert len(store) == 2


# --- rewrites, deletions ------------------------------------------------------------------------------------------


# --- waits --------------------------------------------------------------------------------------------------------


def test_a_loop_names_the_task_that_lags(store: gt.Store, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WaitTimeoutError, match="no row is under way"):
        next(iter(store.claims("reward", timeout_s=0.01)))
    grpo.insert(store, range(3))
    with pytest.raises(WaitTimeoutError, match="'answer' lags by 3 rows, 3 due and 0 claimed: start a process"):
        next(iter(store.claims("advantage", timeout_s=0.01)))
    claim = store.claim("answer", 2)
    with pytest.raises(WaitTimeoutError, match=r"1 due and 2 claimed; process \d+ has claimed the oldest one, row 0"):
        next(iter(store.claims("advantage", timeout_s=0.01)))
    claim.release()


def test_an_idle_loop_says_so_and_goes_on(
    store: gt.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geartrain.store.tasked.FIRST_WORD_S", 0.05)
    grpo.insert(store, range(1))
    claim = store.claim("answer")
    later = threading.Timer(0.12, grpo.work, (store, "answer", claim))
    with caplog.at_level(logging.WARNING, "geartrain.store.tasked"):
        later.start()
        with next(iter(store.claims("reward"))) as found:
            assert len(found) == 1
    later.join()
    assert "'answer' lags by 1 rows" in caplog.text and len(caplog.records) == 1


def test_a_loop_ends_when_the_store_is_closed_and_a_wait_says_so() -> None:
    store = grpo.new_store()
    said: list[object] = []

    def wait() -> None:
        try:
            store.claim("answer", timeout_s=patience(60))
        except StoreClosedError as error:
            said.append(error)

    threads = [
        threading.Thread(target=lambda: said.append(list(store.claims("answer")))),
        threading.Thread(target=wait),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    store.close()
    for thread in threads:
        thread.join(patience(10))
        assert not thread.is_alive()
    assert [] in said and len(said) == 2
    with pytest.raises(StoreClosedError):
        store.claims("answer")


def test_agents_wait_together_on_one_thread(store: gt.Store) -> None:
    async def agent() -> list[int]:
        claim = await store.claim_async("answer")
        found: list[int] = claim["id"].tolist()
        grpo.work(store, "answer", claim)
        return found

    async def run() -> None:
        before = threading.active_count()
        agents = [asyncio.create_task(agent()) for _ in range(5)]
        others = [asyncio.create_task(store.claim_async("reward")) for _ in range(2)]
        cancelled = asyncio.create_task(store.claim_async("answer"))
        await asyncio.sleep(0.05)
        assert threading.active_count() == before + 1
        cancelled.cancel()
        grpo.insert(store, range(5))
        found = await asyncio.wait_for(asyncio.gather(*agents), patience(10))
        assert sorted(number for numbers in found for number in numbers) == list(range(5))
        assert [len(each) for each in await asyncio.gather(*others)] == [1, 1]
        assert not await store.claim_async("answer", timeout_s=0.01)
        store.finish()
        assert not await asyncio.wait_for(store.claim_async("answer"), patience(10))

    asyncio.run(run())
    assert store.task_stats()["answer"]["claimed"] == 0


# --- handles ------------------------------------------------------------------------------------------------------


def test_a_childs_claims_are_its_parents(store: gt.Store, fork: Callable[[Callable[[], object]], int]) -> None:
    from segments import wait_for

    answered(store, 2)
    claim = store.claim("reward", 2)

    def body() -> int:
        with pytest.raises(StaleClaimError, match="forked"):
            claim.put(reward=np.zeros(6, np.float32))
        assert claim.release() == 0
        return 0

    assert wait_for(fork(body)) == 0
    assert len(claim.put(reward=np.zeros(6, np.float32))) == 0


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_claims_are_neither_copied_nor_pickled(store: gt.Store, how: Callable[[object], object]) -> None:
    grpo.insert(store, range(1))
    claim = store.claim("answer")
    for one in (claim, next(iter(claim))):
        with pytest.raises(ArgumentError, match="cannot be copied or pickled"):
            how(one)


def test_any_thread_may_put(store: gt.Store) -> None:
    answered(store, 8)
    claims = [store.claim("reward", 2) for _ in range(4)]
    threads = [threading.Thread(target=grpo.work, args=(store, "reward", claim)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.task_stats()["reward"]["done"] == 8


def test_an_insert_of_several_parts_says_how_many_rows_are_in_the_store(name):
    with gt.Store.create(name, {"x": gt.Field(("n",), "int64")}, capacity=4, span_bytes=1 << 16) as store:
        with pytest.raises(WaitTimeoutError, match=r"The first 4 of 6 rows are in the store"):
            store.insert({"x": [[1]] * 6}, timeout_s=0.05)
        assert len(store) == 4


def test_a_put_of_a_field_that_the_task_does_not_have_names_those_that_it_has(name):
    with grpo.new_store(name) as store:
        grpo.insert(store, range(1))
        with store.claim("answer") as claim, pytest.raises(FieldError, match=r"missing \['ids'.*unknown \['idz'\]"):
            claim.put(idz=[1])


# --- claims for others --------------------------------------------------------------------------------------------


def test_a_row_is_claimed_again_by_an_old_number_unless_another_has_claimed_it_since() -> None:
    with simple() as store:
        store.insert({"x": np.arange(2)})

        def again(claim: gt.Claim) -> list[int]:
            return store.native.claim_again(1, claim.keys.row, claim.keys.generation, claim._claims, 0)

        first = store.claim("work", 2)
        assert again(first) == [0, 0]  # it is claimed
        first.release()
        assert again(first) == [1, 1] and store.task_stats()["work"]["claimed"] == 2
        one, other = first
        one.put(y=[1.0])
        assert again(first) == [2, 0]  # put by that claim; claimed
        other.release()
        second = store.claim("work", 2)
        second.release()
        assert again(first) == [2, 0] and again(second) == [1]
        assert store.audit() == []


def test_no_claim_has_the_number_of_a_row_that_nobody_has_claimed() -> None:
    with simple() as store:
        store.insert({"x": [1]})
        numbers = set()
        for _ in range(1100):
            with store.claim("work") as claim:
                numbers.add(int(claim._claims[0]))
        assert numbers == set(range(1, 1024))


@pytest.mark.parametrize("call", ["append", "put"])
def test_a_number_in_place_of_a_rows_values_is_refused_with_what_to_pass(call: str) -> None:
    tasks = {"answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}), "train": gt.Task(after="answer")}
    with gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, capacity=4, span_bytes=1 << 16) as store:
        store.insert({"x": [1]})
        (row,) = store.claim("answer")
        with pytest.raises(SchemaError, match=r"'ids'.*: pass a list or an array$"):
            getattr(row, call)(ids=1)
