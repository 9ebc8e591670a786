"""A baseline in an environment of its own, timed on request: runs with that environment's Python, without geartrain.

Reads one JSON object a line from stdin and answers each with one on stdout (baselines.py is the other end):

    {"do": "setup", "baseline": "torchrl", "rows": 8000, "fields": {"x": [[100, 256], "float32"]}}
        -> {"versions": {...}, "rows": 8000}
    {"do": "threads", "n": 2}                          -> {"n": 2}; fewer where the baseline has no threads
    {"do": "sample", "batch": 32, "calls": 4}          -> {"seconds": [per call], "cpu_seconds": ..., "disturbed": ...}
    {"do": "insert", "batch": 32, "calls": 4}          -> the same

With "kind": "priorities" the baseline stores priorities only, and has other laps:

    {"do": "setup", "kind": "priorities", "baseline": "cpprb", "rows": 1000, "fields": {}}   -> as above
    {"do": "sample" or "update", "batch": ..., "calls": ...}                          -> by its sampler
    {"do": "sample tree" or "update tree", ...}        -> its sum tree alone; an error where it is not exposed
    {"do": "laps"}                                     -> {"laps": ["sample", ...]}: those it supports
    {"do": "counts", "draws": 4000000}                 -> {"counts": [8 numbers]}: see PriorityBaseline.counts

An answer {"error": "..."} ends the baseline. It ends as well when stdin closes or its parent dies. Rows are noise.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

CHUNK_ROWS = 64
#: Priorities written at once, and the exponents of prioritized replay.
CHUNK_PRIORITIES = 1_000_000
ALPHA, BETA = 0.6, 0.4


class Baseline:
    """Interface of a baseline; `most_rows` bounds its size, because filling takes time."""

    most_rows = 2**31

    def setup(self, rows: int, fields: dict[str, Any]) -> None:
        """Creates a buffer of so many rows and fills it."""
        self.rows, self.fields = min(rows, self.most_rows), fields
        self.noise = np.random.default_rng(1)
        self.sources: dict[int, Any] = {}
        self.versions: dict[str, str] = {}
        self.make()
        left = self.rows
        while left:
            n = min(left, CHUNK_ROWS)
            self.extend(self.prepare(n))
            left -= n

    def make(self) -> None:
        """Creates the empty buffer; returns its versions."""
        raise NotImplementedError

    def prepare(self, n: int) -> Any:
        """n rows as arguments of `extend`."""
        raise NotImplementedError

    def extend(self, source: Any) -> None:
        """Inserts rows."""
        raise NotImplementedError

    def sample(self, batch: int) -> None:
        """Samples rows, and drops the batch."""
        raise NotImplementedError

    def arrays(self, n: int) -> dict[str, Any]:
        """n rows of noise, a field each."""
        made: dict[str, Any] = {}
        for name, (shape, dtype) in self.fields.items():
            if dtype == "float32":
                made[name] = self.noise.standard_normal((n, *shape), dtype=np.float32)
            else:
                made[name] = self.noise.integers(0, 2, (n, *shape)).astype(dtype)
        return made

    def threads(self, n: int) -> int:
        """Threads it will use, of at most n."""
        return 1

    def laps(self) -> list[str]:
        """Its laps."""
        return ["sample", "insert"]

    def counts(self, draws: int) -> list[int]:
        """See `PriorityBaseline.counts`."""
        raise NotImplementedError

    def source(self, n: int) -> Any:
        """The n rows of every insert of n rows, created before the clock starts."""
        if n not in self.sources:
            self.sources = {n: self.prepare(n)}
        return self.sources[n]

    def sample_many(self, batch: int, calls: int) -> None:
        """The body of a lap."""
        for _ in range(calls):
            self.sample(batch)

    def insert_many(self, batch: int, calls: int) -> None:
        """The body of a lap."""
        source = self.source(batch)
        for _ in range(calls):
            self.extend(source)

    def body(self, what: str, batch: int, calls: int) -> Callable[[int], None]:
        """Prepares a lap and one more call; returns a function that runs the next so many of these calls."""
        if what == "sample":
            self.before_sample(batch)
            return lambda n: self.sample_many(batch, n)
        self.source(batch)
        return lambda n: self.insert_many(batch, n)

    def before_sample(self, batch: int) -> None:
        """Preparation before the clock starts."""

    def after(self) -> None:
        """Waits until the baseline's own background work is over."""

    def cpu_s(self) -> float:
        """CPU time of all processes and threads of this baseline."""
        return time.process_time()


