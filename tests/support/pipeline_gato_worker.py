"""A rank that trains the demo's transformer in every way that two ranks can, and writes the losses of each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from replay_calls import replay_of
from torch.distributed.device_mesh import init_device_mesh

import geartrain as gt

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import hopper_learner as learner
import pipeline_gato

STEPS, EPISODES, LENGTH = 8, 12, 60
FIELDS = {
    "obs": gt.Field((learner.OBS,), "float32"),
    "action": gt.Field((learner.ACTION,), "float32"),
    "return_to_go": gt.Field((), "float32"),
}


def fill(store):
    rng = np.random.default_rng(0)
    for length in rng.integers(5, LENGTH + 1, EPISODES):  # short ones are padded, and count for less
        with store.row(priority=float(length)) as row:
            obs = rng.uniform(-1.0, 1.0, (length, learner.OBS))
            row["obs"][:length], row["action"][:length] = obs, obs[:, : learner.ACTION]
            row["return_to_go"][:length] = np.arange(length)[::-1]
            row.length = length


def model():
    return learner.make_model(0, np.random.default_rng(1).normal(size=(100, learner.OBS)).astype(np.float32), 60.0)


def main(out, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        store = gt.Store.create(name, FIELDS, max_length=LENGTH, capacity=EPISODES)
        fill(store)
    dist.barrier()
    if not first:
        store = gt.Store.open(name)
    found = {}
    for stages, replicas in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", (stages, replicas), mesh_dim_names=("pp", "dp"))
        trainer = pipeline_gato.Trainer(model(), mesh, STEPS)
        everywhere = pipeline_gato.Everywhere(f"{name}-{stages}", trainer, mesh, model())
        how = {"mesh": mesh, "inputs": ["return_to_go", "obs", "action"], "targets": ["action"]}
        selection = gt.selection.Prioritized(seed=0)
        with replay_of(store, selection, learner.BATCH, window=learner.CONTEXT, num_batches=STEPS, **how) as replay:
            losses = [trainer.step(number, batch) for number, batch in enumerate(replay)]
        if trainer.part.is_last_stage:
            found[f"{stages}x{replicas}"] = losses
        whole = everywhere.gathered(STEPS)
        found[f"norm {stages}x{replicas}"] = torch.cat([each.flatten() for each in whole.parameters()]).norm().item()
        dist.barrier()
        everywhere.close()
    if first:  # by itself, as the demo does it
        alone = model()
        average = torch.optim.swa_utils.AveragedModel(alone, multi_avg_fn=pipeline_gato.get_ema_multi_avg_fn(0.97))
        how = {"window": learner.CONTEXT, "fields": learner.WINDOW_FIELDS, "num_batches": STEPS}
        with replay_of(store, gt.selection.Prioritized(seed=0), learner.BATCH, **how) as replay:
            found["alone"] = []
            for loss in learner.train(alone, replay, STEPS):
                found["alone"].append(loss)
                average.update_parameters(alone)
        found["norm alone"] = torch.cat([each.flatten() for each in average.module.parameters()]).norm().item()
    dist.barrier()
    store.close()
    (Path(out) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
