"""Names for stores, the proof that no test leaves a segment behind, deadlines that wait longer on a busy machine."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import certificates
import deadlines
import preloaded
import pytest
from kernel_worker import Interpreter
from reports import reporting_host  # noqa: F401, a fixture

from geartrain.transport.tls import TLS

# A shell that starts the tests in the background has them ignore an interrupt, and so what they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHM = Path("/dev/shm")
# A killed run of the same process number may have left segments.
RUN = f"{os.getpid()}-{secrets.token_hex(2)}"
_numbers = itertools.count()


class Names:
    """Hands out names that no other test or process uses, and removes what a test was allowed to leave."""

    def __init__(self) -> None:
        self._prefix = f"test-{RUN}-{next(_numbers)}"
        self._count = itertools.count()
        self._forgiven: set[str] = set()

    def __call__(self, *, may_stay: bool = False) -> str:
        """A new name. With `may_stay` its segment may be there when the test ends: the test kills its users."""
        name = f"{self._prefix}-{next(self._count)}"
        if may_stay:
            self._forgiven.add(name)
        return name

    def path(self, name: str) -> Path:
        """Where the segment of that name lives."""
        return SHM / f"geartrain.{name}"

    def clear(self) -> list[str]:
        """Removes all segments of this test; returns those that should not have been there."""
        left = [path for path in SHM.glob(f"geartrain.{self._prefix}-*") if path.is_file()]
        for path in left:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        found = {path.name.removeprefix("geartrain.") for path in left}
        return sorted(found - self._forgiven)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no collection of a test, and no forked process, is to go through it.

    torch has one thread: more would spin wherever they wait for a core that another process has.
    """
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The time after which a test is taken for one that hangs, and what its processes wait, follow the load."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(deadlines.patience(limit_s)), append=False)
    before = os.environ.get(deadlines.VARIABLE)
    os.environ[deadlines.VARIABLE] = f"{deadlines.factor():.2f}"
    try:
        return (yield)
    finally:
        if before is None:
            del os.environ[deadlines.VARIABLE]
        else:
            os.environ[deadlines.VARIABLE] = before


@pytest.fixture
def names() -> Iterator[Names]:
    """Unique store names; fails a test that leaves a segment in /dev/shm."""
    made = Names()
    yield made
    left = made.clear()
    assert not left, f"the test left segments behind: {left}"


@pytest.fixture(scope="session")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    """What both sides of a connection on loopback may show."""
    reason = certificates.why_not()
    if reason is not None:
        pytest.skip(reason)
    return certificates.Authority(tmp_path_factory.mktemp("authority")).sign("loopback", "IP:127.0.0.1")


@pytest.fixture
def name(names: Names) -> str:
    """One unique store name."""
    return names()


@pytest.fixture
def store_name() -> Iterator[Callable[[], str]]:
    """Unique store names for tests of the layers above, which may leave segments; they are removed."""
    made = Names()
    yield lambda: made(may_stay=True)
    made.clear()


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Runs a function in a forked child, which never returns into the test; children still there at the end die."""
    children: list[int] = []

    def start(body: Callable[[], object]) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(body() or 0)  # type: ignore[call-overload]
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
        return child

    yield start
    for child in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, 9)
            os.waitpid(child, 0)


@pytest.fixture
def real_interpreters() -> None:
    """For tests in files of `preloaded_children` whose processes are to be what they are elsewhere."""


@pytest.fixture
def preloaded_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Interpreters that the tested code starts are forks, but in a test that asks for `real_interpreters`."""
    with contextlib.nullcontext() if "real_interpreters" in request.fixturenames else preloaded.children():
        yield


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process in which Triton's interpreter runs the kernels."""
    pytest.importorskip("triton")
    one = Interpreter()
    yield one
    one.close()
