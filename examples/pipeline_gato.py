"""The transformer of offline_gato_hopper.py in two pipeline stages: it learns to hop, on any number of ranks alike.

    torchrun --nproc-per-node 2 examples/pipeline_gato.py              # two stages; about two minutes on two cores
    torchrun --nproc-per-node 2 examples/pipeline_gato.py --stages 1   # two replicas of the whole model
    torchrun --nproc-per-node 1 examples/pipeline_gato.py --stages 1   # one rank, by itself

Both ends of the pipeline draw from the same random stream: the head is given returns, observations and actions of a
batch, the tail the actions that belong to the same windows, and the mask comes to every stage. The same seed gives the
same global batches however many ranks there are and whatever they do, so all three commands draw one curve.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from rich import console, progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import curves
import geartrain as gt
import hopper_learner as learner
import offline_gato_hopper as demo
from geartrain import weights

MICROBATCHES = 4
MASK = slice(learner.ACTION, learner.ACTION + 1)  # of a target: what each step counts for stands beside its action


class Stage(nn.Module):
    """Some layers of a `DecisionTransformer`; the first stage embeds a window, the last one tells the actions."""

    def __init__(self, whole: learner.DecisionTransformer, place: int, stages: int) -> None:
        super().__init__()
        cuts = [math.ceil(len(whole.layers) * at / stages) for at in range(stages + 1)]
        self.is_first_stage, self.is_last_stage = place == 0, place == stages - 1
        self.whole = whole
        whole.layers = whole.layers[cuts[place] : cuts[place + 1]]
        others = [] if self.is_first_stage else ["embed_return", "embed_obs", "embed_action", "embed_place"]
        others += [] if self.is_last_stage else ["norm", "head"]
        for name in others:
            delattr(whole, name)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The head's `x` is (B, W, 1 + OBS + ACTION), that of the others (B, 3 W, width); mask (B, W)."""
        if self.is_first_stage:
            returns, obs, action = x.split([1, learner.OBS, learner.ACTION], -1)
            x = self.whole.embed({"return_to_go": returns[..., 0], "obs": obs, "action": action})
        hidden = self.whole.hidden(mask)
        for layer in self.whole.layers:
            x = layer(x, src_mask=hidden)
        return self.whole.read(x) if self.is_last_stage else x


def loss_of(predicted: Tensor, target: Tensor) -> Tensor:
    """A microbatch's part of the squared error; the parts' mean is the mean over all real steps of the batch."""
    return ((predicted - target[..., : learner.ACTION]).square().mean(-1, keepdim=True) * target[..., MASK]).sum()


class Trainer:
    """This rank's stage, and how a batch goes through all of them."""

    def __init__(self, whole: learner.DecisionTransformer, mesh: DeviceMesh, steps: int) -> None:
        stages, self.replicas = mesh["pp"].size(), mesh["dp"].get_group()
        self.pipeline, self.steps = mesh["pp"].get_group(), steps
        self.part = Stage(whole, mesh["pp"].get_local_rank(), stages)
        self.average = AveragedModel(self.part, multi_avg_fn=get_ema_multi_avg_fn(0.97))
        self.optimizer = torch.optim.AdamW(self.part.parameters(), betas=(0.9, 0.95), weight_decay=1e-4)
        parallel = DistributedDataParallel(self.part, process_group=self.replicas)
        place = mesh["pp"].get_local_rank()
        stage = PipelineStage(parallel, place, stages, torch.device("cpu"), group=self.pipeline)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(self, number: int, batch: gt.Batch) -> float:
        """One step of the optimizer; the loss of the global batch, on ranks that are tails (0 on others)."""
        self.optimizer.param_groups[0]["lr"] = learner.learning_rate(number, self.steps)
        self.optimizer.zero_grad()
        given: tuple[Tensor, ...] = ()
        wanted, losses = {}, []
        if self.part.is_first_stage:
            given = (torch.cat([batch["return_to_go"][..., None], batch["obs"], batch["action"]], -1),)
        if self.part.is_last_stage:
            real = batch.mask.sum().float()
            dist.all_reduce(real, group=self.replicas)
            real /= dist.get_world_size(self.replicas) * MICROBATCHES
            wanted = {"target": torch.cat([batch["action"], batch.mask[..., None] / real], -1), "losses": losses}
        self.schedule.step(*given, **wanted, mask=batch.mask)
        self._clip(1.0)
        self.optimizer.step()
        self.average.update_parameters(self.part)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss, group=self.replicas)
        return loss.item() / dist.get_world_size(self.replicas)

    def _clip(self, most: float) -> None:
        """By the norm of all stages' gradients together."""
        gradients = [each.grad for each in self.part.parameters() if each.grad is not None]
        squared = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squared, group=self.pipeline)
        for gradient in gradients:
            gradient.mul_(min(1.0, most / (squared.sqrt().item() + 1e-6)))


class Everywhere:
    """The averaged weights of all stages, combined on every rank through the host's shared memory."""

    def __init__(self, job: str, trainer: Trainer, mesh: DeviceMesh, scale: learner.DecisionTransformer) -> None:
        self.trainer, self.model = trainer, scale
        self.mine = weights.Publisher(f"{job}-{dist.get_rank()}")
        column = [rank for rank in mesh.mesh[:, mesh["dp"].get_local_rank()].tolist() if rank != dist.get_rank()]
        self.others = [weights.Reader(f"{job}-{rank}") for rank in column]

    def gathered(self, step: int) -> learner.DecisionTransformer:
        layers = range(len(self.model.layers))
        stages = dist.get_world_size(self.trainer.pipeline)
        first = math.ceil(len(layers) * dist.get_rank(self.trainer.pipeline) / stages)
        own = {}
        for name, value in self.trainer.average.module.whole.state_dict().items():
            words = name.split(".")
            if words[0] == "layers":  # numbered from the first of its stage
                words[1] = str(int(words[1]) + first)
            own[".".join(words)] = value
        self.mine.publish(step, own)
        for each in self.others:
            own |= dict(each.latest(at_least=step, timeout_s=120))
        self.model.load_state_dict(own)
        return self.model

    def close(self) -> None:
        for each in (*self.others, self.mine):
            each.close()


