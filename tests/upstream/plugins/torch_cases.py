"""The cases of torch.testing._internal.distributed.distributed_test, over Gloo or over geartrain in its place.

torch ships the cases, and not the file of its test suite that turns them into tests; this stands for that file. A rank
is a fork of a process that has imported them, for imports would take nearly all of a run's time. With
GEARTRAIN_ALLREDUCE=1 a group of the backend "gloo" is one of geartrain's, as under `python -m geartrain_autoload`.

Every rank of a case appends a line to GEARTRAIN_TEST_UPSTREAM_CALLS: the case, and how many collectives of which name
were made by geartrain ("ours") and by Gloo ("inner").
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import geartrain_autoload

geartrain_autoload.autoload()

import torch.distributed  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if os.environ["BACKEND"] == "mpi":  # a name for either
    named = torch.distributed.init_process_group

    def init_process_group(backend: str, *arguments: Any, **names: Any) -> None:
        named("gloo", *arguments, **names)

    torch.distributed.init_process_group = init_process_group

calls: list[tuple[Counter[str], Counter[str]]] = []  # of each group of geartrain's that this process has made

if os.environ.get(geartrain_autoload.VARIABLE) == "1":
    from geartrain.collectives.torch_backend.process_group import ProcessGroup

    make = ProcessGroup.__init__

    def counted(self: Any, *arguments: Any, **names: Any) -> None:
        make(self, *arguments, **names)
        calls.append((self._ours, self._inner))

    ProcessGroup.__init__ = counted


class TestDistributed(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All cases, each in WORLD_SIZE ranks."""

    def setUp(self) -> None:
        super().setUp()
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])

        def process(*, kwargs: dict[str, Any], **names: Any) -> Any:
            return context.Process(kwargs={**kwargs, "environment": dict(os.environ)}, **names)

        self._start_processes(process)

    @classmethod
    def _run(
        cls, rank: int, test_name: str, *arguments: Any, environment: dict[str, str] | None = None, **names: Any
    ) -> None:
        os.environ.update(environment or {})
        try:
            super()._run(rank, test_name, *arguments, **names)
        finally:
            ours, inner = (sum((pair[i] for pair in calls), Counter()) for i in (0, 1))
            with Path(os.environ["GEARTRAIN_TEST_UPSTREAM_CALLS"]).open("a") as file:
                file.write(json.dumps({"case": test_name, "groups": len(calls), "ours": ours, "inner": inner}) + "\n")
