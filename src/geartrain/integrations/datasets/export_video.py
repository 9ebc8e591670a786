"""Encodes images as videos of LeRobot datasets: MP4 files, each with consecutive episodes of one camera."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from geartrain.core.arguments import check_choice, check_whole, optional
from geartrain.core.extras import require
from geartrain.errors import ArgumentError
from geartrain.integrations.datasets.episode import Array

# By the option's word: FFmpeg's encoder, the codec's name in the dataset, and the quality that is taken by default.
_CODECS = {
    "h264": ("libx264", "h264", 18),
    "h264-lossless": ("libx264rgb", "h264", 0),
    "hevc": ("libx265", "hevc", 20),
    "av1": ("libsvtav1", "av1", 24),
}
_MOST_QUALITY = {"h264": 51, "h264-lossless": 0, "hevc": 51, "av1": 63}
_OPTIONS = {
    "h264": {"forced-idr": "1"},
    "h264-lossless": {"forced-idr": "1", "preset": "fast"},
    # With AVX2 x265's CU-tree writes behind a buffer of one int a block: seen with frames of 42 x 34, 41 x 33, 64 x 33.
    "hevc": {"forced-idr": "1", "x265-params": "log-level=none:cutree=0"},
    "av1": {"preset": "10"},
}
_LEAST_AV1_EDGE = 64
_MOST_THREADS = 4


@contextmanager
def scheduling_kept() -> Iterator[None]:
    """Gives the calling thread its scheduling policy back: SVT-AV1 makes it a real-time one's where root encodes.

    Left so, it and all that it starts would keep others from their cores.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, parameters)


@dataclass(frozen=True)
class VideoEncoding:
    """How images are encoded.

    Attributes:
        codec: "h264", "h264-lossless", "hevc" or "av1".
        quality: the encoder's CRF, 0 the best; None for the codec's usual one.
        key_frames: frames from one key frame to the next; each episode begins with one.

    Raises:
        ArgumentError: there is none of that kind.
        MissingDependencyError: PyAV is not installed.
    """

    codec: str = "h264"
    quality: int | None = None
    key_frames: int = 2

    def __post_init__(self) -> None:
        check_choice("the option video_codec", self.codec, _CODECS)
        most = _MOST_QUALITY[self.codec]
        optional(check_whole, f"the option video_quality, 0 the best for {self.codec},", self.quality, 0, most)
        check_whole("the option video_key_frames", self.key_frames, 1, 100_000)
        if self.encoder not in require("av", "geartrain[lerobot]", "Encoding videos").codecs_available:
            raise ArgumentError(f"this build of PyAV has no encoder {self.encoder}: take another video_codec")

    @property
    def encoder(self) -> str:
        """FFmpeg's name of the encoder."""
        return _CODECS[self.codec][0]

    def why_not(self, height: int, width: int) -> str | None:
        """Why frames of a size cannot be encoded, or None."""
        if self.codec == "av1" and (min(height, width) < _LEAST_AV1_EDGE or height % 2 or width % 2):
            return f"AV1 is encoded in even sizes from {_LEAST_AV1_EDGE} x {_LEAST_AV1_EDGE} on"
        return None

    def pixels(self, height: int, width: int) -> str:
        """FFmpeg's name of the pixels that are encoded: colours of half the resolution where the size is even."""
        if self.codec == "h264-lossless":
            return "rgb24"
        return "yuv444p" if height % 2 or width % 2 else "yuv420p"

    def feature(self, height: int, width: int, fps: int) -> dict[str, Any]:
        """The feature in meta/info.json."""
        pixels = self.pixels(height, width)
        return {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": height,
                "video.width": width,
                "video.codec": _CODECS[self.codec][1],
                "video.pix_fmt": "gbrp" if pixels == "rgb24" else pixels,
                "video.is_depth_map": False,
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": False,
            },
        }


@dataclass(frozen=True)
class EncodedEpisode:
    """Place of an episode's frames: chunk, file, and the times in seconds where they begin and end."""

    chunk: int
    file: int
    start_s: float
    end_s: float


class VideoFolder:
    """Numbered MP4 files of one camera. A new file begins after an episode once the current file is large enough.

    Args:
        folder: destination of the files.
        template: path of a file in it, by chunk_index and file_index.
        encoding: how.
        shape: (height, width, 3) of the frames.
        fps: frames a second.
        file_bytes: size from which a file is large enough.
        files_per_chunk: number of files in a chunk.
    """

    def __init__(
        self,
        folder: Path,
        template: str,
        encoding: VideoEncoding,
        shape: Sequence[int],
        fps: int,
        file_bytes: int,
        files_per_chunk: int,
    ) -> None:
        self._av = require("av", "geartrain[lerobot]", "Encoding videos")
        self._folder, self._template, self._encoding = folder, template, encoding
        self._height, self._width = shape[:2]
        self._fps, self._file_bytes, self._files_per_chunk = fps, file_bytes, files_per_chunk
        self._number = -1
        self._file: BinaryIO | None = None
        self._container: Any = None
        self._stream: Any = None
        self._frames = 0

    def write(self, frames: Array, lengths: Sequence[int]) -> list[EncodedEpisode]:
        """Encodes the frames (N, height, width, 3) of episodes of these lengths, N together."""
        places = []
        at = 0
        for length in lengths:
            if self._file is None or self._file.tell() >= self._file_bytes:
                self._begin()
            start = self._frames
            for number in range(at, at + length):
                frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frames[number]), format="rgb24")
                frame.pts, frame.time_base = self._frames, Fraction(1, self._fps)
                if number == at:
                    frame.pict_type = self._av.video.frame.PictureType.I
                with scheduling_kept():
                    packets = self._stream.encode(frame)
                self._container.mux(packets)
                self._frames += 1
            at += length
            chunk, file = divmod(self._number, self._files_per_chunk)
            places.append(EncodedEpisode(chunk, file, start / self._fps, self._frames / self._fps))
        return places

    def _begin(self) -> None:
        self.finish()
        self._number += 1
        chunk, file = divmod(self._number, self._files_per_chunk)
        path = self._folder / self._template.format(chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 writes its settings to stderr otherwise
        # A file of Python's tells a full disk; FFmpeg's own may not.
        self._file = path.open("wb")
        self._container = self._av.open(self._file, "w", format="mp4")
        encoding = self._encoding
        quality = _CODECS[encoding.codec][2] if encoding.quality is None else encoding.quality
        options = {**_OPTIONS[encoding.codec], "crf": str(quality)}
        self._stream = self._container.add_stream(encoding.encoder, rate=self._fps, options=options)
        self._stream.height, self._stream.width = self._height, self._width
        self._stream.pix_fmt = encoding.pixels(self._height, self._width)
        self._stream.codec_context.gop_size = encoding.key_frames
        self._stream.codec_context.thread_count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._frames = 0

    def finish(self) -> None:
        """Completes the file that is being written."""
        if self._container is not None:
            with scheduling_kept():
                packets = self._stream.encode()
            self._container.mux(packets)
        self.close()

    def close(self) -> None:
        """Closes the file, complete or not."""
        file, self._file = self._file, None
        container, self._container = self._container, None
        try:
            if container is not None:
                container.close()
        finally:
            if file is not None:
                file.close()


__all__ = ["EncodedEpisode", "VideoEncoding", "VideoFolder", "scheduling_kept"]
