"""TransferQueue in an environment of its own, timed on request: runs with that environment's Python, without geartrain.

Reads one JSON object a line from stdin and answers each with one on stdout:

    {"do": "setup", "values": "answers.npz"}           -> {"versions": {...}}; one array a field, and "lengths"
    {"do": "lap", "what": "put" | "get" | "later" | "one row" | "get_meta", "calls": 4}
                          -> {"seconds": per call, "cpu_seconds": per call, "unit_cpu_seconds": of storage units alone}
    {"do": "digest"}                                   -> {"digest": sha256 of what a get returns}

It is used as verl uses it: a controller, two units of SimpleStorage, nested tensors, keys of samples, 16 CPUs told to
Ray so that its actors start on a small machine. CPU time is that of this process and of the actors; that of Ray's own
daemons is not counted. What a put is given is made before the clock starts. `get_meta` fetches 16 of 8,192 rows
that are ready; rows of earlier calls are consumed, and given back when few are left.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

#: Rows that a claim is drawn from, and rows of a claim.
READY, CLAIM = 8192, 16


class TransferQueue:
    """A queue with its actors, and the answers that are put into it."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="tq-")
        self.puts = 0
        self.fresh: list[str] = []  # keys to clear after a lap

    def setup(self, values: str) -> dict[str, Any]:
        """Starts Ray and the queue, and puts the answers once."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        from importlib.metadata import version

        import_module("transfer_queue")  # first, for it is what may be missing
        import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import torch
        import transfer_queue  # type: ignore[import-not-found, import-untyped, unused-ignore]

        torch.set_num_threads(1)
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            configure_logging=False,
            object_store_memory=256 << 20,
            _temp_dir=self.directory.name,
        )
        transfer_queue.init()
        self.queue, self.torch = transfer_queue, torch
        tensor: Any = torch.from_numpy
        found = dict(np.load(values))
        lengths = found.pop("lengths").tolist()
        self.lengths = lengths
        self.answers = {name: tensor(flat).split(lengths) for name, flat in found.items()}
        self.keys = [f"answer-{i}" for i in range(len(lengths))]
        self.queue.kv_batch_put(self.keys, "kept", fields=self._fields(slice(None)))
        self.pids = [os.getpid(), *_actors()]
        self.units = _actors((b"ray::SimpleStorageUnit",))
        packages = ("TransferQueue", "ray", "tensordict", "torch")
        return {"versions": {name: version(name) for name in packages}, "actors": len(self.pids) - 1}

    def _fields(self, which: slice, names: tuple[str, ...] = ()) -> Any:
        from tensordict import TensorDict  # type: ignore[import-not-found, import-untyped, unused-ignore]

        made = {
            name: self.torch.nested.as_nested_tensor(list(each[which]), layout=self.torch.jagged)
            for name, each in self.answers.items()
            if not names or name in names
        }
        return TensorDict(made, batch_size=len(self.lengths[which]))

    def lap(self, what: str, calls: int) -> dict[str, Any]:
        """Seconds of one call, of so many, after one that is not timed."""
        prepare: Callable[[], Callable[[], object]] = {
            "put": self._put,
            "get": self._get,
            "later": self._later,
            "one row": self._one_row,
            "get_meta": self._get_meta,
        }[what]
        prepare()()
        seconds = cpu_s = unit_s = 0.0
        for _ in range(calls):
            one = prepare()
            before_s, units_s, began_s = _cpu_s(self.pids), _cpu_s(self.units), time.perf_counter()
            one()
            seconds += time.perf_counter() - began_s
            cpu_s += _cpu_s(self.pids) - before_s
            unit_s += _cpu_s(self.units) - units_s
        if self.fresh:
            self.queue.kv_clear(self.fresh, "put")
            self.fresh = []
        return {"seconds": seconds / calls, "cpu_seconds": cpu_s / calls, "unit_cpu_seconds": unit_s / calls}

    def _fresh(self, n: int) -> list[str]:
        self.puts += 1
        keys = [f"{self.puts}-{i}" for i in range(n)]
        self.fresh += keys
        return keys

    def _put(self) -> Callable[[], object]:
        fields, keys = self._fields(slice(None)), self._fresh(len(self.lengths))
        return lambda: self.queue.kv_batch_put(keys, "put", fields=fields)

    def _one_row(self) -> Callable[[], object]:
        fields, keys = self._fields(slice(0, 1)), self._fresh(1)
        return lambda: self.queue.kv_batch_put(keys, "put", fields=fields)

    def _later(self) -> Callable[[], object]:
        fields = self._fields(slice(None), ("log_prob",)).rename_key_("log_prob", "ref")
        return lambda: self.queue.kv_batch_put(self.keys, "kept", fields=fields)

    def _get(self) -> Callable[[], object]:
        return lambda: self.queue.kv_batch_get(self.keys, "kept", select_fields=list(self.answers))

    def _get_meta(self) -> Callable[[], object]:
        from tensordict import TensorDict  # type: ignore[import-not-found, import-untyped, unused-ignore]

        client = self.queue.get_client()
        if not hasattr(self, "claimed"):
            column = TensorDict({"x": self.torch.zeros(READY, 1, dtype=self.torch.int32)}, batch_size=READY)
            self.queue.kv_batch_put([f"claim-{i}" for i in range(READY)], "claims", fields=column)
            self.claimed = 0
        if self.claimed >= READY // 8:
            client.reset_consumption("claims", "bench")
            self.claimed = 0
        self.claimed += CLAIM
        return lambda: client.get_meta(["x"], CLAIM, "claims", mode="fetch", task_name="bench")

    def digest(self) -> dict[str, Any]:
        """Hash of the bytes that a get returns, a field after the other."""
        got = self.queue.kv_batch_get(self.keys, "kept", select_fields=list(self.answers))
        found = hashlib.sha256()
        for name in self.answers:
            found.update(self.torch.cat(list(got[name].unbind())).numpy().tobytes())
        return {"digest": found.hexdigest()}

    def finish(self) -> dict[str, Any]:
        """Ends the queue and Ray."""
        import ray

        self.queue.close()
        ray.shutdown()
        self.directory.cleanup()
        return {}


def _cpu_s(pids: list[int]) -> float:
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # a process's CPU clock


def _actors(names: tuple[bytes, ...] = (b"ray::SimpleStorageUnit", b"ray::TransferQueue")) -> list[int]:
    """Processes of this session's actors; by default of the controller and the storage units."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes()
            same = os.getsid(int(process.name)) == os.getsid(0)
        except OSError:
            continue
        if words.startswith(names) and same:
            found.append(int(process.name))
    return found


def main() -> None:
    """Answers requests until end of input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    one = TransferQueue()
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            words = getattr(one, what)(**request)
        except Exception as error:
            words = {"error": f"{type(error).__name__}: {error}"[:800]}
        answers.write(json.dumps(words) + "\n")
        answers.flush()
        if "error" in words or what == "finish":
            break
    os._exit(0)  # without waiting for threads that a library left running


if __name__ == "__main__":
    main()
