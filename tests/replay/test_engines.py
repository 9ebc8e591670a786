"""DDP, FSDP2 and pipelines train from one replay over their ranks: the same batches, the same losses, as one rank."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from engine_worker import EXAMPLES, NEEDED, Engines, Rank

import geartrain.tools.doctor as doctor
from geartrain.tools.testing import Hosts

torch = pytest.importorskip("torch")

STEPS, BATCH, EPISODES = 24, 64, 256
PIPELINES = ["pipeline_torch", "pipeline_deepspeed"]
#: `make test` has DeepSpeed's pipeline where its checkpoints are one with the replay's.
EACH_PIPELINE = [PIPELINES[0], pytest.param(PIPELINES[1], marks=pytest.mark.slow(reason="seconds of setting up"))]
# Sums in another order, over few steps: float32 keeps about four digits of a loss.
SAME = {"rtol": 2e-3}

# A job that weighs rows by its own errors, so that its batches tell whether rows, priorities and model came back.
SAVING = ["--prioritize", "--save-every", "8"]

Run = Callable[..., list[Rank]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs an example, once for all tests that look at it; no segment may be left of any."""
    engines, numbers = Engines(), itertools.count()
    prefix = f"test-engines-{os.getpid()}-{secrets.token_hex(2)}"

    @functools.cache
    def of(example: str, ranks: int, *arguments: str, lives: int = 1) -> list[Rank]:
        extra = NEEDED.get(example, "torch").partition(".")[0]
        if importlib.util.find_spec(extra) is None:
            pytest.skip(f'{example} needs pip install "geartrain[{extra}]"')
        name, where = f"{prefix}-{next(numbers)}", tmp_path_factory.mktemp(example)
        return engines.run(example, ranks, where, "--steps", str(STEPS), "--store", name, *arguments, lives=lives)

    yield of
    engines.close()
    left = list(Path("/dev/shm").glob(f"geartrain.{prefix}-*"))
    for segment in left:
        segment.unlink()
    assert not left, f"the examples left segments behind: {left}"


@pytest.fixture
def alone(run: Run) -> Rank:
    """One rank, by plain DDP: what all others must follow."""
    (rank,) = run("ddp", 1)
    return rank


@pytest.fixture(scope="module")
def unkilled(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Rank]]:
    """Two ranks that save and are never killed, with so many shards: what those that are must go on as."""

    @functools.cache
    def of(shards: int) -> list[Rank]:
        directory = tmp_path_factory.mktemp("unkilled")
        return run("ddp", 2, "--shards", str(shards), *SAVING, "--directory", str(directory))

    return of


