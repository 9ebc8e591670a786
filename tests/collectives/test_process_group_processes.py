"""The backend "geartrain" in jobs of processes: unmodified DDP, and what happens when somebody dies."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience
from installed import site

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parents[1] / "support" / "process_group_worker.py"


class Launcher:
    """Forks ranks from a process that has imported torch already: it takes seconds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(WORKER)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.codes: dict[int, int] = {}
        assert self.answers.get(timeout=patience(100)) == {"ready": True}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(json.loads(line))

    def start(self, **job: Any) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode())
        self.process.stdin.flush()
        while "pids" not in (answer := self.answers.get(timeout=patience(30))):
            self.codes[answer["pid"]] = answer["code"]
        return list(answer["pids"])

    def wait(self, pid: int, timeout_s: float) -> int:
        until_s = time.monotonic() + patience(timeout_s)
        while pid not in self.codes:
            answer = self.answers.get(timeout=max(0.01, until_s - time.monotonic()))
            self.codes[answer["pid"]] = answer["code"]
        return self.codes[pid]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    yield one
    one.process.kill()
    one.process.communicate()


class Job:
    """Ranks that go through scenarios of process_group_worker.py; killed at the end, whatever happened."""

    def __init__(self, launcher: Launcher, scenarios: str, size: int, folder: Path, **env: str) -> None:
        self.launcher, self.folder = launcher, folder
        self.pids = launcher.start(scenarios=scenarios, size=size, folder=str(folder), env=env)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            if pid not in self.launcher.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def out(self, rank: int, code: int = 0, timeout_s: float = 90) -> str:
        """What a rank has printed, once it has ended as it should."""
        try:
            ended = self.launcher.wait(self.pids[rank], timeout_s)
        except queue.Empty:
            ended = -1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGABRT)  # what its threads wait for belongs into the report
            with contextlib.suppress(queue.Empty):
                self.launcher.wait(self.pids[rank], 5)
        assert ended == code, f"rank {rank}: {ended}\n" + (self.folder / f"{rank}.err").read_text()[-9000:]
        return (self.folder / f"{rank}.out").read_text()

    def lines(self, rank: int, code: int = 0, timeout_s: float = 90) -> list[dict[str, Any]]:
        """The lines of JSON in it."""
        return [json.loads(line) for line in self.out(rank, code, timeout_s).splitlines() if line.startswith("{")]


def test_unmodified_ddp_gets_gloos_weights_to_the_bit_and_all_else_works(launcher: Launcher, tmp_path: Path) -> None:
    with Job(launcher, "everything_else,ddp,leave", 2, tmp_path) as job:
        said = [job.lines(rank) for rank in range(2)]
    for lines in said:
        assert lines[0] == {"ok": True}
        kinds = {line["kind"]: line for line in lines if "kind" in line}
        assert set(kinds) == {"plain", "unused", "view", "bf16", "static"}
        for kind, line in kinds.items():
            assert line["ours"] == line["gloo"], kind
            assert line["operations"] >= 8, "the fast path was not taken"
        assert kinds["plain"]["ours"] == kinds["view"]["ours"] == kinds["static"]["ours"] != kinds["bf16"]["ours"]
        (counters,) = (line["counters"] for line in lines if "counters" in line)
        assert counters["inner_operations"] == 0
        assert set(counters["inner"]) <= {"send", "recv", "recv_anysource"}
        assert lines[-1] == {"left": True}
    assert [line.get("ours") for line in said[0]] == [line.get("ours") for line in said[1]]


def test_communication_hooks_get_gloos_losses(launcher: Launcher, tmp_path: Path) -> None:
    with Job(launcher, "hooks", 2, tmp_path, TIMEOUT_S=str(patience(30))) as job:
        said = [job.lines(rank) for rank in range(2)]
    for lines in said:
        hooks = {line["hook"]: line for line in lines if "hook" in line}
        assert len(hooks) >= 8
        for hook, line in hooks.items():
            assert line["ours"] == line["gloo"], hook
        assert next(line["counters"] for line in lines if "counters" in line)["inner_operations"] == 0


