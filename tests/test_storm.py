"""The storm: twenty seconds of it, and the proof that it would notice what it looks for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpo
import numpy as np
import pytest
import storm.proof as proof
import storm.recorded as recorded
import storm.tasks as tasks
from deadlines import patience
from storm.journal import COMMITTED, DELETED, DELIVERED, Journal, read
from storm.roles import Part
from storm.rows import FIELDS, STEPS, length_of, rows_of, versions_of

import geartrain as gt
from geartrain.store.recorder import EPISODES

SUPPORT = Path(__file__).parent / "support"


def storm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "storm", *arguments],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=patience(220),
        check=False,
    )


def figures_of(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """The figures of a storm that found nothing."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rsplit(None, 1) for line in done.stdout.split("storm:")[-1].splitlines() if line.startswith("  ")]
    return {name.strip(): int(count.replace(",", "")) for name, count in lines}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_twenty_seconds_of_storm_find_nothing():
    figures = figures_of(storm("--seconds", "20", "--seed", "7"))
    assert figures["kills"] > 0
    assert figures["rows proven"] > 0
    assert figures["defects"] == 0


def test_a_job_of_tasks_goes_on_after_crashes_of_any_and_of_all_processes():
    figures = figures_of(storm("--seconds", "2", "--seed", "7", "--kind", "tasks"))
    assert figures["kills"] > 0 and figures["kills of all"] > 0 and figures["rows proven"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", tasks.KINDS)
def test_two_hundred_crashes_of_a_job_of_tasks_lose_nothing(kind):
    figures = figures_of(storm("--crashes", "200", "--seed", "7", "--kind", kind))
    assert figures.get("kills", 0) + figures["kills of all"] >= 200
    assert figures["kills of all"] > 20 and figures["tasks done"] > 1000


@pytest.fixture
def small(name):
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=20) as store:
        yield store


def put(store: gt.Store, journal: Journal, n: int) -> gt.Keys:
    entries, tags = journal.intend(n)
    keys = store.insert(rows_of(tags), lengths=length_of(tags), versions=versions_of(tags), threads=1)
    journal.set(entries, COMMITTED)
    return keys


def found(store: gt.Store, kind: str, *journals: Journal) -> str:
    return "\n".join(proof.rows(store, kind, [journal.path for journal in journals])[0])


def test_a_sound_store_is_found_sound(small, tmp_path):
    one, two = Journal(tmp_path / "one", 1), Journal(tmp_path / "two", 2)
    keys = put(small, one, 5)
    put(small, two, 6)
    small.delete(keys[:2])
    one.set(slice(0, 2), DELETED)
    assert found(small, "roomy", one, two) == ""
    assert proof.audit(small) == []
    assert proof.drawn(small, "roomy") == []
    small.save(tmp_path / "saved")
    written = proof.written([one.path, two.path])
    assert proof.checkpoint(tmp_path / "saved", f"{small.name}-again", written) == ([], 9)


def test_a_lost_row_is_found(small, tmp_path):
    one = Journal(tmp_path / "one", 1)
    keys = put(small, one, 5)
    small.delete(keys[2:3])
    assert "are lost, 1 in all" in found(small, "roomy", one)
    assert "went before older ones: ++-++" in found(small, "small", one)


def test_a_torn_row_is_found(small, tmp_path):
    one = Journal(tmp_path / "one", 1)
    keys = put(small, one, 5)
    small.column("steps")[int(keys.row[3]), 1, 2] ^= np.uint64(1)
    assert f"torn rows [{(1 << 24) + 3}]" in found(small, "roomy", one)


def test_a_row_that_is_there_twice_or_that_nobody_wrote_is_found(small, tmp_path):
    one = Journal(tmp_path / "one", 1)
    put(small, one, 5)
    tags = np.array([(1 << 24) + 2, 77], np.uint64)
    small.insert(rows_of(tags), lengths=length_of(tags), versions=versions_of(tags), threads=1)
    said = found(small, "roomy", one)
    assert f"rows [{(1 << 24) + 2}] are there more than once" in said
    assert "rows [77] are there that nobody wrote" in said


def test_a_row_sampled_twice_is_found(small, tmp_path):
    one, two = Journal(tmp_path / "one", 1), Journal(tmp_path / "two", 2)
    put(small, one, 5)
    tags = np.array([(1 << 24) + 1], np.uint64)
    one.note(tags, DELIVERED)
    two.note(tags, DELIVERED)
    said = found(small, "sampled once", one, two)
    assert "were sampled more than once" in said
    assert "are there to be sampled again" in said


def test_priorities_that_do_not_add_up_are_found(small, tmp_path, monkeypatch):
    one = Journal(tmp_path / "one", 1)
    put(small, one, 5)
    status = small.status()
    monkeypatch.setattr(type(small), "status", lambda self: {**status, "priority": status["priority"] * 2})
    assert "the priorities add up to" in "\n".join(proof.drawn(small, "roomy"))


def test_wrong_arguments_are_refused_before_anything_starts():
    done = storm("--seconds", "0")
    assert done.returncode == 2
    assert "above zero" in done.stderr


