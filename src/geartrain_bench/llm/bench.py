"""Rows of answers that pass through tasks, as RL of language models has them, beside TransferQueue.

| part | geartrain | compared with |
|---|---|---|
| put | `claim.put` of 256 answers in rows of 16 and of 1; appended answer by answer | TransferQueue's `kv_batch_put` |
| packed fetch | `gt.fetch` of all fields, with `cu_seqlens` | `kv_batch_get` |
| a later field | `claim.put` and `Store.put` of a float32 a token | `Store.write` of padded rows; `kv_batch_put` |
| one row | `row.put`, `insert` | `Store.row` of a padded row; `kv_batch_put` |
| claims | 16 of 8,192 due rows, 16 processes | `get_meta` of one client |
| wake | a put until a process that waits for a claim runs, a core each | a byte through a named pipe |
| the example | loader, tasks and learner of the GRPO example in six processes, 16 answers of 20 tokens a row | |
| memory | bytes of a full region over those of its values, four distributions of lengths | |
| cold gather | `gt.fetch` of random rows of 512 MB, by CPU time on one thread | one copy of as many bytes |

Answers have 200 to 2,048 tokens and four fields of 13 bytes a token: int32, float32, bool, int32. The floor of a call
is one warm `numpy.copyto` of the same bytes. CPU time is that of all threads of the process. That of TransferQueue is
of the client and its actors, a controller and two units, without Ray's own daemons. TransferQueue runs in an
environment of its own (`--baseline-python transferqueue=PYTHON`), its laps are interleaved with ours, and it gets the
same bytes: what its `kv_batch_get` returns has the hash of ours.

What a put is given is made before the clock starts: arrays here, nested tensors there. So is the claim that is put; the
part "claims" times it.

Memory: rows are inserted until one finds no room, two percent of them are removed at random, and so on. Each moment
without room is a sample; the first hundred are left out. Growing rows: 32 at a time get appends of up to 256
tokens to their answers in turn, and are put when all answers are whole. The oldest finished rows go where an append or
a put finds no room. A region has 2,048 rows of mean length, and at most 2 GB, of growing
rows 256 MB.

The floor of a cold gather is one copy of as many bytes from one place of shared memory. "A memcpy a row" copies pieces
of a row's mean size from random places of it, in C.

Threats to validity: the wake and the example depend on who else uses the cores. TransferQueue's one client has no
competitor in `get_meta`, which favours it. Its later field overwrites the one of the lap before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
import geartrain_bench.llm.calls as calls
import geartrain_bench.llm.memory as memory
import geartrain_bench.llm.processes as processes
import geartrain_bench.llm.report as llm_report
from geartrain_bench.harness.child_process import BaselineError
from geartrain_bench.harness.timing import BenchResult
from geartrain_bench.llm.run import FULL, INSTALL, QUICK, Peer, Plan, Run
from geartrain_bench.llm.samples import DISTRIBUTIONS, USUAL, Lengths

BASELINE = "transferqueue"
GATHER_BYTES = (1_200, 4_800, 12_000, 48_000)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    `baselines` maps "transferqueue" to the interpreter of an environment that has it;
    GEARTRAIN_BASELINE_PYTHON_TRANSFERQUEUE does the same.
    """
    wanted = {**report.parse_baselines([]), **(baselines or {})}
    result = run(QUICK if quick else FULL, wanted, quick=quick)
    llm_report.show(result, json_path, plot_path)
    return result


def run(plan: Plan, baselines: dict[str, str], *, quick: bool = False) -> BenchResult:
    """All parts."""
    began_s = time.monotonic()
    known = {name: python for name, python in baselines.items() if name == BASELINE}
    result = harness.new_result("llm", quick=quick, baselines=known, packages=("numpy", "torch"))
    harness.note_missing(result, baselines, (BASELINE,))
    if not known:
        result.baselines_missing[BASELINE] += f"; install it with: {INSTALL}"
    one = Run(plan, result)
    with harness.one_torch_thread():
        with _peer(one, known.get(BASELINE)) as started:
            # Ray takes a while to start; what the memory holds does not depend on who else uses the processor.
            _memory(one)
            one.peer = started()
            for name, part in _beside_peer(one).items():
                if one.begins(name):
                    part()
            if one.peer is not None:
                one.peer.close()
                one.peer = None
        for name, part in _alone(one).items():
            if one.begins(name):
                part()
    return harness.finish(result, began_s)


@contextlib.contextmanager
def _peer(one: Run, python: str | None) -> Iterator[Callable[[], Peer | None]]:
    """A function that waits until the peer is set up, which begins now; None without one."""
    with ThreadPoolExecutor(1) as pool:
        starting: Future[Peer] | None = None if python is None else pool.submit(Peer, python, one.answers)

        def started() -> Peer | None:
            if starting is None:
                return None
            try:
                peer = starting.result()
            except BaselineError as error:
                one.lose_peer(f"{error}; install it with: {INSTALL}")
                return None
            one.result.versions.update(peer.versions)
            return peer

        try:
            yield started
        finally:
            if one.peer is not None:
                one.peer.close()


def _memory(one: Run) -> None:
    for per_row in one.plan.per_row:
        for lengths in DISTRIBUTIONS:
            case = f"memory, {lengths.name}, rows of {per_row}"
            if one.begins(case):
                memory.memory(one, lengths, per_row)
            if one.begins(f"{case}, growing"):
                memory.growing_memory(one, lengths, per_row)


def _beside_peer(one: Run) -> dict[str, Callable[[], None]]:
    parts: dict[str, Callable[[], None]] = {}
    for per_row in one.plan.per_row:
        for name, part in (
            ("put", calls.put),
            ("packed fetch", calls.packed_fetch),
            ("a later field", calls.later_field),
        ):
            parts[f"{name}, {calls.rows_of(per_row)}"] = lambda part=part, per_row=per_row: part(one, per_row)  # type: ignore[misc]
    return {**parts, "one row": lambda: calls.one_row(one), "claims": lambda: processes.claims(one)}


def _alone(one: Run) -> dict[str, Callable[[], None]]:
    parts: dict[str, Callable[[], None]] = {
        "wakes": lambda: processes.wakes(one),
        "the example, each answer appended": lambda: processes.example(one, appends=True),
        "the example, a put a claim": lambda: processes.example(one, appends=False),
    }
    for lengths, per_row in ((USUAL, 16), (USUAL, 1), (Lengths(20, 400, 210.0), 1)):
        parts[f"cold gather, {lengths.name}, rows of {per_row}"] = (
            lambda lengths=lengths, per_row=per_row: memory.gather(one, lengths, per_row)  # type: ignore[misc]
        )
    for size in GATHER_BYTES:
        parts[f"cold gather, {size} bytes"] = lambda size=size: memory.gather_of_size(one, size)  # type: ignore[misc]
    return parts


__all__ = ["BASELINE", "main", "run"]

if __name__ == "__main__":
    report.main_of("llm", main)
