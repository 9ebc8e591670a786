"""Shared files are opened only from those who are trusted, and live where GEARTRAIN_DIR says."""

from __future__ import annotations

import functools
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience
from mounts import file_system

import geartrain as gt
import geartrain._native as _native
import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain.core.counters import SharedCounters
from geartrain.core.shared_files import open_shared, segments_directory
from geartrain.device.pinned_memory import Ledger
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    IncompatibleStoreError,
    NoSpaceError,
    PinError,
    StoreError,
    StoreExistsError,
    StoreMissingError,
    UntrustedStoreError,
)

ANOTHER = 54321  # a user and a group that nobody here is in
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch(0o600)
    path.write_bytes(b"content")
    return path


@pytest.mark.parametrize("writable", [False, True])
def test_an_own_file_is_opened_and_closed_in_children_that_exec(file, writable):
    fd = open_shared(file, writable=writable)
    try:
        assert os.pread(fd, 7, 0) == b"content"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("what", ["fifo", "directory", "socket", "device", "link", "dangling link", "nothing"])
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, file, what, writable):
    path = tmp_path / "it"
    server = socket.socket(socket.AF_UNIX)
    if what == "fifo":
        os.mkfifo(path, 0o600)
    elif what == "directory":
        path.mkdir()
    elif what == "socket":
        server.bind(str(path))
    elif what == "device":
        path = Path("/dev/null")
    elif what == "link":
        path.symlink_to(file)
    elif what == "dangling link":
        path.symlink_to(tmp_path / "absent")
    expected = {"nothing": StoreMissingError, "link": UntrustedStoreError, "dangling link": UntrustedStoreError}
    try:
        with pytest.raises(expected.get(what, IncompatibleStoreError)) as raised:
            open_shared(path, writable=writable, trust="any")
    finally:
        server.close()
    if what in ("link", "dangling link"):
        assert "symbolic link; give the path that it leads to" in str(raised.value)


@pytest.mark.parametrize(
    ("mode", "trusted"),
    [
        (0o600, "user group any"),
        (0o644, "user group any"),  # others may read
        (0o660, "group any"),
        (0o620, "group any"),
        (0o666, "any"),
        (0o602, "any"),
    ],
)
def test_the_mode_must_let_nobody_write_but_those_who_are_trusted(file, mode, trusted):
    file.chmod(mode)
    for trust in ("user", "group", "any"):
        if trust in trusted.split():
            os.close(open_shared(file, trust=trust))
        else:
            with pytest.raises(UntrustedStoreError, match=r"may write to it .*trust='group' or 'any'"):
                open_shared(file, trust=trust)


@needs_root
@pytest.mark.parametrize(
    ("user", "group", "mode", "trusted"),
    [
        (ANOTHER, ANOTHER, 0o600, "any"),
        (ANOTHER, ANOTHER, 0o644, "any"),  # its owner may write to it
        (ANOTHER, None, 0o660, "group any"),
        (ANOTHER, None, 0o666, "any"),
        (None, ANOTHER, 0o660, "any"),  # a group that this user is not in
        (None, ANOTHER, 0o600, "user group any"),
    ],
)
def test_the_owner_must_be_one_who_is_trusted(file, user, group, mode, trusted):
    os.chown(file, os.geteuid() if user is None else user, os.getegid() if group is None else group)
    file.chmod(mode)
    for trust in ("user", "group", "any"):
        if trust in trusted.split():
            os.close(open_shared(file, trust=trust))
        else:
            with pytest.raises(UntrustedStoreError, match=rf"{file} is not opened: "):
                open_shared(file, trust=trust)


def _become_another_user() -> None:
    os.setgroups([])
    os.setgid(ANOTHER)
    os.setuid(ANOTHER)