def rows_of(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    return list(zip(batch["draw"], batch["shard"], batch["row"], strict=True))


def global_batches(replicas: list[Rank], shards: int) -> list[list[int]]:
    """Every global batch, put together from the replicas' parts: the rows' numbers, shard after shard."""
    whole = []
    for parts in zip(*(rank.batches for rank in replicas), strict=True):
        drawn = sorted(row for part in parts for row in rows_of(part))
        assert [draw for draw, *_ in drawn] == list(range(BATCH)), "every draw went to one replica"
        whole.append([shard * (EPISODES // shards) + row for _, shard, row in drawn])
    return whole


def follow(alone: Rank, replicas: list[Rank], shards: int) -> None:
    """Asserts that ranks that have losses drew the batches of one rank, and learned as it did."""
    assert global_batches(replicas, shards) == global_batches([alone], 1)
    np.testing.assert_allclose(replicas[-1].losses, alone.losses, **SAME)


def test_one_rank_learns(alone: Rank) -> None:
    assert len(alone.losses) == STEPS
    assert alone.losses[-1] < alone.losses[0] / 8


@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_follow_the_curve_of_one(run: Run, alone: Rank, shards: int) -> None:
    follow(alone, run("ddp", 2, "--shards", str(shards)), shards)


@pytest.mark.parametrize("engine", ["fsdp2", *EACH_PIPELINE])
def test_two_ranks_of_other_engines_follow_the_curve_of_one(run: Run, alone: Rank, engine: str) -> None:
    ranks = run(engine, 2, "--shards", "2")
    follow(alone, ranks[-1:] if engine in PIPELINES else ranks, 2)


def test_a_shard_that_is_shared_is_read_in_place(run: Run) -> None:
    for rank in run("ddp", 2, "--shards", "1"):
        assert rank.stats["received_bytes"] == 0
        assert rank.stats["local_bytes"] == rank.stats["bytes"]


@pytest.mark.parametrize(
    "stage", [*(pytest.param(n, marks=pytest.mark.slow(reason="one stage is enough")) for n in (1, 2)), 3]
)
def test_zero_follows_the_curve_of_one_rank(run: Run, alone: Rank, stage: int) -> None:
    ranks = run("zero_deepspeed", 2, "--shards", "2", "--stage", str(stage))
    assert global_batches(ranks, 2) == global_batches([alone], 1)
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, alone.losses, **SAME)


def test_tensor_parallel_ranks_of_megatron_core_have_the_same_rows(run: Run, alone: Rank) -> None:
    ranks = run("tensor_megatron", 4, "--shards", "2")
    for first, second in (ranks[:2], ranks[2:]):
        assert first.batches == second.batches, "ranks that share a copy of the model"
    assert global_batches(ranks[::2], 2) == global_batches([alone], 1)
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, alone.losses, **SAME)


@pytest.mark.parametrize("engine", EACH_PIPELINE)
def test_head_and_tail_hold_the_same_rows_and_each_only_its_own_fields(
    run: Run, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    expert = importlib.import_module("memory_task").expert
    head, tail = run(engine, 2, "--shards", "2")
    assert len(head.batches) == len(tail.batches) == STEPS
    for front, back in zip(head.batches, tail.batches, strict=True):
        assert list(front["fields"]) == ["obs"]
        assert list(back["fields"]) == ["action"]
        for book in ("draw", "shard", "row", "start", "mask"):
            assert front[book] == back[book], f"{book} differs between the pipeline's ends"
        # The bytes say so too: the tail's actions are the expert's for the head's observations.
        obs, mask = np.array(front["fields"]["obs"]), np.array(front["mask"])
        both = mask[:, 1:] & mask[:, :-1]
        wanted = expert(obs[:, 1:], obs[:, :-1])[both]
        np.testing.assert_allclose(np.array(back["fields"]["action"])[:, 1:][both], wanted, atol=1e-5)


@pytest.mark.parametrize("engine", EACH_PIPELINE)
def test_two_replicas_of_two_stages_share_each_batch(run: Run, alone: Rank, engine: str) -> None:
    ranks = run(engine, 4, "--shards", "2")
    heads, tails = ranks[:2], ranks[2:]
    assert global_batches(tails, 2) == global_batches([alone], 1)
    for head, tail in zip(heads, tails, strict=True):
        assert [rows_of(batch) for batch in head.batches] == [rows_of(batch) for batch in tail.batches]
    np.testing.assert_allclose(tails[0].losses, alone.losses, **SAME)


def test_a_killed_job_goes_on_with_the_batches_the_uninterrupted_one_would_have_drawn(
    run: Run, unkilled: Callable[[int], list[Rank]], tmp_path: Path
) -> None:
    whole, plain = unkilled(2), run("ddp", 2, "--shards", "2")
    second = run("ddp", 2, "--shards", "2", *SAVING, "--directory", str(tmp_path), "--crash-at", "13", lives=2)
    for before, after, unweighed in zip(whole, second, plain, strict=True):
        assert [rows_of(b) for b in after.batches] == [rows_of(b) for b in before.batches[8:]]
        assert after.losses == before.losses
        assert all(rows_of(a) != rows_of(b) for a, b in zip(before.batches[8:], unweighed.batches[8:], strict=True))
    said = (second[0].directory / "0.txt").read_text()
    assert f"going on from step 8: {EPISODES // 2} of {EPISODES // 2} rows were still in memory" in said


@pytest.mark.parametrize(
    "how",
    [
        ("pipeline_deepspeed",),
        *(
            pytest.param(("zero_deepspeed", "--stage", n), marks=pytest.mark.slow(reason="one engine is enough"))
            for n in "23"
        ),
    ],
    ids=" ".join,
)
def test_checkpoints_of_deepspeed_and_the_replay_are_one_unit(run: Run, how: tuple[str, ...], tmp_path: Path) -> None:
    """A job that is killed goes on with the model, the optimizer, the priorities and the batches of its last save."""
    example, *options = how
    job = [example, 2, *options, "--shards", "2", *SAVING]
    whole = run(*job, "--directory", str(tmp_path / "whole"))
    second = run(*job, "--directory", str(tmp_path / "killed"), "--crash-at", "13", lives=2)
    for before, after in zip(whole, second, strict=True):
        assert [rows_of(b) for b in after.batches] == [rows_of(b) for b in before.batches[8:]]
        assert len(after.losses) == STEPS and after.losses == before.losses
    said = (second[0].directory / "0.txt").read_text()
    assert f"going on from step 8: {EPISODES // 2} of {EPISODES // 2} rows were still in memory" in said
    unweighed = run("ddp", 2, "--shards", "2")  # which draws what this engine draws
    assert rows_of(unweighed[0].batches[-1]) != rows_of(whole[0].batches[-1]), "priorities took part"


def test_doctor_tells_what_a_job_of_many_ranks_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {finding.what: finding for finding in doctor.examine()}
    ranks = found["one replay over many ranks"]
    assert ranks.state == "ok" and torch.__version__ in ranks.because
    deepspeed = found["DeepSpeed (pipelines, ZeRO)"]
    assert (deepspeed.state == "ok") == (importlib.util.find_spec("deepspeed") is not None)
    assert deepspeed.remedy == ("" if deepspeed.state == "ok" else "pip install 'geartrain[deepspeed]'")
    hosts, reason = found["emulated hosts (bench, tests)"], Hosts.viable()
    assert (hosts.state == "ok") == (reason is None) and hosts.because == (reason or hosts.because)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    (without,) = (finding for finding in doctor.examine() if finding.what == "one replay over many ranks")
    assert without.state == "missing" and "built without Gloo" in without.because


# torchrun keeps one key-value store for all lives of a job, where ranks find addresses of dead ones (docs/ranks.md).
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(example: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLES / f"{example}.py")]


@pytest.mark.slow(reason="torchrun imports torch five times")
def test_torchrun_restarts_a_killed_job_and_leaves_nothing_behind(
    unkilled: Callable[[int], list[Rank]], tmp_path: Path
) -> None:
    name = f"test-torchrun-{os.getpid()}-{secrets.token_hex(2)}"
    options = ["--steps", str(STEPS), "--directory", "saved", *SAVING, "--crash-at", "13", "--store", name]
    start = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*torchrun("ddp", *start), *options],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **NEW_STORE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(100),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "going on from step 8" in done.stdout
    saved = torch.load(tmp_path / "saved" / f"step-{STEPS:08d}" / "model.pt")
    assert saved["losses"] == unkilled(1)[0].losses  # to the last bit: of the same rows, then
    assert not list(Path("/dev/shm").glob(f"geartrain.{name}*"))
    commands = [path for path in Path("/proc").glob("[0-9]*/cmdline") if name.encode() in read_if_there(path)]
    assert not commands, "a process of the job is still there"


def read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # a process that has ended meanwhile
        return b""


@pytest.mark.slow(reason="torchrun on two hosts, each on half of a core")
@pytest.mark.parametrize("engine", ["ddp", *PIPELINES])
def test_torchrun_trains_over_two_hosts(
    alone: Rank, unkilled: Callable[[int], list[Rank]], engine: str, tmp_path: Path
) -> None:
    if (reason := Hosts.viable()) is not None:
        pytest.skip(reason)
    if engine == "pipeline_deepspeed":
        pytest.importorskip("deepspeed", reason='needs DeepSpeed: pip install "geartrain[deepspeed]"')
    start = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d"]
    start.append("--rdzv-endpoint=host0:29400")
    options = ["--steps", str(STEPS)]
    if engine == "ddp":  # and one host loses its rank: the shards of both outlive it
        options += ["--directory", str(tmp_path), *SAVING, "--crash-at", "13"]
    with Hosts(2, rate_mbit=200) as hosts:
        agents = [
            hosts.popen(
                i,
                [*torchrun(engine, *start, f"--local-addr={hosts.address(i)}"), *options],
                env=NEW_STORE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(2)
        ]
        said = "".join(agent.communicate(timeout=patience(100))[0] for agent in agents)
        assert not any(agent.returncode for agent in agents), said
    if engine == "ddp":
        assert f"going on from step 8: {EPISODES // 2} of {EPISODES // 2} rows were still in memory" in said
        saved = torch.load(tmp_path / f"step-{STEPS:08d}" / "model.pt")
        assert saved["losses"] == unkilled(2)[0].losses
        return
    (found,) = re.findall(r"loss (\d\.\d+) -> (\d\.\d+) in", said)
    np.testing.assert_allclose([float(loss) for loss in found], [alone.losses[0], alone.losses[-1]], rtol=5e-3)
