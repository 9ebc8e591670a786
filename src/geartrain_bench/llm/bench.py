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
| remote | claim and put of rows of 16 answers over a link of 1 Gbit/s | a bare socket; storage units of TransferQueue |
| ranks over links | batches of four learners, each on a host of its own, whose rows have 16 answers | one host |
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

Ranks over links: hosts are network namespaces, joined by links of 200 Mbit/s. A learner sleeps for each token that it
has; its floor is this sleep. Rows are in its own host's store, and move where that balances tokens.

Remote: the two hosts are network namespaces. The worker puts ready values from eight threads, so that one claims while
another's row crosses the link. The server's CPU time is that of its whole process, the transport included.

Threats to validity: the wake and the example depend on who else uses the cores. TransferQueue's one client has no
competitor in `get_meta`, which favours it. Its later field overwrites the one of the lap before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
import geartrain_bench.llm.calls as calls
import geartrain_bench.llm.links as links
import geartrain_bench.llm.memory as memory
import geartrain_bench.llm.processes as processes
import geartrain_bench.llm.remote as remote
import geartrain_bench.llm.report as llm_report
from geartrain.errors import ArgumentError
from geartrain_bench.harness.child_process import BaselineError
from geartrain_bench.harness.timing import BenchResult
from geartrain_bench.llm.run import FULL, INSTALL, QUICK, Peer, Plan, Run
from geartrain_bench.llm.samples import DISTRIBUTIONS, USUAL, Lengths

BASELINE = "transferqueue"
#: Parts of the benchmark by name.
Parts = dict[str, Callable[[], None]]
#: Of a field and row.
GATHER_BYTES = (1_200, 4_800, 12_000, 48_000)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    case: Sequence[str] = (),
) -> BenchResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    `baselines` maps "transferqueue" to the interpreter of an environment that has it;
    GEARTRAIN_BASELINE_PYTHON_TRANSFERQUEUE does the same. `case` are texts: only parts with one of them in their name
    are measured.

    Raises:
        ArgumentError: no part has one of the texts in its name.
    """
    wanted = {**report.parse_baselines([]), **(baselines or {})}
    result = run(QUICK if quick else FULL, wanted, quick=quick, only=case)
    llm_report.show(result, json_path, plot_path)
    return result


def run(plan: Plan, baselines: dict[str, str], *, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
    """All parts, or those with one of the texts `only` in their name."""
    began_s = time.monotonic()
    known = {name: python for name, python in baselines.items() if name == BASELINE}
    result = harness.new_result("llm", quick=quick, baselines=known, packages=("numpy", "torch"))
    harness.note_missing(result, baselines, (BASELINE,))
    if not known:
        result.baselines_missing[BASELINE] += f"; install it with: {INSTALL}"
    one = Run(plan, result)
    before, beside, after = (
        {name: part for name, part in parts.items() if not only or any(text in name for text in only)}
        for parts in (_memory(one), _beside_peer(one), _alone(one))
    )
    if only and not (before or beside or after):
        names = [name for parts in (_memory(one), _beside_peer(one), _alone(one)) for name in parts]
        raise ArgumentError(f"no part has {' or '.join(map(repr, only))} in its name; parts are {'; '.join(names)}")
    result.command += "".join(f' --case "{text}"' for text in only)
    with harness.one_torch_thread():
        with _peer(one, known.get(BASELINE) if beside else None) as started:
            # Ray takes a while to start; what the memory holds does not depend on who else uses the processor.
            _measure(one, before)
            one.peer = started()
            _measure(one, beside)
            if one.peer is not None:
                one.peer.close()
                one.peer = None
        _measure(one, after)
    return harness.finish(result, began_s)


def _measure(one: Run, parts: Parts) -> None:
    for name, part in parts.items():
        if one.begins(name):
            part()


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


def _memory(one: Run) -> Parts:
    parts: Parts = {}
    for per_row in one.plan.per_row:
        for lengths in DISTRIBUTIONS:
            name = f"memory, {lengths.name}, rows of {per_row}"
            for more, measure in (("", memory.memory), (", growing", memory.growing_memory)):
                parts[name + more] = partial(measure, one, lengths, per_row)
    return parts


def _beside_peer(one: Run) -> Parts:
    parts: Parts = {}
    measured = {"put": calls.put, "packed fetch": calls.packed_fetch, "a later field": calls.later_field}
    for per_row in one.plan.per_row:
        for name, part in measured.items():
            parts[f"{name}, {calls.rows_of(per_row)}"] = partial(part, one, per_row)
    alone = {"one row": calls.one_row, "claims": processes.claims, "remote": remote.remote}
    return {**parts, **{name: partial(part, one) for name, part in alone.items()}}


def _alone(one: Run) -> Parts:
    parts: Parts = {
        "wakes": partial(processes.wakes, one),
        "the example, each answer appended": partial(processes.example, one, appends=True),
        "the example, a put a claim": partial(processes.example, one, appends=False),
        "ranks over links": partial(links.links, one),
    }
    for lengths, per_row in ((USUAL, 16), (USUAL, 1), (Lengths(20, 400, 210.0), 1)):
        parts[f"cold gather, {lengths.name}, rows of {per_row}"] = partial(memory.gather, one, lengths, per_row)
    for size in GATHER_BYTES:
        parts[f"cold gather, {size} bytes a field and row"] = partial(memory.gather_of_size, one, size)
    return parts


__all__ = ["BASELINE", "main", "run"]

if __name__ == "__main__":
    report.main_of("llm", main)