@needs_root
def test_a_store_of_another_user_is_refused_unless_all_are_trusted(names, fork):
    fields = {"x": gt.Field((), "int64", per_row=True)}
    theirs, mine, shared = names(may_stay=True), names(), names(may_stay=True)

    def another_user() -> None:
        _become_another_user()
        gt.Store.create(theirs, fields, capacity=4, persist=True).close()
        with pytest.raises(StoreExistsError, match=rf"the name '{mine}' is taken: .*Permission denied"):
            gt.Store.create(mine, fields, capacity=4)
        with pytest.raises(StoreExistsError, match="may be removed by its owner alone"):
            gt.Store.open(shared, fields, create="replace", capacity=4, trust="any")
        for join in (gt.Store.open, functools.partial(gt.Store.open, mode="r")):
            with pytest.raises(UntrustedStoreError, match=r"belongs to user|Permission denied"):
                join(mine)

    gt.Store.create(shared, fields, capacity=4, persist=True, trust="any").close()
    with gt.Store.create(mine, fields, capacity=4):
        assert os.waitstatus_to_exitcode(os.waitpid(fork(another_user), 0)[1]) == 0
    for trust in ("user", "group"):
        for join in (gt.Store.open, functools.partial(gt.Store.open, mode="r")):
            with pytest.raises(UntrustedStoreError, match=f"it belongs to user {ANOTHER}"):
                join(theirs, trust=trust)
    with pytest.raises(StoreExistsError, match=rf"the name '{theirs}' is taken: .* it belongs to user {ANOTHER}"):
        gt.Store.create(theirs, fields, capacity=4)
    with pytest.raises(StoreExistsError, match=r"exists already .*0 rows"):
        gt.Store.create(theirs, fields, capacity=4, trust="any")
    gt.Store.open(shared, mode="r", adopt=True, trust="any").unlink()
    with gt.Store.open(theirs, trust="any") as store:
        store.insert({"x": np.arange(2)})
        assert store.audit() == []
        store.unlink()


@needs_root
def test_users_share_a_store_when_both_say_so(names, fork):
    name = names(may_stay=True)
    fields = {"x": gt.Field((), "int64", per_row=True)}
    with gt.Store.create(name, fields, capacity=4, trust="any") as store:
        store.insert({"x": np.arange(2)})

        def another_user() -> None:
            os.setgroups([])
            os.setgid(ANOTHER)
            os.setuid(ANOTHER)
            with pytest.raises(UntrustedStoreError, match="every user may write to it"):
                gt.Store.open(name, trust="group")
            with gt.Store.open(name, trust="any") as mine:
                mine.insert({"x": np.array([7])})
                assert mine.audit() == []

        assert os.waitstatus_to_exitcode(os.waitpid(fork(another_user), 0)[1]) == 0
        assert gt.fetch(store, store.keys(), output="numpy")["x"].tolist() == [0, 1, 7]
        assert stat.S_IMODE(store.path.stat().st_mode) == 0o666


@needs_root
def test_what_another_user_cannot_remove_stays_and_can_be_joined(names, fork):
    name = names(may_stay=True)
    store = gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=4, trust="any")
    store.insert({"x": np.arange(2)})
    (joined, tell_joined), (left, tell_left) = os.pipe(), os.pipe()

    def another_user() -> None:
        os.setgroups([])
        os.setgid(ANOTHER)
        os.setuid(ANOTHER)
        mine = gt.Store.open(name, trust="any")
        os.write(tell_joined, b".")
        assert os.read(left, 1) == b"."
        mine.close()  # the last one, and not the owner

    child = fork(another_user)
    assert os.read(joined, 1) == b"."
    store.close()
    os.write(tell_left, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.path.exists(), "or this test says nothing"
    with gt.Store.open(name, trust="any") as again:
        assert len(again) == 2 and again.audit() == []
    assert not store.path.exists(), "its owner removes it"


def test_a_store_is_as_open_as_it_was_asked_to_be_whatever_the_umask(names):
    fields = {"x": gt.Field((), "int64", per_row=True)}
    before = os.umask(0o077)
    try:
        for trust, mode in (("user", 0o600), ("group", 0o660), ("any", 0o666)):
            with gt.Store.create(names(), fields, capacity=4, trust=trust) as store:
                assert stat.S_IMODE(store.path.stat().st_mode) == mode
                if trust != "user":
                    with pytest.raises(UntrustedStoreError):
                        gt.Store.open(store.name)
                    with pytest.raises(UntrustedStoreError):
                        gt.Store.open(store.name, mode="r", adopt=True)
                gt.Store.open(store.name, trust=trust).close()
                with gt.Store.open(store.name, fields, create="missing", trust=trust, capacity=9) as same:
                    assert same.capacity == 4 and same.trust == trust
    finally:
        os.umask(before)


def test_a_word_that_is_no_trust_is_refused(name):
    for call in (
        lambda: gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=1, trust="all"),
        lambda: gt.Store.open(name, trust="all"),
        lambda: gt.Store.open(name, mode="r", adopt=True, trust="all"),
        lambda: weights.Reader(name, trust="all"),
        lambda: weights.Publisher(name, trust="all"),
    ):
        with pytest.raises(ArgumentError, match="trust is one of 'user', 'group', 'any', found 'all'"):
            call()


