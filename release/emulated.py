"""CPython of another processor, emulated: Debian's packages unpacked, and run by qemu-user-static.

    python3 release/emulated.py aarch64 3.11 -c "import platform; print(platform.machine())"

Nothing is installed: apt-get downloads into a folder of its own, and dpkg unpacks there. What is emulated has one
processor's instructions and another's memory order, and qemu knows no robust mutexes: this shows that the code runs and
computes right, not that it is right about orders of loads and stores, or about processes that are killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

WORK = Path(__file__).resolve().parent.parent / "build" / "wheels"
#: The Debian release that has each CPython, and its processors by the names that `platform.machine` has for them.
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
#: The least that a wheel is for: an instruction of newer processors ends the process.
LEAST = {"aarch64": "cortex-a53", "x86_64": "Nehalem"}  # Armv8.0-A, x86-64-v2
#: Of NumPy's wheels, and of the unwinder.
LIBRARIES = ("libstdc++6", "libgcc-s1")


class UnavailableError(Exception):
    """Why this machine cannot emulate that."""


class Emulated:
    """An interpreter of another processor, its packages in a folder of its own."""

    def __init__(self, arch: str, version: str) -> None:
        """Downloads what is missing. Raises `UnavailableError`."""
        for tool in ("apt-get", "dpkg"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"{tool} is not on this machine")
        if version not in RELEASES or arch not in DEBIAN or not KEYRING.is_file():
            raise UnavailableError(f"no Debian release here has CPython {version} for {arch}")
        self.arch, self.version = arch, version
        self._root = WORK / f"emulated-{arch}-{version}"
        self._emulator = self._host_emulator()
        if not (self._root / "done").exists():
            self._unpack()
        self.python = self._root / "root" / "usr" / "bin" / f"python{version}"

    def command(self, *words: str | Path, path: Path) -> list[str]:
        """The command that runs the interpreter with these words, and with packages of a folder."""
        return [
            str(self._emulator), "-cpu", LEAST[self.arch], "-L", str(self._root / "root"), "-E", f"PYTHONPATH={path}",
            str(self.python), *map(str, words),
        ]  # fmt: skip

    def install(self, tools: Path, folder: Path, *packages: str | Path) -> None:
        """Wheels of that processor into a folder, by an interpreter of this one. Raises `CalledProcessError`."""
        platforms = [f"manylinux_2_{minor}_{self.arch}" for minor in (28, 27, 17)]
        _run(
            str(tools), "-m", "pip", "install", "-q", "--target", str(folder), "--only-binary", ":all:",
            "--python-version", self.version, "--implementation", "cp",
            *(word for platform in platforms for word in ("--platform", platform)), *map(str, packages),
        )  # fmt: skip

    def _host_emulator(self) -> Path:
        name = f"qemu-{self.arch}-static"
        if found := shutil.which(name) or shutil.which(f"qemu-{self.arch}"):
            return Path(found)
        folder = WORK / "qemu"
        emulator = folder / "usr" / "bin" / name
        if not emulator.exists():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                _run("apt-get", "download", "-q", "qemu-user-static", cwd=folder)
            except subprocess.CalledProcessError:
                raise UnavailableError("apt-get cannot download qemu-user-static (after apt-get update?)") from None
            for package in folder.glob("*.deb"):
                _run("dpkg", "-x", str(package), str(folder))
        return emulator

    def _unpack(self) -> None:
        apt = self._root / "apt"
        for name in ("lists/partial", "cache/archives/partial", "state"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        release = RELEASES[self.version]
        (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {release} main\n")
        (apt / "state" / "status").touch()
        options = {
            "Dir::Etc::SourceList": apt / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State": apt / "state",
            "Dir::State::lists": apt / "lists",
            "Dir::State::status": apt / "state" / "status",
            "Dir::Cache": apt / "cache",
            "APT::Architecture": DEBIAN[self.arch],
            "APT::Architectures": DEBIAN[self.arch],
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        if os.geteuid() == 0:
            given += ["-o", "APT::Sandbox::User=root"]  # else the user _apt would have to reach this folder
        packages = [f"python{self.version}", *LIBRARIES]
        try:
            _run("apt-get", *given, "-q", "update")
            _run("apt-get", *given, "-qq", "install", "-y", "-d", "--no-install-recommends", *packages)
        except subprocess.CalledProcessError:
            raise UnavailableError(f"apt-get cannot download {', '.join(packages)} of Debian {release}") from None
        for package in sorted((apt / "cache" / "archives").glob("*.deb")):
            _run("dpkg", "-x", str(package), str(self._root / "root"))
        if not (self._root / "root" / "lib").exists():  # releases whose packages have /usr/lib alone
            (self._root / "root" / "lib").symlink_to("usr/lib")
        (self._root / "done").touch()


def _run(*words: str, cwd: Path | None = None) -> None:
    print("$", " ".join(words), flush=True)
    subprocess.run(words, check=True, cwd=cwd)


def main() -> None:
    """Runs an interpreter with the words that follow."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        emulated = Emulated(sys.argv[1], sys.argv[2])
    except UnavailableError as error:
        sys.exit(f"release: {error}")
    sys.exit(subprocess.run(emulated.command(*sys.argv[3:], path=WORK), check=False).returncode)


if __name__ == "__main__":
    main()
