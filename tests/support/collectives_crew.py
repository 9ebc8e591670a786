"""Ranks of a collective group as threads of a test, and a store in memory for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any

from deadlines import patience

from geartrain.collectives import Group, GroupOptions


class MemoryStore:
    """What a torch store does, within one process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> Any:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("timed out")


def group_of(rank: int, world_size: int, **options: Any) -> Group:
    """A group; fields of `GroupOptions` may be among its options."""
    rare = {field.name: options.pop(field.name) for field in fields(GroupOptions) if field.name in options}
    return Group(rank, world_size, options=GroupOptions(**rare), **options)


def run_ranks(
    world_size: int, body: Callable[[int, Group], Any], on_error: Callable[[], None] = lambda: None, **options: Any
) -> list[Any]:
    """What `body(rank, group)` returned on each rank, or the exception it raised.

    `on_error` is called by a rank that ends with an exception, be it before its body: ends what others wait for.
    """
    options = {"store": MemoryStore(), "timeout_s": 30.0, **options}
    results: list[Any] = [None] * world_size

    def rank(number: int) -> None:
        try:
            group = group_of(number, world_size, **options)
            try:
                results[number] = body(number, group)
            finally:
                group.close(5.0)
        except BaseException as error:
            results[number] = error
            on_error()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(90))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