def test_the_proof_of_recorded_steps_notices_what_is_lost_doubled_or_changed(name, tmp_path):
    with gt.Store.create(name, recorded.FIELDS, max_length=STEPS, capacity=50) as store:
        journal = Journal(tmp_path / "journal-1", 1)
        part = Part(name, 1, 3, tmp_path, None, store, "recorded")
        one = recorded.Recorder(part, store, journal, random.Random(3))
        for _ in range(60):
            one.step()
        one.close()

        def found() -> str:
            return "\n".join(recorded.rows(store, "recorded", [journal.path])[0])

        figures = recorded.rows(store, "recorded", [journal.path])[1]
        assert found() == "" and figures["episodes proven"] > 3 and figures["steps proven"] > 150
        lost, _ = journal.intend(1)
        journal.set(lost, COMMITTED)
        assert "were published; missing: [0, 1" in found()
        journal.set(lost, DELIVERED)
        assert found() == ""
        keys = store.keys()
        batch = gt.fetch(store, keys[:1], output="numpy")
        again = {field: batch[field] for field in recorded.FIELDS}
        store.insert(again, lengths=batch.length)
        assert "are there more than once" in found()
        store.delete(store.keys()[-1:])
        again["action"] = again["action"] + np.uint64(1)
        store.delete(keys[:1])
        store.insert(again, lengths=batch.length)
        assert "actions that nobody took" in found()
        store.delete(store.keys()[-1:])
        again["action"] = again["action"] - np.uint64(1)
        again[EPISODES] = again[EPISODES] + 1
        store.insert(again, lengths=batch.length)
        assert "episodes and has" in found()


@pytest.mark.parametrize("seed", range(3, 9))
def test_no_row_of_a_recorder_that_was_killed_can_be_lost_unseen(name, tmp_path, seed):
    """Each row is left out by itself: also one that holds nothing but a part of an episode that never ended."""
    path = tmp_path / "journal-1"
    with gt.Store.create(name, recorded.FIELDS, max_length=STEPS, capacity=50) as store:
        child = os.fork()
        if child == 0:
            part = Part(name, 1, seed, tmp_path, None, store, "recorded")
            one = recorded.Recorder(part, store, Journal(path, 1), random.Random(seed))
            for _ in range(40 + seed):
                one.step()
            os._exit(0)  # as one that is killed: nothing is closed
        assert os.waitpid(child, 0)[1] == 0
        store.reap()
        assert recorded.rows(store, "recorded", [path])[0] == []
        keys, entries = store.keys(), list(read(path))
        assert any(entry.steps > 0 and entry.state != COMMITTED for entry in entries)
        each = [recorded.actions(gt.fetch(store, keys[at : at + 1], output="numpy"))[0] for at in range(len(keys))]
        whole = sum(each, Counter())
        assert recorded.missing(whole, entries) == []
        for at, lost in enumerate(each):
            assert recorded.missing(whole - lost, entries), f"row {at} of {len(keys)} with {sorted(lost)}"


@pytest.fixture
def done_job(name, tmp_path):
    """The store of a job of tasks that has come to its end with two rows left, and its notes."""
    part = Part(name, 1, 3, tmp_path / "round-1", None, None, "tasks")
    part.folder.mkdir()
    with tasks.open_store(part) as store:
        store.limiter.set(in_flight=None)
        grpo.insert(store, range(11))
        store.finish()
        tasks.Notes(part).add("inserted", list(range(11)))
        for role in ("answer", "reward", "ref", "advantage", "learner"):
            number = 2 + list(tasks.ROLES).index(role)
            tasks.ROLES[role](Part(**{**vars(part), "number": number, "handle": store}))
        yield store, tasks.events(part.folder)
        store.unlink()


def test_a_job_of_tasks_that_is_done_is_found_sound(done_job):
    store, noted = done_job
    figures = Counter()
    assert tasks.prove(store, noted, figures) == []
    assert (figures["batches"], figures["rows proven"], figures["tasks done"]) == (2, 10, 44)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["begins", "reward", 3, []], "done again that were done: [('reward', 3)]"),
        (["begins", "answer", 3, [[0, 1]]], "of the rows [3] appends were lost"),
        (["trained", 1, [1, 2, 3, 4], "x"], "steps [1] were drawn again with other"),
        (["trained", 2, [1, 9], "x"], "rows [1] were trained in two steps"),
        (["trained", 2, [9, 10], "x"], "are there to be drawn again"),
        (["trained", 2, [0], "x"], "rows [0] were trained, and were not inserted"),
        (["trained", 3, [], "x"], "steps were left out: [0, 1, 3]"),
        (["finds", 1], "the clock was 2, and is 1"),
        (["inserted", [11]], "11 rows were inserted, and inserts of"),
        (["inserted", [3]], "inserts of [(3, 2)"),
    ],
)
def test_the_proof_of_tasks_notices_what_is_done_twice_or_lost(done_job, more, said):
    store, noted = done_job
    added = [tasks.Event(noted[-1].at_ns + 1, more[0], more[1:])]
    if more[0] == "begins":  # what nothing was written in has lost its claim before
        assert tasks.prove(store, noted + added, Counter()) == []
        added.append(tasks.Event(noted[-1].at_ns + 2, "did", more[1:3]))
    found = tasks.prove(store, noted + added, Counter())
    assert any(said in each for each in found), found


def test_the_proof_of_tasks_notices_a_row_that_is_gone(done_job):
    store, noted = done_job
    store.delete(store.keys()[:1])
    assert any("are lost, 1 in all" in each for each in tasks.prove(store, noted, Counter()))