def test_four_ranks_add_in_the_order_of_ranks_and_subgroups_work(launcher: Launcher, tmp_path: Path) -> None:
    with Job(launcher, "mesh,hsdp,forget", 4, tmp_path) as job:
        said = [job.lines(rank) for rank in range(4)]
    for rank, lines in enumerate(said):
        assert lines[0]["weights"] == lines[0]["reference"], "not what one process gets that adds in rank order"
        dimensions = {line["dimension"]: line for line in lines if "dimension" in line}
        assert dimensions["a"]["ranks"] == [rank % 2, rank % 2 + 2]
        assert dimensions["a"]["total"] == 2 * (rank % 2) + 2
        assert dimensions["b"]["total"] == (1 if rank < 2 else 5)
        assert {line["kind"] for line in dimensions.values()} == {"ProcessGroup"}
        gloo, ours = (line for line in lines if "losses" in line)
        assert gloo["losses"] == ours["losses"]  # two replicas: a sum of two
        assert ours["counters"]["operations"] > 0
        assert ours["counters"]["inner"] == ours["shard"]["inner"] == {}, "Gloo carried data"
        assert {"all_gather_single", "reduce_scatter_single"} <= set(ours["shard"]["ours"])
        assert lines[-1] == {"forgot": True}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp_and_a_sharded_optimizer_get_gloos_losses_and_gloo_carries_nothing(
    launcher: Launcher, tmp_path: Path, size: int
) -> None:
    with Job(launcher, "fsdp", size, tmp_path) as job:
        said = [job.lines(rank) for rank in range(size)]
    for lines in said:
        gloo, ours = (line for line in lines if "losses" in line)
        if size == 2:
            assert ours["losses"] == gloo["losses"]  # a sum of two
        else:
            assert ours["losses"] == pytest.approx(gloo["losses"], rel=1e-5)  # Gloo adds in another order
        assert ours["counters"]["inner"] == {}, "Gloo carried data"
        made = ours["counters"]["ours"]
        assert {"all_gather_single", "reduce_scatter_single", "broadcast", "barrier"} <= set(made), made


@pytest.mark.slow(reason="imports DeepSpeed")
def test_deepspeeds_zero_follows_ddp_in_every_stage_and_gloo_carries_nothing(
    launcher: Launcher, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason='needs DeepSpeed: pip install "geartrain[deepspeed]"')
    with Job(launcher, "zero", 2, tmp_path) as job:
        said = [job.lines(rank) for rank in range(2)]
    for lines in said:
        stages = {line["stage"]: line for line in lines if "stage" in line}
        assert set(stages) == {1, 2, 3}
        for stage, line in stages.items():
            assert line["losses"] == pytest.approx(line["plain"], rel=1e-4), stage
            assert line["counters"]["inner"] == {}, f"Gloo carried data in stage {stage}"
            made = {name for name, n in line["counters"]["ours"].items() if n > line["before"]["ours"].get(name, 0)}
            assert ({"all_gather_single", "reduce_scatter_single"} if stage == 3 else {"allreduce"}) <= made, stage


def victims(job: Job, victim: int, size: int) -> list[list[dict[str, Any]]]:
    return [job.lines(rank) for rank in range(size) if rank != victim]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"find_unused_parameters": True}, id="unused", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_named_on_every_other_rank(
    launcher: Launcher, tmp_path: Path, options: dict[str, Any]
) -> None:
    with Job(launcher, "victim", 3, tmp_path, FATE="kill", VICTIM="2", DDP=json.dumps(options)) as job:
        for lines in victims(job, 2, 3):
            error = lines[1]
            assert "rank 2" in error["error"], error
            assert error["step"] == 3 and error["took_s"] < patience(10), error
            assert "destroyed_s" in lines[-1] and lines[-1]["destroyed_s"] < patience(5), lines
        assert launcher.wait(job.pids[2], 5) == -signal.SIGKILL


def test_a_stopped_worker_is_named_at_the_deadline(launcher: Launcher, tmp_path: Path) -> None:
    with Job(launcher, "victim", 3, tmp_path, FATE="stop", VICTIM="1", LIMIT_S="4") as job:
        for lines in victims(job, 1, 3):
            error = lines[1]
            assert "waiting for rank(s) 1 " in error["error"], error
            assert 3 < error["took_s"] < patience(20), error


def test_a_worker_that_disagrees_on_the_size_is_named(launcher: Launcher, tmp_path: Path) -> None:
    with Job(launcher, "victim", 3, tmp_path, FATE="size", VICTIM="1", LIMIT_S="30") as job:
        for lines in victims(job, 1, 3):
            assert "rank 1" in lines[1]["error"] and "disagree" in lines[1]["error"], lines


