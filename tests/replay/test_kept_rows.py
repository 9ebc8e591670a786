"""Replays that keep the rows of their batches until they are saved, and the strict order of inserts."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpo
import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of
from segments import Pipe, kill, wait_for

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError, StaleClaimError, WaitTimeoutError
from geartrain.selection import Fifo, Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

TASKS = ("answer", "reward", "ref", "advantage")


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with grpo.new_store(store_name()) as made:
        yield made
        assert made.closed or made.audit() == []


def finish(store: gt.Store, numbers: range) -> gt.Keys:
    keys = grpo.insert(store, numbers)
    work(store)
    return keys


def work(store: gt.Store, n: int = 64) -> None:
    for task in TASKS:
        while claim := store.claim(task, n):
            grpo.work(store, task, claim)


def kept(store: gt.Store, **options: Any) -> gt.Replay:
    given = {"prefetch": 0, "timeout_s": patience(20), "keep": "saved", **options}
    return replay_of(store, given.pop("selection", Uniform(seed=3, replacement=False)), given.pop("n", 4), **given)


def print_of(batch: Any) -> str:
    """Numbers of the rows in their order, and a digest of all values."""
    numbers = grpo.check(batch)
    digest = hashlib.sha256()
    for name in batch:
        digest.update(np.asarray(batch[name]).tobytes())
    return json.dumps([numbers, digest.hexdigest()])


# --- crashes -------------------------------------------------------------------------------------------------------


def learn(name: str, record: Path, state: Path, selection: Any, most: int, alarm_s: float) -> None:
    """Trains to the end: a line for each batch, and a checkpoint every fifth step. Killed soon after `most` lines."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with grpo.new_store(name) as store, store.expect_writers():
        replay = kept(store, selection=selection, prefetch=2)
        if state.exists():
            replay.load_state_dict(json.loads(state.read_text()))
        for lines, batch in enumerate(replay, 1):
            with record.open("a") as file:
                file.write(f"{batch.step} {print_of(batch)}\n")
            if lines == most:
                signal.setitimer(signal.ITIMER_REAL, alarm_s)
            if batch.step % 5 == 4:
                state.with_suffix(".new").write_text(json.dumps(replay.state_dict()))
                os.replace(state.with_suffix(".new"), state)
                replay.saved(batch.step)
        assert store.audit() == []


def do_tasks(name: str) -> None:
    with grpo.new_store(name) as store:
        for row in range(10_000):  # slowly, so that the learner has few rows ahead
            work(store, 1 + row % 3)
            if not store.stats()["under_way"]:
                break
            time.sleep(0.002)
        time.sleep(600)


