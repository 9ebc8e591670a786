"""Iterators of LeRobot's replay buffer: they end without waiting for what may wait for them."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import pytest
from deadlines import patience

from geartrain.integrations.lerobot.prefetch import BatchPrefetch


class Node:
    """Part of a circle, which only the garbage collector ends."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("geartrain-lerobot")]


def test_a_collected_iterator_waits_for_neither_its_thread_nor_a_lock():
    """Its thread waits for the lock of the call in which it is collected: neither could go on."""
    lock, waits = threading.Lock(), threading.Event()

    def sample() -> int:
        waits.set()
        with lock:
            return 3

    with lock:
        node = Node(BatchPrefetch(sample, 2))
        (thread,), dropped = threads(), weakref.ref(node)
        assert waits.wait(patience(20))
        del node
        gc.collect()
        assert dropped() is None
        assert thread.is_alive(), "which waits for the collector's caller"
    thread.join(patience(20))
    assert not thread.is_alive()


def test_an_iterator_is_collected_while_its_thread_waits_for_room():
    made = threading.Semaphore(0)
    node = Node(BatchPrefetch(made.release, 2))
    (thread,) = threads()
    for _ in range(2):
        assert made.acquire(timeout=patience(20))
    assert next(node.held) is None
    assert made.acquire(timeout=patience(20)), "there is room again"
    assert not made.acquire(blocking=False), "more batches than were asked for"
    del node
    gc.collect()
    thread.join(patience(20))
    assert not thread.is_alive()


def test_a_reader_that_waits_is_told_of_the_end():
    lock = threading.Lock()
    lock.acquire()
    iterator = BatchPrefetch(lambda: lock.acquire(timeout=patience(20)), 1)
    (thread,) = threads()
    ended: list[object] = []
    readers = [threading.Thread(target=lambda: ended.append(next(iterator, "ended"))) for _ in range(2)]
    for reader in readers:
        reader.start()
    closing = threading.Thread(target=iterator.close)
    closing.start()
    for reader in readers:
        reader.join(patience(20))
    assert ended == ["ended"] * 2
    lock.release()
    closing.join(patience(20))
    assert not closing.is_alive()
    thread.join(patience(20))
    assert not thread.is_alive()


def test_close_waits_for_the_batch_that_is_made_and_for_none_behind_it():
    began, ends, made = threading.Semaphore(0), threading.Event(), []

    def sample() -> None:
        began.release()
        assert ends.wait(patience(20))
        made.append(1)

    iterator = BatchPrefetch(sample, 4)
    reader = threading.Thread(target=next, args=(iterator, None))  # has asked for the batch that is made
    reader.start()
    assert began.acquire(timeout=patience(20))
    threading.Timer(0.2, ends.set).start()
    began_s = time.monotonic()
    iterator.close()
    assert made == [1]
    assert time.monotonic() - began_s < 4
    reader.join(patience(20))


def test_a_wait_that_is_interrupted_loses_no_batch():
    numbers, more = itertools.count(), threading.Event()

    def sample() -> int:
        assert more.wait(patience(20))
        return next(numbers)

    def interrupt() -> None:
        if not more.is_set():
            more.set()
            raise KeyboardInterrupt

    iterator = BatchPrefetch(sample, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    iterator.close()
