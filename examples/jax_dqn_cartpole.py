"""Double DQN on CartPole in JAX, with a replay buffer in shared memory that has flashbax's interface.

Learns CartPole in about a minute. The environment, the network, the buffer and the updates are one compiled program:
`add` and `sample` are called inside `jax.lax.scan`. `--flashbax` uses flashbax's own buffer (pip install flashbax).

    pip install "geartrain[jax]"
    python examples/jax_dqn_cartpole.py
    python examples/jax_dqn_cartpole.py --store cartpole      # and in another terminal: geartrain top
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ENVS, BATCH, GAMMA, LEARNING_RATE, TAU, LIMIT = 8, 128, 0.99, 1e-3, 0.01, 500


class Step(NamedTuple):
    """What the buffer holds of a timestep. The pair of two has the next observation, but for an episode's last step."""

    obs: Any
    next_obs: Any
    action: Any
    reward: Any
    terminated: Any


class CartPole(NamedTuple):
    state: Any  # (ENVS, 4)
    steps: Any
    returns: Any


def begin(key: Any) -> CartPole:
    start = jax.random.uniform(key, (ENVS, 4), minval=-0.05, maxval=0.05)
    return CartPole(start, jnp.zeros(ENVS, jnp.int32), jnp.zeros(ENVS))


def act(env: CartPole, action: Any, key: Any) -> tuple[CartPole, Any, Any, Any]:
    """One step of the cart (Barto, Sutton and Anderson, 1983): environments, next state, whether it fell, is over."""
    x, speed, angle, turning = env.state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turning**2 * sin) / 1.1
    angular = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    linear = push - 0.05 * angular * cos / 1.1
    state = jnp.stack([x + 0.02 * speed, speed + 0.02 * linear, angle + 0.02 * turning, turning + 0.02 * angular], 1)
    fell = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095)
    over = fell | (env.steps + 1 >= LIMIT)
    fresh = begin(key)
    after = CartPole(state, env.steps + 1, env.returns + 1)
    return (
        jax.tree.map(lambda a, b: jnp.where(over.reshape(-1, *[1] * (a.ndim - 1)), b, a), after, fresh),
        state,
        fell,
        over,
    )


def network(parameters: Any, obs: Any) -> Any:
    for number, (weights, bias) in enumerate(parameters):
        obs = obs @ weights + bias
        obs = jax.nn.relu(obs) if number < len(parameters) - 1 else obs
    return obs


def initial(key: Any, sizes: tuple[int, ...] = (4, 64, 64, 2)) -> Any:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(each, (before, after)) * (2 / before) ** 0.5, jnp.zeros(after))
        for each, before, after in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def loss(parameters: Any, target: Any, batch: Step) -> Any:
    best = network(parameters, batch.next_obs).argmax(-1)
    following = jnp.take_along_axis(network(target, batch.next_obs), best[:, None], 1)[:, 0]
    wanted = batch.reward + GAMMA * jnp.where(batch.terminated, 0.0, following)
    found = jnp.take_along_axis(network(parameters, batch.obs), batch.action[:, None], 1)[:, 0]
    return jnp.square(found - jax.lax.stop_gradient(wanted)).mean()


def adam(parameters: Any, gradients: Any, moments: Any, count: Any) -> tuple[Any, Any]:
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, moments[1], gradients)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), parameters, first, second), (first, second)


def iteration(buffer: Any, carry: Any, number: Any) -> tuple[Any, Any]:
    """A step of all environments into the buffer, and an update from it once it has enough."""
    parameters, target, moments, env, state, key = carry
    key, explore, choose, draw, fresh = jax.random.split(key, 5)
    epsilon = jnp.maximum(0.05, 1.0 - number / 1500)
    greedy = network(parameters, env.state).argmax(-1)
    random = jax.random.randint(choose, (ENVS,), 0, 2)
    action = jnp.where(jax.random.uniform(explore, (ENVS,)) < epsilon, random, greedy)
    after, next_obs, fell, over = act(env, action, fresh)
    state = buffer.add(state, Step(env.state, next_obs, action, jnp.ones(ENVS), fell))

    def update(parameters: Any, target: Any, moments: Any) -> Any:
        batch = buffer.sample(state, draw).experience.first
        gradients = jax.grad(loss)(parameters, target, batch)
        parameters, moments = adam(parameters, gradients, moments, number + 1.0)
        return parameters, jax.tree.map(lambda t, p: t + TAU * (p - t), target, parameters), moments

    parameters, target, moments = jax.lax.cond(
        buffer.can_sample(state), update, lambda *same: same, parameters, target, moments
    )
    returned = jnp.where(over, env.returns + 1, jnp.nan)
    return (parameters, target, moments, after, state, key), returned


def make_buffer(stock: bool, store: str | None) -> Any:
    if stock:
        import flashbax

        return flashbax.make_flat_buffer(50_000, 1_000, BATCH, add_batch_size=ENVS)
    from geartrain.integrations.jax import make_flat_buffer

    return make_flat_buffer(50_000, 1_000, BATCH, add_batch_size=ENVS, store=store)


def evaluate(parameters: Any, key: Any) -> float:
    """Mean return of ENVS episodes of the greedy policy."""

    def step(carry: Any, each: Any) -> Any:
        env, alive = carry
        after, _, _, over = act(env, network(parameters, env.state).argmax(-1), each)
        return (after, alive & ~over), alive

    _, alive = jax.lax.scan(step, (begin(key), jnp.ones(ENVS, bool)), jax.random.split(key, LIMIT))
    return float(alive.sum() / ENVS)


def train(
    iterations: int = 6_000, seed: int = 0, stock: bool = False, store: str | None = None, quiet: bool = False
) -> float:
    """Trains, and returns the greedy policy's mean return (500 at most)."""
    key, weights, environments = jax.random.split(jax.random.key(seed), 3)
    buffer = make_buffer(stock, store)
    example = Step(jnp.zeros(4), jnp.zeros(4), jnp.int32(0), jnp.float32(0), jnp.bool_(False))
    parameters = initial(weights)
    moments = (jax.tree.map(jnp.zeros_like, parameters), jax.tree.map(jnp.zeros_like, parameters))
    target = jax.tree.map(jnp.copy, parameters)  # what is donated is given once
    carry = (parameters, target, moments, begin(environments), buffer.init(example), key)
    piece = min(500, iterations)
    program = jax.jit(partial(jax.lax.scan, partial(iteration, buffer)), donate_argnums=0)
    started = time.monotonic()
    for first in range(0, iterations, piece):
        carry, returned = program(carry, jnp.arange(first, first + piece))
        if not quiet:
            recent = float(jnp.nanmean(returned[-200:]))
            print(
                f"{(first + piece) * ENVS:7,} steps  {time.monotonic() - started:6.1f} s  return {recent:6.1f}",
                flush=True,
            )
    reached = evaluate(carry[0], jax.random.key(seed + 1))
    if not stock:
        buffer.close()
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Double DQN on CartPole in JAX, with a replay buffer in shared memory."
    )
    parser.add_argument("--iterations", type=int, default=6_000, help=f"of {ENVS} environment steps and one update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flashbax", action="store_true", help="use flashbax's own buffer")
    parser.add_argument("--store", help="name of the store, for other processes; by default it has none")
    options = parser.parse_args()
    started = time.process_time()
    reached = train(options.iterations, options.seed, options.flashbax, options.store)
    print(json.dumps({"return": reached, "cpu_s": round(time.process_time() - started, 1)}))


if __name__ == "__main__":
    main()
