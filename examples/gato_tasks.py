"""The tasks of the small Gato: simulators, experts, and the stores of their recorded episodes.

    python examples/gato_tasks.py --data runs/gato_small/data   # records all three, which training does by itself

A store a task. A row is an episode; a step is its tokens (`gato_model.py`), and in Freeway its frame. The tokens of all
tasks have one field, so one mixture draws from the three stores. Experts: linear policies for Hopper (the demo's) and
HalfCheetah (`halfcheetah_expert.py`), which ship, and the network of `online_dqn_atari.py`, which is trained for two
CPU minutes when its file is missing. In every second episode the expert is disturbed on the way, for a model that is
off its path must have seen how to come back: what is recorded is what the expert wants to do (as DART does, Laskey et
al., 2017). The other episodes tell what the expert reaches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich import console, progress

import curves
import geartrain as gt
from gato_model import Shape, binned, numbers_of, observation_tokens

HERE = Path(__file__).parent
FRAME = (42, 40)
SHAPES = {
    "hopper": Shape(numbers=11, actions=3),
    "halfcheetah": Shape(numbers=17, actions=6),
    "freeway": Shape(frame=FRAME, choices=3),
}
TITLES = {"hopper": "Hopper", "halfcheetah": "HalfCheetah", "freeway": "Freeway"}
#: The longest episode; Freeway's game lasts 136 s.
LONGEST = {"hopper": 1000, "halfcheetah": 1000, "freeway": 2100}
TOKENS = max(shape.numbers + shape.actions for shape in SHAPES.values())
DQN_STEPS = 3000
NOISE = 0.15  # of a disturbed episode's actions at most, as a standard deviation


class Simulators(Protocol):
    """n simulators of a task side by side; one that has ended is stepped no further."""

    playing: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray

    def observe(self) -> np.ndarray:
        """(n, numbers) observations, or (n, lines, columns) frames."""

    def step(self, actions: np.ndarray) -> None:
        """(n, actions) numbers between -1 and 1, or (n, 1) choices."""

    def close(self) -> None: ...


class Mujoco:
    """Hopper or HalfCheetah, as Gymnasium has them (`Simulators`)."""

    def __init__(self, task: str, seeds: list[int]) -> None:
        import gymnasium

        with warnings.catch_warnings():  # MuJoCo 4 deprecates a name that Gymnasium still uses.
            warnings.simplefilter("ignore")
            name = {"hopper": "Hopper-v5", "halfcheetah": "HalfCheetah-v5"}[task]
            self._envs = [gymnasium.make(name, disable_env_checker=True) for _ in seeds]
        self._seen = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds, strict=True)])
        self.playing = np.ones(len(seeds), bool)
        self.returns, self.lengths = np.zeros(len(seeds)), np.zeros(len(seeds), int)

    def observe(self) -> np.ndarray:
        return self._seen

    def step(self, actions: np.ndarray) -> None:
        for i in np.flatnonzero(self.playing):
            self._seen[i], reward, fell, out_of_time, _ = self._envs[i].step(actions[i])
            self.returns[i] += reward
            self.lengths[i] += 1
            self.playing[i] = not (fell or out_of_time)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class Freeway:
    """Freeway by its own score, as `online_dqn_atari.py` sees it (`Simulators`)."""

    def __init__(self, seeds: list[int]) -> None:
        from geartrain.actors.envs import make

        self._games = make("atari/freeway", len(seeds), sign_rewards=False)
        self.seen = self._games.reset(seed=seeds[0])
        self.playing = np.ones(len(seeds), bool)
        self.returns, self.lengths = np.zeros(len(seeds)), np.zeros(len(seeds), int)

    def observe(self) -> np.ndarray:
        return self.seen["frame"]

    def step(self, actions: np.ndarray) -> None:
        stepped = self._games.step(actions[:, 0])
        self.seen = stepped.next
        self.returns += np.where(self.playing, stepped.reward, 0.0)
        self.lengths += self.playing
        self.playing &= ~(stepped.terminated | stepped.truncated)

    def close(self) -> None:
        self._games.close()


def simulators(task: str, seeds: list[int]) -> Simulators:
    """A simulator for each seed; seeds are consecutive."""
    return Freeway(seeds) if task == "freeway" else Mujoco(task, seeds)


# --------------------------------------------------------------------------------------------- the experts


Act = Callable[[Simulators], np.ndarray]


def linear_expert(task: str) -> Act:
    expert = np.load(HERE / "data" / f"{task}_expert.npz")
    scaled = expert["W"] / expert["std"]

    def act(envs: Simulators) -> np.ndarray:
        return (envs.observe() - expert["mean"]) @ scaled.T

    return act


def freeway_expert(network: Path, n: int, seed: int) -> Act:
    import online_dqn_atari as dqn

    state = torch.load(network, weights_only=True)
    model = dqn.QNetwork(SHAPES["freeway"].choices)
    model.load_state_dict(state)
    player = dqn.Player(n, SHAPES["freeway"].choices, np.full(n, 0.01), seed)
    return lambda envs: player.act(model, envs.seen)[:, None]  # type: ignore[attr-defined]


def random_player(task: str, seed: int) -> Act:
    rng, shape = np.random.default_rng(seed), SHAPES[task]

    def act(envs: Simulators) -> np.ndarray:
        size = (len(envs.playing), shape.actions)
        return rng.integers(shape.choices, size=size) if shape.choices else rng.uniform(-1, 1, size)

    return act


def train_freeway_expert(network: Path, *, tiny: bool, screen: console.Console) -> None:
    """Runs the DQN example as it is, and keeps its network."""
    size = ["--tiny"] if tiny else ["--steps", str(DQN_STEPS), "--evaluations", "2"]
    command = [sys.executable, str(HERE / "online_dqn_atari.py"), *size, "--network", str(network)]
    screen.print(f"{network} is missing; training it: {' '.join(command[1:])}", soft_wrap=True)
    subprocess.run(command, check=True)


# --------------------------------------------------------------------------------------------- the stores


def fields_of(task: str) -> dict[str, gt.Field]:
    """One field of tokens for all tasks, each as wide as the widest, and frames where there are some."""
    fields = {"tokens": gt.Field((TOKENS,), "int16")}
    frame = SHAPES[task].frame
    return fields | ({"frame": gt.Field(frame, "uint8")} if frame else {})


def steps_of(task: str, observation: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of (n, ...) observations, with actions of 0."""
    shape = SHAPES[task]
    tokens = np.zeros((len(observation), TOKENS), np.int16)
    if shape.frame:
        return {"tokens": tokens, "frame": observation}
    tokens[:, : shape.numbers] = observation_tokens(observation)
    return {"tokens": tokens}


