"""A learner or a collector of DI-engine's DQN on an Atari game, linked by one of its queues; for atari.py.

    atari_worker.py QUEUE FOLDER EPOCHS                        # both, as workers of one command
    atari_worker.py QUEUE FOLDER EPOCHS NODE_ID ADDRESS [PEER] # one of them, on a host of its own

It runs with the Python of an environment with DI-engine, and imports nothing of geartrain with QUEUE "nng". Model,
optimizer, n-step targets, sizes and environments are those of DI-engine's own `pong_dqn_config`; the games come from
ale-py's library, in whose wheel the ROMs are, by a class for gym 0.25.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if sys.argv[1:2] != ["nng"] and __name__ in ("__main__", "__mp_main__"):
    import geartrain.integrations.di_engine  # noqa: F401

import ale_py
import gym
import numpy as np
from ale_py.roms import get_rom_path

GAME = "PongNoFrameskip-v4"
PORT = 22515
#: Passes of the learner's loop before time is taken: the first ones connect, allocate, and wait for each other.
WARMUP_EPOCHS = 3


class Game(gym.Env):  # type: ignore[misc, unused-ignore]
    """Pong's frames at 60 Hz, as gym's "NoFrameskip-v4" had them: no sticky actions."""

    def __init__(self) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.seed(0)
        self.actions = self.ale.getMinimalActionSet()
        self.action_space = gym.spaces.Discrete(len(self.actions))
        self.observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def seed(self, seed: int | None = None) -> list[int]:
        """The interface takes a seed with the ROM."""
        rom = get_rom_path("pong")
        assert rom is not None
        self.ale.setInt("random_seed", (seed or 0) % 2**31)
        self.ale.loadROM(rom)
        return [seed or 0]

    def get_action_meanings(self) -> list[str]:
        """Names of the actions, by which DI-engine's wrappers know that a game is started by FIRE."""
        return [action.name for action in self.actions]

    def reset(self, **_: Any) -> np.ndarray:
        """The first frame, (210, 160, 3) bytes."""
        self.ale.reset_game()
        return self.ale.getScreenRGB()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        """The next frame, the reward, whether the game is over."""
        reward = self.ale.act(self.actions[int(action)])
        return self.ale.getScreenRGB(), float(reward), self.ale.game_over(), {}


gym.register(GAME, entry_point=Game, order_enforce=False, disable_env_checker=True)


def train(folder: str, epochs: int) -> None:
    """Main function of each worker."""
    import torch
    from ding.config import compile_config
    from ding.data import DequeBuffer
    from ding.envs import BaseEnvManagerV2
    from ding.framework import task
    from ding.framework.context import OnlineRLContext
    from ding.framework.middleware import (
        ContextExchanger,
        ModelExchanger,
        OffPolicyLearner,
        StepCollector,
        data_pusher,
        eps_greedy_handler,
        nstep_reward_enhancer,
    )
    from ding.model import DQN
    from ding.policy import DQNPolicy
    from ding.utils import set_pkg_seed
    from dizoo.atari.config.serial.pong.pong_dqn_config import create_config, main_config
    from dizoo.atari.envs.atari_env import AtariEnv

    torch.set_num_threads(1)
    main_config.exp_name = str(Path(folder) / f"experiment-{task.router.node_id}")
    main_config.policy.cuda = False
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
    learns = task.router.node_id == 0
    set_pkg_seed(cfg.seed + task.router.node_id, use_cuda=False)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        task.add_role(task.role.LEARNER if learns else task.role.COLLECTOR)
        model = DQN(**cfg.policy.model)
        policy = DQNPolicy(cfg.policy, model=model)
        buffer = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        task.use(ContextExchanger(skip_n_iter=1))
        task.use(ModelExchanger(model))
        task.use(eps_greedy_handler(cfg))
        if not learns:
            games = [lambda one=one: AtariEnv(one) for one in AtariEnv.create_collector_env_cfg(cfg.env)]
            task.use(StepCollector(cfg, policy.collect_mode, BaseEnvManagerV2(games, cfg=cfg.env.manager)))
            task.use(nstep_reward_enhancer(cfg))
        task.use(data_pusher(cfg, buffer))
        task.use(OffPolicyLearner(cfg, policy.learn_mode, buffer))
        if learns:
            task.use(clock(Path(folder), epochs))
        task.run()


def clock(folder: Path, epochs: int) -> Any:
    """Takes the time of so many passes of the learner's loop, and writes it to the folder."""
    passes, began_s, began_steps, began_cpu_s = 0, 0.0, 0, 0.0

    def tick(ctx: Any) -> None:
        nonlocal passes, began_s, began_steps, began_cpu_s
        passes += 1
        now_s, steps = time.monotonic(), int(ctx.env_step)
        if passes == WARMUP_EPOCHS:
            began_s, began_steps, began_cpu_s = now_s, steps, time.process_time()
        elif passes == WARMUP_EPOCHS + epochs:
            found = {
                "seconds": now_s - began_s,
                "cpu_s": time.process_time() - began_cpu_s,
                "env_steps": steps - began_steps,
                "train_iterations": int(ctx.train_iter),
            }
            draft = folder / "result.new"
            draft.write_text(json.dumps(found))
            draft.replace(folder / "result.json")

    return tick


def main() -> None:
    """Starts one worker or both; whoever started this ends it."""
    from ding.framework import Parallel

    queue, folder, epochs, *where = sys.argv[1:]
    how: dict[str, Any] = {"n_parallel_workers": 2, "topology": "mesh"}
    if where:
        node, address, *peers = where
        how = {
            "n_parallel_workers": 1,
            "node_ids": [int(node)],
            "protocol": "tcp",
            "address": address,
            "ports": [PORT],
            "attach_to": [f"tcp://{peer}:{PORT}" for peer in peers],
            "topology": "alone",
        }
    Parallel.runner(mq_type=queue, **how)(train, folder, int(epochs))
    os._exit(0)


if __name__ == "__main__":
    main()
