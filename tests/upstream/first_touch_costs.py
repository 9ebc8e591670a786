"""CPU of the first copy of an image into shared memory: page by page, and with its pages mapped at once before.

    python tests/upstream/first_touch_costs.py

Each image is 48 pages (3 x 128 x 128 floats) of a file in /dev/shm, reserved by `fallocate` as stores reserve theirs.
Printed are medians in microseconds of the thread's CPU time, of the first copy and of a second one.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time

import numpy as np

IMAGE, IMAGES = 48 * mmap.PAGESIZE, 400
#: Of Linux 5.14, and not in `mmap` yet.
MADV_POPULATE_WRITE = 23


def copies(at_once: bool, reserved: bool) -> tuple[float, float]:
    """Medians of the first copies and of the second ones."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), IMAGE * IMAGES)
        if reserved:
            os.posix_fallocate(file.fileno(), 0, IMAGE * IMAGES)
        memory = mmap.mmap(file.fileno(), IMAGE * IMAGES)
    to, image = np.frombuffer(memory, np.uint8).reshape(IMAGES, IMAGE), np.ones(IMAGE, np.uint8)
    found = []
    for populate in (at_once, False):
        times = []
        for place in range(IMAGES):
            begin = time.thread_time()
            if populate:
                memory.madvise(MADV_POPULATE_WRITE, place * IMAGE, IMAGE)
            to[place] = image
            times.append(time.thread_time() - begin)
        found.append(statistics.median(times) * 1e6)
    return found[0], found[1]


if __name__ == "__main__":
    print(f"load {os.getloadavg()[0]:.1f}")
    for reserved in (True, False):
        for at_once in (False, True):
            first, second = copies(at_once, reserved)
            how = "at once" if at_once else "page by page"
            print(f"{'reserved' if reserved else 'not reserved'}, {how}: {first:.0f} us, again {second:.0f} us")
