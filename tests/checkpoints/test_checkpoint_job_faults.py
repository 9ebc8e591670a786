"""A job's checkpoint when ranks are slow, stuck, killed or out of step: no step is lost, no shard taken away."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from job_checkpoints import close, load_all, population, put, records, save_all, stores_of

import geartrain as gt
import geartrain.checkpoints.job as shards
from geartrain.checkpoints.job import save_checkpoint
from geartrain.checkpoints.steps import describe_steps
from geartrain.errors import CheckpointError, PeerLostError, WaitTimeoutError
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.tools.testing import ThreadRankGroup, run_ranks

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_a_slow_shard_is_waited_for_and_a_stuck_one_is_not(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate = shards.save, threading.Event()

    def held(store: Any, *args: Any, **options: Any) -> Any:
        if store is slow:
            assert gate.wait(patience(20))
        return real(store, *args, **options)

    monkeypatch.setattr(shards, "save", held)
    with stores_of(store_name, [20, 30]) as stores:
        slow = stores[1].native
        group = ThreadRankGroup.make(2, timeout_s=2.0)  # less than the write takes
        opener = threading.Timer(2.5, gate.set)
        opener.start()
        run_ranks(group, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, step=1))
        opener.join()
        gate.clear()
        began_s = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"rank 1 was not ready within 0\.3 s"):
            save_all(stores, tmp_path, step=2, timeout_s=0.3)
        assert time.monotonic() - began_s < patience(5)
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "geartrain-shards":
                thread.join(patience(10))
        loaded = load_all(store_name, tmp_path, 2)
        assert [report.step for _, _, report in loaded] == [1, 1]
        close(loaded)


@pytest.mark.parametrize(
    ("own_disks", "again"),
    [(False, True), (True, False), *(pytest.param(each, each, marks=pytest.mark.slow) for each in (False, True))],
)
def test_a_rank_may_die_at_any_exchange_and_a_step_stays_restorable(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_disks: bool, again: bool
) -> None:
    monkeypatch.setattr(shards, "POLL_S", 10.0)  # so that the exchanges are the same every time
    survived = set()
    for die_at in range(100):
        places = [tmp_path / str(die_at) / (str(k) if own_disks else "0") for k in range(2)]
        with stores_of(store_name, [12, 15]) as stores:
            save_all(stores, places, step=1, keep=1)
            before = population(stores)
            for store in stores:
                put(store, 5000, 3)
            after = population(stores)
            group = ThreadRankGroup.make(2)
            group[1].die_at = die_at
            ended = True
            try:
                run_ranks(
                    group,
                    lambda r, at=places: save_checkpoint(stores[r.rank], at[r.rank], r, step=1 if again else 2, keep=1),
                )
            except PeerLostError:
                ended = False
            loaded = load_all(store_name, places, 2)
            found = population([store for store, _, _ in loaded])
            assert found in (before, after)
            survived.add(found == after)
            close(loaded)
            if ended:
                assert found == after
                break
            # And the next save goes on as if nothing had happened.
            save_all(stores, places, step=3, keep=1)
            assert all([step["step"] for step in describe_steps(place)] == [3] for place in places)
    assert ended and die_at >= 8 and survived == {False, True}


def test_a_step_that_is_removed_before_it_is_opened_is_passed_over_for_a_newer_one(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=1)
        want = population(stores)
        real, lock, saved = shards.saved_shard, threading.Lock(), []

        def removed(place: Path, record: dict[str, Any], k: int, *args: Any) -> Any:
            with lock:
                if k == 1 and not saved:  # the other rank may have opened its shard, or not
                    saved.append(save_all(stores, tmp_path, step=2, keep=1))
            return real(place, record, k, *args)

        monkeypatch.setattr(shards, "saved_shard", removed)
        loaded = load_all(store_name, tmp_path, 2)
        assert saved
        assert [report.step for _, _, report in loaded] == [2, 2]
        assert population([store for store, _, _ in loaded]) == want
        close(loaded)
        saved.clear()
        save_all(stores, tmp_path, step=3, keep=2)
        with pytest.raises(CheckpointError, match="step 2 is not complete"):
            monkeypatch.setattr(
                shards, "saved_shard", lambda *args: [saved, shutil.rmtree(tmp_path / "step-00000002"), real(*args)][2]
            )
            load_all(store_name, tmp_path, 1, step=2, reshard=True)


@pytest.mark.parametrize("reshard", [False, True])
def test_a_step_that_is_being_loaded_is_removed_by_the_next_save_after(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reshard: bool
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=1)
        want = population(stores)
        real, saved, first = Checkpoint.records, [], threading.Semaphore(1)

        def removing(self: Checkpoint) -> Any:
            if first.acquire(blocking=False):
                for number, store in enumerate(stores):
                    store.delete(store.keys()[:10])
                    put(store, 5000 * (number + 1), 5)
                saved.append(save_all(stores, tmp_path, step=2, keep=1))
            return real(self)

        monkeypatch.setattr(Checkpoint, "records", removing)
        loaded = load_all(store_name, tmp_path, 1 if reshard else 2, reshard=reshard)
        assert saved
        # The shard that was open comes from step 1; had another rank not opened its own yet, both start again.
        steps = {report.step for _, _, report in loaded}
        assert steps in ({1}, {2}) if not reshard else steps == {1}
        found = population([store for store, _, _ in loaded])
        assert found == (want if steps == {1} else population(stores))
        close(loaded)
        save_all(stores, tmp_path, step=3, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("own_disks", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("phase", ["_write_shard", "write_record", "replace_record", "prune_steps"])
def test_a_rank_may_die_before_it_does_what_the_others_have_done(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, again: bool, own_disks: bool
) -> None:
    places = [tmp_path / (str(k) if own_disks else "0") for k in range(2)]
    with stores_of(store_name, [12, 15]) as stores:
        save_all(stores, places, step=1, keep=1)
        before = population(stores)
        for store in stores:
            put(store, 5000, 3)
        after = population(stores)
        group = ThreadRankGroup.make(2)
        real, first_is_done = getattr(shards, phase), threading.Event()

        def die(*args: Any, **options: Any) -> Any:
            if threading.current_thread() in doomed:
                assert first_is_done.wait(patience(20))
                group[1].abort("it was killed")
                raise PeerLostError("killed")
            result = real(*args, **options)
            first_is_done.set()
            return result

        doomed: set[threading.Thread] = set()
        run_phase = shards._run_phase

        def marking(ranks: Any, doing: str, body: Callable[[], Any], timeout_s: float) -> Any:
            def marked() -> Any:
                if ranks.rank == 1:
                    doomed.add(threading.current_thread())
                return body()

            return run_phase(ranks, doing, marked, timeout_s)

        monkeypatch.setattr(shards, phase, die)
        monkeypatch.setattr(shards, "_run_phase", marking)
        with pytest.raises(PeerLostError):
            run_ranks(
                group, lambda r: save_checkpoint(stores[r.rank], places[r.rank], r, step=1 if again else 2, keep=1)
            )
        monkeypatch.setattr(shards, phase, real)
        monkeypatch.setattr(shards, "_run_phase", run_phase)
        loaded = load_all(store_name, places, 2)
        assert population([store for store, _, _ in loaded]) in (before, after)
        close(loaded)
        save_all(stores, places, step=3, keep=1)
        assert all([step["step"] for step in describe_steps(place)] == [3] for place in places)


@pytest.mark.parametrize("own_disks", [False, True])
def test_a_rank_that_loses_the_others_does_not_take_its_shard_away_from_them(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_disks: bool
) -> None:
    monkeypatch.setattr(shards, "POLL_S", 10.0)
    for calls in range(1, 5):  # rank 1 hears nothing after that many answers, which rank 0 got in full
        places = [tmp_path / str(calls) / (str(k) if own_disks else "0") for k in range(2)]
        with stores_of(store_name, [12, 15]) as stores:
            save_all(stores, places, step=1, keep=1)
            group = ThreadRankGroup.make(2)
            real, left = group[1].all_gather_object, [calls]

            def deaf(mine: Any, real: Any = real, left: list[int] = left) -> Any:
                answer = real(mine)
                left[0] -= 1
                if left[0] == 0:
                    raise PeerLostError("the last answer was lost")
                return answer

            group[1].all_gather_object = deaf  # type: ignore[method-assign]
            with pytest.raises(PeerLostError):
                run_ranks(group, lambda r, at=places: save_checkpoint(stores[r.rank], at[r.rank], r, step=2, keep=1))
            loaded = load_all(store_name, places, 2)
            assert population([store for store, _, _ in loaded]) == population(stores)
            close(loaded)


@pytest.mark.parametrize("own_disks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_at_any_instant_the_last_step_can_be_restored(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int], own_disks: bool
) -> None:
    places = [tmp_path / (str(k) if own_disks else "0") for k in range(2)]
    rng = np.random.default_rng(0)
    last = 0
    with stores_of(store_name, [30, 20]) as stores:
        save_all(stores, places, step=1)
        for _ in range(8):
            child = fork(lambda last=last: _save_from(last, [s.name for s in stores], places))
            time.sleep(patience(float(rng.uniform(0.02, 0.2))))  # the instant of death is what is drawn here
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            loaded = load_all(store_name, places, 2)
            step = loaded[0][2].step
            assert step >= last
            for store, _, _ in loaded:
                assert store.audit() == []
                extra = [i for i, *_ in records(store) if i >= 10_000]
                assert max(extra, default=10_000) - 10_000 in (step, 0) or step == 1
            last = step
            close(loaded)
        assert last > 8, "it got somewhere between the kills"
        save_all(stores, places, step=100_000)
    for place in places:
        assert sorted(path.name for path in place.iterdir()) == [f"step-{last:08d}", "step-00100000"]
        assert sorted(path.name[:5] for path in (place / "step-00100000").iterdir())[0] == "repla"


def _save_from(last: int, names: list[str], places: list[Path]) -> None:
    stores = [gt.Store.open(name) for name in names]
    for step in range(max(last, 1) + 1, 100_000):
        for store in stores:
            put(store, 10_000 + step, 1)
        run_ranks(2, lambda r, step=step: save_checkpoint(stores[r.rank], places[r.rank], r, step=step))
