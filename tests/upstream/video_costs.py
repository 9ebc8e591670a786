"""CPU a frame of importing a LeRobot dataset's videos, beside what decoding the same frames costs at least.

    python tests/upstream/video_costs.py [--frames 400] [--laps 3] [--lerobot PYTHON]

A dataset of one camera of 480 x 640 is written by `export_store`, for each codec and distance of key frames. In turns
and in one process: PyAV decodes and converts all its frames; the same copied into fresh shared memory, which is the
least that rows cost; and `import_dataset`. With the interpreter of an environment that has lerobot, its reader gives a
few frames of the same dataset one by one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter

import geartrain as gt
from geartrain.integrations import export_store, import_dataset

HEIGHT, WIDTH, LENGTH = 480, 640, 100
KINDS = {"h264, 2": ("h264", 2), "h264, 250": ("h264", 250), "av1, 2": ("av1", 2)}
LEROBOT = """
import resource, sys
from lerobot.datasets import LeRobotDataset
dataset = LeRobotDataset("none/none", root=sys.argv[1], video_backend="pyav")
dataset[0]
before = resource.getrusage(resource.RUSAGE_SELF)
for at in range(20):
    dataset[at * 7 % len(dataset)]
after = resource.getrusage(resource.RUSAGE_SELF)
print((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 20 * 1e6)
"""


def cpu_us() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e6


def make(root: Path, frames: int) -> None:
    rng = np.random.default_rng(0)
    texture = (np.add.outer(np.arange(3 * HEIGHT), np.arange(3 * WIDTH)) // 4 % 128).astype(np.uint8)
    noise = rng.integers(0, 40, (HEIGHT, WIDTH, 3), np.uint8)
    fields = {"obs.images.top": gt.Field((HEIGHT, WIDTH, 3), "uint8"), "action": gt.Field((), "float32")}
    name = f"video-costs-{os.getpid()}"
    with gt.Store.create(name, fields, max_length=LENGTH, capacity=frames // LENGTH) as store:
        for episode in range(frames // LENGTH):
            with store.row() as row:
                row["action"], row.length = 0, LENGTH
                for step in range(LENGTH):
                    at = 2 * (episode * LENGTH + step) % HEIGHT
                    moved = texture[at : at + HEIGHT, at : at + WIDTH, None]
                    row["obs.images.top"][step] = noise + moved
        for kind, (codec, distance) in KINDS.items():
            options = {"video": True, "video_codec": codec, "video_key_frames": distance}
            export_store(store, root / kind, format="lerobot", fps=30, progress=False, **options)
        store.unlink()


def decoded(root: Path, into: np.ndarray | None) -> None:
    reformatter = VideoReformatter()
    options = {"threads": 1} if int(av.__version__.partition(".")[0]) >= 17 else {}
    at = 0
    for path in sorted(root.rglob("*.mp4")):
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in file.decode(stream):
                plane = reformatter.reformat(frame, format="rgb24", **options).planes[0]
                if into is not None:
                    pixels = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
                    into[at] = pixels[:HEIGHT, : 3 * WIDTH].reshape(HEIGHT, WIDTH, 3)
                at += 1


def shared(root: Path, frames: int) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(frames * HEIGHT * WIDTH * 3)
        memory = mmap.mmap(file.fileno(), 0)
        decoded(root, np.frombuffer(memory, np.uint8).reshape(frames, HEIGHT, WIDTH, 3))


def imported(root: Path, threads: int, **options: object) -> None:
    name = f"video-costs-{os.getpid()}"
    store = import_dataset(root, name, fields="obs.images.top", threads=threads, progress=False, **options)
    store.unlink()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--lerobot", help="an interpreter that has lerobot")
    given = parser.parse_args()
    frames = max(1, given.frames // LENGTH) * LENGTH
    runs: dict[str, Callable[[Path], None]] = {
        "decode and convert": lambda root: decoded(root, None),
        "and copy to fresh shared memory": lambda root: shared(root, frames),
        "import, 1 thread": lambda root: imported(root, 1),
        "import, 2 threads": lambda root: imported(root, 2),
        "import, 240 x 320": lambda root: imported(root, 1, image_size=(240, 320)),
    }
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), frames)
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(given.laps):
            for kind in KINDS:
                for name, run in runs.items():
                    before, started = cpu_us(), time.monotonic()
                    run(Path(folder, kind))
                    told = ((cpu_us() - before) / frames, (time.monotonic() - started) * 1e6 / frames)
                    found.setdefault((kind, name), []).append(told)
        for (kind, name), each in found.items():
            cpu, wall = (statistics.median(column) for column in zip(*each, strict=True))
            print(f"{kind:10} {name:32} {cpu:8,.0f} us of CPU, {wall:8,.0f} us a frame")
        for kind in KINDS if given.lerobot else ():
            words = [given.lerobot, "-c", LEROBOT, str(Path(folder, kind))]
            out = subprocess.run(
                words, capture_output=True, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
            )
            print(f"{kind:10} {'LeRobotDataset[i]':32} {float(out.stdout.split()[-1]):8,.0f} us of CPU a frame")
    print(f"load {os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
