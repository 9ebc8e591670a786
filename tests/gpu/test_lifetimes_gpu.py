"""Processes, forks, closing and checkpoints while a GPU reads the segment: `pytest tests/gpu/test_lifetimes_gpu.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience
from device_batches import check_same, filled_store
from replay_calls import replay_of

import geartrain as gt
import geartrain.device.kernels as kernels
import geartrain.device.pinned_memory as pinning
from geartrain.replay.device import DeviceOptions
from geartrain.selection import Uniform

reason = kernels.why_not_viable()
pytestmark = pytest.mark.skipif(
    reason is not None or kernels.interpreting(), reason=f"no GPU to run on: {reason or 'TRITON_INTERPRET is set'}"
)

SETUP = """
import sys
import geartrain as gt
from geartrain.replay.device import DeviceOptions
from geartrain.selection import Uniform
store = gt.Store.open(sys.argv[1])
replay = gt.Replay(store, Uniform(seed=1), 64, device=DeviceOptions("cuda", path="gather"))
batch = replay.sample()
print(float(batch["x"].double().sum()), flush=True)
"""


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with filled_store(store_name(), rows=500, capacity=500, max_length=40) as made:
        yield made


def gathered(store: gt.Store, seed: int = 1, **options: Any) -> gt.Replay:
    return replay_of(store, Uniform(seed=seed), 64, device=DeviceOptions("cuda", path="gather"), **options)


def pinning_processes(store: gt.Store) -> set[int]:
    return {one.pid for one in pinning.Ledger().entries() if one.path == str(store.path)}


def test_two_processes_pin_one_segment_and_a_killed_one_takes_nothing_along(store: gt.Store) -> None:
    with gt.Replay(store, Uniform(seed=1), 64) as slow, gathered(store) as fast:
        host = slow.sample()
        check_same(host, fast.sample(), {}, False)
        child = subprocess.Popen(
            [sys.executable, "-c", SETUP + "sys.stdin.read()", store.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            assert float(child.stdout.readline()) == pytest.approx(float(host["x"].double().sum()), rel=1e-12)
            assert pinning_processes(store) == {os.getpid(), child.pid}
        finally:
            child.kill()
            child.wait()
        assert pinning_processes(store) == {os.getpid()}
        for _ in range(5):
            check_same(slow.sample(), fast.sample(), {}, False)
    assert pinning_processes(store) == set()


@pytest.mark.parametrize("ending", ["", "store.close()", "replay.close(); store.close(); print(batch['x'].sum())"])
def test_a_process_ends_without_an_error_whatever_it_has_closed(store: gt.Store, ending: str) -> None:
    command = [sys.executable, "-c", SETUP + ending, store.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "CUDA error", "terminate called")), done.stderr
    assert pinning_processes(store) == set()


def test_a_fork_has_the_store_and_not_the_gpu(store: gt.Store, fork: Callable[[Callable[[], object]], int]) -> None:
    with gt.Replay(store, Uniform(seed=1), 64) as slow, gathered(store) as fast:
        for _ in range(3):
            check_same(slow.sample(), fast.sample(), {}, False)

        def child() -> None:
            with gt.Replay(store, Uniform(seed=9), 4) as replay:
                assert len(replay.sample()["x"]) == 4
            fast.close()

        pid = fork(child)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for _ in range(3):
            check_same(slow.sample(), fast.sample(), {}, False)
        assert pinning_processes(store) == {os.getpid()}


def test_batches_outlive_their_replay_whose_stream_is_behind(store: gt.Store) -> None:
    import torch

    with gt.Replay(store, Uniform(seed=1), 64, num_batches=4) as slow:
        expected = list(slow)
    fast = gathered(store, num_batches=4)
    torch.cuda._sleep(500_000_000)
    kept = list(fast)
    fast.close()
    store.close()  # unmaps what was unpinned a moment ago
    for host, landed in zip(expected, kept, strict=True):
        check_same(host, landed, {}, False)


def test_a_replay_that_is_closed_again_and_again_pins_again(store: gt.Store) -> None:
    with gt.Replay(store, Uniform(seed=1), 64) as slow:
        host = slow.sample()
    for _ in range(5):
        with gathered(store) as one, gathered(store) as other:
            check_same(host, one.sample(), {}, False)
            one.close()
            check_same(host, other.sample(), {}, False)
        assert pinning_processes(store) == set()


def test_a_checkpoint_is_written_while_batches_are_gathered(
    store: gt.Store, store_name: Callable[[], str], tmp_path: Path
) -> None:
    failures: list[BaseException] = []

    def save() -> None:
        try:
            for step in range(3):
                gt.save_checkpoint(store, tmp_path, step=step)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=save)
    with gt.Replay(store, Uniform(seed=1), 64, num_batches=30) as slow, gathered(store, num_batches=30) as fast:
        thread.start()
        for host, landed in zip(slow, fast, strict=True):
            check_same(host, landed, {}, False)
        thread.join()
    assert failures == []
    loaded, _, _ = gt.load_checkpoint(tmp_path, store_name())
    with loaded, gt.Replay(loaded, Uniform(seed=1), 64) as slow, gathered(loaded) as fast:
        check_same(slow.sample(), fast.sample(), {}, False)
