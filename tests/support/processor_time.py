"""A pytest plugin that tells the processor time of each test, and of threads that a test has left running.

    PYTHONDONTWRITEBYTECODE= PYTHONPATH=tests/support .venv/bin/pytest -n 2 -p processor_time

Wall time says little on a busy machine. A line of build/processor-time/WORKER.jsonl is a test: the seconds of a core
that the pytest process took (`own_s`) and its processes (`children_s`, with those that still run), and `wall_s`;
`threads` names threads other than the main one that took more than 0.2 s meanwhile. The line `imports and collection`
is what a worker took before its first test. `python processor_time.py` sums up by folder, file and test. A second run
adds to the first: remove the folder before. Without bytecode (PYTHONDONTWRITEBYTECODE) imports cost twice as much.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "processor-time"
TICKS = os.sysconf("SC_CLK_TCK")


def _used_s(stat: Path, ended: bool = False) -> float:
    """The time of a process or thread; `ended` adds that of the children it has waited for."""
    columns = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, columns[11 : 15 if ended else 13])) / TICKS


def children_s() -> float:
    """Processor time of all processes below this one."""
    times = os.times()
    total, todo = times.children_user + times.children_system, [os.getpid()]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*"):
            try:
                below = (task / "children").read_text().split()
            except OSError:  # it has ended
                continue
            for pid in below:
                try:
                    total += _used_s(Path(f"/proc/{pid}/stat"), ended=True)
                except OSError:
                    continue
                todo.append(int(pid))
    return total


def threads_s() -> dict[str, float]:
    """Processor time of each thread but the main one."""
    names = {str(one.native_id): one.name for one in threading.enumerate()}
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            try:
                found[f"{names.get(task.name, 'native')} {task.name}"] = _used_s(task / "stat")
            except OSError:
                continue
    return found


def _write(line: dict[str, object]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    used_s = round(time.process_time(), 3)
    _write({"id": "imports and collection", "own_s": used_s, "children_s": round(children_s(), 3)})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    own, children, threads, wall = time.process_time(), children_s(), threads_s(), time.monotonic()
    try:
        return (yield)
    finally:
        busy = {name: round(used - threads.get(name, 0), 2) for name, used in threads_s().items()}
        line: dict[str, object] = {
            "id": item.nodeid,
            "own_s": round(time.process_time() - own, 3),
            "children_s": round(children_s() - children, 3),
            "wall_s": round(time.monotonic() - wall, 3),
            "threads": {name: used for name, used in busy.items() if used > 0.2},
        }
        _write(line)


def main() -> None:
    """Prints the folders, the files and the tests that took the most."""
    by_folder: collections.Counter[str] = collections.Counter()
    by_file: collections.Counter[str] = collections.Counter()
    by_test: collections.Counter[str] = collections.Counter()
    for path in FOLDER.glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            used = line["own_s"] + line["children_s"]
            file = line["id"].partition("::")[0]
            by_folder[file.rpartition("/")[0] or file] += used
            by_file[file] += used
            by_test[line["id"]] += used
    for table in (by_folder, by_file, by_test):
        print(f"\n{sum(table.values()):8.1f} s in all")
        for name, used in table.most_common(40):
            print(f"{used:8.1f} s {name}")


if __name__ == "__main__":
    main()
