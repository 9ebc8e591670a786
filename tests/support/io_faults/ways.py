"""Ways to what geartrain keeps in files, for run.py: each prepares, yields what may fail, and then looks what is there.

The error that a way gets back is None where the call succeeded in spite of the fault. A way raises where something is
lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import typer.testing

import geartrain as gt
import geartrain.checkpoints.job as checkpoint_of_job
import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain.errors import GeartrainError
from geartrain.integrations import export_store, import_dataset
from geartrain.store import checkpoint_series as series
from geartrain.tools.cli import app

Way = Generator[Callable[[], object], BaseException | None, None]
WAYS: dict[str, Callable[[Path], Way]] = {}
#: Ways whose errors may be bare ones of the system, as documented.
OS_ERRORS = {"export_npz", "export_npy", "export_parquet", "export_minari", "export_lerobot"}
#: Ways that take a second, for they start a process or write many files.
SLOW = {"export_minari", "import_minari", "export_lerobot"}
#: Ways of which some calls fail, and not all: these, and commands.
DEAR = set(SLOW)

FIELDS = {
    "x": gt.Field((3,), "float32"),
    "number": gt.Field((), "float32"),
    "flag": gt.Field((), "bool"),
    "id": gt.Field((), "int64", per_row=True),
}
STEPS = 4
OF_MINARI = {"obs": "x", "action": "x", "reward": "number", "terminated": "flag", "truncated": "flag"}


def way(function: Callable[[Path], Way]) -> Callable[[Path], Way]:
    """Adds one of `WAYS`."""
    WAYS[function.__name__] = function
    return function


def made(name: str | Path = "rows", rows: int = 3, **options: Any) -> gt.Store:
    """A store of a few rows."""
    store = gt.Store.create(str(name), FIELDS, max_length=STEPS, capacity=8, **options)
    put(store, range(rows))
    return store


def put(store: gt.Store, ids: Any) -> None:
    """Inserts rows of these numbers."""
    numbers = np.asarray(list(ids))
    x = np.full((len(numbers), STEPS, 3), numbers[:, None, None], np.float32)
    store.insert({"x": x, "number": x[..., 0], "flag": x[..., 0] < 0, "id": numbers})


def check(store: gt.Store, ids: Any) -> None:
    """The store has just these rows, whole."""
    batch = gt.fetch(store, store.keys(), output="numpy")
    assert batch["id"].tolist() == list(ids), batch["id"]
    assert (batch["x"] == batch["id"][:, None, None]).all()
    if not store.read_only:
        assert store.audit() == []


# --- stores -----------------------------------------------------------------------------------------------------------


def _create(name: Path | str, **options: Any) -> Way:
    store = None

    def act() -> None:
        nonlocal store
        store = gt.Store.create(str(name), FIELDS, max_length=STEPS, capacity=8, **options)

    error = yield act
    if error is not None:
        act()
    put(store, range(3))
    check(store, range(3))
    store.close()


@way
def create(disk: Path) -> Way:
    yield from _create("rows")


@way
def create_file(disk: Path) -> Way:
    yield from _create(disk / "rows.gt", trust="any")


@way
def create_later(disk: Path) -> Way:
    yield from _create(disk / "rows.gt", reserve=False)


def _open(disk: Path, **how: Any) -> Way:
    first = made(disk / "rows.gt" if how.get("mode") == "r" else "rows")
    if "adopt" in how:
        first.close(keep=True)
    opened = None

    def act() -> None:
        nonlocal opened
        opened = gt.Store.open(first.name, FIELDS, **how)

    error = yield act
    if error is not None:
        act()
    check(opened, range(3))
    opened.close()
    if "adopt" not in how:
        check(first, range(3))
        first.close()


@way
def open_(disk: Path) -> Way:
    yield from _open(disk)


@way
def open_to_read(disk: Path) -> Way:
    yield from _open(disk, mode="r")


@way
def adopt(disk: Path) -> Way:
    yield from _open(disk, adopt=True)


@way
def close(disk: Path) -> Way:
    store = made()
    yield store.close
    store.close()


@way
def replace(disk: Path) -> Way:
    made().close(keep=True)

    def act() -> None:
        with gt.Store.open("rows", FIELDS, max_length=STEPS, capacity=8, create="replace") as store:
            put(store, [7])

    if (yield act) is not None:
        act()


@way
def anonymous(disk: Path) -> Way:
    def act() -> None:
        with gt.Store.create(FIELDS, max_length=STEPS, capacity=8) as store:
            put(store, range(3))

    yield act


# --- checkpoints ------------------------------------------------------------------------------------------------------


@way
def save(disk: Path) -> Way:
    store = made()
    error = yield lambda: store.save(disk / "new" / "checkpoint")
    if error is not None:
        store.save(disk / "new" / "checkpoint")
    check_saved(disk / "new" / "checkpoint", range(3))
    store.close()


def check_saved(path: Path, *rows: Any) -> None:
    """A checkpoint there has one of these sets of rows."""
    with gt.Store.load(path) as loaded:
        ids = gt.fetch(loaded, loaded.keys(), output="numpy")["id"].tolist()
        assert ids in [list(each) for each in rows], ids
        check(loaded, ids)


def _save_again(disk: Path, **options: Any) -> Way:
    store = made()
    store.save(disk / "checkpoint")
    put(store, [3, 4])
    error = yield lambda: store.save(disk / "checkpoint", **options)
    check_saved(disk / "checkpoint", range(5) if error is None else range(3), range(5))
    store.save(disk / "checkpoint")
    check_saved(disk / "checkpoint", range(5))
    store.close()


@way
def save_again(disk: Path) -> Way:
    yield from _save_again(disk)


@way
def save_whole_again(disk: Path) -> Way:
    yield from _save_again(disk, incremental=False)


@way
def load(disk: Path) -> Way:
    with made(priority_per="step") as store:
        store.save(disk / "checkpoint")
    loaded = None

    def act() -> None:
        nonlocal loaded
        loaded = gt.Store.load(disk / "checkpoint", "rows")

    if (yield act) is not None:
        act()
    check(loaded, range(3))
    loaded.close()


@way
def save_series(disk: Path) -> Way:
    store = made()

    def act() -> None:
        with series.holding(disk / "series"):
            series.save_next(store, disk / "series", keep=1)

    act()
    put(store, [3])
    error = yield act
    check_saved(disk / "series" / series.LATEST, range(4) if error is None else range(3), range(4))
    act()
    check_saved(disk / "series" / series.LATEST, range(4))
    assert len(series.saved_in(disk / "series")) == 1
    store.close()


@way
def save_job(disk: Path) -> Way:
    store = made()
    gt.save_checkpoint(store, disk / "run", step=1, state={"a": 1})
    put(store, [3])

    def act() -> None:
        gt.save_checkpoint(store, disk / "run", step=2, state={"a": 2}, keep=1)

    def loaded() -> tuple[list[int], Any]:
        again, state, report = gt.load_checkpoint(disk / "run", "again")
        with again:
            ids = gt.fetch(again, again.keys(), output="numpy")["id"].tolist()
            check(again, ids)
        return ids, (state, report.step)

    error = yield act
    old, new = (list(range(3)), ({"a": 1}, 1)), (list(range(4)), ({"a": 2}, 2))
    assert loaded() in ([new] if error is None else [old, new])
    act()
    assert loaded() == new
    store.close()


@way
def load_job(disk: Path) -> Way:
    with made() as store:
        gt.save_checkpoint(store, disk / "run", step=1, state={"a": 1})

    def act() -> None:
        again, state, _ = gt.load_checkpoint(disk / "run", "again")
        with again:
            check(again, range(3))
            assert state == {"a": 1}

    if (yield act) is not None:
        act()


@way
def newest_step(disk: Path) -> Way:
    with made() as store:
        gt.save_checkpoint(store, disk / "run", step=1)
    found: list[int | None] = []

    def act() -> None:
        found.append(checkpoint_of_job.newest_step(disk / "run"))

    if (yield act) is not None:
        act()
    assert found == [1]  # never "no step", by which a job would begin anew


# --- journals ---------------------------------------------------------------------------------------------------------


def journaled(disk: Path, **options: Any) -> gt.Store:
    """A store with a journal, or what one that ended has left of it."""
    how = {"journal_sync_s": 0.0, **options}
    return gt.Store.create("rows", FIELDS, max_length=STEPS, capacity=8, journal=disk / "journal", **how)


@way
def journal(disk: Path) -> Way:
    store = None

    def act() -> None:
        nonlocal store
        store = journaled(disk)

    if (yield act) is not None:
        act()
    put(store, range(3))
    store.close()
    with journaled(disk) as store:
        check(store, range(3))


def _journal_rows(disk: Path, **options: Any) -> Way:
    store = journaled(disk, **options)
    put(store, range(3))

    def act() -> None:
        put(store, [3])
        store.delete(store.keys()[:1])
        store.sync_journal()

    error = yield act
    ids = gt.fetch(store, store.keys(), output="numpy")["id"].tolist()
    assert error is not None or ids == [1, 2, 3]
    store.close()
    with journaled(disk) as store:
        check(store, ids)


@way
def journal_rows(disk: Path) -> Way:
    yield from _journal_rows(disk)


@way
def journal_rows_or_error(disk: Path) -> Way:
    yield from _journal_rows(disk, journal_full="error")


@way
def restore(disk: Path) -> Way:
    with journaled(disk) as store:
        put(store, range(3))
    again = None

    def act() -> None:
        nonlocal again
        again = journaled(disk)

    if (yield act) is not None:
        act()
    check(again, range(3))
    put(again, [3])
    again.close()
    with journaled(disk) as store:
        check(store, range(4))


@way
def load_into_journal(disk: Path) -> Way:
    with made("saved") as store:
        store.save(disk / "checkpoint")
    loaded = None

    def act() -> None:
        nonlocal loaded
        loaded = gt.Store.load(disk / "checkpoint", "rows", journal=disk / "journal", journal_sync_s=0.0)

    if (yield act) is not None:
        act()
    put(loaded, [3])
    loaded.close()
    act()
    check(loaded, range(4))
    loaded.close()


# --- data sets --------------------------------------------------------------------------------------------------------


def _dataset(path: Path) -> Path:
    np.savez(path, x=np.arange(60, dtype=np.float32).reshape(5, 4, 3))
    return path


@way
def import_(disk: Path) -> Way:
    source = _dataset(disk / "data.npz")

    def act() -> None:
        import_dataset(source, str(disk / "rows.gt"), progress=False).close()

    if (yield act) is not None:
        assert not (disk / "rows.gt").exists()
        act()
    with gt.Store.open(disk / "rows.gt", mode="r") as store:
        x = gt.fetch(store, store.keys(), output="numpy")["x"]
        assert x.ravel().tolist() == list(range(60))


def _import(disk: Path, name: str, **options: Any) -> Way:
    with made() as store:
        export_store(store, disk / name, progress=False, **{"fields": "x", **options})

    def act() -> None:
        with import_dataset(disk / name, "found", progress=False) as found:
            x = gt.fetch(found, found.keys(), output="numpy")["obs" if "obs" in found.fields else "x"]
            assert x[:, 0, 0].tolist() == [0, 1, 2]

    yield act


@way
def import_npy(disk: Path) -> Way:
    yield from _import(disk, "rows", format="npy")


@way
def import_parquet(disk: Path) -> Way:
    yield from _import(disk, "rows.parquet")


@way
def import_minari(disk: Path) -> Way:
    yield from _import(disk, "rows", format="minari", fields=OF_MINARI, repeat_last_obs=True)


@way
def import_lerobot(disk: Path) -> Way:
    yield from _import(disk, "rows", format="lerobot", fps=10)


def _export(disk: Path, name: str, **options: Any) -> Way:
    store = made()
    target = disk / name
    export_store(store, target, progress=False, **options)
    put(store, [3])

    def act() -> None:
        export_store(store, target, overwrite=True, progress=False, **options)

    def count() -> int:
        with import_dataset(target, "found", progress=False) as found:
            return len(found)

    error = yield act
    assert count() == 4 or (error is not None and count() == 3)
    act()
    assert count() == 4
    store.close()


@way
def export_npz(disk: Path) -> Way:
    yield from _export(disk, "rows.npz")


@way
def export_npy(disk: Path) -> Way:
    yield from _export(disk, "rows", format="npy")


@way
def export_parquet(disk: Path) -> Way:
    yield from _export(disk, "rows.parquet")


@way
def export_minari(disk: Path) -> Way:
    yield from _export(disk, "rows", format="minari", fields=OF_MINARI, repeat_last_obs=True)


@way
def export_lerobot(disk: Path) -> Way:
    yield from _export(disk, "rows", format="lerobot", fields="x", fps=10)


# --- weights, counters ------------------------------------------------------------------------------------------------


@way
def publish(disk: Path) -> Way:
    def act() -> None:
        with weights.Publisher("pi") as publisher:
            publisher.publish(1, {"w": np.ones(1000, np.float32)})
            publisher.publish(2, {"w": np.full(1000, 2, np.float32)})

    yield act


@way
def publish_another_schema(disk: Path) -> Way:
    publisher = weights.Publisher("pi")
    publisher.publish(1, {"w": np.ones(1000, np.float32)})
    reader = weights.Reader("pi")
    assert reader.latest(timeout_s=5).version == 1
    publisher.close()
    another = None

    def act() -> None:
        nonlocal another
        another = weights.Publisher("pi")
        try:
            another.publish(2, {"w": np.full(1001, 2, np.float32)})
        except BaseException:
            another.close()
            another = None  # its memory is mapped until then
            raise

    error = yield act
    assert reader.latest(timeout_s=1).version == 1 + (error is None)
    if error is not None:
        act()
    found = reader.latest(timeout_s=1)
    assert found.version == 2 and found["w"].sum() == 2002
    del found
    reader.close()
    another.close()


@way
def read_weights(disk: Path) -> Way:
    publisher = weights.Publisher("pi")
    publisher.publish(1, {"w": np.ones(1000, np.float32)})

    def act() -> None:
        with weights.Reader("pi") as reader:
            assert reader.latest(timeout_s=5)["w"].sum() == 1000
        assert weights.describe("pi").version == 1

    yield act
    publisher.close()


@way
def count(disk: Path) -> Way:
    def act() -> None:
        with counters.SharedCounters.create("job", 2, ["steps"]) as made:
            made.slot(0)["steps"] = 3
            assert counters.SharedCounters.open("job").column("steps").sum() == 3

    yield act


# --- commands ---------------------------------------------------------------------------------------------------------


class RefusedError(GeartrainError):
    """A command has printed one line that says why not, and ended with another code than 0."""


def command(*words: str | Path) -> None:
    """Runs `geartrain`. Raises `RefusedError`, or what the command let through."""
    done = typer.testing.CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        assert re.fullmatch(r"error: [^\n]*\n", done.stderr), done.stderr
        raise RefusedError(done.stderr)


def of_command(function: Callable[[Path], Way]) -> Callable[[Path], Way]:
    """Adds one of `WAYS` and `DEAR`."""
    DEAR.add(function.__name__)
    return way(function)


def _look(disk: Path, *words: str | Path) -> Way:
    with made(journal=disk / "journal", journal_sync_s=0.0) as store:
        store.save(disk / "checkpoint")
        gt.save_checkpoint(store, disk / "run", step=1)
        with weights.Publisher("pi") as publisher, counters.SharedCounters.create("job", 2, ["steps"]):
            publisher.publish(1, {"w": np.ones(10, np.float32)})
            yield lambda: command(*words)
        check(store, range(3))


@of_command
def inspect(disk: Path) -> Way:
    yield from _look(disk, "inspect")


@of_command
def inspect_rows(disk: Path) -> Way:
    yield from _look(disk, "inspect", "rows", "--rows", "2")


@of_command
def inspect_audit(disk: Path) -> Way:
    yield from _look(disk, "inspect", "rows", "--audit")


@of_command
def inspect_checkpoint(disk: Path) -> Way:
    yield from _look(disk, "inspect", disk / "checkpoint")


@of_command
def inspect_job(disk: Path) -> Way:
    yield from _look(disk, "inspect", disk / "run")


@of_command
def inspect_journal(disk: Path) -> Way:
    yield from _look(disk, "inspect", disk / "journal")


@of_command
def top(disk: Path) -> Way:
    yield from _look(disk, "top", "--once", "--every-s", "0.1")


@of_command
def remove(disk: Path) -> Way:
    made().close(keep=True)
    error = yield lambda: command("remove", "rows")
    if error is not None:
        command("remove", "rows")


@of_command
def checkpoint(disk: Path) -> Way:
    store = made()
    error = yield lambda: command("checkpoint", "rows", disk / "saved")
    if error is not None:
        command("checkpoint", "rows", disk / "saved")
    check_saved(disk / "saved" / series.LATEST, range(3))
    store.close()


@of_command
def import_command(disk: Path) -> Way:
    source = _dataset(disk / "data.npz")
    words = ("import", source, "--into", disk / "rows.gt", "--quiet")
    if (yield lambda: command(*words)) is not None:
        command(*words)
    with gt.Store.open(disk / "rows.gt", mode="r") as store:
        assert len(store) == 5


@of_command
def export_command(disk: Path) -> Way:
    with made():
        words = ("export", "rows", disk / "rows.npz", "--quiet", "--overwrite")
        if (yield lambda: command(*words)) is not None:
            command(*words)


@of_command
def trace(disk: Path) -> Way:
    (disk / "trace.json").write_text("[]")
    yield lambda: command("trace", disk / "trace.json", "--out", disk / "joined.json")


@of_command
def plan(disk: Path) -> Way:
    yield lambda: command("plan", "ranks", "--hosts", "2", "--json", disk / "plan.json")


__all__ = ["DEAR", "OS_ERRORS", "SLOW", "WAYS"]
