"""Segments of weights that others may write to are not opened, and those of any content end in errors."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
from fuzz_runs import endings

from geartrain import weights
from geartrain.errors import CorruptStoreError, IncompatibleStoreError, UntrustedStoreError
from geartrain.weights.segment import WeightsSegment


@pytest.mark.parametrize(
    ("seed", "runs"), [(1, 300), pytest.param(2, 10_000, marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_weights_of_any_content_never_end_the_process(tmp_path, seed, runs):
    ended = endings("weights_fuzz_worker.py", seed, runs, tmp_path, 300)
    assert ended["read"] > runs // 20 and ended["CorruptStoreError"] > runs // 20, ended


@pytest.mark.timeout(20)
def test_a_fifo_a_link_and_a_file_that_others_may_write_to_are_refused(tmp_path):
    os.mkfifo(tmp_path / "geartrain-weights.fifo", 0o600)
    with weights.Publisher("real", directory=tmp_path) as publisher:
        publisher.publish(1, {"w": np.ones(3)})
        (tmp_path / "geartrain-weights.link").symlink_to(tmp_path / "geartrain-weights.real")
        for name, error in (("fifo", IncompatibleStoreError), ("link", UntrustedStoreError)):
            for opening in (
                weights.Reader,
                weights.Publisher,
                weights.describe,
            ):
                with pytest.raises(error):
                    opening(name, directory=tmp_path)
        path = tmp_path / "geartrain-weights.real"
        path.chmod(0o666)
        with pytest.raises(UntrustedStoreError, match="every user may write to it"):
            weights.Reader("real", directory=tmp_path)
        with weights.Reader("real", directory=tmp_path, trust="any") as reader:
            assert reader.latest(timeout_s=5)["w"].tolist() == [1, 1, 1]
        assert weights.reap(tmp_path) == []
    (tmp_path / "geartrain-weights.fifo").unlink()
    (tmp_path / "geartrain-weights.link").unlink()


@pytest.mark.parametrize(("trust", "mode"), [("user", 0o600), ("group", 0o660), ("any", 0o666)])
def test_a_file_is_as_open_as_was_asked_for_and_so_is_the_one_that_replaces_it(tmp_path, trust, mode):
    before = os.umask(0o077)
    try:
        with weights.Publisher("p", directory=tmp_path, trust=trust) as first:
            first.publish(1, {"w": np.ones(3)})
            with weights.Reader("p", directory=tmp_path, trust=trust) as reader:
                first.close()
                with weights.Publisher("p", directory=tmp_path, trust=trust) as second:  # of another shape: a new file
                    second.publish(2, {"w": np.ones((2, 2))})
                    assert stat.S_IMODE((tmp_path / "geartrain-weights.p").stat().st_mode) == mode
                    assert reader.latest(at_least=2, timeout_s=5)["w"].shape == (2, 2)
    finally:
        os.umask(before)


def test_a_file_that_was_cut_is_an_error_and_not_a_sigbus(tmp_path):
    with weights.Publisher("p", directory=tmp_path) as publisher, weights.Reader("p", directory=tmp_path) as reader:
        publisher.publish(1, {"w": np.ones(100_000)})
        size = (tmp_path / "geartrain-weights.p").stat().st_size
        os.truncate(tmp_path / "geartrain-weights.p", size - 4096)
        with pytest.raises(CorruptStoreError, match="do not hold what its layout promises"):
            reader.latest(timeout_s=1)
        with pytest.raises(CorruptStoreError):
            weights.describe("p", tmp_path)
        os.truncate(tmp_path / "geartrain-weights.p", size)
        assert reader.latest(timeout_s=1).version == 1


def test_a_file_that_says_it_was_replaced_by_itself_is_an_error_and_not_an_endless_search(tmp_path):
    with weights.Publisher("p", directory=tmp_path) as publisher:
        publisher.publish(1, {"w": np.ones(3)})
        segment = WeightsSegment.open("p", tmp_path)
        segment.signals["replaced"] = 1
        with pytest.raises(CorruptStoreError, match="says that it was replaced"):
            weights.Reader("p", directory=tmp_path)
        segment.signals["replaced"] = 0
        segment.close()
