"""Performance model of distributed replay: bytes, times and the bottleneck of a cluster.

A batch has B rows of r bytes. They are drawn from the shards of W hosts. Each of the D = W x G ranks gets B / D rows.
Every rank does these stages for each batch, one after the other on the replay's prefetch thread:

| stage | time |
|---|---|
| gather | one all-gather, of ceil(log8 D) rounds where D is above 32: the ranks' steps and the shards' totals |
| choose | a target for each of B draws, a tree descent for each of the B / W draws of the rank's own shard |
| assign | `geartrain.replay.distributed.assignment.assign` itself, run here on such draws, with that many ranks |
| fetch | B / D rows at the rate of a copy, or of the host's memory shared by its G ranks |
| exchange | all-to-all: the rows of the host that sends or receives most, over its link or through the transport |

The stages overlap with training, so a step takes the longer of the two. The rows that move depend on the assignment:

    local_first   each host trains on its own rows while it has any. Draws per host are multinomial. With equal shards
                  a host's draws are X ~ Binomial(B, 1 / W), and W E[max(0, X - B / W)] rows move in all, about
                  sqrt(B (W - 1) / (2 pi)) of them
    ordered       rank i trains on slice i: B (W - 1) / W rows move
    central       one host has all rows: B (W - 1) / W rows leave through its one link

The model leaves out:

- other traffic on the links, and stragglers
- priority updates, which are sent to the rows' hosts and need another gathering of the totals
- strategies that draw without replacement (fewer rows move) or stratified (hardly any rows move)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from geartrain.core.arguments import check_choice, check_real, shown
from geartrain.errors import ArgumentError
from geartrain.ranks.rank_collectives import DIRECT_RANKS, RADIX
from geartrain.replay.distributed.assignment import Replica, assign
from geartrain.replay.distributed.messages import rank_status
from geartrain.tools.plan.machine import Constants, median_s

Arm = Literal["local_first", "ordered", "central"]
ARMS: tuple[Arm, ...] = get_args(Arm)
#: A rank's record in the all-gather that begins a batch: geartrain/replay/distributed/messages.py.
STATUS_BYTES = rank_status(1).itemsize
SIMULATED_BATCHES = 4000


#: Least and most of a cluster: a prediction draws batches and assigns their rows, as the ranks would.
_RANGES: dict[str, tuple[int, int]] = {
    "hosts": (1, 1024),
    "gpus": (1, 1024),
    "rows": (1, 10**15),
    "batch": (1, 2**24),
    "row_bytes": (1, 10**15),
    "step_ms": (0, 10**9),
}


@dataclass(frozen=True)
class Cluster:
    """Hosts, and a batch for them.

    Attributes:
        hosts, gpus: hosts, and ranks that read data on each (the data-parallel replicas; a pipeline's stages count
            once, for its first stage).
        rows, row_bytes: of all shards together.
        batch: rows of the global batch, a multiple of the ranks.
        link_gbit: of each host's link, each way.
        step_ms: time of a training step; 0 for a consumer that does nothing.
        shares: the probability that a draw falls into each host's shard; equal by default.
        memory_gb: of each host; None where it is unknown.
        one_machine: all hosts are network namespaces of this machine, and share its cores.
    """

    hosts: int
    gpus: int
    rows: float
    batch: int
    row_bytes: float
    link_gbit: float
    step_ms: float = 0.0
    shares: tuple[float, ...] | None = None
    memory_gb: float | None = None
    one_machine: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            check_real(name, getattr(self, name), least, most)
        check_real("link_gbit", self.link_gbit, 1e-9)
        if self.batch % self.ranks:
            raise ArgumentError(
                f"a batch of {self.batch} rows cannot be divided evenly over {self.ranks} ranks: "
                f"{-(-self.batch // self.ranks) * self.ranks} can"
            )
        if self.shares is not None and (
            len(self.shares) != self.hosts or min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6
        ):
            raise ArgumentError(f"shares are {self.hosts} numbers that add up to 1, found {list(self.shares)}")

    @property
    def ranks(self) -> int:
        """Data-parallel replicas."""
        return self.hosts * self.gpus

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The chance of each host's shard."""
        return self.shares or (1 / self.hosts,) * self.hosts


@dataclass(frozen=True)
class Prediction:
    """Prediction of one configuration; see the module. Times in milliseconds and bytes are of one batch."""

    arm: Arm
    gather_ms: float
    choose_ms: float
    assign_ms: float
    fetch_ms: float
    exchange_ms: float
    moved_rows: float
    moved_bytes: float
    busiest_bytes: float
    status_bytes: float
    batch_ms: float
    gb_per_s_rank: float
    samples_per_s: float
    bound_by: str


