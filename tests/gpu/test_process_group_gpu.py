"""All-reduce of tensors on a GPU, with two ranks that are threads: `pytest tests/gpu/test_process_group_gpu.py`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to run on: torch.cuda.is_available()")


def ranks(body: Callable[[Any, int], Any]) -> list[Any]:
    from geartrain.collectives.torch_backend.process_group import ProcessGroup

    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = ProcessGroup(store, rank, 2, timedelta(seconds=60), name="gpu")
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                return body(group, rank)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_right_at_every_size_and_in_every_order_of_waiting(dtype: Any) -> None:
    sizes = [1, 1000, (4 << 20) // 4, (4 << 20) // 4 + 1, 9_000_001]

    def body(group: Any, rank: int) -> None:
        for _ in range(3):
            tensors, works = [], []
            for size in sizes:
                tensor = torch.full((size,), rank + 1, dtype=dtype, device="cuda")
                for _ in range(20):  # work that the copy has to come after
                    tensor = tensor * 2 - tensor
                tensors.append(tensor)
                works.append(group.allreduce([tensor]))
            futures = [work.get_future() for work in works[::2]]
            for work in reversed(works[1::2]):
                work.wait()
            for future in futures:
                future.wait()
            for tensor in tensors:
                assert bool((tensor == 3).all())
        assert group.counters()["operations"] == 3 * len(sizes)

    ranks(body)


def test_submitting_does_not_wait_for_the_callers_stream() -> None:
    def body(group: Any, rank: int) -> None:
        group.allreduce([torch.ones(10, device="cuda")]).wait()  # connections, pinned buffers
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second of the caller's stream
        tensor = torch.ones(1 << 20, device="cuda")
        work = group.allreduce([tensor])
        assert not torch.cuda.current_stream().query(), "the caller's stream was waited for"
        work.wait()
        assert bool((tensor == 2).all())

    ranks(body)


def test_strided_and_coalesced_tensors() -> None:
    def body(group: Any, rank: int) -> None:
        whole = torch.ones(6, 5, device="cuda")
        group.allreduce([whole[:, 1:3]]).wait()
        assert whole[:, 1:3].sum().item() == 24 and whole.sum().item() == 42
        several = [torch.ones(n, device="cuda") for n in (3, 4, 5)]
        group.allreduce_coalesced(several).wait()
        assert all(bool((t == 2).all()) for t in several)

    ranks(body)


def test_memory_given_back_early_is_not_written() -> None:
    def body(group: Any, rank: int) -> None:
        for _ in range(50):
            tensor = torch.ones(1 << 20, device="cuda")
            work = group.allreduce([tensor])
            work.wait()
            del tensor, work
            other = torch.full((1 << 20,), 7.0, device="cuda")
            torch.cuda.current_stream().synchronize()
            assert bool((other == 7).all())

    ranks(body)
