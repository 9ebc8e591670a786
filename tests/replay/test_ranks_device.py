"""One replay over many ranks, on devices: every rank's batches are those it would get in host memory."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tagged
from deadlines import patience
from device_batches import check_same
from interpreter import interpreted
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, PinError, RanksDisagreeError
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.device import Convert, DeviceOptions
from geartrain.selection import Fifo, GroupSampling, Lifo, Limits, Mixture, Prioritized, TopK, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from geartrain.tools.testing import SimulatedDevice  # noqa: E402

N, STEPS, B = 120, 30, 24
FIELDS = {
    "x": gt.Field((11,), "float32"),
    "pixels": gt.Field((3, 5), "uint8"),
    "group": gt.Field((), "int64", per_row=True),
}


def values(first: int, last: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    every = {
        "x": rng.normal(size=(N, STEPS, 11)).astype("f"),
        "pixels": rng.integers(0, 255, (N, STEPS, 3, 5), dtype=np.uint8),
        "group": np.arange(N) // 4,
    }
    return {name: array[first:last] for name, array in every.items()}


@pytest.fixture
def make_shards(store_name: Callable[[], str]) -> Iterator[Callable[..., list[str]]]:
    """Names of shards of different sizes, which each rank opens for itself."""
    made: list[gt.Store] = []

    def make(shards: int, **options: Any) -> list[str]:
        cuts = [0, *(N * 4 * (i + 1) // (5 * shards) // 4 * 4 for i in range(shards - 1)), N]
        for first, last in itertools.pairwise(cuts):
            store = gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=N, **options)
            store.native.advance_sequence(first + 1)
            lengths = np.random.default_rng(1).integers(1, STEPS + 1, N)[first:last]
            priorities = np.random.default_rng(2).random(N)[first:last]
            store.insert(values(first, last), lengths=lengths, priorities=priorities, versions=np.arange(first, last))
            made.append(store)
        return [store.name for store in made[-shards:]]

    yield make
    for store in made:
        store.close()


def compare(
    shards: list[Any],
    selection: Any,
    options: Callable[[Any], DeviceOptions],
    *,
    ranks: int,
    steps: int = 4,
    **settings: Any,
) -> list[dict[str, float]]:
    """Makes the batches twice on every rank, in host memory and on a device of its own; returns the figures."""
    settings = {"window": 7, "pad": "right", "num_batches": steps, "assignment": "ordered", **settings}
    place = settings.pop("place", None)

    def body(pair: tuple[ThreadRankGroup, ThreadRankGroup]) -> dict[str, float]:
        rank = pair[0].rank
        device = SimulatedDevice(rank)
        names = shards[rank % len(shards)]
        opened = [gt.Store.open(name) for name in ([names] if isinstance(names, str) else names)]
        store: Any = opened[0] if isinstance(names, str) else opened
        chosen = options(device)
        mesh = {} if place is None else {"mesh": place(rank)}
        with (
            replay_of(store, selection, B, group=pair[0], **mesh, **settings) as slow,
            replay_of(store, selection, B, group=pair[1], device=chosen, **mesh, **settings) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, dict(chosen.convert), chosen.packed and len(host) > 0)
            assert all(one["path"] == chosen.path for one in fast.describe() if chosen.path != "auto")
            stats = fast.stats()
        assert not device.registered
        for one in opened:
            one.close()
        return stats

    return run_pairs(ranks, body)


def run_pairs(ranks: int, body: Callable[[tuple[ThreadRankGroup, ThreadRankGroup]], Any]) -> list[Any]:
    """Two groups over the same threads: one for each replay."""
    others = ThreadRankGroup.make(ranks)
    return run_ranks(ranks, lambda one: body((one, others[one.rank])))


STRATEGIES = [
    Uniform(seed=1), Uniform(seed=4, stratified=True), Prioritized(seed=2, beta=0.5),
    Prioritized(seed=3, replacement=False),
    TopK(), Lifo(), Fifo(), GroupSampling("group", 4, seed=1), Uniform(seed=5, limits=Limits(min_length=4)),
]  # fmt: skip


@pytest.mark.parametrize("path", ["gather", "staged"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{type(s).__name__}{getattr(s, 'seed', '')}")
def test_every_strategy_gives_the_batches_of_the_host(
    make_shards: Callable[..., list[str]], strategy: Any, path: Any
) -> None:
    shards = make_shards(3)
    pixels, halves = {"pixels": Convert("bfloat16", 1 / 255, 0.5)}, {"x": Convert("float16")}
    for window, convert, packed in [(None, {}, False), (7, pixels, False), (7, halves, True), (40, {}, True)]:
        options = functools.partial(DeviceOptions, path=path, convert=convert, packed=packed)
        stats = compare(shards, strategy, options, ranks=3, window=window)
        assert sum(one["received_bytes"] for one in stats) > 0, "nothing moved"


@pytest.mark.parametrize(
    ("words", "batches"), [(["some"], 26), pytest.param([], 110, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_devices_draw_the_rows_of_their_shards_as_hosts_do(words: list[str], batches: int) -> None:
    """Triton's interpreter; totals and rows come from the copies of priorities, and updates reach them."""
    assert int(interpreted("rank_selection_cases.py", *words, timeout_s=patience(110))) == batches