class Torchrl(Baseline):
    """A buffer of whole rows in memory, sampled uniformly: Python only, without the C++ sampler."""

    def make(self) -> None:
        import tensordict
        import torch
        import torchrl
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        self.torch = torch
        self.versions = {
            "torchrl": torchrl.__version__,
            "tensordict": tensordict.__version__,
            "torch": torch.__version__,
        }
        torch.set_num_threads(1)
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(self.rows), batch_size=CHUNK_ROWS)

    def threads(self, n: int) -> int:
        self.torch.set_num_threads(n)
        return n

    def prepare(self, n: int) -> Any:
        from tensordict import TensorDict

        return TensorDict({k: self.torch.from_numpy(v) for k, v in self.arrays(n).items()}, batch_size=[n])

    def extend(self, source: Any) -> None:
        self.buffer.extend(source)

    def sample(self, batch: int) -> None:
        self.buffer.sample(batch)


class Cpprb(Baseline):
    """The plain ring buffer."""

    def make(self) -> None:
        from importlib.metadata import version

        import cpprb

        self.versions = {"cpprb": version("cpprb"), "numpy": np.__version__}
        env = {name: {"shape": tuple(shape), "dtype": np.dtype(dtype)} for name, (shape, dtype) in self.fields.items()}
        self.buffer = cpprb.ReplayBuffer(self.rows, env)

    def prepare(self, n: int) -> Any:
        return self.arrays(n)

    def extend(self, source: Any) -> None:
        self.buffer.add(**source)

    def sample(self, batch: int) -> None:
        self.buffer.sample(batch)


