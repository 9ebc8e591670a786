"""Signal handlers at every line of a call, which call the same object: no lock stays taken, nobody hangs.

The scenario call_at_any_line does it to every public class, at lines by chance. Here are the calls whose locks are held
across a wait, or taken with a deadline, at all their lines.
"""

from __future__ import annotations

import ast
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile.peers
import numpy as np
import pytest
from deadlines import factor, patience
from hostile.instants import Interruption
from hostile.subject import Tools

import geartrain
from geartrain.collectives import Group
from geartrain.core.threads import held
from geartrain.errors import GeartrainError

torch = pytest.importorskip("torch")

from geartrain.collectives.torch_backend.work import Finisher, TorchWork  # noqa: E402

END_S = 3.0


class HandlerError(Exception):
    """What a handler raises."""


def raise_it() -> None:
    raise HandlerError


def lines(make: Callable[[], Callable[[], object]], handler: Callable[[], object] | None = None) -> Iterator[int]:
    """Numbers of the lines of a call, which is made anew for each."""
    counted = Interruption(None, raise_it)
    counted.during(make())
    yield from range(counted.lines)


def ends(call: Callable[[], object], what: str) -> None:
    """Another thread makes the call, which may be refused: it ends."""

    def make() -> None:
        with contextlib.suppress(GeartrainError, RuntimeError):
            call()

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(patience(END_S))
    assert not thread.is_alive(), f"another thread hangs after {what}"


def interrupted(call: Callable[[], object], line: int, handler: Callable[[], object]) -> str:
    """Makes the call with a handler before a line; returns which one that was."""
    one = Interruption(line, handler)
    with contextlib.suppress(HandlerError, GeartrainError, RuntimeError):
        one.during(call)
    return f"a handler at {one.where}"


def test_a_lock_is_free_wherever_a_handler_raises():
    lock = threading.RLock()

    def use() -> None:
        with held(lock, 1.0) as mine:
            assert mine

    for line in lines(lambda: use):
        where = interrupted(use, line, raise_it)
        free: list[bool] = []
        ends(lambda free=free: free.append(lock.acquire(timeout=0.1)) or lock.release(), where)
        assert free == [True], where


def test_a_lock_that_is_not_free_in_time_is_not_held():
    lock = threading.RLock()
    with lock:
        found: list[bool] = []

        def use() -> None:
            with held(lock, 0.01) as mine:
                found.append(mine)

        ends(use, "a deadline")
        with held(lock, 0.01) as mine:
            assert mine
        ends(use, "a nested use")
    assert found == [False, False]
    ends(use, "the end")
    assert found == [False, False, True]


def test_no_condition_is_entered_but_by_its_lock():
    """`with condition` enters by a function of Python's, in which a handler may raise with the lock taken."""
    package = Path(geartrain.__file__).parent
    wrong = []
    for file in package.rglob("*.py"):
        text = file.read_text()
        if "threading.Condition(" not in text:
            continue
        tree = ast.parse(text)
        conditions = {
            target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("threading.Condition(")
            for target in node.targets
        }
        for node in ast.walk(tree):
            entered = [ast.unparse(item.context_expr) for item in node.items] if isinstance(node, ast.With) else []
            if any(name.rpartition(".")[2] in conditions for name in entered):
                wrong.append(f"{file.relative_to(package)}:{node.lineno}")
    assert wrong == [], f"{wrong}: `with` the lock that was given to the condition"


def settled_work(tensors: list[Any]) -> tuple[TorchWork, Finisher]:
    finisher = Finisher("handlers")
    return TorchWork(lambda timeout_s: None, lambda: True, tensors, finisher), finisher


@pytest.mark.parametrize("other", ["wait", "is_completed", "get_future"])
@pytest.mark.parametrize("name", ["wait", "is_completed", "get_future"])
def test_a_handler_may_call_the_work_that_it_has_interrupted(name, other):
    def trial(line: int) -> None:
        work, finisher = settled_work([torch.ones(1)])
        interrupted(getattr(work, name), line, getattr(work, other))
        work.wait()
        assert work.get_future().wait()[0] == 1
        finisher.close(patience(END_S))

    for line in lines(lambda: getattr(settled_work([torch.ones(1)])[0], name)):
        ends_here(lambda line=line: trial(line), f"{other} within {name}, line {line}")


def ends_here(call: Callable[[], object], what: str) -> None:
    """In a thread of its own, whose hang this test survives; errors are this test's."""
    errors: list[BaseException] = []

    def make() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(patience(END_S))
    assert not thread.is_alive(), f"{what} hangs"
    if errors:
        raise errors[0]


def refused_or(call: Callable[[], object]) -> Callable[[], object]:
    """The call, which may be refused with an error of geartrain's."""

    def make() -> None:
        with contextlib.suppress(GeartrainError):
            call()

    return make


@pytest.fixture
def tools(request: pytest.FixtureRequest) -> Iterator[Tools]:
    made = Tools(f"handlers-{abs(hash(request.node.name)) % 10**8}", factor())
    yield made
    made.clean()
    for left in Path("/dev/shm").glob(f"*{made.prefix}*"):  # made when a handler raised, and given to nobody
        left.unlink()


@pytest.mark.parametrize("other", ["result", "done", "add_done_callback"])
def test_a_future_has_its_result_for_all_wherever_a_handler_calls_it(tools, other):
    one, _ = hostile.peers.nodes(tools)

    def future() -> Any:
        return one.call_async("peer", "hostile.twice", 21)

    lost: list[str] = []

    def trial(line: int) -> None:
        waited = future()
        inner = {
            "result": refused_or(waited.result),
            "done": waited.done,
            "add_done_callback": lambda: waited.add_done_callback(lambda _: None),
        }[other]
        where = interrupted(waited.result, line, inner)
        results: list[Any] = []
        ends(lambda: results.append(waited.result(timeout_s=patience(END_S) / 2)), where)
        if results != [42]:
            lost.append(where)

    for line in lines(lambda: future().result):
        ends_here(lambda line=line: trial(line), f"{other} within result, line {line}")
    one.close()
    assert lost == []


def test_a_group_refuses_a_handler_within_its_calls():
    with Group(0, 1) as group:
        array = np.ones(8, np.float32)
        refused = []

        def again() -> None:
            try:
                group.all_reduce(array)
            except GeartrainError as error:
                refused.append(error)

        for line in lines(lambda: lambda: group.all_reduce(array)):
            ends_here(
                lambda line=line: interrupted(lambda: group.all_reduce(array), line, again), f"all_reduce, line {line}"
            )
    assert len(refused) > 0
    assert all("a signal handler must not call it again" in str(error) for error in refused)
