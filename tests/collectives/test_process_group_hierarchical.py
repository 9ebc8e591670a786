"""The backend "geartrain" with all-reduces within hosts first; ranks are threads of one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from geartrain.collectives.torch_backend.options import BackendOptions  # noqa: E402
from geartrain.collectives.torch_backend.process_group import ProcessGroup  # noqa: E402


def test_all_reduces_go_by_host_and_all_else_among_equal_ranks() -> None:
    options = BackendOptions.from_environment({"GEARTRAIN_ALLREDUCE_HIERARCHICAL": "1"})
    assert options.hierarchical and options.of_ranks([0, 1], 4).hierarchical
    store = dist.HashStore()

    def run(rank: int) -> dict[str, Any]:
        group = ProcessGroup(store, rank, 3, timedelta(seconds=60), name="test", options=options)
        try:
            tensor = torch.full((100_000,), float(rank))
            assert group.allreduce([tensor]).get_future().wait()[0][0] == 3  # DDP's way
            group.allreduce_coalesced([tensor, torch.ones(3, 4).t()]).wait()
            assert tensor[0] == 9
            gathered = [torch.empty(5) for _ in range(3)]
            group.allgather([gathered], [torch.full((5,), float(rank))]).wait()
            assert [one[0].item() for one in gathered] == [0, 1, 2]
            found: dict[str, Any] = group.counters()["groups"]
            group.barrier().wait()  # nobody leaves before all have counted
            return found
        finally:
            group.shutdown()

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(run, range(3)):
            assert found["cpu"]["links"] == {"tcp": 0, "shm": 4}  # within the host, and on the way back
            assert found["cpu"]["operations"] == 2 and found["cpu/ranks"]["operations"] == 1


def test_what_a_reducer_loss_may_do_is_said_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="GEARTRAIN_ALLREDUCE_HIERARCHICAL=1 has not"):
        BackendOptions.from_environment(
            {"GEARTRAIN_ALLREDUCE_HIERARCHICAL": "1", "GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS": "continue"}
        )
