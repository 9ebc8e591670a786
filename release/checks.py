"""What must be true of a wheel and of an sdist: sizes, contents, tags, ELF symbols.

python3 release/checks.py dist/*.whl dist/*.tar.gz      # needs pyelftools for wheels
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path

MAX_WHEEL_BYTES = 10_000_000
MAX_SDIST_BYTES = 2_000_000
GLIBC = (2, 28)
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# Of the C library, and the unwinder that it uses itself; what else a wheel used would have to be in it.
LIBRARIES = {
    "libgcc_s.so.1",
    "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
NATIVE = {"_native", "lib/libgeartrain_allreduce"}
PACKAGES = {"geartrain", "geartrain_bench", "geartrain_autoload"}
IN_SDIST = {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", "native", "src"}
# Tests of what works without torch, run from outside the tree against an installed wheel: what a wheel could have
# broken, that is what calls compiled code, in every dtype, in other processes and after forks. What fills disks, kills
# writers at every instruction or damages files by the thousand is the tree's (`make test`).
CORE_SUITE = (
    "core/test_facade.py", "core/test_futex.py", "core/test_json_values.py", "core/test_keys.py", "core/test_locks.py",
    "core/test_shared_files.py", "core/test_threads.py",
    "selection/test_selection.py", "selection/test_selection_conformance.py", "selection/test_sharded.py",
    "store/test_anonymous.py", "store/test_capacity.py", "store/test_checkpoint.py", "store/test_copies.py",
    "store/test_insert.py", "store/test_journal.py", "store/test_processes.py", "store/test_rate_limiter.py",
    "store/test_recorder.py", "store/test_removers.py", "store/test_rewrite.py", "store/test_segment.py",
    "store/test_step_priorities.py", "store/test_store.py", "store/test_store_arguments.py",
    "store/test_store_forks.py", "store/test_taken_values.py",
)  # fmt: skip
# Their times are shares of NumPy's, of which each version of CPython gets another.
NOT_IN_CORE_SUITE = ("core/test_facade.py::test_store_and_replay_are_imported_quickly",)


def refuse(path: Path, what: str) -> None:
    """Ends with one line."""
    sys.exit(f"release: {path.name}: {what}")


def check_elf(wheel: Path, name: str, data: bytes, arch: str) -> None:
    """Of that processor, needing no library but the C library's and no symbol newer than glibc 2.28."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] != MACHINES[arch]:
        refuse(wheel, f"{name} is for {elf['e_machine']}")
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags("DT_NEEDED"):
                if tag.needed not in LIBRARIES:
                    refuse(wheel, f"{name} needs {tag.needed}")
        if section.name == ".dynsym":
            own = [
                s.name for s in section.iter_symbols() if s.name.startswith("_Unwind_") and s["st_shndx"] != "SHN_UNDEF"
            ]
            taken = [s.name for s in section.iter_symbols() if s.name == "_Unwind_RaiseException"]
            if own or not taken:
                refuse(wheel, f"{name} unwinds stacks by a library of its own, which crashes where the C library does")
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
                    if found is None or (int(found[1]), int(found[2])) > GLIBC:
                        refuse(wheel, f"{name} needs {version.name}, newer than glibc {GLIBC[0]}.{GLIBC[1]}")


def check_wheel(wheel: Path, arch: str) -> None:
    """Ends with one line where a wheel is not what it should be."""
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        refuse(wheel, f"{wheel.stat().st_size} bytes, more than {MAX_WHEEL_BYTES}")
    tag = re.search(
        rf"-(cp310-cp310|cp311-cp311|cp312-abi3)-[a-z0-9_.]*manylinux_2_(\d+)_{arch}[a-z0-9_.]*\.whl$", wheel.name
    )
    if tag is None or int(tag[2]) > GLIBC[1]:
        refuse(wheel, "an unexpected tag")
    found = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            top = name.split("/")[0]
            if top not in PACKAGES and not top.endswith(".dist-info"):
                refuse(wheel, f"holds {name}")
            if name.endswith(".so"):
                check_elf(wheel, name, archive.read(name), arch)
                found.add(name.removeprefix("geartrain/").split(".")[0])
    if found != NATIVE:
        refuse(wheel, f"holds the libraries {sorted(found)}, not {sorted(NATIVE)}")


def check_sdist(sdist: Path) -> None:
    """Ends with one line where an sdist holds what no build reads, or lacks what one does."""
    if sdist.stat().st_size > MAX_SDIST_BYTES:
        refuse(sdist, f"{sdist.stat().st_size} bytes, more than {MAX_SDIST_BYTES}")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    tops = {name.split("/")[0] for name in names}
    if tops != IN_SDIST:
        refuse(sdist, f"holds {sorted(tops)}, not {sorted(IN_SDIST)}")
    for name in names:
        if name.endswith((".so", ".pyc", ".png")) or name.startswith("native/tests"):
            refuse(sdist, f"holds {name}")


def pytest_settings(pyproject: Path) -> str:
    """[tool.pytest.ini_options] as pytest.ini, for tests that run without the tree."""
    text = pyproject.read_text().split("[tool.pytest.ini_options]")[1]
    markers = re.findall(r'^  "((?:slow|long): [^"]*)"', text, re.MULTILINE)
    lines = ["[pytest]", "pythonpath = tests/support", "addopts = -q -m 'not slow and not long'", "timeout = 300"]
    return "\n".join([*lines, "markers =", *(f"    {marker}" for marker in markers), ""])


def main() -> None:
    """Checks the files that are named."""
    for path in map(Path, sys.argv[1:]):
        if path.name.endswith(".tar.gz"):
            check_sdist(path)
        else:
            check_wheel(path, next(arch for arch in MACHINES if arch in path.name))
        print(f"{path.name}: as it should be, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
