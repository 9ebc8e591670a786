"""Locks of whole modules: a child that is forked while another thread has one uses what they guard."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import deadlines
import pytest

import geartrain.actors.store_server as store_server
import geartrain.device.cuda_ipc as cuda_ipc


def exit_code(child: int) -> int:
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], deadlines.patience(10))[0]:
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        (store_server, "_lock", store_server._served.clear),
        (cuda_ipc, "_spare_lock", cuda_ipc._spare.clear),
    ],
    ids=["store_server", "cuda_ipc"],
)
def test_a_child_forked_beside_a_thread_that_holds_it_uses_what_it_guards(
    module: Any, name: str, use: Callable[[], object]
) -> None:
    lock = getattr(module, name)
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            over.wait(1)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    child = os.fork()
    if child == 0:
        with getattr(module, name):
            use()
        os._exit(0)
    over.set()
    thread.join()
    assert exit_code(child) == 0
