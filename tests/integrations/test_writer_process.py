"""The process that writes HDF5: its deadline, its death, its parent's death, and ends by several threads."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import deadlines
import preloaded
import pytest
import writer_kinds
from ended import has_ended

from geartrain.errors import ProcessDiedError, WaitTimeoutError
from geartrain.integrations.datasets.writer_process import WriterProcess

KIND = f"{writer_kinds.__name__}:Kind"


def writer(folder: Path) -> WriterProcess:
    return WriterProcess(KIND, {"folder": str(folder)}, "the test's dataset", answer_s=deadlines.patience(60))


@pytest.mark.usefixtures("preloaded_children")
def test_a_child_that_does_not_answer_in_time_is_killed_and_gives_no_late_answer(tmp_path):
    one = writer(tmp_path)
    assert one.call("echo", 1) == 1
    one.answer_s = 0.3
    with pytest.raises(WaitTimeoutError, match=r"writes the test's dataset has not answered in 0.3 s, and was killed"):
        one.call("sleep", 3600)
    assert has_ended(one.pid)
    with pytest.raises(ProcessDiedError, match="was ended"):
        one.call("echo", 2)
    one.close()


@pytest.mark.usefixtures("preloaded_children")
def test_a_stopped_child_is_the_same_error_and_ends(tmp_path):
    one = writer(tmp_path)
    one.answer_s = 0.3
    deadlines.stop(one.pid)
    with pytest.raises(WaitTimeoutError):
        one.call("echo", bytes(1 << 22))  # more than the socket holds: it is the sending that waits
    assert has_ended(one.pid)
    one.close()
    one.close()


@pytest.mark.usefixtures("preloaded_children")
def test_a_child_that_dies_is_an_error_with_its_last_words(tmp_path):
    one = writer(tmp_path)
    with pytest.raises(RuntimeError, match="LocalError: from within"):
        one.call("raise_what_does_not_travel")
    with pytest.raises(ProcessDiedError, match="exited with 3: its last words"):
        one.call("die", 3)
    with pytest.raises(ProcessDiedError):
        one.call("echo", 1)
    one.close()
    one = writer(tmp_path)
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match="died of SIGKILL"):
        one.call("echo", 1)
    one.close()


@pytest.mark.usefixtures("preloaded_children")
def test_threads_that_close_it_at_once_close_it_once_and_end_a_call(tmp_path):
    one = writer(tmp_path)
    ended, errors = threading.Event(), []

    def call() -> None:
        try:
            one.call("sleep", 3600)
        except ProcessDiedError as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=call, daemon=True).start()
    deadlines.until((tmp_path / "asleep").exists)
    closers = [threading.Thread(target=one.close) for _ in range(4)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(deadlines.patience(10))
    assert ended.wait(deadlines.patience(10))
    assert len(errors) == 1
    assert has_ended(one.pid)


@pytest.mark.slow  # interpreters of their own
@pytest.mark.parametrize("how", ["while it waits", "while it works", "in the middle of a message"])
def test_a_child_whose_parent_is_killed_ends_without_a_word(tmp_path, how):
    program = f"""
import sys
sys.path.insert(0, {str(Path(writer_kinds.__file__).parent)!r})
from geartrain.integrations.datasets.writer_process import WriterProcess
one = WriterProcess({KIND!r}, {{"folder": sys.argv[1]}}, "it")
if sys.argv[2] == "while it works":
    one.call("sleep", 0.5)
if sys.argv[2] == "in the middle of a message":
    one._socket.sendall((1 << 20).to_bytes(8, "little") + bytes(100))
open(sys.argv[1] + "/ready", "w").close()
import time
time.sleep(3600)
"""
    script = tmp_path / "parent.py"
    script.write_text(program)
    there = tmp_path / ("asleep" if how == "while it works" else "ready")
    with deadlines.killed(preloaded.Popen([preloaded.sys.executable, str(script), str(tmp_path), how])):
        deadlines.until(there.exists)
        pid = int((tmp_path / "pid").read_text())
    deadlines.until(lambda: has_ended(pid), "the child is still there", 15.0)
    assert (tmp_path / "awake").exists() == (how == "while it works")
