"""Fetch on a GPU: the batches of the CPU, gathered by the GPU out of pinned shared memory. On a machine that has one:

pytest tests/gpu
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from device_batches import check_same, filled_store
from replay_calls import replay_of

sys.path.insert(0, str(Path(__file__).parent.parent))

import geartrain as gt
import geartrain.device.kernels as kernels
import geartrain.device.pinned_memory as pinning
from geartrain.replay.device import Convert, DeviceOptions
from geartrain.selection import Fifo, GroupSampling, Lifo, Mixture, Prioritized, TopK, Uniform

reason = kernels.why_not_viable()
pytestmark = pytest.mark.skipif(
    reason is not None or kernels.interpreting(), reason=f"no GPU to run on: {reason or 'TRITON_INTERPRET is set'}"
)


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with filled_store(store_name(), rows=2000, capacity=2000, max_length=60) as made:
        yield made


def test_random_batches_are_those_of_the_native_code() -> None:
    """Every case is registered, gathered by the compiled kernel, and compared to the bit."""
    import gather_cases
    import torch

    from geartrain.device.device import open_device

    device = open_device("cuda")
    kept = gather_cases._compare

    def compare(store: gt.Store, *args: Any) -> Any:
        pin = pinning.pins().hold(store, device)
        try:
            return kept(store, *args)
        finally:
            torch.cuda.synchronize()
            pin.release()

    gather_cases._compare = compare
    try:
        began_s, seed = time.monotonic(), 0
        while seed < 300 and time.monotonic() - began_s < 30:  # each set of dtypes and layouts is compiled once
            assert gather_cases.run_case(seed, f"test-gpu-{os.getpid()}-{seed}", "cuda") is None
            seed += 1
        assert seed >= 10
    finally:
        gather_cases._compare = kept


STRATEGIES = [
    Uniform(seed=1), Uniform(seed=4, stratified=True), Prioritized(seed=2, beta=0.5),
    Prioritized(seed=3, replacement=False),
    TopK(), Lifo(), Fifo(), GroupSampling("group", 4, seed=1),
]  # fmt: skip


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{type(s).__name__}{getattr(s, 'seed', '')}")
def test_every_strategy_gives_the_batches_of_the_host(store: gt.Store, strategy: Any, path: Any) -> None:
    for window, convert, packed in [(None, {}, False), (7, {"pixels": Convert("bfloat16", 1 / 255)}, True)]:
        on_device = DeviceOptions("cuda", path=path, convert=convert, packed=packed)
        with (
            replay_of(store, strategy, 64, window=window, pad="right", num_batches=5) as slow,
            replay_of(store, strategy, 64, window=window, pad="right", num_batches=5, device=on_device) as fast,
        ):
            for a, b in zip(slow, fast, strict=True):
                check_same(a, b, convert, packed)


def test_rows_chosen_on_the_gpu_and_mixtures_and_torn_rows() -> None:
    import device_selection_cases

    assert device_selection_cases.main("cuda", pause_s=0.002) > 30


def test_a_mixture_lands_in_one_batch(store: gt.Store) -> None:
    mixture = Mixture([0.6, 0.4], [Uniform(seed=1), Prioritized(seed=2, beta=1.0)])
    with (
        gt.Replay([store, store], mixture, 64, window=5, num_batches=4) as slow,
        gt.Replay([store, store], mixture, 64, window=5, num_batches=4, device="cuda") as fast,
    ):
        for a, b in zip(slow, fast, strict=True):
            check_same(a, b, {}, False)


def test_work_on_a_busy_stream_reads_the_right_batches_and_memory_is_recycled(store: gt.Store) -> None:
    import torch

    stream = torch.cuda.Stream()
    sums, addresses = [], set()
    with (
        gt.Replay(store, Uniform(seed=1), 64, num_batches=60) as slow,
        gt.Replay(store, Uniform(seed=1), 64, num_batches=60, device=DeviceOptions("cuda", path="gather")) as fast,
    ):
        with torch.cuda.stream(stream):
            for batch in fast:
                torch.cuda._sleep(2_000_000)  # the consumer is behind
                sums.append(batch["x"].double().sum())
                addresses.add(batch["x"].data_ptr())
                del batch
        for total, batch in zip(sums, slow, strict=True):
            assert float(total) == pytest.approx(float(batch["x"].double().sum()), rel=1e-12)
    assert len(addresses) < 30


def test_the_host_of_the_consumer_does_not_wait(store: gt.Store) -> None:
    """With work queued for a second, batches are handed over in a small part of it."""
    import torch

    with gt.Replay(store, Uniform(seed=1), 64, device=DeviceOptions("cuda", path="gather")) as fast:
        for _ in range(5):
            fast.sample()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(1_000_000_000)
        end.record()
        began_s = time.perf_counter()
        kept = [fast.sample() for _ in range(3)]
        taken_s = time.perf_counter() - began_s
        end.synchronize()
        assert taken_s < start.elapsed_time(end) / 1e3 / 2
        assert len(kept) == 3


def test_torch_compile_takes_batches(store: gt.Store) -> None:
    import torch

    @torch.compile
    def loss(x: Any, mask: Any) -> Any:
        return (x.square().sum(-1) * mask).sum() / mask.sum()

    with gt.Replay(store, Uniform(seed=1), 64, window=9, num_batches=4, device="cuda") as fast:
        for batch in fast:
            x, mask = batch["x"], batch.mask
            expected = (x.square().sum(-1) * mask).sum() / mask.sum()
            torch.testing.assert_close(loss(x, mask), expected)


def test_a_cuda_graph_is_captured_while_batches_are_made_and_replayed_on_each(store: gt.Store) -> None:
    import torch

    with gt.Replay(store, Uniform(seed=1), 64, window=9, num_batches=12, device="cuda") as fast:
        batches = iter(fast)
        static = next(batches).clone()
        priority = torch.randn(11, 4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                (static["x"] @ priority).sum()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the replay's thread goes on making batches
            made = (static["x"] @ priority).sum(-1)
        for batch in batches:
            static.copy_(batch)
            graph.replay()
            torch.testing.assert_close(made, (batch["x"] @ priority).sum(-1))


def test_batches_on_the_callers_thread_leave_its_stream_alone_and_others_captures(store: gt.Store) -> None:
    """Small batches are built where they are asked for, on the replay's stream; another thread captures meanwhile."""
    import torch

    begun, ended, mine = threading.Event(), threading.Event(), torch.cuda.Stream()
    x = torch.ones(64, device="cuda")
    made: list[Any] = []

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):  # the mode that refuses calls of every thread
            y = x * 2
            begun.set()
            ended.wait(30)
            y = y + 1
        made.extend([graph, y])

    with (
        gt.Replay(store, Uniform(seed=1), 64, window=9, num_batches=40) as slow,
        gt.Replay(store, Uniform(seed=1), 64, window=9, num_batches=40, prefetch=0, device="cuda") as fast,
        torch.cuda.stream(mine),
    ):
        pairs = zip(slow, fast, strict=True)
        check_same(*next(pairs), {}, False)
        thread = threading.Thread(target=capture)
        thread.start()
        try:
            assert begun.wait(30)
            landed = []
            for host, batch in itertools.islice(pairs, 20):
                assert torch.cuda.current_stream() == mine
                landed.append((host, batch))
        finally:
            ended.set()
            thread.join()
        for host, batch in (*landed, *pairs):
            check_same(host, batch, {}, False)
    graph, y = made
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 3).all()