@pytest.mark.parametrize("path", ["gather", "staged"])
def test_draws_of_steps_give_the_batches_of_the_host(make_shards: Callable[..., list[str]], path: Any) -> None:
    for per, strategy in (("row", Uniform(seed=1, over="steps")), ("step", Prioritized(seed=2, beta=0.5))):
        shards = make_shards(3, priority_per=per)
        options = functools.partial(DeviceOptions, path=path)
        windows = [7] if path == "gather" else [7, gt.Windows(5, whole=True), gt.Windows(5, anchor="first", whole=True)]
        for window in windows:
            stats = compare(shards, strategy, options, ranks=3, steps=2, window=window)
            assert sum(one["received_bytes"] for one in stats) > 0, "nothing moved"


@pytest.mark.parametrize("path", ["gather", "staged"])
def test_ranks_that_share_a_shard_read_it_themselves(make_shards: Callable[..., list[str]], path: Any) -> None:
    stats = compare(
        make_shards(1),
        Prioritized(seed=1),
        lambda device: DeviceOptions(device, path=path),
        ranks=3,
        assignment="local_first",
    )
    assert all(one["received_bytes"] == 0 and one["local_bytes"] > 0 for one in stats)


@pytest.mark.parametrize("path", ["gather", "staged"])
def test_a_mixture_lands_in_one_batch(make_shards: Callable[..., list[str]], path: Any) -> None:
    pairs = [list(pair) for pair in zip(make_shards(2), make_shards(2), strict=True)]
    mixture = Mixture([0.6, 0.4], [Uniform(seed=1), Prioritized(seed=2, beta=1.0)])
    compare(pairs, mixture, lambda device: DeviceOptions(device, path=path), ranks=2)
    compare(pairs, mixture, lambda device: DeviceOptions(device, path=path, packed=True), ranks=2)


