"""The loops `collect` and `train` of `geartrain bench online` on Reverb, in an interpreter of its own.

    python reverb_baseline.py '{"loop": "train", "actors": 2, "environments": 4, "seconds": 6, ...}'

Processes act with a policy in NumPy (their interpreter has no torch), and append transitions by a `trajectory_writer`
for each environment; a server stores them; this process draws batches from a `TrajectoryDataset`. No weights are
published. Imports nothing of geartrain.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from importlib.metadata import version
from typing import Any

OBSERVED, WIDTH, ACTIONS = 4, 64, 2
#: Batches that the dataset may have in flight, and prefetched.
AHEAD = 4


def act(name: str, environments: int, address: str, number: int) -> None:
    """One actor, until it is killed."""
    import gymnasium
    import numpy as np
    import reverb

    random = np.random.default_rng(0)
    layers = [
        (random.normal(size=(a, b)).astype(np.float32) / np.sqrt(a), np.zeros(b, np.float32))
        for a, b in ((OBSERVED, WIDTH), (WIDTH, WIDTH), (WIDTH, ACTIONS))
    ]

    def greedy(hidden: Any) -> Any:
        for weight, bias in layers[:-1]:
            hidden = np.tanh(hidden @ weight + bias)
        return (hidden @ layers[-1][0] + layers[-1][1]).argmax(-1)

    client = reverb.Client(address)
    made = [gymnasium.make(name) for _ in range(environments)]
    writers = [client.trajectory_writer(num_keep_alive_refs=2) for _ in made]
    observation = np.stack([one.reset(seed=number * 1000 + i)[0] for i, one in enumerate(made)])
    begun = [False] * environments
    while True:
        actions = greedy(observation)
        for i, (one, writer) in enumerate(zip(made, writers, strict=True)):
            after, reward, terminated, truncated, _ = one.step(int(actions[i]))
            writer.append(
                {
                    "observation": observation[i],
                    "action": np.int64(actions[i]),
                    "reward": np.float32(reward),
                    "terminated": np.bool_(terminated),
                }
            )
            if begun[i]:  # two steps: a transition
                writer.create_item(
                    "steps", priority=1.0, trajectory={key: column[-2:] for key, column in writer.history.items()}
                )
                writer.flush(block_until_num_items=16)
            begun[i] = True
            if terminated or truncated:
                writer.end_episode(clear_buffers=True)
                begun[i] = False
                after, _ = one.reset()
            observation[i] = after


def throughput(asked: dict[str, Any]) -> dict[str, Any]:
    """Collects for so long, and trains meanwhile where requested."""
    import reverb

    table = reverb.Table(
        name="steps",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=asked["capacity"],
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table], port=None)
    address = f"localhost:{server.port}"
    context = multiprocessing.get_context("spawn")
    for number in range(asked["actors"]):
        context.Process(
            target=act, args=(asked["environment"], asked["environments"], address, number), daemon=True
        ).start()

    def inserted() -> int:
        return int(table.info.rate_limiter_info.insert_stats.completed)

    until_s = time.monotonic() + 120
    while inserted() < asked["least"]:
        if time.monotonic() > until_s:
            raise RuntimeError("nothing was collected within 120 s")
        time.sleep(0.01)
    batches = None
    if asked["loop"] == "train":
        batches = iter(dataset(address, asked["batch"]).batch(asked["batch"]).prefetch(AHEAD))
        next(batches)
    time.sleep(asked["warm_s"])
    slices = []
    updates, wait_s = 0, 0.0
    began_s = since_s = time.perf_counter()
    before = inserted()
    while (now_s := time.perf_counter()) < began_s + asked["seconds"]:
        if now_s - since_s >= 1.0:
            after, elapsed_s = inserted(), now_s - since_s
            slices.append(
                {"steps": (after - before) / elapsed_s, "updates": updates / elapsed_s, "wait": wait_s / elapsed_s}
            )
            before, since_s, updates, wait_s = after, now_s, 0, 0.0
        if batches is None:
            time.sleep(0.02)
            continue
        asked_s = time.perf_counter()
        next(batches)
        wait_s += time.perf_counter() - asked_s
        time.sleep(asked["train_ms"] / 1e3)
        updates += 1
    return {"slices": slices}


def dataset(address: str, batch: int) -> Any:
    """Transitions, sampled one by one."""
    import reverb
    import tensorflow as tf  # type: ignore[import-untyped, unused-ignore]

    return reverb.TrajectoryDataset(
        address,
        "steps",
        dtypes={"observation": tf.float32, "action": tf.int64, "reward": tf.float32, "terminated": tf.bool},
        shapes={
            "observation": tf.TensorShape((2, OBSERVED)),
            "action": tf.TensorShape((2,)),
            "reward": tf.TensorShape((2,)),
            "terminated": tf.TensorShape((2,)),
        },
        max_in_flight_samples_per_worker=AHEAD * batch,
        num_workers_per_iterator=1,
    )


def main() -> None:
    """Runs the loop of argv."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        report = throughput(json.loads(sys.argv[1]))
        report["versions"] = {name: version(name) for name in ("dm-reverb", "tensorflow", "gymnasium")}
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"[:800]}
    answers.write(json.dumps(report) + "\n")
    answers.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)  # a server that is asked to stop waits for its readers


if __name__ == "__main__":
    main()