def test_the_pinned_segment_is_listed_and_let_go(store: gt.Store) -> None:
    def mine() -> list[int]:  # other processes may pin meanwhile
        return [one.nbytes for one in pinning.Ledger().entries() if one.pid == os.getpid()]

    assert mine() == []
    with gt.Replay(store, Uniform(seed=1), 8, device=DeviceOptions("cuda", path="gather")) as fast:
        fast.sample()
        assert mine() == [store.nbytes]
        assert fast.describe()[0]["path"] == "gather"
    assert mine() == []


def test_a_failed_registration_does_not_poison_the_next_launch(store: gt.Store) -> None:
    import torch

    from geartrain.device.device import open_device
    from geartrain.errors import PinError

    device = open_device("cuda")
    memory = store.native.segment()
    device.register(memory)
    with pytest.raises(PinError):
        device.register(memory)  # already registered
    assert int(torch.ones(10, device="cuda").sum()) == 10
    device.unregister(memory)


def test_two_threads_take_batches_of_two_replays(store: gt.Store) -> None:
    failures: list[BaseException] = []

    def consume(seed: int) -> None:
        import torch

        try:
            with (
                torch.cuda.stream(torch.cuda.Stream()),
                gt.Replay(store, Uniform(seed=seed), 32, num_batches=10) as slow,
            ):
                with gt.Replay(store, Uniform(seed=seed), 32, num_batches=10, device="cuda") as fast:
                    for a, b in zip(slow, fast, strict=True):
                        check_same(a, b, {}, False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=consume, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def pinned_here() -> int:
    """Bytes that this process has pinned: other tests run beside this one."""
    return sum(one.nbytes for one in pinning.Ledger().entries() if one.pid == os.getpid())


# --- copied rows -----------------------------------------------------------------------------------------------------


def test_the_pieces_of_a_batch_are_given_in_one_call(store: gt.Store) -> None:
    import ctypes

    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if version.value < 12080:
        pytest.skip(f"the driver is of CUDA {version.value}")
    with gt.Replay(store, Uniform(seed=1), 64, device=DeviceOptions("cuda", path="copy")) as fast:
        fast.sample()
        batches: Any = fast._builder.source.device._batches  # type: ignore[attr-defined]
        assert batches.form == ("cuMemcpyBatchAsync_v2" if version.value >= 13000 else "cuMemcpyBatchAsync")


@pytest.mark.parametrize("packed", [False, True])
def test_copied_rows_are_whole_while_they_are_overwritten(store_name: Callable[[], str], packed: bool) -> None:
    import numpy as np
    import tagged

    stop = threading.Event()
    with tagged.create(store_name(), capacity=400) as store:
        tagged.insert(store, np.arange(1, 401))

        def write() -> None:
            tag = 1000
            while not stop.wait(0.0002):
                tagged.insert(store, np.arange(tag, tag + 4))
                tag += 4

        writer = threading.Thread(target=write)
        options = DeviceOptions("cuda", path="copy", packed=packed)
        with replay_of(store, Uniform(seed=1), 16, window=60, device=options, timeout_s=60) as fast:
            writer.start()
            try:
                until_s, batches = time.monotonic() + 10, 0
                while time.monotonic() < until_s and (batches < 100 or fast.stats()["redrawn"] == 0):
                    tagged.check_steps(fast.sample().to("cpu"))
                    batches += 1
            finally:
                stop.set()
                writer.join()
            assert batches > 20
            assert fast.stats()["redrawn"] > 0


# --- gt.fetch(out=) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_fetches_into_tensors_are_those_of_the_host(store_name: Callable[[], str], path: Any) -> None:
    import torch
    from device_fetches import check_random_fetches, make_store

    with make_store(store_name(), 1, rows=500) as store, make_store(store_name(), 2, rows=50) as other:
        for seed in range(48):  # 12 kinds of kernels
            with torch.cuda.stream(torch.cuda.Stream() if seed % 2 else torch.cuda.default_stream()):
                check_random_fetches([store, other][: 1 + seed // 2 % 2], seed, path, lambda: None, "cuda")
        assert pinned_here() == (0 if path == "staged" else store.nbytes + other.nbytes)
    assert pinned_here() == 0


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_a_busy_stream_finds_the_fetched_rows_in_any_memory(store: gt.Store, path: Any) -> None:
    """Tensors at odd addresses of a buffer that is used again at once, on a stream that is behind."""
    import torch

    keys = store.keys()
    hosts = [gt.fetch(store, keys[i : i + 64], window=9, fields=["pixels"]) for i in range(0, 640, 64)]
    size = hosts[0]["pixels"].nbytes
    room, sums = torch.zeros(size + 8, dtype=torch.uint8, device="cuda"), []
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for number, host in enumerate(hosts):
            out = {"pixels": room[number % 8 :][:size].view(host["pixels"].shape)}
            if path == "staged":  # the others wait for the stream
                torch.cuda._sleep(20_000_000)
            gt.fetch(store, host.keys, window=9, fields=["pixels"], out=out, path=path)
            sums.append(out["pixels"].clone())
        torch.cuda.current_stream().synchronize()
    for host, copy in zip(hosts, sums, strict=True):
        assert torch.equal(host["pixels"], copy.cpu())


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_a_fetched_row_is_whole_or_its_key_is_stale(store_name: Callable[[], str], path: Any) -> None:
    import numpy as np
    import tagged
    import torch

    from geartrain.errors import StaleKeyError

    stop = threading.Event()
    with tagged.create(store_name(), capacity=400) as store:
        tagged.insert(store, np.arange(1, 401))

        def write() -> None:
            tag = 1000
            while not stop.wait(0.0005):
                tagged.insert(store, np.arange(tag, tag + 4))
                tag += 4

        writer = threading.Thread(target=write)
        writer.start()
        try:
            whole = stale = 0
            until_s = time.monotonic() + 3
            while time.monotonic() < until_s and (whole < 50 or stale < 20):
                keys = store.keys()  # the oldest first, which are the next to be overwritten
                keys = keys[-8:] if whole < stale else keys[:64]
                n = len(keys)
                out = {
                    name: torch.empty((n, *spec.block_shape(9)), dtype=getattr(torch, spec.dtype), device="cuda")
                    for name, spec in tagged.FIELDS.items()
                }
                try:
                    batch = gt.fetch(store, keys, window=9, out=out, path=path)
                except StaleKeyError:
                    stale += 1
                    continue
                tagged.check_steps(batch.to("cpu"))
                whole += 1
        finally:
            stop.set()
            writer.join()
        assert whole > 0
        assert stale > 0


def test_what_is_on_no_one_device_is_refused(store: gt.Store) -> None:
    import torch

    from geartrain.errors import ArgumentError, StaleKeyError

    keys = store.keys()[:4]
    host = gt.fetch(store, keys)
    out = {name: values.cuda() for name, values in host.fields.items()}
    for spoiled in (host["x"].clone(), out["x"].double(), out["x"].transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ArgumentError, match=r"host memory|float32|contiguous"):
            gt.fetch(store, keys, out={**out, "x": spoiled})
    store.delete(keys[:1])
    for path in ("gather", "staged"):
        with pytest.raises(StaleKeyError, match="1 of 4 keys are stale"):
            gt.fetch(store, keys, out=out, path=path)  # type: ignore[arg-type]
    assert torch.cuda.current_device() == 0


def test_cupy_reads_batches_in_place(store: gt.Store) -> None:
    cupy = pytest.importorskip("cupy")
    from geartrain.integrations.cupy import as_cupy

    with gt.Replay(store, Uniform(seed=1), 8, device="cuda") as fast:
        batch = fast.sample()
        arrays = as_cupy(batch)
        assert arrays["x"].data.ptr == batch["x"].data_ptr()
        assert bool(cupy.isfinite(arrays["x"]).all())