def action_tokens(task: str, actions: np.ndarray) -> np.ndarray:
    return actions.astype(np.int16) if SHAPES[task].choices else binned(actions)


def actions_of(task: str, tokens: np.ndarray) -> np.ndarray:
    """What the simulator is given for an action's tokens."""
    return tokens.astype(int) if SHAPES[task].choices else numbers_of(tokens)


def play(task: str, seeds: list[int], act: Act, disturb: Callable[[np.ndarray], np.ndarray], limit: int) -> Any:
    """Plays an episode for each seed; the simulators as they ended, and the fields of all steps, (limit, n, ...)."""
    shape = SHAPES[task]
    envs = simulators(task, seeds)
    made: dict[str, list[np.ndarray]] = {}
    for _ in range(limit):
        step = steps_of(task, envs.observe())
        wanted = act(envs)
        # What is recorded is what the player wants, whatever is done: the model learns how to come back.
        step["tokens"][:, shape.numbers : shape.numbers + shape.actions] = action_tokens(task, wanted)
        for name, value in step.items():
            made.setdefault(name, []).append(value)
        # The action that is done is the middle of its bin: undisturbed, it is what the tokens say.
        envs.step(actions_of(task, action_tokens(task, disturb(wanted))))
        if not envs.playing.any():
            break
    envs.close()
    return envs, {name: np.stack(values) for name, values in made.items()}


