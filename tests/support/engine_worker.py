"""Runs the examples of training engines on forked ranks, so that torch is imported once for all of them.

A process reads jobs from its standard input, one JSON object a line, and forks the ranks of each. It keeps the
key-value store that they meet at, as torchrun does. `Engines` is the other end, for tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preloaded
from deadlines import patience

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 60.0
#: What an example imports beside torch, which takes seconds of a core.
NEEDED = {"pipeline_deepspeed": "deepspeed", "zero_deepspeed": "deepspeed", "tensor_megatron": "megatron.core"}


@dataclass(frozen=True)
class Rank:
    """What one rank of a job saw: its losses, and of every batch the rows, draws and fields."""

    losses: list[float]
    batches: list[dict[str, Any]]
    stats: dict[str, float]
    directory: Path  # holds what rank i printed, in i.txt


class Engines:
    """The process that runs examples."""

    def __init__(self) -> None:
        self._process = preloaded.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    def run(self, example: str, ranks: int, directory: Path, *arguments: str, lives: int = 1) -> list[Rank]:
        """Runs `examples/<example>.py` on so many ranks of one host; raises with their output if one fails.

        When a rank fails, the others are killed; with more than one life all are then started again.
        """
        job = {"example": example, "ranks": ranks, "directory": str(directory), "arguments": arguments, "lives": lives}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        said = "".join(f"--- rank {i}\n{(directory / f'{i}.txt').read_text()}" for i in range(ranks))
        assert not any(codes), f"{example} ended with {codes}\n{said}"
        return [Rank(**json.loads((directory / f"{i}.json").read_text()), directory=directory) for i in range(ranks)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(patience(10))


def serve() -> None:
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.pipelining  # noqa: F401

    import geartrain  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        if (needed := NEEDED.get(job["example"])) is not None:
            with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs; standard output is for answers
                importlib.import_module(needed)  # once for all ranks and lives
        for life in range(job["lives"]):
            keeper, port = fork_keeper()
            children = []
            for rank in range(job["ranks"]):
                child = os.fork()
                if child == 0:
                    os._exit(be_rank(rank, port, life, job))
                children.append(child)
            codes = wait_for(children)
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
            if not any(codes):
                break
        print(json.dumps(codes), flush=True)


def fork_keeper() -> tuple[int, int]:
    """The process that keeps the key-value store, whose threads must not be there when ranks are forked; its port."""
    import torch.distributed as dist

    reader, writer = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        os.close(writer)
        signal.alarm(int(2 * LIMIT_S))  # dies with its job, even if the worker is killed
        while True:
            signal.pause()
    os.close(writer)
    port = int(os.read(reader, 16))
    os.close(reader)
    return keeper, port


def wait_for(children: list[int]) -> list[int]:
    """Their exit codes; all that are left are killed when one fails or the time is up."""
    left = {os.pidfd_open(child): child for child in children}
    codes, deadline_s = dict.fromkeys(children, 1), time.monotonic() + LIMIT_S
    while left:
        ended, _, _ = select.select(list(left), [], [], max(0.0, deadline_s - time.monotonic()))
        for descriptor in ended:
            os.close(descriptor)
            child = left.pop(descriptor)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not ended or any(codes[child] for child in codes if child not in left.values()):
            for child in left.values():
                os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is still its own
            deadline_s = time.monotonic() + LIMIT_S
    return [codes[child] for child in children]


def be_rank(rank: int, port: int, life: int, job: dict[str, Any]) -> int:
    directory = Path(job["directory"])
    output = os.open(directory / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(life),
    }
    signal.alarm(int(2 * LIMIT_S))  # a rank does not outlive its worker for long, whatever happens
    faulthandler.dump_traceback_later(LIMIT_S - 5, file=2)
    try:
        sys.path.insert(0, str(EXAMPLES))
        seen = watch_replays()
        refuse_living_models()
        losses = importlib.import_module(job["example"]).main(job["arguments"])
        (directory / f"{rank}.json").write_text(json.dumps({"losses": losses, **seen}))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def refuse_living_models() -> None:
    """Lets no process group be destroyed while a DDP is alive, which may hang when it is freed (docs/ranks.md)."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    destroy = dist.destroy_process_group

    def checked(*arguments: Any) -> None:
        living = [each for each in gc.get_objects() if isinstance(each, DistributedDataParallel)]
        assert not living, f"{len(living)} models of DDP are alive when their process group is destroyed"
        destroy(*arguments)

    dist.destroy_process_group = checked


def watch_replays() -> dict[str, Any]:
    """Puts a recorder in the place of `geartrain.Replay`; returns what it will have seen."""
    import geartrain

    seen: dict[str, Any] = {"batches": [], "stats": {}}

    class Recorder(geartrain.Replay):
        def sample(self) -> geartrain.Batch:
            batch = super().sample()
            books = {"row": batch.keys.row, "shard": batch.keys.shard, "draw": batch.draw, "start": batch.start}
            of_batch = {name: None if book is None else book.tolist() for name, book in books.items()}
            of_batch["fields"] = {name: array.tolist() for name, array in batch.fields.items()}
            of_batch["mask"] = batch.mask.tolist()
            seen["batches"].append(of_batch)
            seen["stats"] = self.stats()
            return batch

    geartrain.Replay = Recorder  # type: ignore[misc]
    return seen


if __name__ == "__main__":
    serve()