def run(
    chosen: argparse.Namespace, store: gt.Store, mesh: DeviceMesh, curve: curves.Curve, bars: progress.Progress
) -> dict:
    rows = demo.recorded(store)
    target = float(rows["expert"].mean())
    curve.line("expert", 100.0)
    curve.line("promise", 95.0)
    trainer = Trainer(learner.make_model(chosen.seed, rows["obs"], target), mesh, chosen.steps)
    everywhere = Everywhere(store.name, trainer, mesh, learner.make_model(chosen.seed, rows["obs"], target))
    rank, world = dist.get_rank(), dist.get_world_size()
    marks = {math.ceil(share * chosen.steps) for share in (*demo.EVALUATE_AT, 1)}
    losses, train_s = [], 0.0
    with gt.Replay(
        store,
        gt.selection.Prioritized(seed=chosen.seed),
        learner.BATCH,
        window=learner.CONTEXT,
        group=gt.RankOptions(mesh=mesh, inputs=["return_to_go", "obs", "action"], targets=["action"]),
        num_batches=chosen.steps,
        options=gt.ReplayOptions(timeout_s=300),  # one rank may be evaluating while another has a batch ready
    ) as replay:
        bar = bars.add_task("training", total=chosen.steps)
        since = time.perf_counter()
        for number, batch in enumerate(replay):
            losses.append(trainer.step(number, batch))
            bars.update(bar, advance=1)
            if len(losses) in marks:
                train_s += time.perf_counter() - since
                episodes = chosen.eval_episodes if len(losses) == chosen.steps else min(2, chosen.eval_episodes)
                model = everywhere.gathered(len(losses))
                mine = range(rank, episodes, world)  # the ranks share out the episodes
                returns = learner.evaluate(model, mine, target, bars) if mine else []
                found = [None] * world
                dist.all_gather_object(found, list(returns))
                percent = 100 * torch.tensor([each for part in found for each in part]) / target
                curve.point(len(losses), percent.mean(), percent.min(), percent.max())
                bars.console.print(f"step {len(losses):>4}: {percent.mean():5.1f} % of the expert's return")
                since = time.perf_counter()
        figures = replay.stats()
    dist.barrier()
    everywhere.close()
    # Losses are known to the tails; rank 0 writes them down.
    found = [None] * world
    dist.all_gather_object(found, losses if trainer.part.is_last_stage else None)
    curve.content["losses"] = next(each for each in found if each)
    return {
        "expert": target,
        "share_of_expert": percent.mean() / 100,
        "ranks": world,
        "stages": chosen.stages,
        "train_s": train_s,
        "wait_share": figures["wait_s"] / train_s,
        "last_loss": curve.content["losses"][-1],
    }


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    text.add_argument("--stages", type=int, default=2, help="of a pipeline; there are ranks / stages replicas (2)")
    text.add_argument(
        "--steps", type=int, help=f"training steps, {learner.BATCH} windows of {learner.CONTEXT} steps each (400)"
    )
    text.add_argument("--episodes", type=int, help="expert episodes to collect (100)")
    text.add_argument("--eval-episodes", type=int, help="in the last evaluation (10)")
    chosen = text.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start this with torchrun: torchrun --nproc-per-node 2 examples/pipeline_gato.py")
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks % chosen.stages or ranks != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit(f"this needs a multiple of {chosen.stages} ranks, all on one host; there are {ranks}")
    for name, usual, tiny in (("steps", 400, 4), ("episodes", 100, 4), ("eval_episodes", 10, 2)):
        setattr(chosen, name, getattr(chosen, name) or (tiny if chosen.tiny else usual))
    curves.prepare()
    dist.init_process_group("gloo")
    talks = dist.get_rank() == 0
    mesh = init_device_mesh("cpu", (chosen.stages, ranks // chosen.stages), mesh_dim_names=("pp", "dp"))
    curve = curves.Curve(
        f"Hopper, {chosen.stages} stages x {ranks // chosen.stages}",
        "training step",
        "return, % of the expert's",
        chosen,
    )
    # One store for all ranks of the host: the first fills it, the others open it by its name.
    name = f"gato-{os.environ['MASTER_PORT']}"
    screen = console.Console(quiet=not talks)
    with contextlib.ExitStack() as stack:
        bars = stack.enter_context(curves.bars(screen))
        if talks:
            store = stack.enter_context(
                gt.Store.create(name, demo.FIELDS, max_length=learner.EPISODE_STEPS, capacity=chosen.episodes)
            )
            demo.collect(store, chosen.episodes, chosen.seed, bars)
        dist.barrier()
        if not talks:
            store = stack.enter_context(gt.Store.open(name))
        result = run(chosen, store, mesh, curve, bars)
        used_s = torch.tensor(0.0 if talks else curves.used_cpu_s())
        dist.all_reduce(used_s)
    if talks:
        finished = curve.finish(others_cpu_s=used_s.item(), **result)["result"]
        screen.print(", ".join(f"{name} {value:,.4g}" for name, value in finished.items()))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
