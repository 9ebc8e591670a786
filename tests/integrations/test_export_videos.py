"""Export of images as videos of LeRobot datasets: every frame in its place, and as close as is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from imports import imported, rows, store_name
from mounts import file_system

import geartrain as gt
import geartrain.integrations.datasets.export_lerobot as export_lerobot
import geartrain.integrations.datasets.stored_rows as stored_rows
from geartrain.errors import ArgumentError, NoSpaceError, SourceError
from geartrain.integrations import export_store

av = pytest.importorskip("av")
from videos import HEIGHT, WIDTH, numbers_of, picture  # noqa: E402

LENGTHS = [7, 1, 20, 12]
FIELDS = {
    "obs.images.top": gt.Field((HEIGHT, WIDTH, 3), "uint8"),
    "obs.images.depth": gt.Field((16, 16, 1), "uint8"),
    "obs.state": gt.Field((3,), "float32"),
    "action": gt.Field((), "int64"),
}


@pytest.fixture
def robots() -> Iterator[gt.Store]:
    """Rows whose frames say the number of their step."""
    rng = np.random.default_rng(0)
    with gt.Store.create(store_name(), FIELDS, max_length=max(LENGTHS), capacity=len(LENGTHS)) as store:
        at = 0
        for length in LENGTHS:
            with store.row() as row:
                row.length = length
                row["obs.images.top"][:length] = [picture(number) for number in range(at, at + length)]
                row["obs.images.depth"][:length] = rng.integers(0, 256, (length, 16, 16, 1))
                row["obs.state"][:length] = rng.normal(size=(length, 3))
                row["action"][:length] = range(at, at + length)
            at += length
        yield store


def export(store: gt.Store, path: Path, **options: Any) -> Any:
    return export_store(store, path, format="lerobot", fps=10, video=True, progress=False, **options)


#: By codec: how much the pixels may differ in the mean.
ERRORS = {"h264": 2.0, "h264-lossless": 0.0, "hevc": 2.5, "av1": 3.0}


@pytest.mark.parametrize("codec", ERRORS)
def test_videos_come_back_frame_by_frame(
    codec: str, robots: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "GROUP_BYTES", 400_000)  # a row or so
    if f"{export_encoder(codec)}" not in av.codecs_available:
        pytest.skip("not in this build of PyAV")
    policy = os.sched_getscheduler(0)
    export(robots, tmp_path / "x", video_codec=codec)
    policies = {os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()}
    assert policies == {policy}, "an encoder has made a thread a real-time one"
    with imported(tmp_path / "x", fields=list(FIELDS)) as found:
        assert found.fields == FIELDS
        for row, expected in zip(rows(found), rows(robots), strict=True):
            for name in ("obs.state", "action", "obs.images.depth"):
                assert row[name].tobytes() == expected[name].tobytes()
            frames = row["obs.images.top"]
            assert numbers_of(frames) == expected["action"].tolist()
            difference = np.abs(frames.astype(int) - expected["obs.images.top"])
            assert difference.mean() <= ERRORS[codec]


def export_encoder(codec: str) -> str:
    from geartrain.integrations.datasets.export_video import VideoEncoding

    try:
        return VideoEncoding(codec).encoder
    except ArgumentError:
        return "none"


def test_the_dataset_tells_where_episodes_are_in_the_videos(
    robots: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "GROUP_BYTES", 400_000)
    monkeypatch.setattr(export_lerobot, "_VIDEO_BYTES", 0)
    monkeypatch.setattr(export_lerobot, "_FILES_PER_CHUNK", 2)
    export(robots, tmp_path / "x", video_key_frames=30)
    info = json.loads((tmp_path / "x/meta/info.json").read_text())
    feature = info["features"]["observation.images.top"]
    assert feature["dtype"] == "video"
    assert feature["shape"] == [HEIGHT, WIDTH, 3]
    assert feature["info"]["video.codec"] == "h264"
    assert info["features"]["observation.images.depth"]["dtype"] == "image"
    (table,) = (tmp_path / "x/meta/episodes").glob("*/*.parquet")
    key = "videos/observation.images.top"
    places = set()
    for row, length in zip(pq.read_table(table, partitioning=None).to_pylist(), LENGTHS, strict=True):
        chunk, file = row[f"{key}/chunk_index"], row[f"{key}/file_index"]
        places.add((chunk, file))
        path = (
            tmp_path
            / "x"
            / info["video_path"].format(video_key="observation.images.top", chunk_index=chunk, file_index=file)
        )
        assert row[f"{key}/to_timestamp"] - row[f"{key}/from_timestamp"] == pytest.approx(length / 10)
        with av.open(str(path)) as video:
            stream = video.streams.video[0]
            assert stream.average_rate == 10
            keys = [float(each.pts * stream.time_base) for each in video.demux(stream) if each.is_keyframe]
        assert any(abs(each - row[f"{key}/from_timestamp"]) < 1e-6 for each in keys), "an episode begins within a group"
    assert len(places) == len(LENGTHS)
    assert {chunk for chunk, _ in places} == {0, 1}
    (data,) = (tmp_path / "x/data").glob("*/*.parquet")
    assert "observation.images.top" not in pq.read_table(data, partitioning=None).column_names
    stats = json.loads((tmp_path / "x/meta/stats.json").read_text())
    pixels = np.concatenate([row["obs.images.top"].reshape(-1, 3) for row in rows(robots)]) / 255
    np.testing.assert_allclose(np.ravel(stats["observation.images.top"]["mean"]), pixels.mean(0), rtol=1e-9)


def test_options_of_another_value_are_refused(robots: gt.Store, tmp_path: Path) -> None:
    for option, value in (
        ("video_codec", "vp9"),
        ("video_codec", 3),
        ("video_quality", -1),
        ("video_quality", 52),
        ("video_quality", "good"),
        ("video_key_frames", 0),
    ):
        with pytest.raises(ArgumentError, match=option):
            export(robots, tmp_path / "x", **{option: value})
    with pytest.raises(ArgumentError, match="video_quality is of videos: give video=True too"):
        export_store(robots, tmp_path / "x", format="lerobot", fps=10, video_quality=3, progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("codec", ["h264", "h264-lossless", "hevc", "av1"])
def test_odd_sizes_are_encoded_or_refused_by_name(codec: str, tmp_path: Path) -> None:
    fields = {"obs.view": gt.Field((41, 33, 3), "uint8")}
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 41, 33, 3), np.uint8)
    with gt.Store.create(store_name(), fields, max_length=3, capacity=1) as store:
        store.insert({"obs.view": pixels})
        if export_encoder(codec) == "none":
            pytest.skip("not in this build of PyAV")
        if codec == "av1":
            with pytest.raises(SourceError, match=r"obs\.view is \(41, 33\): AV1 is encoded in even sizes"):
                export(store, tmp_path / "x", video_codec=codec)
            return
        export(store, tmp_path / "x", video_codec=codec, video_quality=0)
    with imported(tmp_path / "x", fields="obs.view") as found:
        difference = np.abs(rows(found)[0]["obs.view"].astype(int) - pixels[0])
        assert difference.mean() <= (0 if codec == "h264-lossless" else 3)


ENCODE = """
import pathlib, sys
import numpy as np
from geartrain.integrations.datasets.export_video import VideoEncoding, VideoFolder

