"""Wheels in environments where nothing else is: the smoke test, and the core suite from outside the tree."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import checks
from emulated import Emulated, UnavailableError
from steps import LeftOutError, Made, StepError, digest, run, version_of

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
# What one process computes, without the statistics of a million draws: an emulated processor takes ten times as long.
EMULATED_SUITE = ("selection/test_selection.py", "selection/test_selection_conformance.py", "selection/test_sharded.py")


def _scripts(*names: str) -> list[Path]:
    return [ROOT / "release" / name for name in names]


def suite_outside(folder: Path) -> Path:
    """A copy of the tests that no import finds the tree from, in the place of an earlier one."""
    outside = folder / "suite"
    if outside.exists():  # of a suite that failed or was interrupted, or of other tests
        shutil.rmtree(outside)
    shutil.copytree(ROOT / "tests", outside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (outside / "pytest.ini").write_text(checks.pytest_settings(ROOT / "pyproject.toml"))
    return outside


class _Wheel:
    """A file in dist/, which a build of other sources replaces."""

    def __init__(self, path: Path) -> None:
        self.path, self.contents = path, digest(path)

    def check(self) -> None:
        """Raises `StepError` where it is another by now."""
        if digest(self.path) != self.contents:
            raise StepError(f"another build has replaced {self.path.name} meanwhile")


class Installed:
    """A wheel in an environment where nothing else is, for its smoke test and then for the tests that need no torch."""

    def __init__(self, wheel: Path, version: str, python: Path) -> None:
        """`python`: the interpreter of that version."""
        self._wheel, self._python = _Wheel(wheel), python
        self._folder = WORK / f"empty-{version}"
        self._inside = self._folder / "bin" / "python"
        self._stamp = self._folder / "wheel.sha256"
        self.made_of = digest(wheel, str(python), version_of(python), *_scripts("smoke.py", "installed_wheel.py"))
        # no compiler, no cmake, no tree
        self._nothing = {"PATH": str(self._folder / "bin"), "HOME": str(self._folder), "LANG": "C.UTF-8"}

    def smoke_test(self) -> Made:
        """Installs it, and NumPy by it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        run(self._python, "-m", "venv", self._folder)
        run(self._inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", self._wheel.path)
        self._wheel.check()
        run(self._inside, "-I", ROOT / "release" / "smoke.py", cwd=self._folder, env=self._nothing)
        self._stamp.write_text(self.made_of)
        return Made()

    def suite(self) -> Made:
        """Runs the core suite from outside the tree."""
        if not self._stamp.exists() or self._stamp.read_text() != self.made_of:
            self.smoke_test()
        for command in ("mount", "umount"):  # of the tests that fill a small file system
            found, link = shutil.which(command), self._folder / "bin" / command
            if found and not link.exists():
                link.symlink_to(found)
        run(
            self._inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", "pytest", "pytest-timeout",
            "pytest-xdist", "hypothesis", "scipy", "ml_dtypes",
        )  # fmt: skip
        outside = suite_outside(self._folder)
        suite = [outside / "tests" / name for name in checks.CORE_SUITE]
        run(
            self._inside, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-rs", "--rootdir", outside,
            *(f"--deselect=tests/{name}" for name in checks.NOT_IN_CORE_SUITE), *suite,
            cwd=outside, env=self._nothing,
        )  # fmt: skip
        return Made()


class InstalledElsewhere:
    """The same on an emulated processor. The smoke test, and of the suite what computes: no kills, no forks."""

    def __init__(self, wheel: Path, tools: Path, arch: str, version: str) -> None:
        """`tools`: the interpreter that installs."""
        self._wheel, self._tools, self._arch, self._version = _Wheel(wheel), tools, arch, version
        self._folder = WORK / f"empty-{arch}-{version}"
        self._stamp = self._folder / "wheel.sha256"
        self.made_of = digest(wheel, *_scripts("smoke.py", "installed_wheel.py", "emulated.py"))
        self._nothing = {"PATH": str(self._folder), "HOME": str(self._folder), "LANG": "C.UTF-8"}

    def smoke_test(self) -> Made:
        """Installs it, and NumPy by it. Raises `LeftOutError` where there is no emulator or interpreter."""
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / "site").mkdir(parents=True)
        there = self._emulated()
        there.install(self._tools, self._folder / "site", self._wheel.path)
        self._wheel.check()
        command = there.command("-s", ROOT / "release" / "smoke.py", path=self._folder / "site")
        run(*command, cwd=self._folder, env=self._nothing)
        self._stamp.write_text(self.made_of)
        return Made()

    def suite(self) -> Made:
        """Runs some tests. Raises `LeftOutError`."""
        if not self._stamp.exists() or self._stamp.read_text() != self.made_of:
            self.smoke_test()
        there = self._emulated()
        there.install(
            self._tools, self._folder / "site", "pytest", "pytest-timeout", "hypothesis", "scipy", "ml_dtypes"
        )
        outside = suite_outside(self._folder)
        suite = [outside / "tests" / name for name in EMULATED_SUITE]
        run(
            *there.command(
                "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", outside, *suite, path=self._folder / "site"
            ),
            cwd=outside, env=self._nothing,
        )  # fmt: skip
        return Made()

    def _emulated(self) -> Emulated:
        try:
            return Emulated(self._arch, self._version)
        except UnavailableError as error:
            raise LeftOutError(f"this machine is {platform.machine()} and {error}") from None