@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 2, 1), (1, 3, 1), (2, 1, 2)])
def test_heads_tails_and_tensor_parallel_peers(
    make_shards: Callable[..., list[str]], dp: int, pp: int, tp: int
) -> None:
    settings = {"inputs": ["pixels", "group"], "targets": ["x"], "assignment": "local_first"}
    convert = {"pixels": Convert("bfloat16", 1 / 255), "x": Convert("bfloat16")}
    compare(
        make_shards(2), Prioritized(seed=3, beta=0.5), lambda device: DeviceOptions(device, convert=convert),
        ranks=dp * pp * tp, place=lambda at: MeshPosition(at // tp % dp, at // tp // dp, at % tp, dp, pp, tp),
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("path", ["gather", "staged"])
def test_a_torn_row_is_drawn_again_and_never_returned(store_name: Callable[[], str], path: Any, packed: bool) -> None:
    """Every shard is written anew about once a batch, while two ranks of a shard read it for all four."""
    done = threading.Event()
    stores = [tagged.create(store_name(), capacity=40) for _ in range(2)]
    for store in stores:
        tagged.insert(store, np.arange(1, 41))
    redrawn = [0.0] * 4

    def write(store: gt.Store) -> None:
        tag = 100
        while not done.wait(0.002):
            tagged.insert(store, np.arange(tag, tag + 4))
            tag += 4

    def body(rank: ThreadRankGroup) -> None:
        device = SimulatedDevice(rank.rank)
        options = DeviceOptions(device, path=path, packed=packed)
        settings = {"window": 9, "assignment": "ordered", "group": rank}
        with (
            gt.Store.open(stores[rank.rank % 2].name) as store,
            replay_of(store, Uniform(seed=1), 24, device=options, **settings) as fast,
        ):
            for batches in range(200):
                batch = fast.sample()
                device.finish()
                tagged.check_steps(batch)
                redrawn[rank.rank] = fast.stats()["redrawn"]
                # All ranks stop at the same batch: what each has redrawn is told to all.
                told = rank_sum(rank, redrawn[rank.rank])
                if batches >= 10 and (path == "staged" or told > 0):
                    return
            raise AssertionError("no row was ever torn")

    totals = ThreadRankGroup.make(4)

    def rank_sum(rank: ThreadRankGroup, mine: float) -> float:
        return float(totals[rank.rank].all_gather(np.array([mine]).view(np.uint8)).view(np.float64).sum())

    writers = [threading.Thread(target=write, args=(store,)) for store in stores]
    for writer in writers:
        writer.start()
    try:
        run_ranks(4, body)
    finally:
        done.set()
        for writer in writers:
            writer.join()
        for store in stores:
            store.close()


def test_work_of_the_consumer_waits_on_its_stream_and_memory_is_used_again(
    make_shards: Callable[..., list[str]],
) -> None:
    shards = make_shards(2)

    def body(pair: tuple[ThreadRankGroup, ThreadRankGroup]) -> int:
        rank = pair[0].rank
        device = SimulatedDevice(20 + rank)
        settings = {"window": 7, "num_batches": 30, "assignment": "ordered"}
        sums: list[Any] = []
        addresses = set()
        with (
            gt.Store.open(shards[rank]) as store,
            replay_of(store, Uniform(seed=1), B, group=pair[0], **settings) as slow,
            replay_of(store, Uniform(seed=1), B, group=pair[1], device=DeviceOptions(device), **settings) as fast,
        ):
            for batch in fast:
                total = torch.zeros(())
                device.run(lambda x=batch["x"], total=total: total.add_(x.sum()))
                sums.append(total)
                addresses.add(batch["x"].data_ptr())
                del batch
            device.finish()
            assert threading.current_thread().name not in device.syncs, "the consumer's host waited"
            assert [float(total) for total in sums] == [float(batch["x"].sum()) for batch in slow]
        return len(addresses)

    assert max(run_pairs(2, body)) < 20, "memory was not recycled"


def test_a_dropped_replay_lets_go_of_the_segment_and_a_closed_one_too(make_shards: Callable[..., list[str]]) -> None:
    (name,) = make_shards(1)
    device = SimulatedDevice(1)
    with gt.Store.open(name) as store:
        for close in (True, False):
            (rank,) = ThreadRankGroup.make(1)
            replay = gt.Replay(store, Uniform(seed=1), 8, group=rank, device=DeviceOptions(device, path="gather"))
            replay.sample()
            assert len(device.registered) == 1
            if close:
                replay.close()
            del replay
            gc.collect()
            assert not device.registered


def test_what_does_not_fit_is_refused_at_the_door(make_shards: Callable[..., list[str]]) -> None:
    names = make_shards(2)
    of_peers = {"mesh": MeshPosition(dp_size=1, tp_size=1)}
    refused: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"select": "device"}, {}, ArgumentError, "runs no kernels"),
        ({"convert": {"no": Convert("float32")}}, {}, ArgumentError, r"convert takes no no; it takes"),
        ({"exchange": "nccl"}, {}, ArgumentError, "needs a process group of torch.distributed"),
        ({"exchange": "nccl", "path": "staged"}, of_peers, ArgumentError, "leave out path='staged'"),
        ({"path": "gather", "pin_limit_bytes": 1000}, {}, PinError, "the limit is 0.00 GB"),
    ]
    with gt.Store.open(names[0]) as store:
        for options, settings, error, message in refused:
            (rank,) = ThreadRankGroup.make(1)
            chosen = DeviceOptions(SimulatedDevice(1), **options)
            with pytest.raises(error, match=message):
                replay_of(store, Uniform(seed=1), 8, group=rank, device=chosen, **settings)
    with pytest.raises(ArgumentError, match="exchange is one of 'host', 'nccl'"):
        DeviceOptions(exchange="mpi")  # type: ignore[arg-type]

    def peers(rank: ThreadRankGroup) -> None:
        place = MeshPosition(tp=rank.rank, dp_size=1, tp_size=2)
        options = DeviceOptions(SimulatedDevice(1), path="gather")
        with gt.Store.open(names[0]) as store, pytest.raises(ArgumentError, match="tensor parallelism"):
            replay_of(store, Uniform(seed=1), 8, group=rank, mesh=place, device=options)

    run_ranks(2, peers)


