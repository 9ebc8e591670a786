"""CPU per add and per sample, and bytes a timestep, of flashbax's flat buffer and geartrain's, in turns, in one run.

    pip install flashbax && python tests/upstream/flashbax_costs.py

Two ways each: a call from Python (flashbax's is jitted, with its state donated; geartrain's is not), and inside one
compiled loop (`lax.scan`). Process CPU time, so that XLA's threads count; medians of rounds that alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from geartrain.integrations.jax import make_flat_buffer

LOOP = 200


def timestep(frames: bool, streams: int | None) -> Any:
    shape = () if streams is None else (streams,)
    obs = np.zeros((*shape, 84, 84, 4), np.uint8) if frames else np.zeros((*shape, 17), np.float32)
    return {"obs": obs, "action": np.zeros((*shape, 6), np.float32), "reward": np.zeros(shape, np.float32),
            "done": np.zeros(shape, bool)}  # fmt: skip


def microseconds(call: Callable[[], Any], calls: int) -> float:
    begun = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - begun) / calls * 1e6


class Case:
    """One buffer, filled."""

    def __init__(self, buffer: Any, frames: bool, streams: int | None, stock: bool, timesteps: int) -> None:
        self.key = jax.random.key(0)
        step = jax.tree.map(jnp.asarray, timestep(frames, streams))
        example = jax.tree.map(jnp.asarray, timestep(frames, None))
        state = buffer.init(example)
        add = jax.jit(buffer.add, donate_argnums=0) if stock else buffer.add
        sample = jax.jit(buffer.sample) if stock else buffer.sample
        fill = jax.jit(
            lambda state: jax.lax.fori_loop(0, LOOP, lambda _, s: buffer.add(s, step), state), donate_argnums=0
        )
        for _ in range(-(-timesteps // (LOOP * (streams or 1)))):
            state = fill(state)
        self.state = jax.block_until_ready(state)

        def drawn(total: Any, key: Any) -> Any:
            found = buffer.sample(self.state, key).experience
            return total + found.first["reward"].sum() + found.second["obs"].astype(jnp.float32).sum(), None

        keys = jax.random.split(self.key, LOOP)
        loop = jax.jit(lambda keys: jax.lax.scan(drawn, jnp.float32(0), keys)[0])

        def added() -> None:
            self.state = jax.block_until_ready(add(self.state, step))

        def filled() -> None:
            self.state = jax.block_until_ready(fill(self.state))

        few = frames
        self.rounds: dict[str, Callable[[], float]] = {
            "add": lambda: microseconds(added, 100),
            "sample": lambda: microseconds(
                lambda: jax.block_until_ready(sample(self.state, self.key)), 20 if few else 60
            ),
            "add in jit": lambda: microseconds(filled, 2) / LOOP,
            "sample in jit": lambda: microseconds(lambda: jax.block_until_ready(loop(keys)), 1) / LOOP,
        }
        for each in self.rounds.values():
            each()  # compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(json.dumps({"jax": jax.__version__, "load": os.getloadavg()[0], "cores": os.cpu_count()}))
    for name, frames, streams, batch, timesteps in (
        ("17 floats, 1 stream, batch 256, of 100,000", False, None, 256, 100_000),
        ("17 floats, 16 streams, batch 256, of 100,000", False, 16, 256, 100_000),
        ("frames 84 x 84 x 4, 1 stream, batch 32, of 4,000", True, None, 32, 4_000),
    ):
        stock = Case(
            flashbax.make_flat_buffer(timesteps, batch, batch, add_batch_size=streams), frames, streams, True, timesteps
        )
        with make_flat_buffer(timesteps, batch, batch, add_batch_size=streams) as buffer:
            ours = Case(buffer, frames, streams, False, timesteps)
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(rounds):
                for what in stock.rounds:
                    found.setdefault(what, []).append((stock.rounds[what](), ours.rounds[what]()))
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stock.state.experience)) / timesteps
            row = {
                what: [round(statistics.median(each), 1) for each in zip(*pairs, strict=True)]
                for what, pairs in found.items()
            }
            row["bytes a timestep"] = [round(nbytes), round(ours.state.store.nbytes / timesteps)]
        print(json.dumps({"case": name, "flashbax, geartrain": row}), flush=True)


if __name__ == "__main__":
    main()
