"""Futex: a sleeper is woken by whoever changes the word, also in another process."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from deadlines import killed

import geartrain.core.futex as futex


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    word = np.array([5, 0], dtype=np.uint32)
    assert futex.wait(word, 4, 60.0)
    assert futex.wait(word[1:], 1, 60.0)


def test_a_wait_has_a_deadline() -> None:
    word = np.zeros(1, np.uint32)
    began_s = time.monotonic()
    assert not futex.wait(word, 0, 0.4)
    assert 0.4 <= time.monotonic() - began_s < 10
    assert not futex.wait(word, 0, 0.0)
    assert not futex.wait(word, 0, -1.0)


def test_a_sleeper_is_woken_at_once() -> None:
    word = np.zeros(1, np.uint32)
    woken: list[tuple[bool, float]] = []
    sleeper = threading.Thread(target=lambda: woken.append((futex.wait(word, 0, 60.0), time.monotonic())))
    sleeper.start()
    time.sleep(0.3)  # beyond the first look at signals
    assert woken == []
    word[0] = 1
    futex.wake(word)
    sleeper.join(30)
    assert woken[0][0]


def test_a_sleeper_in_another_process_is_woken(tmp_path: Path) -> None:
    path = tmp_path / "word"
    path.write_bytes(bytes(4096))
    code = (
        "import mmap, sys\n"
        "import numpy as np\n"
        "import geartrain.core.futex as futex\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"  # reading is enough to sleep
        "word = np.frombuffer(memory, np.uint32)[7:]\n"
        "print('asleep', flush=True)\n"
        "print(futex.wait(word, 0, 60.0), word[0], flush=True)\n"
    )
    with path.open("r+b") as file:
        words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint32)
    with killed(subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asleep\n"
        words[7] = 9
        futex.wake(words[7:])
        assert child.stdout.readline() == "True 9\n"


def test_signals_are_handled_while_sleeping_and_the_sleep_goes_on() -> None:
    word = np.zeros(1, np.uint32)
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began_s = time.monotonic()
        assert not futex.wait(word, 0, 0.5)
        assert time.monotonic() - began_s >= 0.5
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came == [1]


def test_a_handler_that_raises_ends_the_sleep() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            futex.wait(np.zeros(1, np.uint32), 0, 60.0)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("words", [np.zeros(1, np.uint64), np.zeros(0, np.uint32), np.zeros(8, np.uint8)])
def test_only_words_of_32_bits_are_futexes(words: np.ndarray) -> None:
    with pytest.raises(TypeError):
        futex.wait(words, 0, 0.0)
    with pytest.raises(TypeError):
        futex.wake(words)


def test_a_fork_does_not_disturb_a_sleeper() -> None:
    word = np.zeros(1, np.uint32)
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(futex.wait(word, 0, 60.0)))
    sleeper.start()
    time.sleep(0.05)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    word[0] = 1
    futex.wake(word)
    sleeper.join(30)
    assert woken == [True]
