"""Builds of wheels go on where they were interrupted, and do again only what changed."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deadlines import patience

RELEASE = Path(__file__).parent.parent / "release"


@pytest.fixture(autouse=True)
def _import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RELEASE)


def build(folder: Path, sources: dict[str, str], broken: str = "") -> tuple[list[str], list[str]]:
    """What was done of a step for each source, and what failed."""
    from steps import Made, StepError, Steps, digest

    done = []

    def make(name: str) -> Made:
        if name == broken:
            raise StepError("the compiler failed")
        done.append(name)
        made = folder / f"{name}.whl"
        made.write_text(sources[name].upper())
        return Made((made,))

    steps = Steps(folder / "steps", list(sources))
    for name, source in sources.items():
        steps.once(name, digest(source), lambda name=name: make(name))
    return done, steps.failed


def test_a_step_is_done_once_for_what_it_is_made_of(tmp_path: Path) -> None:
    assert build(tmp_path, {"a": "x", "b": "y"}) == (["a", "b"], [])
    assert build(tmp_path, {"a": "x", "b": "y"}) == ([], [])
    assert build(tmp_path, {"a": "x", "b": "z"}) == (["b"], [])


def test_a_step_whose_file_is_another_is_done_again(tmp_path: Path) -> None:
    build(tmp_path, {"a": "x", "b": "y", "c": "z"})
    (tmp_path / "a.whl").unlink()
    (tmp_path / "b.whl").write_text("torn")
    assert build(tmp_path, {"a": "x", "b": "y", "c": "z"}) == (["a", "b"], [])


def test_a_step_that_fails_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path, {"a": "x", "b": "y", "c": "z"}, broken="b") == (["a", "c"], ["b: the compiler failed"])
    assert "[2/3] b: FAILED" in capsys.readouterr().out
    assert build(tmp_path, {"a": "x", "b": "y", "c": "z"}) == (["b"], [])
    told = capsys.readouterr().out
    assert "[1/3] a: as it was; left: b, c" in told and "[2/3] b: done in" in told


def test_a_step_that_failed_is_not_taken_for_what_it_was_before(tmp_path: Path) -> None:
    build(tmp_path, {"a": "x"})
    assert build(tmp_path, {"a": "y"}, broken="a")[1]
    assert build(tmp_path, {"a": "x"}) == (["a"], [])  # the failed one may have changed the files


def test_an_interrupted_step_is_done_again_and_lets_go_of_its_lock(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from steps import Made, Steps
folder = Path(sys.argv[1])
steps = Steps(folder / "steps", ["a", "b"])
steps.once("a", "1", Made)
steps.once("b", "1", lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
    # (an interpreter without site, which imports nothing else: cheaper than a fork of one that has imported torch)
    killed = subprocess.Popen(
        [sys.executable, "-S", "-c", program, str(tmp_path)],
        env={"PYTHONPATH": str(RELEASE)},
        stdout=subprocess.DEVNULL,
    )
    assert killed.wait(patience(30)) == -9
    from steps import Made, Steps

    done = []
    steps = Steps(tmp_path / "steps", ["a", "b"])
    for name in ("a", "b"):
        steps.once(name, "1", lambda name=name: (done.append(name), Made())[1])
    assert done == ["b"]


def test_a_second_build_waits_for_a_step_and_finds_it_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import queue
    import threading

    import steps
    from steps import Made, Steps

    monkeypatch.setattr(steps, "LOCK_RETRY_S", 0.01)
    began, finish = threading.Event(), threading.Event()
    done, said = [], queue.Queue[str]()

    def slow() -> Made:
        began.set()
        assert finish.wait(patience(30))
        done.append("first")
        return Made(note="made by the first")

    def second() -> Made:
        done.append("second")
        return Made()

    def say(line: str, flush: bool) -> None:
        if threading.current_thread() is other:
            said.put(line)

    first = threading.Thread(target=lambda: Steps(tmp_path, ["a"]).once("a", "1", slow))
    found = []
    other = threading.Thread(target=lambda: found.append(Steps(tmp_path, ["a"]).once("a", "1", second)))
    monkeypatch.setattr(steps, "print", say, raising=False)
    first.start()
    assert began.wait(patience(30))
    other.start()
    try:
        assert said.get(timeout=patience(30)) == "waits for another build, which holds a.lock"
        assert done == []
    finally:
        finish.set()
        first.join(patience(30))
        other.join(patience(30))
    assert done == ["first"] and found == [Made(note="made by the first")]
    assert said.get_nowait() == "[1/1] a: as it was" and said.empty()


def test_contents_and_names_are_digested_and_bytecode_is_not(tmp_path: Path) -> None:
    from steps import digest

    (tmp_path / "a").write_text("1")
    before = digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("2")
    assert digest(tmp_path) == before
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest(tmp_path) != before
    assert digest("ab", "c") != digest("a", "bc")


class Tree:
    """A copy of release/ with a wheel, whose commands are noted instead of run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import compiled
        import installed_wheel as installed
        import wheels
        from steps import StepError

        self.folder, self.failing = folder, ""
        shutil.copytree(RELEASE, folder / "release", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(RELEASE.parent / "pyproject.toml", folder)
        self.python = folder / "python"
        self.update_python("Python 3.11.2")
        self.wheel = folder / "a.whl"
        self.wheel.write_text("a wheel")
        (folder / "tests" / "core").mkdir(parents=True)
        self.test = folder / "tests" / "core" / "test_a.py"
        self.test.write_text("")
        self.work = folder / "work"
        (self.work / "empty-3.11" / "bin").mkdir(parents=True)
        self.ran: list[str] = []

        def run(*command: object, **_options: object) -> None:
            line = " ".join(map(str, command))
            self.ran.append(line)
            if "venv" in line:
                (self.work / "empty-3.11" / "bin").mkdir(parents=True)
            if self.failing and self.failing in line:
                raise StepError("it failed")

        for module in (compiled, installed, wheels):
            for name, value in (("ROOT", folder), ("WORK", self.work), ("run", run)):
                monkeypatch.setattr(module, name, value)

    def update_python(self, version: str) -> None:
        """An interpreter of another version in the same place."""
        self.python.write_text(f"#!/bin/sh\necho '{version}'\n")
        self.python.chmod(0o755)

    def change(self, name: str) -> None:
        """Another comment in a file."""
        with (self.folder / name).open("a") as file:
            file.write("# changed\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_a_suite_runs_again_after_one_that_failed(tree: Tree) -> None:
    from installed_wheel import Installed
    from steps import StepError

    one = Installed(tree.wheel, "3.11", tree.python)
    one.smoke_test()
    tree.failing = "-m pytest"
    with pytest.raises(StepError, match="it failed"):
        one.suite()
    tree.failing = ""
    copied = tree.work / "empty-3.11" / "suite" / "tests" / "core"
    assert [path.name for path in copied.iterdir()] == ["test_a.py"]
    tree.test.rename(tree.test.with_name("test_b.py"))
    one.suite()
    assert [path.name for path in copied.iterdir()] == ["test_b.py"]  # none of before is left


def test_a_wheel_that_another_build_replaced_is_not_taken_for_the_one_that_was_built(tree: Tree) -> None:
    from installed_wheel import Installed
    from steps import StepError

    one = Installed(tree.wheel, "3.11", tree.python)
    tree.wheel.write_text("of other sources")
    with pytest.raises(StepError, match="another build has replaced"):
        one.suite()  # for which it would be installed first
    assert not any("-m pytest" in line for line in tree.ran)


def test_an_installed_wheel_is_tested_again_where_the_test_or_its_interpreter_changed(tree: Tree) -> None:
    from installed_wheel import Installed

    def made_of() -> str:
        return Installed(tree.wheel, "3.11", tree.python).made_of

    seen = [made_of(), made_of()]
    assert len(set(seen)) == 1
    for name in ("release/smoke.py", "release/installed_wheel.py", "a.whl"):
        tree.change(name)
        seen.append(made_of())
    tree.update_python("Python 3.11.9")
    seen.append(made_of())
    assert len(set(seen)) == 5


def test_a_wheel_is_built_again_where_its_recipe_or_an_interpreter_changed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compiled import build_wheel
    from steps import Steps

    seen = []

    class Noted(Steps):
        def once(self, name: str, made_of: str, *_: object, **_options: object) -> None:
            seen.append(made_of)

    packages = tree.work / "requirements"
    (packages / "nanobind-1.dist-info").mkdir(parents=True)
    monkeypatch.setattr("compiled.REQUIREMENTS", packages)
    (tree.folder / "source").mkdir()

    def look() -> None:
        build_wheel(Noted(tree.work, []), tree.folder / "source", tree.python, "x86_64", "3.11", tree.python)

    look()
    look()
    assert len(set(seen)) == 1
    for name in ("release/compiled.py", "release/zig.cmake", "release/checks.py", "source/a.cc"):
        tree.change(name)
        look()
    tree.update_python("Python 3.11.9")
    look()
    (packages / "nanobind-1.dist-info").rename(packages / "nanobind-2.dist-info")
    look()
    monkeypatch.setenv("CXXFLAGS", "-O1")
    look()
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "1")  # which makes no other code
    look()
    assert len(seen) == 10 and len(set(seen)) == 8


def test_versions_share_what_is_compiled_until_the_recipe_changes(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled import build_wheel
    from steps import Steps

    source, kept = tree.folder / "source", tree.work / "native-x86_64" / "rows.o"
    source.mkdir()
    monkeypatch.setattr("compiled.unwinder", lambda *_: tree.folder)
    monkeypatch.setattr("compiled.REQUIREMENTS", tree.folder / "requirements")
    tree.failing = "pip wheel"  # after the folder was looked at

    def keeps(version: str) -> bool:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("")
        tree.update_python(f"Python {version}.1")
        steps = Steps(tree.work / "steps", [f"wheel x86_64 {version}"])
        assert build_wheel(steps, source, tree.python, "x86_64", version, tree.python) is None
        assert steps.failed == [f"wheel x86_64 {version}: it failed"]
        return kept.exists()

    assert [keeps(version) for version in ("3.10", "3.11", "3.12", "3.10")] == [False, True, True, True]
    tree.change("release/zig.cmake")
    assert [keeps(version) for version in ("3.10", "3.11")] == [False, True]


def test_suites_run_while_a_build_of_other_sources_unpacks_them(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    import wheels
    from steps import Made, locked

    source, ran = tree.work / "steps" / "source.lock", []

    def build(*_: object) -> Path:
        with pytest.raises(BlockingIOError), source.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which is held
        return tree.wheel

    class Tested:
        made_of = "a"

        def __init__(self, *_: object) -> None: ...

        def smoke_test(self) -> Made:
            return Made()

        def suite(self) -> Made:
            with locked(source):
                ran.append("suite")
            return Made()

    @contextmanager
    def unpacked(_sdist: Path) -> Iterator[Path]:
        with locked(source, shared=True):
            yield tree.folder

    for name, value in (
        ("unpacked", unpacked), ("build_wheel", build), ("Installed", Tested), ("build_sdist", lambda _: tree.wheel),
        ("interpreter", lambda _: tree.python), ("environment", lambda *_: tree.python), ("NEWER", ()),
        ("install_requirements", lambda *_: None),
    ):  # fmt: skip
        monkeypatch.setattr(wheels, name, value)
    monkeypatch.setattr("steps.LOCK_TIMEOUT_S", 0.0)
    release = wheels.Release(["3.11"], [platform.machine()], tests=True)
    release.make()
    assert ran == ["suite"] and release.steps.failed == []