def surplus_rows(batch: int, shares: Sequence[float]) -> float:
    """Rows that `local_first` moves per batch, on average: draws of a shard beyond its host's part of the batch.

    Draws of shard i are X ~ Binomial(B, p_i). With p = 1 / W the mean of max(0, X - B / W) is v (1 - p) P(X = v) for
    v = B / W + 1, exactly (de Moivre); otherwise the terms are added up.
    """
    hosts = len(shares)
    room = batch / hosts
    found: dict[float, float] = {}
    for p in shares:
        if p not in found:
            if room.is_integer() and math.isclose(p * hosts, 1.0):
                v = int(room) + 1
                found[p] = v * (1 - p) * _binomial(batch, v, p) if v <= batch else 0.0
            else:
                found[p] = sum((k - room) * _binomial(batch, k, p) for k in range(math.ceil(room), batch + 1))
    return sum(found[p] for p in shares)


def _binomial(n: int, k: int, p: float) -> float:
    if p in (0.0, 1.0):
        return float(k == n * p)
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    return math.exp(log)


def moved_rows(cluster: Cluster, arm: Arm) -> tuple[float, float]:
    """Rows that cross the network per batch, on average: in all, and through the busiest host's link, one way."""
    hosts, batch = cluster.hosts, cluster.batch
    room = batch / hosts
    if hosts == 1:
        return 0.0, 0.0
    if arm == "central":
        return batch - room, batch - room
    random = np.random.default_rng(0)
    if arm == "ordered":
        # Whose rows each host's slice holds: the part on the diagonal stays.
        batches = max(50, min(SIMULATED_BATCHES, 4_000_000 // hosts**2))
        slices = random.multinomial(batch // hosts, cluster.probabilities, (batches, hosts))
        stay = np.einsum("bii->bi", slices)
        busiest = np.maximum(slices.sum(axis=1) - stay, slices.sum(axis=2) - stay).max(axis=1)
        return float(room * (1 - np.array(cluster.probabilities)).sum()), float(busiest.mean())
    beyond = random.multinomial(batch, cluster.probabilities, SIMULATED_BATCHES) - room
    return surplus_rows(batch, cluster.probabilities), float(np.abs(beyond).max(axis=1).mean())


def _rounds(ranks: int) -> int:
    """Rounds of the all-gather that begins a batch."""
    if ranks <= DIRECT_RANKS:
        return min(1, ranks - 1)
    rounds, reached = 0, 1
    while reached < ranks:
        rounds, reached = rounds + 1, reached * RADIX
    return rounds


def predict(cluster: Cluster, arm: Arm, constants: Constants) -> Prediction:
    """Predicts the times and bytes of a batch. Raises `ArgumentError` for an unknown arm."""
    check_choice("arm", arm, ARMS)
    hosts, ranks, batch, r = cluster.hosts, cluster.ranks, cluster.batch, cluster.row_bytes
    per_rank = batch / ranks
    # Ranks that have to take turns on the machine's cores.
    busy = cluster.ranks if cluster.one_machine else cluster.gpus
    turns = max(1.0, busy / constants.cores)
    moved, busiest = moved_rows(cluster, arm)

    rounds = _rounds(ranks)
    gather_s = rounds * constants.round_us * 1e-6 * turns
    # In the central arm the one shard's host finds all rows, and its ranks read what the others train on.
    found, read = (batch, batch / cluster.gpus) if arm == "central" else (batch / hosts, per_rank)
    shard_rows = cluster.rows if arm == "central" else cluster.rows / hosts
    choose_s = turns * (batch * constants.target_ns + found * constants.descent_at_ns(shard_rows)) * 1e-9
    choose_s += turns * constants.batch_us * 1e-6
    assign_s = turns * _assign_s(hosts, cluster.gpus, batch, arm) if ranks > 1 else 0.0

    threads = max(1.0, min(constants.threads, constants.cores / busy))
    copy = min(constants.copy_gb_per_s * threads, constants.host_copy_gb_per_s / busy) * 1e9
    fetch_s = read * (r / copy + turns * constants.row_ns * 1e-9)

    link = cluster.link_gbit / 8 * 1e9 * constants.link_share
    through = min(link, constants.tcp_gb_per_s * 1e9 * cluster.gpus / turns)
    exchange_s = (busiest * r / through + constants.round_us * 1e-6 * turns) if hosts > 1 else 0.0

    make_s = gather_s + choose_s + assign_s + fetch_s + exchange_s
    step_s = cluster.step_ms / 1e3
    batch_s = max(make_s, step_s)
    stages = {
        "training": step_s if step_s >= make_s else 0.0,
        "gather": gather_s,
        "selection": choose_s,
        "assignment": assign_s,
        "copying": fetch_s,
        "network" if link <= through else "transport": exchange_s,
    }
    bound_by = "training" if step_s >= make_s else max(stages, key=lambda name: stages[name])
    return Prediction(
        arm=arm,
        gather_ms=gather_s * 1e3,
        choose_ms=choose_s * 1e3,
        assign_ms=assign_s * 1e3,
        fetch_ms=fetch_s * 1e3,
        exchange_ms=exchange_s * 1e3,
        moved_rows=moved,
        moved_bytes=moved * r,
        busiest_bytes=busiest * r,
        status_bytes=float((ranks - 1) * STATUS_BYTES),
        batch_ms=batch_s * 1e3,
        gb_per_s_rank=per_rank * r / batch_s / 1e9,
        samples_per_s=batch / batch_s,
        bound_by=bound_by,
    )


@cache
def _assign_s(hosts: int, gpus: int, batch: int, arm: Arm) -> float:
    """Processor time of the assignment on every rank, however busy this machine is: the real code, for so many."""
    shards = 1 if arm == "central" else hosts
    readers = [
        Replica((rank,), (frozenset({rank // gpus}) if rank // gpus < shards else frozenset(),))
        for rank in range(hosts * gpus)
    ]
    servers = [list(range(host * gpus, (host + 1) * gpus)) for host in range(shards)]
    draws = np.random.default_rng(0).integers(0, shards, batch)
    how: Literal["local_first", "ordered"] = "ordered" if arm == "ordered" else "local_first"
    assign(draws, readers, servers, how)
    return median_s(lambda: assign(draws, readers, servers, how), 5, clock=time.thread_time)


# --- against measurements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """A prediction and its measurement."""

    case: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else math.inf


#: What `check` reads of a case, and the type of each.
_OF_A_CASE: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("arm", "strategy", "case"), str),
    **dict.fromkeys(("hosts", "ranks", "batch"), int),
    **dict.fromkeys(
        ("rows", "row_bytes", "link_gbit", "train_ms", "moved_bytes", "median_samples_per_s"), (int, float)
    ),
}


def _check_case(number: int, case: Any) -> None:
    if not isinstance(case, dict):
        raise ArgumentError(f"case {number} of the result is no JSON object")
    for name, kind in _OF_A_CASE.items():
        value = case.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is not str and not 0 <= case[name] <= 1e15):
            raise ArgumentError(f"case {number} of the result: {name} is {shown(case.get(name, 'missing'))}")
    if case["hosts"] < 1:
        raise ArgumentError(f"case {number} of the result: hosts is {case['hosts']}")


def check(result: Mapping[str, Any], constants: Constants | None = None) -> list[Checked]:
    """Predictions for the cases of a `geartrain bench ranks` result, each with its measurement.

    The constants are those that the bench measured in the same run, unless others are given. Cases of strategies
    outside the model (ordered ones) are left out.

    Raises:
        ArgumentError: not such a result.
    """
    if result.get("bench") != "ranks" or not isinstance(result.get("cases"), list):
        raise ArgumentError("not a result of `geartrain bench ranks --json FILE`")
    if constants is None:
        if not isinstance(result.get("constants"), dict):
            raise ArgumentError("the result holds no constants; give those of another run")
        constants = Constants.from_json(result["constants"])
    constants = replace(constants, link_share=1.0)  # the bench measures its links by their payload, without headers
    checked = []
    for number, case in enumerate(result["cases"]):
        _check_case(number, case)
        if case["arm"] not in ARMS or case["strategy"] not in ("prioritized", "uniform"):
            continue
        found = predict(
            Cluster(
                hosts=case["hosts"],
                gpus=case["ranks"] // case["hosts"],
                rows=case["rows"],
                batch=case["batch"],
                row_bytes=case["row_bytes"],
                link_gbit=case["link_gbit"],
                step_ms=case["train_ms"],
                one_machine=True,
            ),
            case["arm"],
            constants,
        )
        name = case["case"]
        if case["hosts"] > 1:
            checked.append(Checked(name, "moved", "MB", found.moved_bytes / 1e6, case["moved_bytes"] / 1e6))
        checked.append(Checked(name, "samples", "1/s", found.samples_per_s, case["median_samples_per_s"]))
    return checked