def disturbance(task: str, disturbed: np.ndarray, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """What is done instead of what the expert wants, in the `disturbed` episodes.

    A choice is another one at one step of twenty. Numbers have noise at every step, of one strength an episode, and at
    one step of twenty a stronger one.
    """
    rng = np.random.default_rng([seed, 1])
    strength = rng.uniform(0.0, NOISE, len(disturbed))[:, None]

    def disturb(actions: np.ndarray) -> np.ndarray:
        struck = (disturbed & (rng.random(len(actions)) < 0.05))[:, None]
        if SHAPES[task].choices:
            return np.where(struck, rng.integers(SHAPES[task].choices, size=actions.shape), actions)
        noise = rng.normal(0.0, 1.0, actions.shape) * np.where(struck, 2 * NOISE, strength)
        return np.where(disturbed[:, None], actions + noise, actions).clip(-1.0, 1.0)

    return disturb


def record(task: str, directory: Path, chosen: argparse.Namespace, bars: progress.Progress) -> None:
    """Records a task's episodes into a store, and saves that with `recorded.json`: what expert and chance reach."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    episodes = chosen.games if task == "freeway" else chosen.episodes
    limit = min(LONGEST[task], chosen.longest)
    expert, lengths, steps = [], [], 0
    with gt.Store.create(store_name(task), fields_of(task), max_length=LONGEST[task], capacity=episodes) as store:
        bar = bars.add_task(f"{TITLES[task]}: expert's episodes", total=episodes)
        for first in range(0, episodes, 8):
            seeds = [1_000 * (1 + chosen.data_seed) + number for number in range(first, min(first + 8, episodes))]
            act = freeway_expert(chosen.network, len(seeds), seeds[0]) if task == "freeway" else linear_expert(task)
            disturbed = np.arange(first, first + len(seeds)) % 2 == 1
            envs, made = play(task, seeds, act, disturbance(task, disturbed, seeds[0]), limit)
            for i, length in enumerate(envs.lengths):
                with store.row() as row:
                    for field, values in made.items():
                        row[field][:length] = values[:length, i]
                    row.length = int(length)
            expert += envs.returns[~disturbed].tolist()
            lengths += envs.lengths[~disturbed].tolist()
            steps += int(envs.lengths.sum())
            bars.update(bar, advance=len(seeds))
        seeds = [500_000 + number for number in range(8)]
        chance, _ = play(task, seeds, random_player(task, seeds[0]), lambda actions: actions, limit)
        directory.mkdir(parents=True, exist_ok=True)
        store.save(directory / "store")
    content = {
        "task": task,
        "episodes": episodes,
        "steps": steps,
        "expert": {"returns": expert, "lengths": lengths},
        "random": {"returns": chance.returns.tolist(), "lengths": chance.lengths.tolist()},
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - cpu_s,
    }
    (directory / "recorded.json").write_text(json.dumps(content, indent=1))  # last: without it nothing was recorded


def store_name(task: str) -> str:
    """The task's store of this process."""
    return f"gato-{task}-{os.getpid()}"


def record_missing(chosen: argparse.Namespace, screen: console.Console) -> dict[str, Any]:
    """What was recorded of each task; what is not there is recorded first."""
    for task in SHAPES:
        if (chosen.data / task / "recorded.json").exists():
            continue
        if task == "freeway" and not chosen.network.exists():
            train_freeway_expert(chosen.network, tiny=chosen.tiny, screen=screen)
        with curves.bars(screen) as bars:
            record(task, chosen.data / task, chosen, bars)
    found = {task: json.loads((chosen.data / task / "recorded.json").read_text()) for task in SHAPES}
    for task, content in found.items():
        screen.print(
            f"{TITLES[task]}: {content['episodes']} episodes, {content['steps']:,} steps; the expert returns "
            f"{np.mean(content['expert']['returns']):,.1f}, random actions {np.mean(content['random']['returns']):,.1f}"
        )
    return found


def opened(data: Path) -> Iterator[gt.Store]:
    """The stores of the recordings, loaded into shared memory in the order of `SHAPES`."""
    for task in SHAPES:
        yield gt.Store.load(data / task / "store", store_name(task))


def recording_options(text: argparse.ArgumentParser) -> None:
    add = text.add_argument
    add("--data", type=Path, help="folder of the recordings, made when missing (runs/gato_small/data)")
    add("--network", type=Path, help="Freeway's expert, trained when missing (runs/gato_small/freeway.pt)")
    add("--episodes", type=int, help="to record of Hopper and of HalfCheetah, 1,000 steps at most each (150)")
    add("--games", type=int, help="to record of Freeway, 2,045 steps each (24)")
    add("--data-seed", type=int, default=0, help="of the recorded episodes (0)")


def fill_recording_options(chosen: argparse.Namespace, text: argparse.ArgumentParser) -> None:
    """Sizes that were not chosen; refuses senseless ones."""
    folder = Path("runs/gato_tiny" if chosen.tiny else "runs/gato_small")
    chosen.data = chosen.data or folder / "data"
    chosen.network = chosen.network or folder / "freeway.pt"
    for name, tiny, usual in (("episodes", 4, 150), ("games", 2, 24)):
        given = getattr(chosen, name)
        setattr(chosen, name, (tiny if chosen.tiny else usual) if given is None else given)
        if given is not None and given < 2:  # one is disturbed, one tells what the expert reaches
            text.error(f"--{name} is at least 2, found {given}")
    if not 0 <= chosen.data_seed < 2**20:
        text.error(f"--data-seed is from 0 to {2**20 - 1:,}, found {chosen.data_seed}")
    chosen.longest = 40 if chosen.tiny else max(LONGEST.values())


def main(arguments: list[str] | None = None) -> int:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recording_options(text)
    text.add_argument("--tiny", action="store_true", help="a few short episodes: does it run?")
    chosen = text.parse_args(arguments)
    fill_recording_options(chosen, text)
    curves.prepare()
    record_missing(chosen, console.Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
