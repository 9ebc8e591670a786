"""CPU per addition and per batch, and bytes a transition, of LeRobot's replay buffer and of geartrain's.

    PYTHONPATH=CHECKOUT/src nice python tests/upstream/lerobot_costs.py

Both are filled and sampled in turns, on one thread; additions are means, batches medians, in microseconds of CPU.
`optimize_memory` is set, as LeRobot's learner sets it. It also counts, of 2,000 sampled transitions that are not done,
those whose next state is not the one that was added; episodes are cut off after 5 steps there.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np
import torch
from lerobot.rl.buffer import ReplayBuffer as Stock

from geartrain.integrations.lerobot import ReplayBuffer as Ours

TURNS, BATCHES = 10, 7
STATE, IMAGE = "observation.state", "observation.image"
CASES: tuple[tuple[str, bool, Any, bool, int, int, int], ...] = (
    # title, an image, its dtype, augmented, capacity, batch, batches a turn
    ("17 floats, batch 256, of 20,000", False, None, False, 20_000, 256, 20),
    ("and an image 3 x 128 x 128 of floats, batch 64, of 1,000", True, torch.float32, False, 1_000, 64, 2),
    ("the same, augmented", True, torch.float32, True, 1_000, 64, 2),
    ("and an image 3 x 128 x 128 of bytes, batch 64, of 1,000", True, torch.uint8, False, 1_000, 64, 2),
)


def states(image: bool, dtype: Any) -> list[dict[str, torch.Tensor]]:
    found = [{STATE: torch.rand(1, 17)} for _ in range(64)]
    if image:
        for each in found:
            each[IMAGE] = (torch.rand(1, 3, 128, 128) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    return found


def measure(image: bool, dtype: Any, augmented: bool, size: int, batch: int, calls: int) -> dict[str, list[float]]:
    made: dict[str, Any] = {
        name: kind(size, "cpu", [STATE, IMAGE], use_drq=augmented, optimize_memory=True)
        for name, kind in (("stock", Stock), ("geartrain", Ours))
    }
    given, action = states(image, dtype), torch.zeros(1, 6)
    adding, sampling = dict.fromkeys(made, 0.0), {name: [] for name in made}
    turn = size // TURNS
    for begin in range(0, turn * TURNS, turn):
        for name, buffer in made.items():
            start = time.process_time()
            for t in range(begin, begin + turn):
                over = t % 100 == 99
                buffer.add(given[t % 64], action, 1.0, given[(t + (9 if over else 1)) % 64], over, False)
            adding[name] += time.process_time() - start
    for buffer in made.values():
        buffer.sample(batch)  # compiles
    for _ in range(BATCHES):
        for name, buffer in made.items():
            start = time.process_time()
            for _ in range(calls):
                buffer.sample(batch)
            sampling[name].append((time.process_time() - start) / calls)
    held = made["stock"]
    tensors = (*held.states.values(), held.actions, held.rewards, held.dones, held.truncateds, held.episode_ends)
    sizes = {"stock": sum(each.nbytes for each in tensors), "geartrain": made["geartrain"].store.nbytes}
    made["geartrain"].close()
    return {
        name: [adding[name] / (turn * TURNS) * 1e6, float(np.median(sampling[name])) * 1e6, sizes[name] / size]
        for name in made
    }


def wrong_next_states(kind: Any) -> int:
    """Of 2,000 sampled transitions, those with a next state that was not added with them."""
    buffer = kind(1000, "cpu", [STATE], optimize_memory=True)
    for t in range(3000):
        here, there = (torch.tensor([[float(t + t // 5 * 100 + step)]]) for step in (0, 1))
        buffer.add({STATE: here}, torch.zeros(1, 1), 0.0, {STATE: there}, False, t % 5 == 4)
    batches = [buffer.sample(1000) for _ in range(2)]
    return sum(int((each["next_state"][STATE] != each["state"][STATE] + 1).sum()) for each in batches)


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({"torch": torch.__version__, "load": os.getloadavg()[0], "cores": os.cpu_count()}))
    print(
        f"wrong next states of 2,000: stock {wrong_next_states(Stock)}, geartrain {wrong_next_states(Ours)}", flush=True
    )
    print(f"{'':58} {'add, us':>17} {'sample, us':>19} {'bytes':>19}")
    for title, *case in CASES:
        found = measure(*case)
        cells = [f"{found['stock'][i]:9.0f}{found['geartrain'][i]:9.0f}" for i in range(3)]
        print(f"{title:58} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
