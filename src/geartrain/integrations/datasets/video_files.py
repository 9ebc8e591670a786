"""Reads frames of video files by their times, decoded by PyAV (FFmpeg).

A reader keeps its position after an episode. If the next episode follows in the same file, it continues there, so no
frame is decoded twice. Otherwise it seeks to the preceding key frame. A frame's time is its presentation time in the
container, as in LeRobot. Only local MP4 containers are opened. Playlists under another name are refused, and so is
anything else that a container can refer to.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.extras import require
from geartrain.core.lifetime import on_error
from geartrain.errors import SourceError
from geartrain.integrations.datasets.episode import Array, DeferredSteps, reading
from geartrain.integrations.datasets.images import ImageForm

#: Readers of files that nobody reads at the moment, beyond one for each thread.
_MOST_IDLE = 8


class VideoReader:
    """Frames of one file, from any time on. For one thread at a time.

    Args:
        path: an MP4 file.
        place: for messages.

    Raises:
        SourceError: it is missing, no MP4 file, cut short, or its codec is not decoded.
        MissingDependencyError: PyAV is not installed.
    """

    def __init__(self, path: Path, place: str) -> None:
        self._av = require("av", "geartrain[lerobot]", "Decoding videos")
        self.path = path
        self._frames: deque[Any] = deque()
        self._before: Any = None  # the frame before the next one
        self._span = self._key = 0  # longest distance of key frames seen, and the last key frame
        self._sought = 0
        self._first: Any = None  # packet that was sought
        self._first_group = False  # whether what is read is before the next key frame
        self._refers_back = False  # whether such a group was seen to refer to what is before it
        self._counts_from: int | None = None  # the key frame before which errors do not count
        with (
            reading(place, "an MP4 file with a video that this build of FFmpeg decodes"),
            contextlib.ExitStack() as opened,
        ):
            # "file:" and the format keep the container from naming anything but this file.
            options = {"protocol_whitelist": "file"}
            name = f"file:{path.absolute()}"
            self._container = opened.enter_context(self._av.open(name, format="mp4", options=options))
            if not self._container.streams.video:
                raise ValueError("there is no video in it")
            self._stream = self._container.streams.video[0]
            if self._stream.codec_context is None:
                raise ValueError("its codec is not known")
            # Files of several episodes are read by several threads already.
            self._stream.codec_context.thread_count = 1
            self._stream.codec_context.options = {"err_detect": "explode"}
            self._tick = float(self._stream.time_base)
            self._packets: Iterator[Any] = self._container.demux(self._stream)
            self._open = opened.pop_all()

    @property
    def next_time(self) -> float | None:
        """Time of the frame that it would give next, in seconds, where that is known."""
        return self.time_of(self._frames[0]) if self._frames else None

    def time_of(self, frame: Any) -> float:
        """When a frame is shown, in seconds."""
        return float(frame.pts * self._tick)

    def nearest(
        self,
        times: Sequence[float],
        tolerance_s: float,
        part: tuple[float, float],
        place: str,
        stopped: Callable[[], bool],
    ) -> Iterator[Any]:
        """For each time the frame that is nearest to it.

        Args:
            times: in seconds, none before the one in front of it.
            tolerance_s: how far it may be away.
            part: times from which and before which a frame must be shown to be one of these.
            place: for messages.
            stopped: asked before each frame that is decoded; once it says so, no more are given.

        Raises:
            SourceError: there is none; or what comes before it cannot be decoded.
        """
        begin, end = part
        for number, time in enumerate(times):
            if stopped():
                return
            with reading(f"{place}: frame {number}, at {time:.6f} s", "a frame of that time"):
                if number == 0:
                    self._go_to(time)
                while (ahead := self._ahead()) is not None and self.time_of(ahead) < max(time, begin):
                    if stopped():
                        return
                    self._before = self._frames.popleft()
                around = [each for each in (self._before, ahead) if each is not None]
                around = [each for each in around if begin <= self.time_of(each) < end]
                found = min(around, key=lambda each: abs(self.time_of(each) - time), default=None)
                if found is None or not abs(self.time_of(found) - time) < tolerance_s:
                    there = " and ".join(f"{self.time_of(each):.6f} s" for each in around) or "none at all"
                    last = ", where it ends" if ahead is None else ""
                    raise ValueError(
                        f"the video has no frame of that time to within {tolerance_s:g} s; the nearest of its "
                        f"part, from {begin:.6f} to {end:.6f} s, are {there}{last}"
                    )
                if found.is_corrupt:
                    raise ValueError("the frame is damaged")
            yield found

    def _ahead(self) -> Any:
        """The next frame, or None at the end."""
        while not self._frames:
            packet = next(self._packets, None)
            if packet is None:
                return None
            if packet.pts is not None:
                self._span = max(self._span, packet.pts - self._key)
                if packet.is_keyframe:
                    self._key = packet.pts
                    self._first_group = packet is self._first
            if packet.dts is not None and packet.dts == self._counts_from:
                self._counts_from = None
            try:
                self._frames.extend(packet.decode())
            except self._av.error.InvalidDataError:
                if self._counts_from is not None:
                    continue
                if not self._first_group or self._refers_back:
                    raise
                self._begin_earlier()
        if self._frames[0].pts is None:
            raise ValueError("a frame has no time")
        return self._frames[0]

    def _begin_earlier(self) -> None:
        """Reads again from another key frame, and goes on where it was.

        In streams with open groups of pictures, what follows a key frame may refer to frames before it. A decoder that
        begins there cannot tell their lack from damage, so that errors count from the second key frame on.
        """
        self._refers_back = True
        before = self._before
        self._seek(self._sought)
        while before is not None and (frame := self._ahead()) is not None and frame.pts <= before.pts:
            self._frames.popleft()
        self._before = before

    def _go_to(self, time: float) -> None:
        """Has the next frame be the last one before a time, or an earlier one."""
        pts = round(time / self._tick)
        here = self._before or (self._frames[0] if self._frames else None)
        if here is None or not here.pts <= pts <= max(here.pts, self._key) + self._span:
            self._seek(pts)

    def _seek(self, pts: int) -> None:
        """Seeks to the last key frame that is shown no later than `pts`, or to the first one if there is none.

        A key frame may stand in the file before a time and be shown after it, with what is shown before it behind it:
        then the one before is needed.
        """
        self._frames.clear()
        self._before = self._counts_from = None
        self._sought, self._first_group = pts, True
        at = pts
        while True:
            first = self._packet_at(at)
            if first is None or first.pts is None or first.dts is None:
                break
            if first.pts <= pts or first.dts >= at:
                if self._refers_back:
                    self._counts_from = first.dts
                    first = self._packet_at(first.dts - 1)
                break
            at = first.dts - 1
        if first is not None:
            self._key = first.pts if first.pts is not None else 0
            self._first, self._packets = first, itertools.chain([first], self._packets)

    def _packet_at(self, pts: int) -> Any:
        """The key frame's packet that the container has for a time."""
        self._container.seek(pts, stream=self._stream, backward=True, any_frame=False)
        self._packets = self._container.demux(self._stream)
        return next(self._packets, None)

    def close(self) -> None:
        """Closes the file."""
        self._frames.clear()
        self._before = None
        self._open.close()


