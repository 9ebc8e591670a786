"""The loops of `geartrain bench online` on torchrl, in an interpreter of its own: one loop, one line of JSON.

    python torchrl_baseline.py '{"loop": "train", "actors": 2, "environments": 4, "seconds": 8, ...}'

`collect` and `train`: torchrl's `MultiAsyncCollector` fills a shared `ReplayBuffer` while this process draws batches.
`ask`: processes that step one environment each and request actions from torchrl's `InferenceServer`. Imports nothing of
geartrain.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from functools import partial
from importlib.metadata import version
from typing import Any

#: What CartPole observes, the width of the policy, and its actions.
OBSERVED, WIDTH, ACTIONS = 4, 64, 2


def make_policy() -> Any:
    """The same small network that the geartrain loops use; greedy."""
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(OBSERVED, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ACTIONS)
    )
    return TensorDictSequential(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        TensorDictModule(greedy, in_keys=["logits"], out_keys=["action"]),
    ).requires_grad_(False)


def greedy(logits: Any) -> Any:
    """The best action, as a number."""
    return logits.argmax(-1)


def flat(steps: Any) -> Any:
    """Steps of several environments as steps."""
    return steps.reshape(-1)


def make_environment(name: str, several: int) -> Any:
    """So many environments that are stepped together."""
    import torch
    from torchrl.envs import GymEnv, SerialEnv

    torch.set_num_threads(1)
    one = partial(GymEnv, name, categorical_action_encoding=True)
    return SerialEnv(several, one) if several > 1 else one()


def throughput(asked: dict[str, Any]) -> dict[str, Any]:
    """Collects for so long, and trains meanwhile where requested; rates are of the time after a warm-up."""
    import torch
    from torchrl.collectors import MultiAsyncCollector
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    torch.set_num_threads(1)
    policy = make_policy()
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(asked["capacity"], scratch_dir=asked["scratch"]),
        batch_size=asked["batch"],
        shared=True,
    )
    buffer.append_transform(flat, invert=True)
    collector = MultiAsyncCollector(
        [partial(make_environment, asked["environment"], asked["environments"])] * asked["actors"],
        policy,
        frames_per_batch=asked["frames"],
        total_frames=-1,
        replay_buffer=buffer,
    )
    collector.start()
    until_s = time.monotonic() + 120
    while buffer.write_count < asked["least"]:
        if time.monotonic() > until_s:
            raise RuntimeError("nothing was collected within 120 s")
        time.sleep(0.01)
    if asked["loop"] == "train":
        buffer.sample()  # the first one initialises
    time.sleep(asked["warm_s"])
    slices = []
    updates, total_updates, wait_s = 0, 0, 0.0
    began_s = since_s = time.perf_counter()
    before = buffer.write_count
    while (now_s := time.perf_counter()) < began_s + asked["seconds"]:
        if now_s - since_s >= 1.0:
            after, elapsed_s = buffer.write_count, now_s - since_s
            slices.append(
                {
                    "steps": (after - before) / elapsed_s,
                    "updates": updates / elapsed_s,
                    "wait": wait_s / elapsed_s,
                }
            )
            before, since_s, updates, wait_s = after, now_s, 0, 0.0
        if asked["loop"] == "collect":
            time.sleep(0.02)
            continue
        asked_s = time.perf_counter()
        buffer.sample()
        wait_s += time.perf_counter() - asked_s
        time.sleep(asked["train_ms"] / 1e3)
        updates += 1
        total_updates += 1
        if total_updates % asked["publish_every"] == 0:
            collector.update_policy_weights_()
    return {"slices": slices}


def observe(client: Any, name: str, number: int, ready: Any, seconds: float, warm_s: float, results: Any) -> None:
    """One observer: latency of each action, in seconds."""
    import gymnasium
    import torch
    from tensordict import TensorDict

    torch.set_num_threads(1)
    environment = gymnasium.make(name)
    observation, _ = environment.reset(seed=number)
    client(TensorDict({"observation": torch.from_numpy(observation)}))
    ready.wait(120)
    began_s = time.perf_counter()
    took_s = []
    while (asked_s := time.perf_counter()) < began_s + warm_s + seconds:
        answer = client(TensorDict({"observation": torch.from_numpy(observation)}))
        action = int(answer["action"])
        if asked_s > began_s + warm_s:
            took_s.append(time.perf_counter() - asked_s)
        observation, _, terminated, truncated, _ = environment.step(action)
        if terminated or truncated:
            observation, _ = environment.reset()
    results.put(took_s)


def latency(asked: dict[str, Any]) -> dict[str, Any]:
    """Observers that call one server, for so long."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.inference_server import InferenceServer, MPTransport, SharedMemoryTransport

    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    observers = asked["observers"]
    request = TensorDict({"observation": torch.zeros(OBSERVED)})
    response = TensorDict({"action": torch.zeros((), dtype=torch.int64)})
    transport: Any = (
        SharedMemoryTransport(request, response, num_slots=observers, ctx=context)
        if asked["transport"] == "shared_memory"
        else MPTransport(ctx=context)
    )
    clients = [transport.client() for _ in range(observers)]
    server = InferenceServer(
        make_policy(),
        transport,
        max_batch_size=observers,
        timeout=asked["max_wait_us"] * 1e-6,
        policy_version_key=None,
    )
    ready, results = context.Barrier(observers), context.Queue()
    processes = [
        context.Process(
            target=observe,
            args=(client, asked["environment"], number, ready, asked["seconds"], asked["warm_s"], results),
            daemon=True,
        )
        for number, client in enumerate(clients)
    ]
    with server:
        for process in processes:
            process.start()
        took_s = [results.get(timeout=180) for _ in processes]
        for process in processes:
            process.join(20)
    return {"took_s": [value for each in took_s for value in each]}


def main() -> None:
    """Runs the loop of argv."""
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    try:
        report = latency(asked) if asked["loop"] == "ask" else throughput(asked)
        report["versions"] = {name: version(name) for name in ("torchrl", "tensordict", "torch", "gymnasium")}
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"[:800]}
    answers.write(json.dumps(report) + "\n")
    answers.flush()
    for child in multiprocessing.active_children():  # a shutdown of the collector waits for 20 s
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