def test_a_rank_that_cannot_pin_is_an_error_on_all_and_at_once(make_shards: Callable[..., list[str]]) -> None:
    shards = make_shards(2)

    def body(rank: ThreadRankGroup) -> None:
        device = SimulatedDevice(rank.rank, most_pinned=1000 if rank.rank else None)
        expected = (PinError, "cannot be pinned") if rank.rank else (RanksDisagreeError, "rank 1 cannot take part")
        with gt.Store.open(shards[rank.rank]) as store, pytest.raises(expected[0], match=expected[1]):
            gt.Replay(store, Uniform(seed=1), 8, group=rank, device=DeviceOptions(device, path="gather"))
        assert not device.registered

    run_ranks(2, body, timeout_s=patience(10))


def test_some_ranks_may_be_without_a_device(make_shards: Callable[..., list[str]]) -> None:
    """What is sent does not depend on where it is wanted."""
    shards = make_shards(3)

    def body(pair: tuple[ThreadRankGroup, ThreadRankGroup]) -> None:
        rank = pair[0].rank
        device = SimulatedDevice(rank)
        options = [None, DeviceOptions(device, path="staged"), DeviceOptions(device, path="gather")][rank]
        settings = {"window": 7, "num_batches": 3, "assignment": "ordered"}
        with (
            gt.Store.open(shards[rank]) as store,
            replay_of(store, Uniform(seed=1), B, group=pair[0], **settings) as slow,
            replay_of(store, Uniform(seed=1), B, group=pair[1], device=options, **settings) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, {}, False)

    run_pairs(3, body)


class NotedGroup(ThreadRankGroup):
    """Notes which calls a rank makes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: list[str] = []

    def all_gather(self, mine: Any) -> Any:
        self.calls.append("all_gather")
        return super().all_gather(mine)

    def exchange(self, *messages: Any) -> None:
        self.calls.append("exchange")
        super().exchange(*messages)


@pytest.mark.parametrize("path", ["staged", "gather"])
def test_ranks_with_and_without_a_device_make_the_same_calls_where_no_row_moves(
    make_shards: Callable[..., list[str]], path: Any
) -> None:
    """As a group of the user's own may ask of them, whose all-gather need not be an exchange."""
    (shard,) = make_shards(1)

    def body(rank: ThreadRankGroup) -> None:
        device = SimulatedDevice(rank.rank)
        options = DeviceOptions(device, path=path) if rank.rank else None
        with (
            gt.Store.open(shard) as store,
            gt.Replay(store, Uniform(seed=1), B, group=rank, device=options, num_batches=3) as replay,
        ):
            for _ in replay:
                device.finish()
            assert replay.stats()["sent_bytes"] == 0

    group = NotedGroup.make(2)
    run_ranks(group, body)
    assert group[0].calls == group[1].calls