# --- counters and the ledger of pinned memory -----------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 5000,
        b"[" * 4096,
        json.dumps({"format": "geartrain-board-1", "slots": 10**9, "columns": ["steps"]}).encode().ljust(8192, b"\0"),
        json.dumps({"format": "geartrain-board-1", "slots": -1, "columns": ["steps"]}).encode().ljust(8192, b"\0"),
        json.dumps({"format": "geartrain-board-1", "slots": 1, "columns": "steps"}).encode().ljust(4160, b"\0"),
        json.dumps({"format": "geartrain-board-1", "slots": 1, "columns": []}).encode().ljust(4096, b"\0"),
        json.dumps({"format": "geartrain-board-1"}).encode().ljust(8192, b"\0"),
        json.dumps(["geartrain-board-1"]).encode().ljust(8192, b"\0"),
    ],
    ids=["empty", "text", "nested", "slots", "negative", "columns", "none", "absent", "list"],
)
def test_counters_of_any_content_are_an_error(monkeypatch, tmp_path, content):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    path = tmp_path / "geartrain-board-hostile"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(IncompatibleStoreError, match="does not have the counter format of this build"):
        SharedCounters.open("hostile")
    with pytest.raises(StoreError):
        counters.describe("hostile")


@pytest.mark.timeout(20)
def test_counters_behind_a_fifo_or_a_link_are_refused_and_survive_a_cleaning(monkeypatch, tmp_path):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    os.mkfifo(tmp_path / "geartrain-board-fifo", 0o600)
    (tmp_path / "geartrain-board-link").symlink_to("/etc/hostname")
    for name, error in (("fifo", IncompatibleStoreError), ("link", UntrustedStoreError)):
        with pytest.raises(error):
            SharedCounters.open(name)
    assert counters.remove_stale() == []
    with SharedCounters.create("mine", 2, ("steps",)) as mine, SharedCounters.open("mine") as same:
        same.slot(1)["steps"] = 5
        assert mine.column("steps").tolist() == [0, 5]
        assert mine.path.stat().st_blocks * 512 >= mine.path.stat().st_size, "allocated now, not at the first write"


def test_the_ledger_of_pinned_memory_is_a_directory_of_its_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    ledger = Ledger()
    assert ledger.directory == tmp_path / f"geartrain-pinned-{os.geteuid()}"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    hostile.chmod(0o777)
    with pytest.raises(PinError, match="not a directory of this user alone"):
        Ledger(hostile).total()
    hostile.chmod(0o700)
    (hostile / "guard").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Ledger(hostile).total()
    assert victim.read_text() == "precious"
    assert ledger.total() == 0


# --- GEARTRAIN_DIR --------------------------------------------------------------------------------------------------


def test_every_shared_file_goes_where_the_variable_says(monkeypatch, tmp_path, name):
    monkeypatch.setenv("GEARTRAIN_DIR", f"{tmp_path}/")
    monkeypatch.setenv("GEARTRAIN_REPORT_S", "0")
    assert segments_directory() == tmp_path
    assert _native.segment_path("a") == str(tmp_path / "geartrain.a")
    assert _native.segment_path("./a") == "./a", "a path stays one"
    fields = {"x": gt.Field((), "int64", per_row=True)}
    with (
        gt.Store.create(name, fields, capacity=4) as store,
        gt.Store.create(fields, capacity=4) as anonymous,
        weights.Publisher(name) as publisher,
        SharedCounters.create(name, 1, ("steps",)) as counted,
    ):
        publisher.publish(1, {"w": np.ones(3)})
        Ledger().total()
        assert {path.name for path in tmp_path.iterdir()} == {
            f"geartrain.{name}",
            f"geartrain.{anonymous.name}",
            f"geartrain-weights.{name}",
            f"geartrain-board-{name}",
            f"geartrain-pinned-{os.geteuid()}",
        }
        assert store.path.parent == tmp_path and counted.path.parent == tmp_path
        store.insert({"x": np.arange(3)})
        # A process of its own finds them by the variable that it inherits, and by their names alone.
        told = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys, geartrain as gt, geartrain.core.counters as c, geartrain.weights as w\n"
                "name = sys.argv[1]\n"
                "with gt.Store.open(name) as s, w.Reader(name) as r:\n"
                "    print(len(s), r.latest(timeout_s=5).version, w.names(), c.names())",
                name,
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=patience(60),
        ).stdout
        assert told == f"3 1 ['{name}'] ['{name}']\n"
    assert {path.name for path in tmp_path.iterdir()} == {f"geartrain-pinned-{os.geteuid()}"}