class VideoReaders:
    """Readers of a dataset's files, for several threads. Few files are open at a time.

    A reader that no thread uses is kept open while it may be needed again.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads + _MOST_IDLE
        self._idle: list[VideoReader] = []  # the one given back last is the last
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrowed(self, path: Path, time: float, place: str) -> Iterator[VideoReader]:
        """A reader of a file, by preference the one that is nearest before a time."""
        with self._lock:
            mine = [each for each in self._idle if each.path == path]
            before = [each for each in mine if each.next_time is not None and each.next_time <= time + 1e-3]
            reader = max(before, key=lambda each: each.next_time or 0.0, default=mine[0] if mine else None)
            if reader is not None:
                self._idle.remove(reader)
        if reader is None:
            reader = VideoReader(path, place)
        with on_error(reader.close):
            yield reader
        with self._lock:
            self._idle.append(reader)
            dropped = self._idle.pop(0) if len(self._idle) > self._most else None
        if dropped is not None:
            dropped.close()

    def close(self) -> None:
        """Closes the files that nobody reads at the moment."""
        with self._lock:
            idle, self._idle = self._idle, []
        for reader in idle:
            reader.close()


class VideoClip(DeferredSteps):
    """Frames of a video that are an episode's steps.

    Args:
        readers: readers that open the file.
        path: the file.
        times: (T,) times of the frames in the file, in seconds, never decreasing.
        tolerance_s: how far a frame may be from its time.
        part: times from which and before which the file's frames are this episode's.
        picture: (height, width, channels) that the frames must have, with 1 or 3 channels.
        form: the form in which frames are stored.
        place: for messages.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        readers: VideoReaders,
        path: Path,
        times: Array,
        tolerance_s: float,
        part: tuple[float, float],
        picture: tuple[int, int, int],
        form: ImageForm,
        place: str,
    ) -> None:
        self._readers, self._path, self._times = readers, path, times
        self._tolerance_s, self._part = tolerance_s, part
        self._picture, self._form, self._place = picture, form, place
        self.shape = (len(times), *form.shape(picture))

    def first(self, length: int) -> VideoClip:
        """The first frames alone."""
        about = (self._tolerance_s, self._part, self._picture, self._form, self._place)
        return VideoClip(self._readers, self._path, self._times[:length], *about)

    def read_into(self, out: Array, stopped: Callable[[], bool] = lambda: False) -> None:
        """Decodes the frames, each into its step."""
        if not len(self._times):
            return
        height, width, channels = self._picture
        convert = _Converter(*(self._form.size or (height, width)), channels)
        with self._readers.borrowed(self._path, float(self._times[0]), self._place) as reader:
            frames = reader.nearest(self._times.tolist(), self._tolerance_s, self._part, self._place, stopped)
            for number, frame in enumerate(frames):
                if (frame.height, frame.width) != (height, width):
                    raise SourceError(
                        f"{self._place}: frame {number} is {frame.height} x {frame.width} pixels, meta/info.json "
                        f"promises {height} x {width}"
                    )
                with reading(f"{self._place}: frame {number}", f"pixels that convert to {convert.pixels}"):
                    self._form.put(convert.array(frame), out[number])


class _Converter:
    """Converts frames to arrays as LeRobot's own reader does, and resizes them in the same pass."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        av = require("av", "geartrain[lerobot]", "Decoding videos")
        self.pixels = "gray" if channels == 1 else "rgb24"
        self._shape = (height, width, channels)
        self._reformatter = av.video.reformatter.VideoReformatter()
        # By itself it takes a thread for each processor; older versions have but one.
        self._options = {"threads": 1} if int(av.__version__.partition(".")[0]) >= 17 else {}

    def array(self, frame: Any) -> Array:
        """(height, width, channels), a view of memory that lives as long as the array."""
        height, width, channels = self._shape
        converted = self._reformatter.reformat(frame, width, height, self.pixels, **self._options)
        plane = converted.planes[0]
        rows: Array = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        return rows[:height, : width * channels].reshape(height, width, channels)


__all__ = ["VideoClip", "VideoReaders"]
