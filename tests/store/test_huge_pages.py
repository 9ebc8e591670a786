"""Segments in huge pages: reserved ones are, for all who open them; others take no more memory than they need."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import geartrain as gt
from geartrain import _native
from geartrain.errors import StoreError

Fork = Callable[[Callable[[], object]], int]

FIELDS = {"x": gt.Field((1000,), "float32", per_row=True)}
ROWS = 6000  # 24 MB
HUGE_PAGE = 2 << 20
PR_SET_THP_DISABLE = 41

needs_huge_pages = pytest.mark.skipif(
    not _native.has_huge_pages(_native.segments_directory()), reason="the kernel gives segments no huge pages here"
)


def mapped_in_huge_pages() -> int:
    """Bytes of shared memory that this process has mapped so."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    raise AssertionError("smaps_rollup has no ShmemPmdMapped")


def allocated(name: str) -> int:
    return os.stat(_native.segment_path(name)).st_blocks * 512


def size_of(name: str) -> int:
    return os.stat(_native.segment_path(name)).st_size


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_huge_pages
def test_a_reserved_store_is_in_huge_pages_for_its_creator_and_for_whoever_opens_it(name: str, fork: Fork) -> None:
    def open_and_read() -> int:
        before = mapped_in_huge_pages()
        with gt.Store.open(name) as store:
            assert store.column("x").sum() == 0
            assert mapped_in_huge_pages() - before > 0.8 * size_of(name)
        return 0

    before = mapped_in_huge_pages()
    with gt.Store.create(name, FIELDS, capacity=ROWS) as store:
        assert allocated(name) >= size_of(name) > 10 * HUGE_PAGE
        assert store.column("x").sum() == 0
        assert mapped_in_huge_pages() - before > 0.8 * size_of(name)
        assert wait_for(fork(open_and_read)) == 0


@needs_huge_pages
def test_a_forked_child_that_opens_the_file_anew_still_has_it_in_huge_pages(name: str, fork: Fork) -> None:
    with gt.Store.create(name, FIELDS, capacity=ROWS) as store:

        def read_by_the_parents_handle() -> int:
            before = mapped_in_huge_pages()
            assert store.column("x").sum() == 0
            assert mapped_in_huge_pages() - before > 0.8 * size_of(name)
            return 0

        assert wait_for(fork(read_by_the_parents_handle)) == 0


def test_a_store_that_is_not_reserved_takes_the_memory_of_what_is_written(name: str) -> None:
    with gt.Store.create(name, FIELDS, capacity=ROWS, reserve=False) as store:
        store.insert({"x": np.ones((10, 1000), np.float32)})
        assert allocated(name) < HUGE_PAGE


def test_a_kernel_that_refuses_leaves_a_store_on_small_pages(name: str, fork: Fork) -> None:
    def refused() -> int:
        assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        assert not _native.has_huge_pages(_native.segments_directory())
        before = mapped_in_huge_pages()
        with gt.Store.create(name, FIELDS, capacity=ROWS) as store:
            assert allocated(name) >= size_of(name)
            keys = store.insert({"x": np.full((100, 1000), 7, np.float32)})
            assert (store.column("x")[keys.row] == 7).all()
            assert mapped_in_huge_pages() == before
            assert store.audit() == []
        return 0

    assert wait_for(fork(refused)) == 0


def test_a_directory_on_a_disk_has_none_and_an_absent_one_is_an_error(tmp_path: Path) -> None:
    if os.stat(tmp_path).st_dev != os.stat(_native.segments_directory()).st_dev:
        assert not _native.has_huge_pages(str(tmp_path))
    with pytest.raises(StoreError):
        _native.has_huge_pages(str(tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []
