"""DI-engine's DQN on CartPole: learner, collector and evaluator as tasks of their own, linked by geartrain.

One command on one host (docs/di-engine.md says what to install):

    geartrain-ditask --package examples --main di_engine_dqn.main --parallel-workers 3 --topology mesh

or one for each task, on any hosts, which find each other through node 0:

    export GEARTRAIN_SECRET=...
    TASK="geartrain-ditask --package examples --main di_engine_dqn.main --init-method tcp://HOST:29500"
    $TASK --node-ids 0 --labels learner
    $TASK --node-ids 1 --labels evaluator --attach-to 0
    $TASK --node-ids 2 --labels collector --attach-to 0,1

The evaluator prints the return of the learner's policy now and then, and ends the job when it is good.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

import gymnasium
import torch
from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import (
    ContextExchanger,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    interaction_evaluator,
    termination_checker,
)
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

import geartrain.integrations.di_engine  # noqa: F401  (so that `ditask` itself knows the queue as well)

ROLES = {"learner": task.role.LEARNER, "evaluator": task.role.EVALUATOR, "collector": task.role.COLLECTOR}
MOST_STEPS = int(os.environ.get("DQN_MOST_STEPS", "60000"))
#: Where the evaluator writes [iterations, return] pairs, if anywhere.
CURVE = os.environ.get("DQN_CURVE", "")


def main() -> None:
    torch.set_num_threads(1)
    main_config.exp_name = tempfile.mkdtemp(prefix="di-engine-dqn-")
    main_config.policy.collect.n_sample = 64
    main_config.policy.learn.update_per_collect = 10
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
    set_pkg_seed(cfg.seed + task.router.node_id, use_cuda=False)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        for role in roles():
            task.add_role(role)
        model = DQN(**cfg.policy.model)
        policy = DQNPolicy(cfg.policy, model=model)
        buffer = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        if task.router.is_active:
            task.use(ContextExchanger(skip_n_iter=1))
            task.use(ModelExchanger(model))
        task.use(interaction_evaluator(cfg, policy.eval_mode, environments(cfg, cfg.env.evaluator_env_num)))
        if task.has_role(task.role.EVALUATOR):
            task.use(note_return)
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, environments(cfg, cfg.env.collector_env_num)))
        task.use(data_pusher(cfg, buffer))
        task.use(OffPolicyLearner(cfg, policy.learn_mode, buffer))
        task.use(termination_checker(max_env_step=MOST_STEPS))
        task.run()


def roles() -> list[object]:
    """This task's: by its label, else by its node id; none, and so all of them, in a single process."""
    if not task.router.is_active:
        return []
    labelled = [role for label, role in ROLES.items() if label in task.router.labels]
    return labelled or [list(ROLES.values())[min(task.router.node_id, 2)]]


def environments(cfg: object, count: int) -> BaseEnvManagerV2:
    return BaseEnvManagerV2(
        env_fn=[lambda: DingEnvWrapper(gymnasium.make("CartPole-v0")) for _ in range(count)], cfg=cfg.env.manager
    )


_curve: list[tuple[int, float]] = []


def note_return(ctx: OnlineRLContext) -> None:
    if ctx.last_eval_iter == ctx.train_iter and (not _curve or _curve[-1][0] != ctx.train_iter):
        _curve.append((int(ctx.train_iter), float(ctx.eval_value)))
        print(f"after {ctx.train_iter} iterations a return of {ctx.eval_value:.1f}", flush=True)
        if CURVE:
            beside = Path(CURVE + ".new")
            beside.write_text(json.dumps(_curve))
            beside.replace(CURVE)


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.INFO)
    main()
