"""Tensor parallelism with Megatron-Core's layers, whose parallel state tells the replay which ranks need the same rows.

Learns to imitate a controller in about a minute.

    torchrun --nproc-per-node 2 examples/tensor_megatron.py              # needs pip install "geartrain[megatron]"
    torchrun --nproc-per-node 4 examples/tensor_megatron.py --shards 2   # 2 tensor-parallel ranks x 2 replicas

Two ranks share the feed-forward layers and get the same rows. Replicas average their gradients. On CPUs Megatron-Core's
process groups and layers run over Gloo. Its fused kernels and its optimizer need GPUs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import geartrain as gt
import memory_task as task

try:
    with warnings.catch_warnings():  # of kernels that are not installed
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
except ModuleNotFoundError:
    raise SystemExit('this example needs Megatron-Core: pip install "geartrain[megatron]"') from None

TENSOR = 2  # ranks that share one copy of the model


class Cut(nn.Module):
    """A linear layer of Megatron-Core's, of which this rank has its part, with the weights of a whole one."""

    def __init__(self, whole: nn.Linear, config: ModelParallelConfig, *, rows: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_, "bias": True}
        shape = (whole.in_features, whole.out_features)
        self.part = (
            RowParallelLinear(*shape, **options, input_is_parallel=True, skip_bias_add=False)
            if rows
            else ColumnParallelLinear(*shape, **options, gather_output=False)
        )
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        with torch.no_grad():
            self.part.weight.copy_(whole.weight.chunk(size, 1 if rows else 0)[rank])
            self.part.bias.copy_(whole.bias if rows else whole.bias.chunk(size)[rank])

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)[0]


def main(arguments: list[str] | None = None) -> list[float]:
    chosen = task.options(__doc__).parse_args(arguments)
    device = task.start(multiple_of=TENSOR)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR)
    store = task.open_shard(chosen.store, chosen.episodes, chosen.shards)

    config = ModelParallelConfig(tensor_model_parallel_size=TENSOR, use_cpu_initialization=True)
    layers = task.layers(chosen.seed)
    for layer in layers:
        if isinstance(layer, task.Block):
            layer.linear1 = Cut(layer.linear1, config, rows=False)
            layer.linear2 = Cut(layer.linear2, config, rows=True)
    model = nn.Sequential(*layers).to(device)
    optimizer = task.optimizer_of(model)
    replicas = parallel_state.get_data_parallel_group()

    losses: list[float] = []
    with gt.Replay(
        store,
        gt.selection.Prioritized(seed=chosen.seed),
        task.BATCH,
        window=task.WINDOW,
        group=gt.RankOptions(mesh=parallel_state),
        num_batches=chosen.steps,
    ) as replay:
        for batch in replay:  # this replica's part of the batch, on all its ranks
            part = batch.to(device)
            loss = task.loss_of(model(part["obs"]), task.target_of(part))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad /= dist.get_world_size(replicas)
            optimizer.step()
            losses.append(task.mean_over(replicas, loss))
            if dist.get_rank() == 0 and len(losses) % 20 == 0:
                print(f"step {len(losses):>4}  loss {losses[-1]:.4f}", flush=True)
        if dist.get_rank() == 0:
            task.report(losses, replay)
    store.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
