"""First uses of torch's operators beside forks: no child begins, or ends, with one half looked up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import deadlines
import pytest

pytest.importorskip("torch")

import geartrain.core.torch_operators as operators

FOUND = """
import sys
import numpy as np
import geartrain as gt
import geartrain.core.torch_operators as operators
from geartrain.selection import Uniform
with gt.Store.create({"x": gt.Field((2,), "float32")}, max_length=4, capacity=8) as store:
    store.insert({"x": np.ones((3, 4, 2), np.float32)})
    with gt.Replay(store, Uniform(seed=1), 2, output="numpy") as replay:
        replay.sample()
    assert not operators._found and "torch" not in sys.modules
    with gt.Replay(store, Uniform(seed=1), 2) as replay:
        assert operators._found
        assert type(replay.sample()["x"]).__name__ == "Tensor"
"""


def test_operators_are_found_before_tensors_are_made_and_arrays_need_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOUND], capture_output=True, text=True, timeout=deadlines.patience(60), check=False
    )
    assert done.returncode == 0, done.stderr


def forked() -> int:
    """The exit code of a child that uses them."""
    child = os.fork()
    if child == 0:
        free = operators._looking.acquire(timeout=deadlines.patience(5))
        operators.find_operators()
        os._exit(0 if free else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_a_thread_that_uses_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(operators, "_found", False)
    within, over = threading.Event(), threading.Event()
    first = torch.full

    def full(*arguments: object, **options: object) -> object:
        within.set()
        over.wait(deadlines.patience(20))
        return first(*arguments, **options)  # type: ignore[call-overload]

    codes: list[int] = []
    monkeypatch.setattr(torch, "full", full)
    threads = [
        threading.Thread(target=operators.find_operators),
        threading.Thread(target=lambda: codes.append(forked())),
    ]
    threads[0].start()
    within.wait()
    threads[1].start()
    threads[1].join(0.2)
    waited = threads[1].is_alive()
    over.set()
    for thread in threads:
        thread.join(deadlines.patience(20))
    assert waited
    assert codes == [0]
