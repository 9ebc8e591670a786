"""Tasks of a store in several processes: the whole way of rows, deaths of claimers, a full region."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import grpo
import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of
from segments import Pipe, kill, wait_for

import geartrain as gt
from geartrain.errors import StaleClaimError

Fork = Callable[[Callable[[], object]], int]
WORK = ("answer", "reward", "ref", "advantage")


def loop(name: str, task: str, n: int = 4) -> None:
    with grpo.new_store(name) as store:
        for claim in store.claims(task, n, timeout_s=patience(60)):
            grpo.work(store, task, claim)


def test_rows_pass_through_tasks_in_processes_of_their_own_and_are_trained_on(name: str, fork: Fork) -> None:
    """A loader, a process for each task (two of the first), and a learner that draws every row once, whole."""
    rows = 60

    def load() -> None:
        with grpo.new_store(name, capacity=16) as store:
            for number in range(rows):
                grpo.insert(store, [number])
            store.finish()
            while len(store) or store.stats()["under_way"]:  # the last process would remove the segment
                time.sleep(0.01)

    with grpo.new_store(name, capacity=16) as store:
        children = [fork(load), *(fork(lambda task=task: loop(name, task)) for task in ("answer", *WORK))]  # type: ignore[misc]
        seen: list[int] = []
        for batch in replay_of(store, gt.selection.Fifo(), batch_size=4, timeout_s=patience(60)):
            seen += grpo.check(batch)
            if len(seen) == rows:
                break
        assert sorted(seen) == list(range(rows))
        assert [wait_for(child) for child in children] == [0] * 6
        assert store.audit() == [] and store.stats()["under_way"] == 0
        assert [figures["done"] for figures in store.task_stats().values()] == [rows] * len(grpo.TASKS)


def test_two_claimers_never_get_the_same_row(name: str, fork: Fork) -> None:
    with grpo.new_store(name, capacity=256) as store:
        grpo.insert(store, range(100))
        store.finish()

        def claim_all() -> None:
            with grpo.new_store(name) as mine:
                for claim in mine.claims("answer", 3):
                    ids = [grpo.ids_of(0)] * len(claim)
                    pid = np.full(len(ids[0]), os.getpid(), np.float32)
                    claim.put(ids=ids, log_prob=[pid] * len(claim), length=[grpo.lengths_of(0)] * len(claim))

        children = [fork(claim_all) for _ in range(3)]
        assert [wait_for(child) for child in children] == [0, 0, 0]
        assert store.task_stats()["answer"]["done"] == 100 and store.audit() == []


def claim_and_wait(name: str, pipe: Pipe, work: Callable[[gt.Claim], object]) -> None:
    with grpo.new_store(name) as store:
        claim = store.claim("answer", 2)
        work(claim)
        pipe.say()
        time.sleep(600)


def test_what_a_killed_claimer_had_is_due_again_with_what_it_had_appended(name: str, fork: Fork) -> None:
    with grpo.new_store(name) as store:
        grpo.insert(store, range(2))
        pipe = Pipe()

        def work(claim: gt.Claim) -> None:
            next(iter(claim)).append(item=0, ids=[1, 2, 3], log_prob=[1.0, 2.0, 3.0], done=True)

        child = fork(lambda: claim_and_wait(name, pipe, work))
        pipe.hear()
        assert not store.claim("answer")
        kill(child)
        claim = store.claim("answer", 2, timeout_s=patience(10))
        assert len(claim) == 2 and store.task_stats()["answer"]["deaths"] == 2
        first, second = claim
        assert first.partial["ids"][0].tolist() == [1, 2, 3] and first.partial.done == {0} and not second.partial
        assert store.audit() == []


def test_a_row_whose_claimers_die_three_times_is_dropped_unless_they_got_on(name: str, fork: Fork) -> None:
    with grpo.new_store(name) as store:
        grpo.insert(store, range(2))
        pipe = Pipe()

        def work(claim: gt.Claim) -> None:
            if len(claim) == 2:
                list(claim)[1].append(item=0, ids=[1], log_prob=[1.0])

        for death in range(3):
            child = fork(lambda: claim_and_wait(name, pipe, work))
            pipe.hear()
            kill(child)
            store.reap()
            assert store.task_stats()["answer"]["deaths"] == 2 * (death + 1)
        assert store.stats()["given_up"] == 1 and store.stats()["under_way"] == 1
        (row,) = store.claim("answer", 2)
        assert row["id"] == 1 and row.partial.lengths == {0: 3}
        assert store.audit() == []


def test_a_crash_of_all_processes_is_counted_against_no_row_and_single_deaths_are(name: str, fork: Fork) -> None:
    pipe = Pipe()

    def body() -> None:
        with grpo.new_store(name) as store:
            if store.stats()["inserted"] == 0:
                grpo.insert(store, range(2))
            claim_and_wait(name, pipe, lambda claim: None)

    for _ in range(4):
        child = fork(body)
        pipe.hear()
        kill(child)
    with grpo.new_store(name) as store:
        its = store.task_stats()["answer"]
        assert (its["due"], its["deaths"], its["released"]) == (2, 0, 8)
        for _ in range(3):
            assert store.stats()["given_up"] == 0
            child = fork(body)
            pipe.hear()
            kill(child)
            store.reap()
        assert store.stats()["given_up"] == 2 and store.audit() == []


@pytest.mark.parametrize("adopts", [False, True])
def test_the_death_of_a_process_that_claims_for_others_is_not_counted(name: str, fork: Fork, adopts: bool) -> None:
    watching = None if adopts else grpo.new_store(name)
    for round_ in range(4):
        pipe = Pipe()

        def serve(pipe: Pipe = pipe, first: bool = round_ == 0) -> None:
            with grpo.new_store(name) as mine:
                if first:
                    grpo.insert(mine, range(2))
                mine.native.claim_for_others()
                claim = mine.claim("answer", 2, timeout_s=patience(10))
                pipe.say()
                time.sleep(600)
                del claim

        child = fork(serve)
        pipe.hear()
        kill(child)
        if watching is not None:
            watching.reap()
            assert watching.task_stats()["answer"]["due"] == 2
    with watching or grpo.new_store(name) as found:
        its = found.task_stats()["answer"]
        assert (its["due"], its["deaths"], its["released"]) == (2, 0, 8) and found.stats()["given_up"] == 0
        assert found.audit() == []


def test_a_process_that_is_stopped_and_killed_within_a_put_leaves_the_row_due(name: str, fork: Fork) -> None:
    """Killed at instants over a whole put: the row is either answered or due, and never both."""
    with grpo.new_store(name) as store:
        for round_ in range(12):
            pipe = Pipe()

            def body(pipe: Pipe = pipe) -> None:
                with grpo.new_store(name) as mine:
                    pipe.say()
                    for claim in mine.claims("answer", 4):
                        grpo.work(mine, "answer", claim)

            grpo.insert(store, range(4))
            child = fork(body)
            pipe.hear()
            time.sleep(0.0007 * round_)
            kill(child)
            store.reap()
            assert store.audit() == []
            stats = store.task_stats()
            assert stats["answer"]["due"] + stats["reward"]["due"] == 4 * (round_ + 1) - store.stats()["given_up"]
            for task in ("answer", "reward"):
                with store.claim(task, 100) as claim:
                    if claim and task == "reward":
                        numbers = claim["id"].tolist()
                        assert claim["ids"].tolist() == [i for each in numbers for i in grpo.ids_of(each).tolist()]


def test_a_full_region_with_all_rows_claimed_and_growing_is_never_stuck(name: str, fork: Fork) -> None:
    """Answers outgrow the spans: rows are set back or their claims revoked, and all of them come through in the end."""
    rows, tokens = 12, 4000

    def grow() -> None:
        with grpo.new_store(name) as store:
            for claim in store.claims("answer", 3):
                for row in claim:
                    try:
                        begun = row.partial.lengths.get(0, 0)
                        for at in range(begun, tokens, 500):
                            ids = np.arange(at, at + 500, dtype=np.int32)
                            row.append(item=0, ids=ids, log_prob=ids.astype(np.float32), timeout_s=patience(60))
                        row.put(timeout_s=patience(60))
                    except StaleClaimError:
                        continue

    with grpo.new_store(name, capacity=rows, span_bytes=3 * 8 * tokens) as store:
        grpo.insert(store, range(rows))
        store.finish()
        children = [fork(grow) for _ in range(3)]
        done = 0
        for claim in store.claims("reward", timeout_s=patience(60)):
            assert claim["ids"].tolist() == list(range(tokens))
            claim.drop()  # which frees its spans
            done += 1
        assert done == rows
        assert [wait_for(child) for child in children] == [0, 0, 0]
        stats = store.stats()
        assert stats["set_back"] + stats["revoked"] > 0 and stats["under_way"] == 0 and store.audit() == []


@pytest.mark.parametrize("signalled", [signal.SIGINT])
def test_a_signal_ends_a_wait_for_due_rows(name: str, fork: Fork, signalled: signal.Signals) -> None:
    pipe = Pipe()

    def body() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with grpo.new_store(name) as store:
            pipe.say()
            try:
                store.claim("answer", timeout_s=patience(60))
            except KeyboardInterrupt:
                return 3
        return 1

    with grpo.new_store(name):
        child = fork(body)
        pipe.hear()
        time.sleep(0.1)
        os.kill(child, signalled)
        assert wait_for(child) == 3