@pytest.mark.parametrize(
    "selection", [Uniform(seed=1, replacement=False), Fifo(strict=True)], ids=["uniform", "strict"]
)
def test_a_killed_job_draws_the_same_batches_again(
    store_name: Callable[[], str], fork: Callable[[Callable[[], object]], int], tmp_path: Path, selection: Any
) -> None:
    """All processes are killed after a random number of batches, again and again; some before they saved any."""
    name = store_name()
    rows, record, state = 120, tmp_path / "record", tmp_path / "state.json"

    def load() -> None:
        store = grpo.new_store(name, capacity=rows)
        grpo.insert(store, range(rows))
        store.finish()
        os.kill(os.getpid(), 9)

    assert wait_for(fork(load)) == -9
    lines = lambda: record.read_text().splitlines() if record.exists() else []  # noqa: E731
    dice, code, resumed = random.Random(7), -signal.SIGALRM, []
    while code == -signal.SIGALRM:
        before = len(lines())
        most = dice.randint(1, 9) if len(resumed) < 5 else rows
        worker = fork(lambda: do_tasks(name))
        alarm_s = 10 ** dice.uniform(-6, -2)
        code = wait_for(fork(lambda n=most, s=alarm_s: learn(name, record, state, selection, n, s)))
        kill(worker)
        if len(lines()) > before:
            resumed.append(int(lines()[before].split()[0]))
    assert code == 0 and len(resumed) > 2
    by_step: dict[int, set[str]] = {}
    for line in lines():
        step, text = line.split(" ", 1)
        by_step.setdefault(int(step), set()).add(text)
    assert sorted(by_step) == list(range(rows // 4))
    assert all(len(texts) == 1 for texts in by_step.values())  # to the bit
    trained = [number for texts in by_step.values() for text in texts for number in json.loads(text)[0]]
    assert sorted(trained) == list(range(rows))
    assert resumed[0] == 0 and resumed[1:] == sorted(resumed[1:]) and all(step % 5 == 0 for step in resumed)
    if isinstance(selection, Fifo):
        assert [n for step in sorted(by_step) for text in by_step[step] for n in json.loads(text)[0]] == sorted(trained)


# --- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["settle", "iterate again", "load", "another replay"])
def test_dropped_batches_are_drawn_again_with_their_rows(store: gt.Store, how: str) -> None:
    finish(store, range(24))
    with contextlib.ExitStack() as stack:
        replay = stack.enter_context(kept(store, prefetch=2))
        first = [print_of(replay.sample()) for _ in range(2)]
        state = replay.state_dict()
        until_s = time.monotonic() + patience(20)
        while store.stats()["kept"] < 16 and time.monotonic() < until_s:
            time.sleep(0.001)  # until two more batches are drawn ahead
        marked = [store.native.taken(step)[:2] for step in range(4)]
        expected = [print_of(gt.fetch(store, gt.Keys(*each))) for each in marked]
        assert expected[:2] == first
        if how == "settle":
            replay.settle()
        elif how == "load":
            replay.load_state_dict({**state, "step": 1})
            assert print_of(replay.sample()) == first[1]
        if how == "another replay":
            replay.close()
            replay = stack.enter_context(kept(store))
            replay.load_state_dict(state)
        batches = iter(replay) if how == "iterate again" else iter(replay.sample, None)
        assert [print_of(next(batches)) for _ in range(2)] == expected[2:]
        assert store.stats()["sampled"] == store.stats()["kept"] >= 16


def test_saved_frees_what_was_kept_up_to_a_step(store: gt.Store) -> None:
    keys = finish(store, range(12))
    free = store.stats()["free_span_bytes"]
    with kept(store, selection=Fifo()) as replay:
        for _ in range(3):
            replay.sample()
        assert (store.stats()["kept"], len(store)) == (12, 0)
        replay.saved(1)
        assert store.stats()["kept"] == 4 and store.stats()["free_span_bytes"] > free
        assert gt.fetch(store, keys[8:], fields=["id"])["id"].tolist() == [8, 9, 10, 11]  # kept ones can be read
        replay.saved(2)
        replay.saved(2)
        assert store.stats()["kept"] == 0 and store.stats()["exhausted"] == 12
        with pytest.raises(ArgumentError, match=r"step 3 was not delivered yet.*`batch.step`"):
            replay.saved(3)
        for wrong in (-1, 1.5, None):
            with pytest.raises(ArgumentError):
                replay.saved(wrong)  # type: ignore[arg-type]
    with gt.Replay(store, Fifo(), 4) as plain, pytest.raises(ArgumentError, match="keep='saved'"):
        plain.saved(0)


def test_a_batch_without_all_of_its_rows_is_drawn_anew(store: gt.Store) -> None:
    """What a death in the middle of a draw leaves: some places of the step are marked."""
    keys = finish(store, range(12))
    store.limiter.set(samples_per_insert=1.0, error_buffer=100)
    some = keys[[5, 1, 9]]
    store.native.count_samples(some.row, some.generation, step=0, places=np.array([0, 1, 3], np.uint32))
    assert (store.stats()["kept"], len(store)) == (3, 9)
    with kept(store, selection=Fifo()) as replay:
        assert grpo.check(replay.sample()) == [0, 1, 2, 3]
        assert (store.stats()["kept"], store.stats()["sampled"]) == (4, 4)
        replay.load_state_dict({**replay.state_dict(), "step": 0})
        samples = store.limiter.state().samples
        assert store.delete(keys[2:3]) == 0
        assert grpo.check(replay.sample()) == [0, 1, 3, 4]
        assert store.limiter.state().samples == samples + 1  # three are as if they had not been drawn before


def test_a_step_of_another_batch_size_is_drawn_anew(store: gt.Store) -> None:
    finish(store, range(12))
    with kept(store, selection=Fifo()) as replay:
        replay.sample()
    with kept(store, selection=Fifo(), n=6) as replay:
        assert grpo.check(replay.sample()) == list(range(6))


def test_a_repeated_batch_is_no_further_sample_for_the_limiter(store: gt.Store) -> None:
    finish(store, range(12))
    store.limiter.set(samples_per_insert=1.0, error_buffer=100)
    samples = lambda: store.limiter.state().samples  # noqa: E731
    fails = [True]

    def transform(batch: gt.Batch) -> gt.Batch:
        if fails.pop():
            raise RuntimeError("once")
        return batch

    with kept(store, selection=Fifo(), transform=transform) as replay:
        with pytest.raises(RuntimeError, match="once"):
            replay.sample()
        fails[:] = [False] * 4
        assert grpo.check(replay.sample()) == [0, 1, 2, 3]
        assert samples() == 4
        replay.load_state_dict({**replay.state_dict(), "step": 0})
        replay.sample()
        assert samples() == store.stats()["sampled"] == 4


def test_a_repeated_batch_has_the_attributes_of_the_first_one(store: gt.Store) -> None:
    finish(store, range(4))
    for selection in (Fifo(), Uniform(seed=0, replacement=False)):
        with kept(store, selection=selection, output="numpy") as replay:
            first = replay.sample()
            replay.load_state_dict({**replay.state_dict(), "step": 0})
            again = replay.sample()
            assert again.keys == first.keys and again.step == first.step == 0 and again.importance_weights is None
            for name in ("start", "length", "version"):
                assert np.array_equal(getattr(again, name), getattr(first, name))
                assert getattr(again, name).dtype == getattr(first, name).dtype
            assert again.probability.tolist() == [1.0] * 4 or np.isnan(again.probability).all()
            assert isinstance(selection, Fifo) == (again.probability.tolist() == [1.0] * 4)
            store.native.untake(0)


def test_kept_rows_that_alone_stop_a_replay_are_an_error_at_once(store_name: Callable[[], str]) -> None:
    with (
        grpo.new_store(store_name(), capacity=10) as store,
        store.expect_writers(),
        kept(store, prefetch=2, timeout_s=0.5) as replay,
    ):
        finish(store, range(10))
        batches = [replay.sample().step for _ in range(2)]
        time.sleep(0.7)  # the thread that works ahead must not raise: saved may be called before the next batch
        replay.saved(0)
        finish(store, range(10, 12))
        assert replay.sample().step == 2 and batches == [0, 1]
        finish(store, range(12, 14))
        with pytest.raises(
            NotEnoughRowsError,
            match=r"has 2, and no other can come: saved was last told step 0; 2 steps hold 8 of 10 rows",
        ):
            replay.sample()
        replay.saved(2)
        finish(store, range(14, 16))
        assert replay.sample().step == 3


def test_kept_rows_that_take_the_room_of_answers_are_an_error_and_answers_wait_without_spinning(
    store_name: Callable[[], str],
) -> None:
    """Two threads answer, and neither finds room: only `saved` can make some."""
    with (
        grpo.new_store(store_name(), span_bytes=20 << 10) as store,
        store.expect_writers(),
        kept(store, selection=Fifo()) as replay,
    ):
        grpo.insert(store, range(64))

        def work_on(rows: int, tasks: tuple[str, ...] = TASKS) -> None:
            for task in tasks * rows:
                grpo.work(store, task, store.claim(task))

        for _ in range(4):
            work_on(4)
            replay.sample()

        def answer() -> None:
            while True:
                with contextlib.suppress(StaleClaimError):
                    return grpo.work(store, "answer", store.claim("answer", timeout_s=patience(20)))

        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(answer) for _ in range(2)]
            with pytest.raises(
                NotEnoughRowsError,
                match=r"4 steps hold 16 of 64 rows and 12,288 of 20,480 bytes of spans: .*span_bytes=",
            ):
                replay.sample()
            before = store.stats()["set_back"]
            time.sleep(0.1)
            assert store.stats()["set_back"] == before
            assert not any(each.done() for each in answers)
            replay.saved(0)
            for each in answers:
                each.result(patience(20))
        work_on(2, TASKS[1:])
        work_on(2)
        assert grpo.check(replay.sample()) == [16, 17, 18, 19]
        assert store.audit() == []


def test_a_wait_says_which_steps_keep_rows(store: gt.Store) -> None:
    finish(store, range(6))
    with store.expect_writers(), kept(store, timeout_s=0.05) as replay:
        replay.sample()
        with pytest.raises(WaitTimeoutError, match=r"saved was not called yet; 1 step holds 4 of 64 rows"):
            replay.sample()


def test_a_replay_behind_the_saved_step_warns(store: gt.Store, caplog: pytest.LogCaptureFixture) -> None:
    finish(store, range(12))
    with kept(store, selection=Fifo()) as replay:
        replay.sample(), replay.sample()
        replay.saved(0)
    with caplog.at_level(logging.WARNING), kept(store, selection=Fifo()) as replay:
        assert grpo.check(replay.sample()) == [8, 9, 10, 11]
        assert grpo.check(replay.sample()) == [4, 5, 6, 7]  # of step 1
    assert [record.message for record in caplog.records if "step 0 was told" in record.message]


def test_iteration_ends_behind_the_last_kept_batch(store: gt.Store) -> None:
    finish(store, range(8))
    store.finish()
    with kept(store, selection=Fifo()) as replay:
        first = [print_of(batch) for batch in replay]
        replay.load_state_dict({**replay.state_dict(), "step": 0})
        assert [print_of(batch) for batch in replay] == first and len(first) == 2


def test_one_replay_keeps_rows_of_a_store(
    store: gt.Store, fork: Callable[[Callable[[], object]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would train on the same rows: of this process, of another, or a rank without its group."""
    monkeypatch.setattr("geartrain.replay.kept_rows._ENDS_S", 0.2)
    finish(store, range(16))
    first = kept(store)
    with pytest.raises(gt.errors.ReplayError, match=r"another replay keeps rows of the store.*pass group="):
        kept(store)

    told = Pipe()

    def child() -> None:
        with pytest.raises(gt.errors.ReplayError, match="does not work in a forked child"):
            first.sample()
        with pytest.raises(gt.errors.ReplayError, match="another replay"):
            kept(store)
        told.say()
        time.sleep(60)

    orphan = fork(child)  # it has no part in the lock
    told.hear()
    first.sample()
    first.close()
    second = kept(store)
    second.sample()
    del second
    gc.collect()

    def keep_and_wait() -> None:
        replay = kept(store)
        replay.sample()
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(fork(keep_and_wait)) == -signal.SIGKILL
    with kept(store) as last:
        assert last.sample().step == 0
    kill(orphan)


def test_what_cannot_be_kept_is_refused(store: gt.Store) -> None:
    class Custom:
        seed = 0

        def select(self, *_: Any, **__: Any) -> Any: ...

    for selection, match in (
        (Prioritized(beta=0.5, seed=0), "importance weights"),
        (Custom(), r"stateless=True"),
    ):
        with pytest.raises(ArgumentError, match=match):
            kept(store, selection=selection)
    with pytest.raises(ArgumentError, match="keep"):
        kept(store, keep="always")
    with pytest.raises(ArgumentError, match=f"from 1 to {2**22}"):
        kept(store, n=2**22 + 1)
    with (
        grpo.new_store(max_times_sampled=2) as twice,
        pytest.raises(ArgumentError, match="max_times_sampled=2: create"),
    ):
        kept(twice)
    fields = {"x": gt.Field((), "int64", per_row=True)}
    with gt.Store.create(fields, capacity=4) as plain, pytest.raises(ArgumentError, match="has none"):
        kept(plain)


# --- strict order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, "saved"])
def test_a_strict_order_waits_for_older_rows_and_leaves_dropped_ones_out(store: gt.Store, keep: Any) -> None:
    grpo.insert(store, range(9))
    with store.claim("answer", 3) as slow:  # 0 to 2
        work(store)
        with store.expect_writers(), kept(store, selection=Fifo(strict=True), keep=keep, timeout_s=0.05) as replay:
            with pytest.raises(WaitTimeoutError, match=r"has 6 selectable rows.*0 of them before the first"):
                replay.sample()
        with store.expect_writers(), kept(store, selection=Fifo(strict=True), keep=keep) as replay:

            def go_on() -> None:
                rows = list(slow)
                rows[1].drop()
                for row, number in ((rows[0], 0), (rows[2], 2)):
                    grpo.append(row, number)
                    row.put()
                work(store)

            late = threading.Timer(0.1, go_on)
            late.start()
            assert [grpo.check(replay.sample()) for _ in range(2)] == [[0, 2, 3, 4], [5, 6, 7, 8]]
            late.join()


def test_a_strict_order_that_nobody_can_complete_is_an_error(store: gt.Store) -> None:
    grpo.insert(store, range(5))
    with store.claim("answer", 1), kept(store, selection=Fifo(strict=True), keep=None) as replay:
        work(store)
        with pytest.raises(NotEnoughRowsError, match="0 of them before the first that is under way"):
            replay.sample()


def test_strict_is_for_stores_with_tasks_and_without_limits() -> None:
    fields = {"x": gt.Field((), "int64", per_row=True)}
    with (
        gt.Store.create(fields, capacity=4) as plain,
        pytest.raises(ArgumentError, match=r"no tasks: leave out strict"),
    ):
        gt.Replay(plain, Fifo(strict=True), 2)
    with pytest.raises(ArgumentError, match="leave out limits"):
        Fifo(strict=True, limits=gt.selection.Limits(min_version=1))
    with pytest.raises(ArgumentError):
        Fifo(strict="yes")  # type: ignore[arg-type]


# --- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"selection": Fifo(strict=True), "keep": None}], ids=["keep", "strict"])
def test_a_group_of_one_rank_repeats_global_batches(store: gt.Store, options: Any) -> None:
    finish(store, range(8))

    def alone(rank: ThreadRankGroup) -> None:
        with kept(store, group=rank, **options) as replay:
            first = replay.sample()
            if replay._builder.samplers[0].kept is not None:
                replay.load_state_dict({**replay.state_dict(), "step": 0})
                again = replay.sample()
                assert again.keys == first.keys and again.draw is not None and first.draw is not None
                assert again.draw.tolist() == first.draw.tolist() == [0, 1, 2, 3]

    run_ranks(1, alone)
