"""Videos of LeRobot datasets: every step has the frame of its time, whatever the files look like.

Frames carry their numbers as patterns, so that a frame that is one off is seen.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crossed import crossed
from imports import imported, rows, store_name

from geartrain.errors import ArgumentError, MissingDependencyError, SourceError
from geartrain.integrations import import_dataset, ingest, open_source
from geartrain.integrations.datasets.episode import DeferredSteps
from geartrain.integrations.datasets.lerobot import LeRobotSource
from geartrain.store.store import Store

pytest.importorskip("av")
from videos import CODECS, HEIGHT, WIDTH, numbers_of, picture, write_dataset, write_video

LENGTHS = [23, 1, 40, 9, 17]


def check(found: list[dict[str, Any]], cameras: dict[str, int], lengths: list[int] = LENGTHS) -> None:
    """Each step's frames say the step's number."""
    assert [len(row["action"]) for row in found] == lengths
    at = 0
    for row in found:
        numbers = list(range(at, at + len(row["action"])))
        assert row["action"].tolist() == numbers
        for name, camera in cameras.items():
            assert row[name].shape[1:] == (HEIGHT, WIDTH, 3)
            assert numbers_of(row[name]) == [number + 1000 * camera for number in numbers], name
        at += len(numbers)


@pytest.mark.parametrize(("codec", "threads"), crossed(list(CODECS), [1, 3]))
def test_episodes_are_cut_from_a_video_to_the_frame(codec: str, threads: int, tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top"], codec=codec)
    with imported(tmp_path, threads=threads) as store:
        assert store.fields["obs.images.top"].dtype == "uint8"
        check(rows(store), {"obs.images.top": 0})


@pytest.mark.parametrize("threads", [1, 4])
def test_several_cameras_and_files(threads: int, tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top", "wrist"], files=[[0, 1], [2], [3, 4]])
    with imported(tmp_path, threads=threads) as store:
        check(rows(store), {"obs.images.top": 0, "obs.images.wrist": 1})


def test_a_file_for_each_episode(tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top", "wrist"], version="v2.1")
    with imported(tmp_path) as store:
        check(rows(store), {"obs.images.top": 0, "obs.images.wrist": 1})


def test_files_of_episodes_that_are_not_chosen_are_not_opened(tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top"], version="v2.1")
    for file in [*tmp_path.rglob("*.mp4"), *tmp_path.rglob("*.parquet")]:
        if not file.stem.endswith("3"):
            file.write_bytes(b"damaged")
    with imported(tmp_path, where=["length>=5", "length<10"]) as store:
        (row,) = rows(store)
    assert numbers_of(row["obs.images.top"]) == row["action"].tolist() == list(range(64, 73))


@pytest.mark.parametrize("size", [(HEIGHT // 2, WIDTH // 2), "32x48", [np.int64(32), 48]])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_frames_are_resized_and_laid_out_as_asked(size: Any, layout: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, [5, 3], ["top"])
    with imported(tmp_path, image_size=size, image_layout=layout) as store:
        assert store.fields["obs.images.top"].shape == ((32, 48, 3) if layout == "hwc" else (3, 32, 48))
        frames = np.concatenate([row["obs.images.top"] for row in rows(store)])
        assert numbers_of(frames if layout == "hwc" else frames.transpose(0, 2, 3, 1)) == list(range(8))


def test_colours_are_those_that_were_encoded(tmp_path: Path) -> None:
    write_dataset(tmp_path, [5], ["top"])
    with imported(tmp_path) as store:
        for number, frame in enumerate(rows(store)[0]["obs.images.top"]):
            assert np.abs(frame.astype(int) - picture(number)).mean() < 3


def test_frames_are_converted_and_cut_on_the_way(tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top"])
    options = {"fields": {"view": "obs.images.top", "action": "action"}, "cast": "uint8=float32"}
    with imported(tmp_path, max_length=10, on_too_long="truncate", **options) as store:
        assert store.fields["view"].dtype == "float32"
        starts = np.cumsum([0, *LENGTHS])
        for row, start, length in zip(rows(store), starts, LENGTHS, strict=False):
            assert numbers_of(row["view"]) == list(range(start, start + min(length, 10)))
    with imported(tmp_path, max_length=20, on_too_long="skip") as store:
        assert [numbers_of(row["obs.images.top"])[0] for row in rows(store)] == [23, 64, 73]


def test_the_frame_nearest_to_a_steps_time_is_its_frame(tmp_path: Path) -> None:
    write_dataset(tmp_path, [4, 3], ["top"])
    path = next((tmp_path / "videos").rglob("*.mp4"))
    # Frames of a camera that dropped some and repeats its clock a little late.
    write_video(path, [0, 1, 2, 3, 4, 5, 6], ticks=[0, 2, 5, 7, 100, 103, 104], fps=60)
    about = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(about).to_pylist()
    for row, edges in zip(table, [(0, 10 / 60), (100 / 60, 107 / 60)], strict=True):
        row["videos/observation.images.top/from_timestamp"], row["videos/observation.images.top/to_timestamp"] = edges
    pq.write_table(pa.Table.from_pylist(table), about)
    with pytest.raises(SourceError, match=r"frame 2, at 0\.066667 s: the video has no frame of that time to within"):
        import_dataset(tmp_path, store_name(), progress=False)
    with imported(tmp_path, tolerance_s=0.02) as store:  # steps are at 0, 2, 4 and 6 sixtieths of a second
        assert [numbers_of(row["obs.images.top"]) for row in rows(store)] == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("tolerance_s", [0.05, 0.2])
def test_a_tolerance_does_not_reach_into_another_episode(tolerance_s: float, tmp_path: Path) -> None:
    """A step whose frame was dropped got a frame of the episode before or behind it, where that was the nearest."""
    write_dataset(tmp_path, [4, 4], ["top"])
    path = next((tmp_path / "videos").rglob("*.mp4"))
    write_video(path, [0, 1, 5, 6, 7], ticks=[0, 1, 5, 6, 7])  # without the end of one and the beginning of the other
    if tolerance_s < 2 / 30:
        with pytest.raises(SourceError, match=r"episode 0 .*frame 3, at 0\.100000 s: .* are 0\.033333 s \(expected"):
            import_dataset(tmp_path, store_name(), tolerance_s=tolerance_s, progress=False)
        return
    with imported(tmp_path, tolerance_s=tolerance_s, threads=1) as store:
        assert [numbers_of(row["obs.images.top"]) for row in rows(store)] == [[0, 1, 1, 1], [5, 5, 6, 7]]


def test_decoding_that_nobody_wants_any_more_ends_before_the_first_frame_that_was_wanted(tmp_path: Path) -> None:
    write_dataset(tmp_path, [60, 2], ["top"], codec="h264, one key frame")
    _, last = open_source(tmp_path)
    frames = last.timed["obs.images.top"]
    assert isinstance(frames, DeferredSteps)
    out = np.full(frames.shape, 9, np.uint8)
    asked = itertools.count()
    frames.read_into(out, lambda: next(asked) >= 5)
    assert next(asked) == 6
    assert (out == 9).all()
    frames.read_into(out)
    assert numbers_of(out) == [60, 61]


def test_episodes_of_an_opened_source_are_decoded_when_they_are_looked_at(tmp_path: Path) -> None:
    write_dataset(tmp_path, [4, 3], ["top"])
    source = open_source(tmp_path)
    first, second = source
    frames = second.timed["obs.images.top"]
    assert (frames.shape, frames.dtype, len(frames)) == ((3, HEIGHT, WIDTH, 3), np.uint8, 3)
    assert numbers_of(np.asarray(frames)) == [4, 5, 6]
    assert numbers_of(np.asarray(first.cut(2).timed["obs.images.top"])) == [0, 1]
    assert np.asarray(frames, dtype="f4").dtype == np.float32
    source.release()
    assert numbers_of(np.asarray(frames)) == [4, 5, 6]


def test_the_command_line_has_the_options(run_command: Callable[..., Any], tmp_path: Path) -> None:
    write_dataset(tmp_path / "robot", [4, 3], ["top"])
    into = tmp_path / "robot.store"
    words = ("import", str(tmp_path / "robot"), "--into", str(into), "--quiet")
    for wrong in ("image_size=wide", "tolerance_s=0", "tolerance_s=often", "threads=0.5", "video=true"):
        done = run_command(*words, "--option", wrong)
        assert done.exit_code != 0
        assert not into.exists()
    done = run_command(*words, "--option", "image_size=32x48", "--option", "tolerance_s=1e-3", "--option", "threads=2")
    assert done.exit_code == 0, done.output
    with Store.open(str(into)) as store:
        assert store.fields["obs.images.top"].shape == (32, 48, 3)
        assert numbers_of(np.concatenate([row["obs.images.top"] for row in rows(store)])) == list(range(7))


def test_what_was_decoded_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path, [4, 3], ["top", "wrist"])
    with imported(tmp_path) as data, Store.open(data.name) as store:
        store.delete(store.keys())
        report = ingest(open_source(tmp_path), store)
        assert (report.episodes, report.steps, report.frames) == (2, 7, 14)
        assert "14 frames of videos (" in capsys.readouterr().err


def test_fields_without_videos_need_no_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path, [4, 3], ["top"])
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with imported(tmp_path, fields="action") as store:
        assert len(store) == 2
    with pytest.raises(MissingDependencyError, match=r"Importing videos needs av .*geartrain\[lerobot\]"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": "12"},
        {"image_size": 0},
        {"image_size": "axb"},
        {"image_size": (1, 2, 3)},
        {"image_size": 1.5},
        {"image_size": (10.5, 3)},
        {"image_size": True},
        {"image_size": 10**6},
        {"image_size": (float("inf"), 3)},
        {"image_size": (float("nan"), 3)},
        {"image_size": b"AB"},
        {"image_size": {32: 1, 48: 2}},
        {"image_size": {32, 48}},
        {"image_size": (True, 3)},
        {"image_size": np.array(3.5)},
        {"image_size": np.ones((2, 2), int)},
        {"image_size": "3x"},
        {"image_layout": "hcw"},
        {"tolerance_s": 0},
        {"tolerance_s": float("nan")},
        {"tolerance_s": "often"},
        {"tolerance_s": True},
        {"tolerance_s": np.True_},
        {"tolerance_s": np.array([1e-3, 1e-3])},
        {"threads": 0},
        {"threads": True},
        {"threads": np.float64(2)},
        {"threads": 2000},
        {"threads": 1.5},
    ],
)
def test_options_of_another_value_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    write_dataset(tmp_path, [2], ["top"])
    if str(options.get("image_size")) == "12":
        with imported(tmp_path, **options) as store:
            assert store.fields["obs.images.top"].shape == (12, 12, 3)
        return
    for opened in (open_source, LeRobotSource):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            opened(tmp_path, **options)


@pytest.mark.parametrize(
    "feature", [{"dtype": "string"}, {"shape": [2]}, {"shape": 3}, {"dtype": "bool"}, {"dtype": None}]
)
def test_times_that_are_no_numbers_are_refused_where_there_are_videos(feature: dict[str, Any], tmp_path: Path) -> None:
    write_dataset(tmp_path, [2], ["top"])
    edit(tmp_path, lambda info: info["features"]["timestamp"].update(feature))
    with pytest.raises(SourceError, match=r"meta/info\.json"):
        LeRobotSource(tmp_path, fields=["obs.images.top"])


def test_times_that_are_no_numbers_in_the_files_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, [3], ["top"])
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("timestamp")
    for values in ([False, True, True], ["a", "b", "c"], [[0.0, 1.0]] * 3):
        pq.write_table(table.set_column(at, "timestamp", pa.array(values)), path)
        refused(tmp_path, r"episode 0 .*timestamp")


def edit(root: Path, change: Any) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    change(info)
    (root / "meta/info.json").write_text(json.dumps(info))


def test_depth_maps_and_other_pictures_are_refused_by_name(tmp_path: Path) -> None:
    write_dataset(tmp_path, [4, 3], ["top", "depth"])
    depth = "observation.images.depth"
    edit(tmp_path, lambda info: info["features"][depth].update(info={"is_depth_map": True}))
    with pytest.raises(SourceError, match=r"obs\.images\.depth \(video of a depth map"):
        open_source(tmp_path)
    with imported(tmp_path, skip_unsupported=True) as store:
        assert "obs.images.depth" not in store.fields
        check(rows(store), {"obs.images.top": 0}, [4, 3])
    for shape in ([64, 96], [64, 96, 5], [64, 96, 0], "x", None):
        edit(tmp_path, lambda info, shape=shape: info["features"][depth].update(info={}, shape=shape))
        with pytest.raises(SourceError):
            open_source(tmp_path)


def damaged(tmp_path: Path, files: list[list[int]] | None = None) -> tuple[Path, Path]:
    """A dataset, and its last video."""
    write_dataset(tmp_path, LENGTHS, ["top"], files=files)
    return tmp_path, sorted((tmp_path / "videos").rglob("*.mp4"))[-1]


def refused(root: Path, message: str) -> None:
    """An import ends with the error that says so, in one line, and nothing is left of the store."""
    name = store_name()
    with pytest.raises(SourceError, match=message) as told:
        import_dataset(root, name, progress=False, threads=3)
    assert "\n" not in str(told.value)
    assert str(root) in str(told.value)
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_a_missing_video_is_named(tmp_path: Path) -> None:
    root, video = damaged(tmp_path, [[0, 1, 2], [3, 4]])
    video.unlink()
    refused(root, r"videos/observation\.images\.top/chunk-000/file-001\.mp4 is missing, meta/ speaks of it")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("lacking", ["video_path", "data_path"])
def test_a_template_that_names_one_file_for_several_is_refused(version: str, lacking: str, tmp_path: Path) -> None:
    """Every camera, or every episode, had the same video."""
    write_dataset(tmp_path, [4, 3], ["top", "wrist"], version=version)
    whole = json.loads((tmp_path / "meta/info.json").read_text())[lacking]
    number = "{file_index:03d}" if version == "v3.0" else "{episode_index:06d}"
    wrong = [(number, "000000"[: 3 if version == "v3.0" else 6], number[1:].partition(":")[0])]
    if lacking == "video_path":
        wrong += [("{video_key}", "observation.images.top", "video_key")]
        wrong += [("{video_key}", "{video_key:.22}", "video_key")]  # cut after "top"
    for part, instead, said in wrong:
        edit(tmp_path, lambda info, part=part, instead=instead: info.update({lacking: whole.replace(part, instead)}))
        with pytest.raises(SourceError, match=rf"meta/info\.json: {lacking}: .*names the same file for every {said}"):
            open_source(tmp_path, fields=["obs.images.top", "action"])


def test_a_video_that_is_none_is_named(tmp_path: Path) -> None:
    root, video = damaged(tmp_path)
    whole = video.read_bytes()
    for content in (b"", b"#EXTM3U\nhttp://127.0.0.1/x.mp4\n", whole[: len(whole) // 2], b"\0" * 1000, whole[:40]):
        video.write_bytes(content)
        refused(root, r"episode 0 .*field 'obs\.images\.top': videos/.*mp4: .*\(expected an MP4 file")


def test_a_video_that_ends_early_is_named_with_the_place(tmp_path: Path) -> None:
    root, video = damaged(tmp_path)
    write_video(video, range(70), faststart=True)
    whole = video.read_bytes()
    refused(root, r"episode 3 .*frame 6, at 2\.333333 s: .* no frame of that time .*2\.300000 s, where it ends")
    video.write_bytes(whole[: len(whole) * 2 // 3])  # its index is in front
    refused(root, r"episode \d .*field 'obs\.images\.top': videos/.*mp4: frame \d+, at ")


def test_an_episode_never_has_frames_of_the_next_one(tmp_path: Path) -> None:
    root, _ = damaged(tmp_path)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    name = "videos/observation.images.top/to_timestamp"
    at = table.schema.get_field_index(name)
    for wrong, said in (
        (-1 / 30, r"step 39 of 40 is at 2\.100000 s"),
        (-10.0, "step 0 of 40"),
        (np.nan, "step 0 of 40"),
    ):
        column = table.column(name).to_pylist()
        column[2] += wrong
        pq.write_table(table.set_column(at, name, pa.array(column)), path)
        refused(root, rf"episode 2 .*{said}.* where meta/episodes has 0\.800000 to")
    pq.write_table(table.drop_columns([name]), path)
    refused(root, r"cannot be read: .*expected Parquet with .*to_timestamp")


def test_steps_whose_times_go_back_are_named(tmp_path: Path) -> None:
    root, _ = damaged(tmp_path)
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    for value in (0.0, float("nan")):
        times = table.column("timestamp").to_numpy().copy()
        times[10] = value
        at = table.schema.get_field_index("timestamp")
        pq.write_table(table.set_column(at, "timestamp", pa.array(times)), path)
        refused(root, r"episode 0 .*step 10 has the timestamp (0\.0|nan), expected none before")


def test_frames_of_another_size_are_named(tmp_path: Path) -> None:
    root, video = damaged(tmp_path)
    write_video(video, range(90), height=80, width=96)
    refused(root, r"episode 0 .*frame 0 is 80 x 96 pixels, meta/info.json promises 64 x 96")


def test_a_codec_that_is_not_known_is_named(tmp_path: Path) -> None:
    root, video = damaged(tmp_path)
    video.write_bytes(video.read_bytes().replace(b"avc1", b"zzzz"))
    refused(root, r"episode 0 .*mp4: .*codec.* \(expected an MP4 file")


def open_files(root: Path) -> int:
    """How many files below a folder this process has open."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(each.readlink())
    return sum(link.is_relative_to(root.resolve()) for link in links)


