"""CPU per trajectory and per batch, and bytes a sample, of RLinf's replay buffer and of geartrain's.

    PYTHONPATH=tests/support nice python tests/upstream/rlinf_costs.py WHEEL_OR_CHECKOUT

Both are filled and sampled in turns, on one thread; additions and batches are medians, in microseconds of CPU. Windows
are full before additions are measured the second time. Rows of the first touch are those of a window that fills.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

LAPS, BATCHES = 5, 9
#: Title, steps, environments, entries of an observation by shape and dtype, window, samples of a batch.
CASES: tuple[tuple[str, int, int, dict[str, tuple[tuple[int, ...], Any]], int, int], ...] = (
    ("42 floats, 50 steps of 32 environments, batch 1,024", 50, 32, {"states": ((42,), torch.float32)}, 20, 1024),
    ("42 floats, 10 steps of 8 environments, batch 256", 10, 8, {"states": ((42,), torch.float32)}, 100, 256),
    (
        "and two images 128 x 128 x 3 of bytes, 20 steps of 4 environments, batch 256",
        20,
        4,
        {
            "states": ((19,), torch.float32),
            "main_images": ((128, 128, 3), torch.uint8),
            "wrist_images": ((128, 128, 3), torch.uint8),
        },
        16,
        256,
    ),
)


def trajectory(kind: Any, steps: int, environments: int, entries: dict[str, Any], seed: int) -> Any:
    """One of RLinf's, whose episodes end with it."""
    generator = torch.Generator().manual_seed(seed)

    def some(shape: tuple[int, ...], dtype: Any, extra: int = 0) -> torch.Tensor:
        values = torch.rand((steps + extra, environments, *shape), generator=generator)
        return (values * 255).to(dtype) if dtype == torch.uint8 else values.to(dtype)

    observed = {name: some(*about, 1) for name, about in entries.items()}
    flags = torch.zeros(steps + 1, environments, 1, dtype=torch.bool)
    return kind(
        max_episode_length=steps,
        model_weights_id="w",
        actions=some((4,), torch.float32),
        intervene_flags=torch.zeros(steps, environments, 4, dtype=torch.bool),
        rewards=some((1,), torch.float32),
        dones=flags,
        terminations=flags.clone(),
        truncations=flags.clone(),
        prev_logprobs=some((4,), torch.float32),
        versions=torch.zeros(steps, environments, 1),
        forward_inputs={"action": some((4,), torch.float32)},
        curr_obs={name: values[:-1].contiguous() for name, values in observed.items()},
        next_obs={name: values[1:].contiguous() for name, values in observed.items()},
    )


def measure(made: dict[str, Any], given: list[Any], window: int, batch: int) -> dict[str, list[float]]:
    adding: dict[str, list[float]] = {name: [] for name in made}
    again: dict[str, list[float]] = {name: [] for name in made}
    sampling: dict[str, list[float]] = {name: [] for name in made}
    for lap in range(window + max(window, 10)):
        for name, buffer in made.items():
            start = time.process_time()
            buffer.add_trajectories([given[lap % len(given)]])
            (adding if lap < window else again)[name].append(time.process_time() - start)
    for buffer in made.values():
        buffer.sample(batch)
    for _ in range(BATCHES):
        for name, buffer in made.items():
            start = time.process_time()
            for _ in range(LAPS):
                buffer.sample(batch)
            sampling[name].append((time.process_time() - start) / LAPS)
    return {
        name: [float(np.median(times)) * 1e6 for times in (adding[name][1:], again[name], sampling[name])]
        for name in made
    }


def nbytes(flat: Any) -> int:
    """Bytes of RLinf's cache."""
    if isinstance(flat, dict):
        return sum(map(nbytes, flat.values()))
    return int(flat.nbytes) if isinstance(flat, torch.Tensor) else 0


def main() -> None:
    import rlinf_source

    from geartrain.integrations.rlinf import TrajectoryReplayBuffer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rlinf = rlinf_source.loaded(Path(sys.argv[1]).resolve(), Path(folder))
        about = {
            "rlinf": rlinf.revision,
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
        }
        print(json.dumps(about), flush=True)
        print(f"{'':78} {'filling, us':>19} {'add, us':>19} {'sample, us':>19} {'bytes':>17}")
        for title, steps, environments, entries, window, batch in CASES:
            given = [trajectory(rlinf.trajectory, steps, environments, entries, seed) for seed in range(4)]
            made = {
                "stock": rlinf.buffer(sample_window_size=window),
                "geartrain": TrajectoryReplayBuffer(sample_window_size=window),
            }
            found = measure(made, given, window, batch)
            samples = window * steps * environments
            sizes = (nbytes(made["stock"]._flat_trajectory_cache.get_buffer()), made["geartrain"].store.nbytes)
            cells = [f"{found['stock'][i]:10.0f}{found['geartrain'][i]:10.0f}" for i in range(3)]
            print(f"{title:78} {''.join(cells)} {sizes[0] / samples:8.0f}{sizes[1] / samples:9.0f}", flush=True)
            for buffer in made.values():
                buffer.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
