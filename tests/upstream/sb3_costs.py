"""CPU per addition and per batch, and bytes a transition, of Stable-Baselines3's buffers and of geartrain's.

    nice python tests/upstream/sb3_costs.py

Both are filled and sampled in turns, on one thread; additions are means, batches medians, in microseconds of CPU.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers as stock

from geartrain.integrations import sb3 as ours

TURNS, BATCHES = 20, 30
CASES = (
    ("17 floats, 1 environment, batch 256", (17,), np.float32, 1, 200_000, 256, 1000),
    ("17 floats, 16 environments, batch 256", (17,), np.float32, 16, 200_000, 256, 1000),
    ("frames 4 x 84 x 84, 1 environment, batch 32", (4, 84, 84), np.uint8, 1, 8_000, 32, 1000),
)


def measure(
    shape: tuple[int, ...], dtype: Any, n_envs: int, size: int, batch: int, length: int
) -> dict[str, list[float]]:
    space = spaces.Box(0, 255, shape, dtype)
    action_space = spaces.Box(-1, 1, (6,), np.float32)
    buffers = {"stock": stock.ReplayBuffer, "geartrain": ours.ReplayBuffer}
    made = {name: cls(size, space, action_space, n_envs=n_envs) for name, cls in buffers.items()}
    random = np.random.default_rng(0)
    observations = [random.integers(0, 255, (n_envs, *shape)).astype(dtype) for _ in range(64)]
    action, reward = np.zeros((n_envs, 6), np.float32), np.ones(n_envs, np.float32)
    goes_on, ends = np.zeros(n_envs, bool), np.ones(n_envs, bool)
    infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
    adding, sampling = dict.fromkeys(made, 0.0), {name: [] for name in made}
    turn = size // n_envs // TURNS
    for begin in range(0, turn * TURNS, turn):
        for name, buffer in made.items():
            start = time.process_time()
            for t in range(begin, begin + turn):
                over = t % length == length - 1
                following = observations[(t + (9 if over else 1)) % 64]
                buffer.add(observations[t % 64], following, action, reward, ends if over else goes_on, infos)
            adding[name] += time.process_time() - start
    for _ in range(BATCHES):
        for name, buffer in made.items():
            start = time.process_time()
            for _ in range(20):
                buffer.sample(batch)
            sampling[name].append((time.process_time() - start) / 20)
    held = made["stock"]
    arrays = (held.observations, held.next_observations, held.actions, held.rewards, held.dones, held.timeouts)
    sizes = {"stock": sum(array.nbytes for array in arrays), "geartrain": made["geartrain"].store.nbytes}
    return {
        name: [adding[name] / (turn * TURNS) * 1e6, float(np.median(sampling[name])) * 1e6, sizes[name] / size]
        for name in made
    }


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':46} {'add, us':>17} {'sample, us':>15} {'bytes':>17}")
    for title, *case in CASES:
        found = measure(*case)
        cells = [f"{found['stock'][i]:8.1f}{found['geartrain'][i]:8.1f}" for i in range(3)]
        print(f"{title:46} {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