def test_a_video_that_was_refused_is_closed(tmp_path: Path) -> None:
    root, video = damaged(tmp_path)
    video.write_bytes(video.read_bytes().replace(b"avc1", b"zzzz"))
    frames = next(iter(open_source(root))).timed["obs.images.top"]
    with pytest.raises(SourceError) as told:  # the error keeps the frames of the calls
        np.asarray(frames)
    assert open_files(root / "videos") == 0
    assert "codec" in str(told.value)


def test_few_of_many_videos_are_open(tmp_path: Path) -> None:
    write_dataset(tmp_path, [1] * 15, ["top"], version="v2.1")
    source = open_source(tmp_path, threads=2)
    seen = []
    for episode in source:
        np.asarray(episode.timed["obs.images.top"])
        seen.append(open_files(tmp_path / "videos"))
    assert seen == [min(n, 2 + 8) for n in range(1, 16)]
    source.release()
    assert open_files(tmp_path / "videos") == 0
    with imported(source):
        assert open_files(tmp_path / "videos") == 0


def test_damage_in_the_middle_of_a_video_is_no_frame(tmp_path: Path) -> None:
    root, video = damaged(tmp_path)
    whole = bytearray(video.read_bytes())
    begin, end = whole.index(b"mdat"), whole.index(b"moov")
    for at in range(begin + (end - begin) * 2 // 3, end - 10, 50):
        whole[at] ^= 0xFF
    video.write_bytes(whole)
    refused(root, r"episode \d .*mp4: frame \d+, at ")


def import_damaged(root: Path, video: Path, seeds: range) -> int:
    """Imports the dataset with each of these damages to a video; how many of them were refused."""
    whole = video.read_bytes()
    told = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        content = bytearray(whole)
        if seed % 5 == 0:
            del content[rng.integers(len(content)) :]
        for _ in range(rng.integers(1, 6)):
            if content:
                content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        video.write_bytes(content)
        try:
            with imported(root, threads=2, max_length=max(LENGTHS), capacity=len(LENGTHS)) as store:
                assert len(store) == len(LENGTHS)
        except SourceError as error:
            assert "\n" not in str(error)
            assert str(root) in str(error)
            told += 1
    return told


@pytest.mark.parametrize("codec", ["h264 with B frames", "mpeg4 with B frames"])
def test_damage_is_one_error_or_no_harm(codec: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top"], codec=codec)
    assert import_damaged(tmp_path, next((tmp_path / "videos").rglob("*.mp4")), range(30)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_much_damage_is_one_error_or_no_harm(codec: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS, ["top"], codec=codec)
    assert import_damaged(tmp_path, next((tmp_path / "videos").rglob("*.mp4")), range(1000, 1300)) > 100


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import geartrain.integrations.datasets.row_filling as row_filling

    write_dataset(tmp_path, LENGTHS, ["top"])

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(row_filling.RowFiller, "_commit_first", interrupted)
    name = store_name()
    with pytest.raises(KeyboardInterrupt):
        import_dataset(tmp_path, name, progress=False, threads=2)
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_frames_are_decoded_into_rows_and_not_held(tmp_path: Path) -> None:
    """No array of an episode's frames is made on the way: what is held is a few frames, however long it is."""
    import gc
    import tracemalloc

    import av

    write_dataset(tmp_path, [300], ["top"], codec="h264, key frames only")
    frames = next(iter(open_source(tmp_path))).timed["obs.images.top"]
    assert isinstance(frames, DeferredSteps)
    out = np.empty(frames.shape, np.uint8)
    frames.read_into(out)  # what is imported and opened once
    asked = itertools.count()
    held, peaks = [], []

    def stopped() -> bool:
        if next(asked) % 50 == 0:  # tracemalloc does not see the buffers of FFmpeg, which its frames hold
            peaks.append(tracemalloc.get_traced_memory()[1])
            held.append(sum(isinstance(each, av.VideoFrame) for each in gc.get_objects()))
            tracemalloc.reset_peak()  # the list of all objects is no part of it
        return False

    tracemalloc.start()
    try:
        frames.read_into(out, stopped)
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert numbers_of(out) == list(range(300))
    assert max(peaks) < out.nbytes / 10
    assert len(held) > 5
    assert max(held) - min(held) < 20
