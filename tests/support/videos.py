"""Videos whose frames tell their numbers, LeRobot datasets that have them, and what a decoded frame says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geartrain.integrations.datasets.export_video import scheduling_kept

HEIGHT, WIDTH = 64, 96
_BLOCK = 16  # pixels of one bit: large enough for any codec, and for a half of the size
_BITS = 16
CODECS: dict[str, tuple[str, dict[str, str], int]] = {  # encoder, its options, frames between key frames
    "h264 with B frames": ("libx264", {"bf": "3", "preset": "fast"}, 12),
    "h264 without": ("libx264", {"bf": "0", "preset": "fast"}, 7),
    "h264, one key frame": ("libx264", {"bf": "2", "preset": "fast"}, 10_000),
    "h264, open groups": ("libx264", {"bf": "3", "x264-params": "open-gop=1", "preset": "fast"}, 9),
    "h264, key frames only": ("libx264", {"preset": "fast"}, 1),
    "mpeg4 with B frames": ("mpeg4", {"bf": "2"}, 12),
    "hevc": ("libx265", {"preset": "fast", "x265-params": "log-level=error:pools=1:cutree=0"}, 25),
    "av1": ("libsvtav1", {"preset": "12", "crf": "30", "svtav1-params": "lp=1"}, 2),  # LeRobot's default
}


def picture(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """A frame (height, width, 3) whose blocks are the bits of a number, in three grey levels of colour."""
    pixels = np.full((height, width, 3), 60, np.uint8)
    for bit in range(_BITS):
        top, left = divmod(bit, WIDTH // _BLOCK)
        if number >> bit & 1:
            pixels[_BLOCK * top : _BLOCK * (top + 1), _BLOCK * left : _BLOCK * (left + 1)] = (220, 210, 200)
    return pixels


def number_of(pixels: np.ndarray) -> int:
    """The number that a frame (height, width, 3) says, of whatever size it is."""
    block = _BLOCK * pixels.shape[0] // HEIGHT
    number = 0
    for bit in range(_BITS):
        top, left = divmod(bit, WIDTH // _BLOCK)
        inner = pixels[block * top + block // 4 : block * (top + 1) - block // 4]
        inner = inner[:, block * left + block // 4 : block * (left + 1) - block // 4]
        number |= int(inner.mean() > 140) << bit
    return number


def write_video(
    path: Path,
    numbers: Sequence[int],
    codec: str = "h264 with B frames",
    *,
    fps: int = 30,
    height: int = HEIGHT,
    width: int = WIDTH,
    ticks: Sequence[int] | None = None,
    faststart: bool = False,
) -> None:
    """A video of these frames, one after the other or at these multiples of 1 / fps."""
    import av

    encoder, options, distance = CODECS[codec]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "+faststart"} if faststart else {}) as file:
        stream = file.add_stream(encoder, rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = distance
        stream.codec_context.thread_count = 1
        for at, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(picture(number, height, width), "rgb24")
            frame.pts, frame.time_base = at if ticks is None else ticks[at], Fraction(1, fps)
            with scheduling_kept():
                packets = stream.encode(frame)
            file.mux(packets)
        file.mux(stream.encode())


def video_feature(height: int = HEIGHT, width: int = WIDTH, **info: Any) -> dict[str, Any]:
    """A video feature of meta/info.json."""
    names = ["height", "width", "channels"]
    return {"dtype": "video", "shape": [height, width, 3], "names": names, "info": {"video.fps": 30, **info}}


def write_dataset(
    root: Path,
    lengths: Sequence[int],
    cameras: Sequence[str],
    *,
    files: Sequence[Sequence[int]] | None = None,
    version: str = "v3.0",
    codec: str = "h264 with B frames",
    fps: int = 30,
) -> Path:
    """A LeRobot dataset. Frame i of all, of camera c, says `i + 1000 * c`; its `action` is i.

    Args:
        root: where to.
        lengths: of the episodes.
        cameras: features below `observation.images`.
        files: for v3.0, the episodes of each video file; all in one by default.
        version: v3.0 or v2.1.
        codec: of `CODECS`.
        fps: frames a second.
    """
    starts = np.cumsum([0, *lengths])
    keys = [f"observation.images.{camera}" for camera in cameras]
    number = {"dtype": "int64", "shape": [1], "names": None}
    features = {key: video_feature() for key in keys}
    features |= {"action": number, "episode_index": number, "timestamp": {**number, "dtype": "float32"}}
    info: dict[str, Any] = {"codebase_version": version, "fps": fps, "chunks_size": 2, "features": features}
    tables = [
        pa.table(
            {
                "action": np.arange(start, start + length),
                "episode_index": np.full(length, index),
                "timestamp": (np.arange(length) / fps).astype(np.float32),
            }
        )
        for index, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]
    (root / "meta").mkdir(parents=True)
    if version == "v3.0":
        info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        about: list[dict[str, Any]] = [
            {"episode_index": index, "length": length, "data/chunk_index": 0, "data/file_index": 0}
            for index, length in enumerate(lengths)
        ]
        for place, episodes in enumerate(files or [range(len(lengths))]):
            frames = [i for each in episodes for i in range(starts[each], starts[each + 1])]
            at = 0
            for each in episodes:
                for key in keys:
                    about[each] |= {
                        f"videos/{key}/chunk_index": place // 2,
                        f"videos/{key}/file_index": place % 2,
                        f"videos/{key}/from_timestamp": at / fps,
                        f"videos/{key}/to_timestamp": (at + lengths[each]) / fps,
                    }
                at += lengths[each]
            for camera, key in enumerate(keys):
                path = root / info["video_path"].format(video_key=key, chunk_index=place // 2, file_index=place % 2)
                write_video(path, [i + 1000 * camera for i in frames], codec, fps=fps)
        (root / "meta/episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(about), root / "meta/episodes/chunk-000/file-000.parquet")
        (root / "data/chunk-000").mkdir(parents=True)
        pq.write_table(pa.concat_tables(tables), root / "data/chunk-000/file-000.parquet")
    else:
        info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        lines = []
        for index, length in enumerate(lengths):
            place = {"episode_chunk": index // 2, "episode_index": index}
            for camera, key in enumerate(keys):
                frames = [i + 1000 * camera for i in range(starts[index], starts[index + 1])]
                write_video(root / info["video_path"].format(video_key=key, **place), frames, codec, fps=fps)
            path = root / info["data_path"].format(**place)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(tables[index], path)
            lines.append(json.dumps({"episode_index": index, "length": length, "tasks": []}))
        (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def numbers_of(frames: np.ndarray) -> list[int]:
    """What the frames (T, height, width, 3) say."""
    return [number_of(each) for each in frames]