shape = (66, 98, 3) if sys.argv[2] == "av1" else (42, 34, 3)
frames = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
folder = VideoFolder(pathlib.Path(sys.argv[1]), "0.mp4", VideoEncoding(sys.argv[2]), shape, 10, 1, 1)
folder.write(frames, [3])
folder.finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_an_encoder_leaves_the_heap_whole_and_stderr_empty(codec: str, tmp_path: Path) -> None:
    if export_encoder(codec) == "none":
        pytest.skip("not in this build of PyAV")
    checked = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}  # aborts where a block was overrun
    command = [sys.executable, "-c", ENCODE, str(tmp_path), codec]
    done = subprocess.run(command, check=False, env=os.environ | checked, capture_output=True, text=True)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")


def test_a_disk_that_fills_while_videos_are_written_is_one_error(robots: gt.Store, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with file_system(tmp_path / "small", "40k") as small:
        with pytest.raises(NoSpaceError):
            export(robots, small / "x", fields="obs.images.top", video_codec="h264-lossless")
        assert list(small.iterdir()) == []


def test_the_command_line_writes_videos(robots: gt.Store, run_command: Callable[..., Any], tmp_path: Path) -> None:
    words = ("export", robots.name, str(tmp_path / "x"), "--format", "lerobot", "--option", "fps=10", "--quiet")
    assert run_command(*words, "--option", "video=maybe").exit_code != 0
    done = run_command(*words, "--option", "video=true", "--option", "video_codec=h264", "--option", "video_quality=10")
    assert done.exit_code == 0, done.output
    with imported(tmp_path / "x", fields="obs.images.top") as found:
        assert numbers_of(rows(found)[0]["obs.images.top"]) == list(range(LENGTHS[0]))
