"""Global random generators beside forks: no child begins with one that a thread of its parent's was drawing from."""

from __future__ import annotations

import ast
import os
import threading
from pathlib import Path

import deadlines

import geartrain
from geartrain.core.global_generators import drawing

PACKAGE = Path(geartrain.__file__).parent
#: Of a generator of their own, which no child uses.
OWN = {"integrations/rlinf/replay_buffer.py": "self._generator"}


def forked() -> int:
    """The exit code of a child that draws."""
    child = os.fork()
    if child == 0:
        free = drawing.acquire(timeout=deadlines.patience(5))
        os._exit(0 if free else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_a_thread_that_draws_and_the_child_draws() -> None:
    holding, over = threading.Event(), threading.Event()
    codes: list[int] = []

    def draw() -> None:
        with drawing:
            holding.set()
            over.wait(deadlines.patience(20))

    def fork() -> None:
        codes.append(forked())

    threads = [threading.Thread(target=draw), threading.Thread(target=fork)]
    threads[0].start()
    holding.wait()
    threads[1].start()
    threads[1].join(0.2)
    waited = threads[1].is_alive()
    over.set()
    for thread in threads:
        thread.join(deadlines.patience(20))
    assert waited
    assert codes == [0]


def test_a_fork_within_a_draw_as_by_a_signals_handler_leaves_parent_and_child_with_the_generator() -> None:
    with drawing:
        assert forked() == 0
    assert forked() == 0


def is_global_draw(call: ast.Call, own: str | None) -> bool:
    text = ast.unparse(call.func)
    if not text.startswith(("torch.rand", "torch.multinomial", "torch.normal", "np.random.")):
        return False
    if text.startswith(("np.random.default_rng", "np.random.Generator", "np.random.Philox", "np.random.PCG64")):
        return False
    return own is None or own not in ast.unparse(call)


def draws_outside(path: Path) -> list[str]:
    own = OWN.get(str(path.relative_to(PACKAGE)))
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any(ast.unparse(item.context_expr) == "drawing" for item in node.items)
        for inner in ast.walk(node)
    }
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and is_global_draw(node, own) and id(node) not in guarded
    ]


def test_every_draw_from_a_global_generator_is_one_that_a_fork_waits_for() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "random" in (text := path.read_text()) or "torch.rand" in text]
    assert len(files) > 10
    found = [each for path in files for each in draws_outside(path)]
    assert not found