class Reverb(Baseline):
    """One server process, one TrajectoryDataset over loopback: the fastest way in its documentation.

    The dataset prefetches. A lap therefore drops as many batches as can be prefetched before its clock starts,
    and waits afterwards until server and client are idle.
    """

    most_rows = 100_000
    most_ahead_bytes = 256 << 20

    def make(self) -> None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        from importlib.metadata import version

        import reverb

        self.reverb = reverb
        self.versions = {name: version(name) for name in ("dm-reverb", "tensorflow", "numpy")}
        self.server = subprocess.Popen(
            [sys.executable, __file__, "reverb-server", str(self.rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.server.stdout is not None
        self.address = f"localhost:{json.loads(self.server.stdout.readline())['port']}"
        self.client = reverb.Client(self.address)
        self.writer = self.client.trajectory_writer(num_keep_alive_refs=1)
        self.batches: Any = None
        self.batches_of: int | None = None
        self.row_bytes = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.fields.values())

    def prepare(self, n: int) -> Any:
        arrays = self.arrays(n)
        return [{name: arrays[name][i] for name in arrays} for i in range(n)]

    def extend(self, source: Any) -> None:
        for row in source:
            self.writer.append(row)
            self.writer.create_item("rows", 1.0, {name: self.writer.history[name][-1] for name in row})
        self.writer.flush()

    def before_sample(self, batch: int) -> None:
        import tensorflow as tf  # type: ignore[import-untyped, unused-ignore]

        ahead = max(1, min(2 * batch, self.most_ahead_bytes // self.row_bytes))
        if self.batches_of != batch:
            dataset = self.reverb.TrajectoryDataset(
                self.address,
                "rows",
                dtypes={name: tf.dtypes.as_dtype(dtype) for name, (_, dtype) in self.fields.items()},
                shapes={name: tf.TensorShape(shape) for name, (shape, _) in self.fields.items()},
                max_in_flight_samples_per_worker=ahead,
                num_workers_per_iterator=1,
            )
            options = tf.data.Options()
            options.autotune.enabled = False  # it adds a buffer that grows whenever a lap drains it
            self.batches, self.batches_of = iter(dataset.batch(batch).with_options(options)), batch
        for _ in range(-(-ahead // batch) + 1):
            next(self.batches)

    def sample(self, batch: int) -> None:
        next(self.batches)

    def after(self) -> None:
        before = self.cpu_s()
        for _ in range(40):
            time.sleep(0.05)
            now = self.cpu_s()
            if now - before < 0.01:
                return
            before = now

    def cpu_s(self) -> float:
        with open(f"/proc/{self.server.pid}/stat") as stat:
            ticks = stat.read().rpartition(")")[2].split()[11:13]
        return time.process_time() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def reverb_server(rows: int) -> None:
    """Serves one table until stdin closes."""
    import reverb

    table = reverb.Table(
        "rows",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table], port=None)
    print(json.dumps({"port": server.port}), flush=True)
    sys.stdin.read()
    server.stop()


BASELINES: dict[str, type[Baseline]] = {"torchrl": Torchrl, "torchrl-thp": Torchrl, "cpprb": Cpprb, "reverb": Reverb}


class PriorityBaseline(Baseline):
    """A baseline's prioritized sampler, without rows: exponential priorities, alpha 0.6, beta 0.4."""

    dtype = "float32"

    def setup(self, rows: int, fields: dict[str, Any]) -> None:
        self.rows = rows
        self.noise = np.random.default_rng(1)
        self.versions = {"numpy": np.__version__}
        self.make()
        self.fill(lambda n: self.noise.standard_exponential(n, np.float32) + np.float32(1e-4))

    def fill(self, priorities: Callable[[int], Any]) -> None:
        """Sets a priority for every row."""
        for first in range(0, self.rows, CHUNK_PRIORITIES):
            rows = np.arange(first, min(first + CHUNK_PRIORITIES, self.rows))
            self.write(rows, priorities(len(rows)).astype(self.dtype))

    def write(self, rows: Any, priorities: Any) -> None:
        """Updates priorities by the baseline's sampler."""
        raise NotImplementedError

    def draw(self, n: int) -> Any:
        """Row numbers, drawn by the baseline's sampler, which also computes their importance weights."""
        raise NotImplementedError

    def laps(self) -> list[str]:
        trees = ["sample tree", "update tree"] if hasattr(self, "draw_from_tree") else []
        return ["sample", "update", *trees]

    def body(self, what: str, batch: int, calls: int) -> Callable[[int], None]:
        kind, _, tree = what.partition(" ")
        step = getattr(self, {"sample": "draw", "update": "write"}[kind] + ("_from_tree" if tree else ""))
        if kind == "sample":
            todo: Any = iter([(batch,)] * (calls + 1))
        else:
            todo = iter([self.random_update(batch) for _ in range(calls + 1)])

        def some(n: int) -> None:
            for _ in range(n):
                step(*next(todo))

        return some

    def random_update(self, n: int) -> tuple[Any, Any]:
        """Rows and their new priorities."""
        priorities = self.noise.standard_exponential(n, np.float32) + np.float32(1e-4)
        return self.noise.integers(0, self.rows, n), priorities.astype(self.dtype)

    def counts(self, draws: int) -> list[int]:
        """Makes all priorities equal, draws, and counts row number mod 8 of the rows in the upper half.

        Rounding errors of a sum tree are largest there, where the running sum is.
        """
        self.fill(np.ones)
        found = np.zeros(8, np.int64)
        for _ in range(-(-draws // CHUNK_PRIORITIES)):
            rows = np.asarray(self.draw(min(draws, CHUNK_PRIORITIES))).astype(np.int64)
            found += np.bincount(rows[rows >= self.rows // 2] % 8, minlength=8)
        return [int(count) for count in found]


class TorchrlPriorities(PriorityBaseline):
    """PrioritizedSampler; "tree" is its C++ SumSegmentTree alone."""

    def make(self) -> None:
        import torch
        import torchrl
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        self.torch = torch
        self.versions |= {"torchrl": torchrl.__version__, "torch": torch.__version__}
        torch.set_num_threads(1)
        self.sampler = PrioritizedSampler(self.rows, ALPHA, BETA, dtype=getattr(torch, self.dtype))
        self.storage = Rows(self.rows)

    def write(self, rows: Any, priorities: Any) -> None:
        self.sampler.update_priority(self.torch.from_numpy(rows), self.torch.from_numpy(priorities))

    def draw(self, n: int) -> Any:
        return self.sampler.sample(self.storage, n)[0].numpy()

    def write_from_tree(self, rows: Any, priorities: Any) -> None:
        """The sum tree without the min tree and the alpha."""
        self.sampler._sum_tree[self.torch.from_numpy(rows)] = self.torch.from_numpy(priorities)

    def draw_from_tree(self, n: int) -> Any:
        """The descent, including its random numbers."""
        total = self.sampler._sum_tree.query(0, self.rows)
        masses = (self.noise.random(n) * total).astype(self.dtype)
        return self.sampler._sum_tree.scan_lower_bound(masses)


class TorchrlPriorities64(TorchrlPriorities):
    """The same in double precision, which TensorDictPrioritizedReplayBuffer has no option for."""

    dtype = "float64"


class Rows:
    """The part of a torchrl storage that its sampler uses."""

    ndim = 1
    device = None

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.shape = (rows,)

    def __len__(self) -> int:
        return self.rows


class CpprbPriorities(PriorityBaseline):
    """PrioritizedReplayBuffer with one byte a row, which is fetched as well; its draws are stratified."""

    def make(self) -> None:
        from importlib.metadata import version

        import cpprb

        self.versions["cpprb"] = version("cpprb")
        self.buffer = cpprb.PrioritizedReplayBuffer(self.rows, {"x": {"dtype": np.uint8}}, alpha=ALPHA)
        self.stored = 0

    def write(self, rows: Any, priorities: Any) -> None:
        if self.stored < self.rows:
            self.stored += len(rows)
            self.buffer.add(x=np.zeros(len(rows), np.uint8), priorities=priorities)
        else:
            self.buffer.update_priorities(rows, priorities)

    def draw(self, n: int) -> Any:
        return self.buffer.sample(n, beta=BETA)["indexes"]


class TianshouPriorities(PriorityBaseline):
    """The segment tree of its PrioritizedReplayBuffer (numba, double precision), with its wrapper's cost."""

    dtype = "float64"

    def make(self) -> None:
        from importlib.metadata import version

        from tianshou.data import SegmentTree  # type: ignore[import-not-found, unused-ignore]

        self.versions |= {name: version(name) for name in ("tianshou", "numba")}
        self.tree = SegmentTree(self.rows)
        self.least = 1.0

    def write(self, rows: Any, priorities: Any) -> None:
        priorities = np.abs(priorities) + np.finfo(np.float32).eps
        self.tree[rows] = priorities**ALPHA
        self.least = min(self.least, priorities.min())

    def draw(self, n: int) -> Any:
        rows = self.tree.get_prefix_sum_idx(self.noise.random(n) * self.tree.reduce())
        _ = (self.tree[rows] / self.least) ** -BETA
        return rows


PRIORITY_BASELINES: dict[str, type[PriorityBaseline]] = {
    "torchrl fp32": TorchrlPriorities,
    "torchrl fp64": TorchrlPriorities64,
    "cpprb": CpprbPriorities,
    "tianshou": TianshouPriorities,
}


def timed(baseline: Baseline, what: str, batch: int, calls: int) -> dict[str, Any]:
    """One lap."""
    body = baseline.body(what, batch, calls)
    body(1)  # untimed: the previous system's cache contents must not affect a lap
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu_s, began_s = baseline.cpu_s(), time.perf_counter()
    body(calls)
    seconds, cpu_seconds = time.perf_counter() - began_s, baseline.cpu_s() - cpu_s
    disturbed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != switches
    baseline.after()
    return {"seconds": seconds / calls, "cpu_seconds": cpu_seconds / calls, "disturbed": disturbed}


def serve(answers: TextIO) -> None:
    """Answers requests until stdin closes."""
    baseline = Baseline()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "setup":
                kinds = PRIORITY_BASELINES if request.get("kind") == "priorities" else BASELINES
                baseline = kinds[request["baseline"]]()
                baseline.setup(request["rows"], request["fields"])
                answer: dict[str, Any] = {"versions": baseline.versions, "rows": baseline.rows}
            elif request["do"] == "threads":
                answer = {"n": baseline.threads(request["n"])}
            elif request["do"] == "laps":
                answer = {"laps": baseline.laps()}
            elif request["do"] == "counts":
                answer = {"counts": baseline.counts(request["draws"])}
            else:
                answer = timed(baseline, request["do"], request["batch"], request["calls"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            return


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan holds gigabytes
    if sys.argv[1:2] == ["reverb-server"]:
        reverb_server(int(sys.argv[2]))
        return
    # Libraries print to stdout; the real one is reserved for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(answers)


if __name__ == "__main__":
    main()