def test_the_ddp_example_runs_unchanged_on_both_backends_to_the_same_loss(launcher: Launcher, tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "allreduce_ddp.py"), "--steps", "5", "--width", "64"]
    said = {}
    for backend, variable in (("gloo", "0"), ("geartrain", "1")):
        (tmp_path / backend).mkdir()
        env = {"GEARTRAIN_ALLREDUCE": variable, "EXAMPLE": json.dumps(script)}
        with Job(launcher, "example", 2, tmp_path / backend, **env) as job:
            out, _ = job.out(0), job.out(1)
        assert "2 ranks" in out and "samples/s" in out
        assert backend == "gloo" or "geartrain," in out
        said[backend] = out.split("loss")[1].strip()
    assert said["gloo"] == said["geartrain"]


def test_the_diloco_example_learns(launcher: Launcher, tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "diloco.py"), "--outer", "10"]
    with Job(launcher, "example", 2, tmp_path, EXAMPLE=json.dumps(script)) as job:
        lines, _ = job.out(0).splitlines(), job.out(1)
    losses = [float(line.split("loss")[1]) for line in lines if line.startswith("round")]
    assert len(losses) == 10 and losses[-1] < losses[0] / 3, losses


class ReducerProcess:
    """A reducer that can be killed."""

    def __init__(self) -> None:
        text = "import time; from geartrain.collectives import Reducer; r = Reducer(); print(r.address, flush=True); "
        self.process = subprocess.Popen(
            [sys.executable, "-c", text + "time.sleep(600)"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> ReducerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("reducers", [0, 1])
def test_groups_that_are_destroyed_can_be_made_again_over_the_same_store(
    launcher: Launcher, tmp_path: Path, reducers: int
) -> None:
    with ReducerProcess() as reducer:
        env = {"GEARTRAIN_REDUCERS": reducer.address} if reducers else {}
        with Job(launcher, "again", 2, tmp_path, **env) as job:
            for rank in range(2):
                (line,) = job.lines(rank)
                assert line["sums"] == [2] * 6


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_from_the_same_step_without_a_lost_reducer(
    launcher: Launcher, tmp_path: Path, how: signal.Signals
) -> None:
    with ReducerProcess() as dies, ReducerProcess() as stays:
        env = {"GEARTRAIN_REDUCERS": f"{dies.address},{stays.address}", "REDUCER_PID": str(dies.process.pid)}
        env |= {"SIGNAL": str(int(how)), "GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS": "continue"}
        env |= {"GEARTRAIN_ALLREDUCE_SHARES": "0.2,0.2,0.3,0.3"}
        with Job(launcher, "outlives", 2, tmp_path, **env) as job:
            said = [job.lines(rank) for rank in range(2)]
        assert how == signal.SIGSTOP or dies.process.wait(patience(5)) == -signal.SIGKILL
    for (found,) in said:
        assert found["weights"] == found["reference"], "a step was lost, or done twice"
        assert found["lost_reducers"] == 1


def torchrun(ranks: int, script: str, *arguments: str, restarts: int = 0, **env: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "--max-restarts", str(restarts), script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_starts_a_job_again_that_lost_a_rank() -> None:
    with ReducerProcess() as reducer:
        out = torchrun(3, str(WORKER), "restart", restarts=1, GEARTRAIN_REDUCERS=reducer.address)
    lines = [json.loads(line) for line in re.findall(r"\{[^{}]*\}", out)]  # two ranks may print into one line
    assert sorted(line["rank"] for line in lines) == [0, 1, 2]
    assert all(line["life"] == "1" and line["epoch"] == 1 and line["operations"] >= 3 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_module_is_enough_under_torchrun(tmp_path: Path) -> None:
    script = ("-m", "geartrain_autoload", "examples/allreduce_ddp.py", "--steps", "5", "--width", "64")
    out = torchrun(2, *script, PYTHONPATH=str(site(tmp_path)))
    assert "geartrain, 2 ranks" in out


@pytest.mark.slow
def test_compiled_ddp_gets_the_same_weights(launcher: Launcher, tmp_path: Path) -> None:
    with Job(launcher, "compiled", 2, tmp_path) as job:
        for rank in range(2):
            (line,) = job.lines(rank)
            assert len(set(line["weights"])) == 1, line
