"""A publisher that several threads use, and signal handlers: versions only increase, whatever comes in between."""

from __future__ import annotations

import itertools
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain.weights as weights
from geartrain.errors import ArgumentError, GeartrainError, StoreClosedError, WaitTimeoutError

ROUNDS = [pytest.param(150, id="150"), pytest.param(3000, id="3000", marks=[pytest.mark.long])]


@pytest.fixture
def name() -> Iterator[str]:
    made = f"threads-{uuid.uuid4().hex}"
    yield made
    weights.unlink(made)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_versions_increase_whichever_thread_publishes_them(name: str, rounds: int) -> None:
    numbers = itertools.count(1)
    published: list[int] = []
    refused: list[ArgumentError] = []

    def publish() -> None:
        for _ in range(rounds):
            number = next(numbers)
            try:
                publisher.publish(number, {"w": np.full(20_000, number)})
                published.append(number)
            except ArgumentError as error:  # a later one was faster
                refused.append(error)

    with weights.Publisher(name, timeout_s=patience(30)) as publisher, weights.Reader(name) as reader:
        threads = [threading.Thread(target=publish) for _ in range(3)]
        for thread in threads:
            thread.start()
        seen = [-1]
        while any(thread.is_alive() for thread in threads):
            snapshot = reader.latest(timeout_s=patience(30))
            assert (snapshot["w"] == snapshot.version).all()
            if snapshot.version != seen[-1]:
                seen.append(snapshot.version)
        for thread in threads:
            thread.join()
        assert seen == sorted(seen)
        assert reader.version == publisher.version == max(published)
        assert len(published) + len(refused) == 3 * rounds
        assert all("versions must increase" in str(error) for error in refused)


def test_threads_that_publish_first_agree_on_one_schema(name: str) -> None:
    """Of two first versions the later one is checked against the other, and not copied into its shapes."""
    for _ in range(20):
        publish_two_shapes_at_once(name)
        weights.unlink(name)


def publish_two_shapes_at_once(name: str) -> None:
    start = threading.Barrier(2)
    outcomes: dict[int, BaseException | None] = {}

    def publish(shape: int) -> None:
        start.wait()
        try:
            publisher.publish(shape, {"w": np.full(shape, shape)})
            outcomes[shape] = None
        except GeartrainError as error:
            outcomes[shape] = error

    with weights.Publisher(name, timeout_s=patience(30)) as publisher, weights.Reader(name) as reader:
        threads = [threading.Thread(target=publish, args=[shape]) for shape in (1, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = [shape for shape, error in outcomes.items() if error is None]
        assert len(kept) == 1, outcomes
        assert reader.latest()["w"].tolist() == [kept[0]] * kept[0]


def test_a_thread_waits_for_its_turn_no_longer_than_its_timeout(name: str) -> None:
    with weights.Publisher(name) as publisher, weights.Reader(name) as reader:
        held = []
        for version in range(2):
            publisher.publish(version, {"w": np.ones(3)})
            held.append(reader.latest())
        raised: list[BaseException] = []

        def publish_while_all_is_held() -> None:
            try:
                publisher.publish(3, {"w": np.ones(3)}, timeout_s=patience(60))
                publisher.publish(4, {"w": np.ones(3)}, timeout_s=patience(60))
            except GeartrainError as error:
                raised.append(error)

        first = threading.Thread(target=publish_while_all_is_held)
        first.start()
        while publisher.version != 3:
            held.append(reader.latest())
            time.sleep(0.005)
        held.append(reader.latest())
        time.sleep(0.05)
        began_s = time.monotonic()
        with pytest.raises(WaitTimeoutError):
            publisher.publish(5, {"w": np.ones(3)}, timeout_s=0.1)
        assert time.monotonic() - began_s < patience(5)
        publisher.close()
        first.join(patience(10))
        assert [type(error) for error in raised] == [StoreClosedError]


def test_a_signal_handler_closes_a_publisher_that_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is published, and the publisher closed at its end: the handler does not wait for its own thread."""
    import geartrain.weights.publisher as module

    publisher = weights.Publisher(name)
    reader = weights.Reader(name)
    publisher.publish(1, {"w": np.ones(3)})
    copy = module._copy
    refused: list[BaseException] = []

    def interrupted(leaves: Any, views: Any) -> None:
        signal.raise_signal(signal.SIGUSR2)
        copy(leaves, views)

    def close(*_: object) -> None:
        try:
            publisher.publish(9, {"w": np.ones(3)})
        except GeartrainError as error:
            refused.append(error)
        publisher.close()

    monkeypatch.setattr(module, "_copy", interrupted)
    before = signal.signal(signal.SIGUSR2, close)
    try:
        publisher.publish(2, {"w": np.full(3, 2.0)})
    finally:
        signal.signal(signal.SIGUSR2, before)
        monkeypatch.undo()
    assert len(refused) == 1
    assert "signal handler" in str(refused[0])
    assert reader.latest()["w"].tolist() == [2.0] * 3
    with pytest.raises(StoreClosedError):
        publisher.publish(3, {"w": np.ones(3)})
    with weights.Publisher(name) as other:  # the name is free
        other.publish(3, {"w": np.ones(3)})
    reader.close()


def test_a_signal_handler_that_closes_as_a_publication_begins_ends_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the look whether the publisher is open: it says that it was closed, first publication or not."""
    from geartrain.weights.writer import Writer

    check = Writer._check_open
    for published in (0, 1):
        publisher = weights.Publisher(name)
        for version in range(published):
            publisher.publish(100 * published + version, {"w": np.ones(3)})

        def close_after(writer: Writer, publisher: weights.Publisher = publisher) -> None:
            check(writer)
            monkeypatch.undo()  # the handler looks as well
            publisher.close()

        monkeypatch.setattr(Writer, "_check_open", close_after)
        with pytest.raises(StoreClosedError):
            publisher.publish(200, {"w": np.full(3, 2.0)})
        monkeypatch.undo()
        with pytest.raises(StoreClosedError):
            publisher.publish(201, {"w": np.ones(3)})
    with weights.Publisher(name) as other:  # the name is free
        other.publish(300, {"w": np.ones(3)})
