"""A wheel, cross-compiled by zig's clang from the unpacked sdist, then repaired and checked.

This file is a part of what wheels are made of, so a change of it compiles all of them again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from installed_wheel import ROOT, WORK
from steps import Made, Steps, digest, run, version_of

DIST = ROOT / "dist"
REQUIREMENTS = WORK / "requirements"  # of the build, for all versions of CPython
# Functions of libgcc_s, as the C++ ABI has them on every processor.
UNWINDER = (
    "Backtrace", "DeleteException", "FindEnclosingFunction", "ForcedUnwind", "GetCFA", "GetDataRelBase", "GetGR",
    "GetIP", "GetIPInfo", "GetLanguageSpecificData", "GetRegionStart", "GetTextRelBase", "RaiseException", "Resume",
    "Resume_or_Rethrow", "SetGR", "SetIP",
)  # fmt: skip


def distributions(folder: Path) -> list[str]:
    """The distributions in a folder or a virtual environment, with their versions."""
    return sorted(
        path.name for where in ("", "lib/python*/site-packages/") for path in folder.glob(f"{where}*.dist-info")
    )


def ambient() -> list[str]:
    """What of this process's environment CMake and scikit-build-core read."""
    flags, jobs = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS"), "CMAKE_BUILD_PARALLEL_LEVEL"
    return sorted(
        f"{name}={value}" for name, value in os.environ.items()
        if name != jobs and (name in flags or name.startswith(("CMAKE_", "SKBUILD_")))
    )  # fmt: skip


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


def build_wheel(steps: Steps, source: Path, tools: Path, arch: str, version: str, inside: Path) -> Path | None:
    """A repaired and checked wheel in dist/, built from the unpacked sdist; None where it failed."""
    compilers = digest(
        *(ROOT / "release" / name for name in ("zig.cmake", "compiled.py")), compiler(tools, arch), *ambient(),
        *distributions(tools.parent.parent), *distributions(REQUIREMENTS),
    )  # fmt: skip
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

    made_of = digest(source, compilers, version_of(inside), ROOT / "release" / "checks.py")
    made = steps.once(f"wheel {arch} {version}", made_of, make, lock=f"native {arch}")
    return made.files[0] if made else None
