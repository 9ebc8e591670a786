"""Disks of journals for tests: one that records what is written, and what a power cut can leave of it."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geartrain.store.journal_directory import Disk


@dataclass
class File:
    """A file as the disk has it, and as the writer sees it."""

    on_disk: bytes = b""
    seen: bytearray = field(default_factory=bytearray)
    named: bool = False  # on the disk


class RecordingDisk(Disk):
    """A disk whose writes go to the page cache, to the disk with `sync` alone.

    Attributes:
        files: by name; those that were removed, and whose removal is not on the disk yet, have `seen` None.
        before: called before each operation, for tests that look or end the process there.
        fail: raises what an operation is to fail with.
    """

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.removed: dict[str, File] = {}
        self.before: Callable[[str], None] = lambda operation: None

    def create(self, path: Path) -> int:
        self.before("create")
        fd = super().create(path)
        self.files[path.name] = File()
        return fd

    def write(self, fd: int, parts: Sequence[memoryview], offset: int) -> None:
        self.before("write")
        super().write(fd, parts, offset)
        seen = self.files[_name(fd)].seen
        data = b"".join(parts)
        seen[len(seen) :] = bytes(max(0, offset - len(seen)))
        seen[offset : offset + len(data)] = data

    def sync(self, fd: int) -> None:
        self.before("sync")
        super().sync(fd)
        file = self.files[_name(fd)]
        file.on_disk = bytes(file.seen)

    def truncate(self, fd: int, size: int) -> None:
        self.before("truncate")
        super().truncate(fd, size)
        if (file := self.files.get(_name(fd))) is not None:
            del file.seen[size:]
            file.on_disk = bytes(file.seen)

    def remove(self, path: Path) -> None:
        self.before("remove")
        super().remove(path)
        if path.name in self.files:
            self.removed[path.name] = self.files.pop(path.name)

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory")
        super().sync_directory(path)
        self.removed.clear()
        for file in self.files.values():
            file.named = True

    def put_manifest(self, path: Path, content: dict[str, Any]) -> None:
        self.before("put_manifest")
        super().put_manifest(path, content)
        written = path.read_bytes()
        self.files[path.name] = File(written, bytearray(written), True)  # the old one or the new one at any time

    # --- what a power cut leaves ----------------------------------------------------------------------------

    def unsynced_pages(self, page: int) -> list[tuple[str, int]]:
        """(file, page number) of pages that are not on the disk as they were written."""
        found = []
        for name, file in self.files.items():
            size = max(len(file.seen), len(file.on_disk))
            for number in range(-(-size // page)):
                part = slice(number * page, (number + 1) * page)
                if file.seen[part] != file.on_disk[part]:
                    found.append((name, number))
        return found

    def image(self, kept: set[tuple[str, int]], page: int, names_kept: bool) -> dict[str, bytes]:
        """The files after a cut at which of the unsynced pages just these had reached the disk."""
        image = {}
        for name, file in self.files.items():
            if not (file.named or names_kept):
                continue
            written = [number for of, number in kept if of == name]
            end = max([len(file.on_disk), *(min(len(file.seen), (number + 1) * page) for number in written)])
            data = bytearray(file.on_disk.ljust(end, b"\0"))
            for number in written:
                part = slice(number * page, min((number + 1) * page, end))
                data[part] = file.seen[part]
            image[name] = bytes(data)
        if not names_kept:
            image.update({name: file.on_disk for name, file in self.removed.items() if file.named})
        return image

    def cuts(self, page: int, most: int, seed: int) -> Iterator[dict[str, bytes]]:
        """Images after cuts: all subsets of the unsynced pages where these are at most `most`, else 2**most of them."""
        pages = self.unsynced_pages(page)
        for names_kept in (True, False):
            if len(pages) <= most:
                subsets: Iterator[tuple[tuple[str, int], ...]] = itertools.chain.from_iterable(
                    itertools.combinations(pages, count) for count in range(len(pages) + 1)
                )
            else:
                chosen = random.Random(seed)
                subsets = (
                    tuple(one for one in pages if chosen.random() < share)
                    for share in (chosen.random() for _ in range(2**most))
                )
            for subset in subsets:
                yield self.image(set(subset), page, names_kept)
            if not pages and not self.removed and all(file.named for file in self.files.values()):
                return


def _name(fd: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name


def put(image: dict[str, bytes], path: Path) -> None:
    """Makes the segment files of a directory, and its manifest if it was written anew, those of an image."""
    for old in path.glob("segment-*.bin"):
        if old.name not in image:
            old.unlink()
    for name, data in image.items():
        (path / name).write_bytes(data)