def test_a_directory_that_cannot_be_is_named(monkeypatch, tmp_path, name):
    fields = {"x": gt.Field((), "int64", per_row=True)}
    monkeypatch.setenv("GEARTRAIN_DIR", "relative/one")
    with pytest.raises(ArgumentError, match="GEARTRAIN_DIR must be an absolute path, found 'relative/one'"):
        gt.Store.create(name, fields, capacity=4)
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path / "absent"))
    with pytest.raises(StoreMissingError, match=r"absent.*No such file"):
        gt.Store.create(name, fields, capacity=4)
    monkeypatch.setenv("GEARTRAIN_DIR", "")
    assert segments_directory() == Path("/dev/shm")


@pytest.fixture
def small_shm(tmp_path: Path):
    """A file system of 64 MiB, as a container's /dev/shm; skips where this user may not mount one."""
    with file_system(tmp_path, "64m"):
        yield tmp_path


def test_a_containers_shared_memory_is_an_error_with_the_remedy(monkeypatch, small_shm, name):
    monkeypatch.setenv("GEARTRAIN_DIR", str(small_shm))
    with pytest.raises(NoSpaceError) as raised:
        gt.Store.create(name, {"x": gt.Field((1 << 20,), "uint8", per_row=True)}, capacity=100)
    for said in (r"64.0 MiB free of 64.0 MiB", "docker run --shm-size=16g", "GEARTRAIN_DIR"):
        assert said in str(raised.value)
    # What is full later is an error as well, for every kind of file: none writes to memory that was not allocated.
    (small_shm / "filler").write_bytes(bytes((64 << 20) - (8 << 10)))
    with pytest.raises(NoSpaceError, match="GEARTRAIN_DIR"), weights.Publisher(name) as publisher:
        publisher.publish(1, {"w": np.ones(100_000)})
    with pytest.raises(NoSpaceError, match="GEARTRAIN_DIR"):
        SharedCounters.create(name, 1000, ("steps",))


MADE = {
    "store": lambda: gt.Store.create("x", {"a": gt.Field((), "uint8", per_row=True)}, capacity=4),
    "store without a name": lambda: gt.Store.create({"a": gt.Field((), "uint8", per_row=True)}, capacity=4),
    "publisher": lambda: weights.Publisher("x"),
    "reader": lambda: weights.Reader("x"),
    "counters": lambda: SharedCounters.create("x", 1, ["steps"]),
}


@pytest.mark.parametrize("what", MADE)
def test_a_directory_of_segments_that_takes_no_file_is_told_with_what_to_do(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    with (
        file_system(tmp_path, "4m", "nr_inodes=1"),
        pytest.raises(NoSpaceError, match=f"(?s){tmp_path}/.*(no inodes are free|no inodes free).*GEARTRAIN_DIR"),
    ):
        MADE[what]()
    with (
        file_system(tmp_path, "4m", "ro"),
        pytest.raises(GeartrainError, match=f"{tmp_path}/.*: Read-only file system. Set GEARTRAIN_DIR"),
    ):
        MADE[what]()


def test_a_store_on_a_read_only_file_system_is_peeked_at(tmp_path: Path) -> None:
    with file_system(tmp_path, "4m") as place:
        store = gt.Store.create(place / "x", {"a": gt.Field((), "uint8", per_row=True)}, capacity=4)
        store.insert({"a": np.arange(3, dtype=np.uint8)})
        store.close()
        del store  # and its mapping, for which the file is open
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        with pytest.raises(GeartrainError, match=r"Read-only file system; Store\.open\(\.\.\., mode='r'\) reads it"):
            gt.Store.open(place / "x")
        with gt.Store.open(place / "x", mode="r", adopt=True) as looked:
            assert len(looked) == 3
