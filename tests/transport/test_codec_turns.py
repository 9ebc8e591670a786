"""Large messages are decoded beside other threads: they run meanwhile, and find nothing that is half made."""

from __future__ import annotations

import gc
import itertools
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from deadlines import patience

from geartrain import _native
from geartrain.transport.codec import native_codec

LISTS = 3_000_003
EMPTY_LIST = b"l" + struct.pack("<I", 0)


def of_empty_lists(tag: bytes, count: int = LISTS) -> _native.Message:
    """A message of `count` empty lists, in a list (tag l) or tuple (t)."""
    return _native.Message.make(tag + struct.pack("<I", count) + EMPTY_LIST * count, [])


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """Collections of the interpreter's own, which hold the GIL for as long as they take over millions of objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def longest_pause_s(work: Callable[[], object]) -> float:
    """Of another thread, while this one works, in processor time of this process: other processes do not count."""
    over, times = threading.Event(), [time.process_time()]

    def tick() -> None:
        while not over.is_set():
            times.append(time.process_time())
            time.sleep(0.0002)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    while len(times) < 5:
        time.sleep(0.001)
    try:
        work()
        times.append(time.process_time())
    finally:
        over.set()
        thread.join()
    return max(after - before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("tag", [b"l", pytest.param(b"t", marks=pytest.mark.slow)])
def test_another_thread_runs_while_millions_of_objects_are_decoded(tag):
    message, made = of_empty_lists(tag, 5_000_003), []
    pause_s = longest_pause_s(lambda: made.append(native_codec().decode(message)))
    assert len(made[0]) == 5_000_003
    assert made[0][0] == made[0][-1] == []
    assert pause_s < 0.05, f"it stood for {pause_s:.3f} s of processor time"


@pytest.mark.parametrize("tag", [b"b", b"Y", *(pytest.param(each, marks=pytest.mark.slow) for each in (b"y", b"B"))])
def test_another_thread_runs_while_long_bytes_are_copied(tag):
    content = bytes(range(256)) * 500_000
    if tag in b"BY":
        message = _native.Message.make(tag + struct.pack("<Q", len(content)), [content])
    else:
        message = _native.Message.make(tag + struct.pack("<I", len(content)) + content, [])
    made: list[object] = []
    pause_s = longest_pause_s(lambda: made.append(native_codec().decode(message)))
    assert made[0] == content
    assert type(made[0]) is (bytes if tag in b"bB" else bytearray)
    assert pause_s < 0.03, f"it stood for {pause_s:.3f} s of processor time"


@pytest.mark.parametrize("tag", [pytest.param(b"l", marks=pytest.mark.slow), b"t"])
def test_no_other_thread_finds_a_container_with_empty_places(tag):
    message = of_empty_lists(tag)
    kind = list if tag == b"l" else tuple
    over, looked, found = threading.Event(), [], []

    def look() -> None:
        while not over.is_set():
            # (an item of it is not touched: an empty place would end this process)
            found.extend(len(one) for one in gc.get_objects() if type(one) is kind and len(one) == LISTS)
            looked.append(1)

    gc.collect()
    gc.freeze()  # for good: a look passes over what is made from here on, and later collections over all the rest
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    while not looked:
        time.sleep(0.001)
    during, until_s = 0, time.monotonic() + patience(30)
    while during < 2:  # one of them at least began meanwhile
        assert time.monotonic() < until_s, "nobody looked meanwhile"
        made, before = None, len(looked)
        while len(looked) < before + 2:  # looks that had the one before
            time.sleep(0.001)
        found.clear()
        before = len(looked)
        made = native_codec().decode(message)
        during, seen = len(looked) - before, list(found)
    over.set()
    thread.join()
    assert not seen
    assert gc.is_tracked(made)
    assert all(gc.is_tracked(one) for one in made[:10])


@pytest.mark.parametrize("cut", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_message_that_ends_within_its_millions_of_objects_is_refused(cut):
    count = 1_000_003
    whole = b"l" + struct.pack("<I", count) + EMPTY_LIST * count
    with pytest.raises(Exception, match="cannot be decoded"):
        native_codec().decode(_native.Message.make(whole[:-cut], []))
    with pytest.raises(Exception, match="cannot be decoded"):
        native_codec().decode(_native.Message.make(whole[:-cut] + b"?" * cut, []))


def test_the_interpreter_ends_while_daemon_threads_decode():
    code = (
        "import struct, threading, time\n"
        "from geartrain import _native\n"
        "from geartrain.transport.codec import native_codec\n"
        "count = 1_000_003\n"
        "message = _native.Message.make(b't' + struct.pack('<I', count) + (b'l' + bytes(4)) * count, [])\n"
        "began = threading.Barrier(3)\n"
        "def decode():\n"
        "    began.wait()\n"
        "    while True:\n"
        "        native_codec().decode(message)\n"
        "for _ in range(2):\n"
        "    threading.Thread(target=decode, daemon=True).start()\n"
        "began.wait()\n"
        "time.sleep(0.05)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(30), check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
