"""Steps that each field chooses around the drawn one, and fields of which a window has the first step alone."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from crossed import crossed
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, RanksDisagreeError, SchemaError
from geartrain.ranks.topology import MeshPosition
from geartrain.selection import Epochs, Mixture, Prioritized, Uniform
from geartrain.store.recorder import recorded_fields
from geartrain.tools.testing import ThreadRankGroup, run_ranks

MAX = 12
FIELDS = {
    "frame": gt.Field((2,), "int32"),
    "action": gt.Field((), "int64"),
    "at": gt.Field((), "int64"),
    "row": gt.Field((), "int64", per_row=True),
}


class Rows:
    """Row i of a store has 100 i + step + 1 in every step, and random ends of episodes where rows are shared."""

    def __init__(self, rng, count, *, shared=False, fields=FIELDS, name=None, **options):
        if shared:
            own = {field: spec for field, spec in fields.items() if field != "row"}
            fields = recorded_fields({**own, "reward": gt.Field((), "float32")}, share_rows=True)
        self.lengths = rng.integers(1, MAX + 1, count)
        marks = rng.random((count, MAX)) < (0.2 if shared else 0)
        values = {name: np.zeros((count, *field.block_shape(MAX)), field.dtype) for name, field in fields.items()}
        steps = 100 * np.arange(count)[:, None] + np.arange(MAX) + 1
        values |= {"frame": np.stack([steps, -steps], -1).astype(fields["frame"].dtype), "action": steps, "at": steps}
        values["row" if not shared else "last"] = np.arange(count) if not shared else marks
        given = (name,) if name else ()
        self.store = gt.Store.create(*given, fields, max_length=MAX, capacity=count, **options)
        self.store.insert(values, lengths=self.lengths)
        self.episodes = {}  # the first and the last step of the episode of each step, by their values
        for row, length in enumerate(self.lengths):
            ends = [step for step in range(length) if marks[row, step] or step == length - 1]
            for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False):
                for step in range(first, last + 1):
                    self.episodes[100 * row + step + 1] = (100 * row + first + 1, 100 * row + last + 1)

    def anchors(self, windows):
        """Values of the steps that may be drawn, with a stride of 1."""
        every = [0, *itertools.chain.from_iterable(windows.offsets.values())]
        return {
            at
            for at, (first, last) in self.episodes.items()
            if not windows.whole or (at + min(every) >= first and at + max(every) <= last)
        }

    def check(self, batch, windows):
        """Slow and obvious: every field has what its offsets ask for, and nothing else; returns the drawn steps."""
        for i, at in enumerate(batch["at"].tolist()):
            first, last = self.episodes[at]
            for name in ("frame", "action"):
                offsets = windows.offsets.get(name)
                if offsets is None:
                    assert np.asarray(batch[name][i]).ravel()[0] == at
                    continue
                mask = windows.mask_of(name, batch.mask)[i]
                for k, offset in enumerate(offsets):
                    real = first <= at + offset <= last
                    expected = at + offset if real else 0
                    assert mask[k] == real
                    assert batch[name][i, k].tolist() == ([expected, -expected] if name == "frame" else expected)
            every = [0, *itertools.chain.from_iterable(windows.offsets.values())]
            held = [step for step in range(at + min(every), at + max(every) + 1) if first <= step <= last]
            assert batch.start[i] == (held[0] - 1) % 100
            assert batch.mask[i].sum() == len(held)
        return batch["at"].tolist()


def some_offsets(rng):
    """A few offsets within a row's reach, in no order."""
    least, most = sorted(rng.integers(-MAX + 1, MAX, 2).tolist())
    found = rng.permutation(np.arange(least, most + 1))[: rng.integers(1, 6)]
    return (np.sort(found) if rng.random() < 0.7 else found).tolist()


def compare(seed, rounds):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        shared = bool(rng.integers(2))
        offsets = {name: some_offsets(rng) for name in ("frame", "action") if rng.random() < 0.8}
        offsets = offsets or {"action": some_offsets(rng)}
        windows = gt.Windows(offsets=offsets, whole=bool(rng.random() < 0.3))
        per_step = bool(rng.integers(2))
        made = Rows(rng, 24, shared=shared, **({"priority_per": "step"} if per_step else {}))
        with made.store as store:
            wanted = made.anchors(windows)
            if windows.length > MAX and windows.whole:
                with pytest.raises(ArgumentError, match="whole windows need"):
                    gt.Replay(store, Epochs(over="steps"), 8, window=windows)
                continue
            if not wanted:
                continue
            options = {"window": windows, "output": "numpy"}
            with replay_of(store, Epochs(seed=1, over="steps"), 32, **options) as replay:
                found = Counter(step for batch in replay for step in made.check(batch, windows))
            assert found == dict.fromkeys(wanted, 1)  # each once, and none that lacks a step
            selections = [Uniform(seed=2, over="steps")]
            selections += (
                [Prioritized(seed=2)] if per_step else [] if shared else [Prioritized(seed=2), Uniform(seed=3)]
            )
            for selection in selections:
                with replay_of(store, selection, 32, **options) as replay:
                    batch = replay.sample()
                    assert set(made.check(batch, windows)) <= wanted
                    if per_step:
                        assert (batch.keys.step == (batch["at"] - 1) % 100).all()
                    again = gt.fetch(store, batch.keys, ends=(batch["at"] - 1) % 100, window=windows, output="numpy")
                    assert all(np.array_equal(again[name], batch[name]) for name in batch)
                    assert np.array_equal(again.mask, batch.mask)


def test_each_field_has_the_steps_of_its_offsets_and_nothing_else():
    compare(seed=0, rounds=150)  # 3,600 rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_each_field_of_many_more_episodes_has_the_steps_of_its_offsets(seed):
    compare(seed, rounds=1500)


CHUNKS = {"frame": [-3, 0], "action": range(1, 5)}


@pytest.mark.parametrize(
    ("window", "allowed"),
    [
        (gt.Windows(offsets=CHUNKS, stride=3), lambda length: range((length - 1) % 3, length, 3)),
        (gt.Windows(offsets=CHUNKS, stride=2, whole=True), lambda length: range(3 + (length - 8) % 2, length - 4, 2)),
        (gt.Windows(offsets=CHUNKS, at="start"), lambda length: [0]),
        (gt.Windows(offsets=CHUNKS, at="start", whole=True), lambda length: [3]),
        (gt.Windows(offsets=CHUNKS, at="end"), lambda length: [length - 1]),
        (gt.Windows(offsets=CHUNKS, at="end", whole=True), lambda length: [length - 5]),
        (gt.Windows(offsets=CHUNKS, at=lambda keys, lengths, random: lengths // 2), lambda length: [length // 2]),
    ],
    ids=["stride", "stride-whole", "start", "start-whole", "end", "end-whole", "function"],
)
def test_rows_have_the_windows_that_are_placed(window, allowed):
    made = Rows(np.random.default_rng(3), 40)
    of_rows = {
        100 * row + step + 1
        for row, length in enumerate(made.lengths.tolist())
        if not window.whole or length >= 8
        for step in allowed(length)
    }
    with made.store as store, gt.Replay(store, Uniform(seed=0), 4000, window=window, output="numpy") as replay:
        batch = replay.sample()
        assert set(made.check(batch, window)) == of_rows
        if window.stride != 1:
            with gt.Replay(store, Epochs(over="steps"), 40, window=window, output="numpy") as passes:
                assert Counter(at for each in passes for at in each["at"].tolist()) == dict.fromkeys(of_rows, 1)


def test_a_function_that_places_windows_is_told_of_steps_that_are_missing():
    window = gt.Windows(offsets=CHUNKS, whole=True, at=lambda keys, lengths, random: lengths - 4)
    with (
        Rows(np.random.default_rng(3), 40).store as store,
        gt.Replay(store, Uniform(), 8, window=window, output="numpy") as replay,
    ):
        with pytest.raises(ArgumentError, match="whole windows of 8 steps"):
            replay.sample()


def test_episodes_that_go_on_in_the_next_row_have_the_steps_there_or_the_overlap_that_is_needed_is_named():
    fields = {"obs": gt.Field((), "int64"), "action": gt.Field((), "int64"), "reward": gt.Field((), "float32")}
    fields = recorded_fields(fields, overlap=True)
    with gt.Store.create(fields, max_length=9, capacity=20) as store:
        with store.recorder(1, autoreset="disabled", overlap=5) as recorder:
            recorder.reset(np.array([1]))
            for t in range(1, 31):
                recorder.step(np.array([t + 1]), action=[t], reward=[0.0], terminated=[t == 30], truncated=[False])
        window = gt.Windows(offsets={"obs": [-2, 0], "action": range(4)})
        with gt.Replay(store, Epochs(over="steps"), 8, window=window, output="numpy") as replay:
            batches = list(replay)
        drawn = {}
        for batch in batches:
            for obs, action in zip(batch["obs"].tolist(), batch["action"].tolist(), strict=True):
                assert drawn.setdefault(obs[1], (obs, action)) == (obs, action)
        assert len(drawn) == sum(len(batch) for batch in batches) == 31  # each step once
        for t, (obs, action) in drawn.items():
            assert obs == [max(t - 2, 0), t]
            assert action == [t + k if t + k <= 30 else 0 for k in range(4)]
        wide = gt.Windows(offsets={"obs": [-3, 0], "action": range(4)})
        with gt.Replay(store, Uniform(over="steps"), 64, window=wide) as replay, pytest.raises(SchemaError) as told:
            replay.sample()
        assert "overlap=6" in str(told.value)


# --- ranks, mixtures, devices, loaders, stores that are only read -----------------------------------------------------


def as_record(batch):
    metadata = ("mask", "start", "length", "version", "importance_weights")
    record = {name: np.asarray(batch[name]) for name in batch} | {name: getattr(batch, name) for name in metadata}
    return {name: np.asarray(array) for name, array in record.items() if array is not None}


OPTIONS = [
    pytest.param({"window": gt.Windows(offsets=CHUNKS)}, id="offsets"),
    pytest.param({"window": 4, "first_only": ["frame"]}, id="first"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("selection", "more"),
    [
        (Uniform(seed=5), {}),
        (Uniform(seed=5), {"update_lag": 3}),
        (Uniform(seed=5, over="steps"), {}),
        (Epochs(seed=5, over="steps"), {}),
    ],
    ids=["rows", "lag", "steps", "pass"],
)
@pytest.mark.parametrize("one_host", [False, True], ids=["hosts", "host"])
def test_two_ranks_have_the_batches_of_one(options, selection, more, one_host):
    options = {"output": "numpy", "num_batches": 3, **options}
    with Rows(np.random.default_rng(4), 40).store as whole, replay_of(whole, selection, 24, **options) as replay:
        alone = [as_record(batch) for batch in replay]
    stores = []
    with Rows(np.random.default_rng(4), 40).store as whole:
        for first in (0, 20):
            rows = gt.fetch(whole, whole.keys()[first : first + 20], output="numpy")
            stores.append(gt.Store.create(FIELDS, max_length=MAX, capacity=20))
            stores[-1].native.advance_sequence(first + 1)
            stores[-1].insert(dict(rows.fields), lengths=rows.length)

    def body(rank):
        with replay_of(stores[rank.rank], selection, 24, group=rank, **options, **more) as replay:
            return list(replay)

    parts = run_ranks(ThreadRankGroup.make(2, one_host=one_host), body)
    for number, expected in enumerate(alone):
        of_ranks = [part[number] for part in parts]
        order = np.argsort(np.concatenate([batch.draw for batch in of_ranks]))
        records = [as_record(batch) for batch in of_ranks]
        for name, array in expected.items():
            assert np.array_equal(np.concatenate([record[name] for record in records])[order], array), name
    for store in stores:
        store.close()


def test_stages_of_a_pipeline_have_the_steps_of_their_own_fields():
    windows = gt.Windows(offsets=CHUNKS)
    options = {"window": windows, "output": "numpy", "num_batches": 2}
    with Rows(np.random.default_rng(4), 20).store as store:
        with replay_of(store, Uniform(seed=5), 12, **options) as replay:
            alone = list(replay)

        def body(rank):
            place, stages = MeshPosition(0, rank.rank, 0, 1, 2, 1), {"inputs": ["frame", "at"], "targets": ["action"]}
            with replay_of(store, Uniform(seed=5), 12, group=rank, mesh=place, **stages, **options) as replay:
                return list(replay)

        for expected, head, tail in zip(alone, *run_ranks(2, body), strict=True):
            order = np.argsort(head.draw)
            for name, batch in (("frame", head), ("at", head), ("action", tail)):
                assert name in batch and np.array_equal(batch[name][order], expected[name])
                assert np.array_equal(batch.mask[order], expected.mask)


def test_ranks_that_disagree_on_steps_of_fields_are_told():
    def body(rank, options):
        with Rows(np.random.default_rng(0), 4).store as store, pytest.raises(RanksDisagreeError, match=options[2]):
            replay_of(store, Uniform(seed=0), 2, group=rank, **options[rank.rank])

    windows = [{"window": gt.Windows(offsets={"action": [0, k]})} for k in (2, 3)]
    run_ranks(2, lambda rank: body(rank, [*windows, "window"]))
    run_ranks(2, lambda rank: body(rank, [{"first_only": ["at"]}, {}, "first_only"]))


@pytest.mark.parametrize("options", OPTIONS)
def test_stores_of_a_mixture_may_number_their_fields_differently(options):
    rng = np.random.default_rng(6)
    one, other = Rows(rng, 20), Rows(rng, 20, fields=dict(reversed(FIELDS.items())))
    mixture = Mixture([0.5, 0.5], [Uniform(seed=0), Uniform(seed=1)])
    with one.store, other.store:
        with replay_of([one.store, other.store], mixture, 16, output="numpy", **options) as replay:
            batch = replay.sample()
        for number, rows in enumerate((one, other)):
            here = np.flatnonzero(batch.keys.shard == number)
            part = {name: batch[name][here] for name in batch}
            if "first_only" not in options:
                made = gt.Batch(
                    part, batch.keys[here], batch.mask[here], batch.start[here], batch.length, batch.version
                )
                rows.check(made, options["window"])
            else:
                assert part["frame"][:, 0].tolist() == (100 * part["row"] + batch.start[here] + 1).tolist()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ranks", [0, 2])
def test_batches_on_a_device_are_staged_and_those_of_the_host(options, ranks):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from geartrain.replay.device import Convert, DeviceOptions
    from geartrain.tools.testing import SimulatedDevice

    convert = {"frame": Convert("float32", 0.5, 3.0)}
    fields = FIELDS | {"frame": gt.Field((2,), "uint8")}

    def body(rank):
        with Rows(np.random.default_rng(7), 24, fields=fields).store as store:
            group = {} if rank is None else {"group": rank}
            device = SimulatedDevice(0 if rank is None else rank.rank)
            on_device = DeviceOptions(device, convert=convert)
            chosen = {"num_batches": 3, **options, **group}
            with replay_of(store, Uniform(seed=1), 8, **chosen) as replay:
                expected = list(replay)
            with replay_of(store, Uniform(seed=1), 8, device=on_device, **chosen) as replay:
                assert replay.describe()[0]["path"] == "staged"
                for host, landed in zip(expected, replay, strict=True):
                    device.finish()
                    real = None
                    if "first_only" not in options:
                        real = options["window"].mask_of("frame", host.mask)
                    assert torch.equal(landed["frame"].cpu(), convert["frame"].apply(host["frame"], real))
                    for name in ("action", "at", "row"):
                        assert torch.equal(landed[name].cpu(), host[name]), name
                    assert torch.equal(landed.mask.cpu(), host.mask)
            for path in ("gather", "copy") if rank is None else ():
                with pytest.raises(ArgumentError, match="path='staged'"):
                    replay_of(store, Uniform(), 2, device=DeviceOptions(device, path=path), **options)

    if ranks:
        run_ranks(ranks, body)
    else:
        body(None)


def test_packed_windows_have_no_gaps():
    pytest.importorskip("triton")
    from geartrain.replay.device import DeviceOptions
    from geartrain.tools.testing import SimulatedDevice

    with Rows(np.random.default_rng(7), 24).store as store:
        packed = DeviceOptions(SimulatedDevice(0), packed=True)
        with pytest.raises(ArgumentError, match="leave out packed=True, or offsets"):
            gt.Replay(store, Uniform(), 2, device=packed, window=gt.Windows(offsets=CHUNKS))
        device = SimulatedDevice(1)
        packed = DeviceOptions(device, packed=True)
        options = {"window": 4, "first_only": ["at"], "num_batches": 1}
        with (
            replay_of(store, Uniform(seed=1), 8, **options) as plain,
            replay_of(store, Uniform(seed=1), 8, device=packed, **options) as replay,
        ):
            host, landed = plain.sample(), replay.sample()
            device.finish()
            assert landed["at"].cpu().tolist() == host["at"].tolist()
            assert landed["action"].cpu().tolist() == host["action"][host.mask].tolist()


def test_a_loader_has_items_of_a_store_that_is_only_read(store_name):
    torch = pytest.importorskip("torch")
    made = Rows(np.random.default_rng(8), 24, name=store_name())
    windows = gt.Windows(offsets=CHUNKS)
    with made.store, gt.Store.open(made.store.name, mode="r") as store:
        with gt.Replay(store, Epochs(over="steps"), 16, window=windows) as replay:
            loader = torch.utils.data.DataLoader(gt.ReplayDataset(replay), batch_size=None)
            found = Counter()
            for item in loader:
                is_pad = ~windows.mask_of("action", item["mask"])
                assert item["action"].shape == is_pad.shape and not item["action"][is_pad].any()
                assert item["frame"].shape[1:] == (2, 2) and item["at"].ndim == 1
                found.update(item["at"].tolist())
        assert found == dict.fromkeys(made.anchors(windows), 1)


def test_a_fetch_fills_the_callers_arrays_with_the_steps_of_offsets():
    made, windows = Rows(np.random.default_rng(9), 20), gt.Windows(offsets=CHUNKS)
    with made.store as store:
        keys, last = store.keys(), made.lengths - 1
        plain = gt.fetch(store, keys, window=windows, output="numpy")  # at the rows' last steps
        assert plain["at"].tolist() == (100 * np.arange(20) + made.lengths).tolist()
        out = {name: np.zeros_like(array) for name, array in plain.items()}
        filled = gt.fetch(store, keys, window=windows, ends=last // 2, out=out, output="numpy")
        made.check(gt.Batch(out, keys, filled.mask, filled.start, filled.length, filled.version), windows)
        assert out["at"].tolist() == (100 * np.arange(20) + last // 2 + 1).tolist()
        with pytest.raises(ArgumentError, match="has its offsets at step 12, rows have steps 0 to 11"):
            gt.fetch(store, keys, window=windows, ends=last * 0 + MAX)
        for options in ({"starts": last}, {"window": gt.Windows(offsets=CHUNKS, at="end")}):
            with pytest.raises(ArgumentError, match=r"starts|leave out at='end'"):
                gt.fetch(store, keys, **{"window": windows, **options})


# --- the first step of a window ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "pad", "shared"),
    crossed([None, 4, gt.Windows(4, anchor="first"), gt.Windows(3, whole=True)], ["left", "right"], [False, True]),
)
def test_fields_may_have_the_first_step_of_their_window_alone(window, pad, shared):
    made = Rows(np.random.default_rng(10), 40, shared=shared)
    options = {"window": window, "pad": pad, "output": "numpy"}
    with made.store as store:
        with (
            replay_of(store, Uniform(seed=0, over="steps"), 64, first_only=["frame", "at"], **options) as some,
            replay_of(store, Uniform(seed=0, over="steps"), 64, **options) as every,
        ):
            first, whole = some.sample(), every.sample()
        assert first["at"].shape == (64,) and first["frame"].shape == (64, 2)
        assert (first["action"] == whole["action"]).all() and (first.mask == whole.mask).all()
        begin = whole.mask.argmax(1)
        for name in ("frame", "at"):
            assert (first[name] == whole[name][np.arange(64), begin]).all()
        assert ((first["at"] - 1) % 100 == first.start).all()
        steps = whole.mask.shape[1]
        assert first.nbytes == whole.nbytes - 64 * (steps - 1) * (8 + 8)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "names at least one"),
        ([("action", [0])], "dict"),
        ({"action": []}, "1 to 1048576 whole numbers, found \\[\\]"),
        ({"action": 3}, "list of 1 to 1048576 whole numbers"),
        ({"action": "01"}, "list of 1 to 1048576 whole numbers"),
        ({"action": [0.5]}, "offset of 'action'"),
        ({"action": [True]}, "offset of 'action'"),
        ({"action": [None]}, "offset of 'action'"),
        ({"action": [[0, 1]]}, "offset of 'action'"),
        ({"action": np.zeros((2, 2), int)}, "offset of 'action'"),
        ({"action": [0, 2**40]}, "from -1073741823 to 1073741823"),
        ({"action": [1, 0, 1]}, "a step more than once"),
        ({"action": range(10**12)}, "1 to 1048576 whole numbers"),
        ({3: [0]}, "names of fields"),
    ],
    ids=str,
)
def test_offsets_that_are_none_are_refused(asked, says):
    with pytest.raises(ArgumentError, match=says):
        gt.Windows(offsets=asked)


@pytest.mark.parametrize(
    "options", [{"length": 4}, {"anchor": "first"}, {"at": "episode"}, {"at": "episode", "stride": 2}], ids=str
)
def test_offsets_leave_no_choice_of_length_and_anchor(options):
    with pytest.raises(ArgumentError, match="leave out"):
        gt.Windows(offsets={"action": [0, 5]}, **options)
    with pytest.raises(ArgumentError, match="length must be at least 1"):
        gt.Windows()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": gt.Windows(offsets={"actoin": [0]})}, "'actoin'"),
        ({"window": gt.Windows(offsets={"row": [0]})}, "'row', which is per_row"),
        ({"window": gt.Windows(offsets={"action": [-MAX]})}, "offset -12 of 'action' is beyond every row"),
        ({"window": gt.Windows(offsets={"action": [3, 500]})}, "offset 500 of 'action' is beyond every row"),
        ({"window": gt.Windows(offsets={"action": [1 - MAX, 1]}, whole=True)}, "whole windows need 13"),
        (
            {"window": gt.Windows(offsets=CHUNKS), "fields": ["frame", "at"]},
            "'action', but the batch has frame, at: add it",
        ),
        ({"window": gt.Windows(offsets=CHUNKS), "pad": "right"}, "leave out pad"),
        ({"window": gt.Windows(offsets=CHUNKS), "first_only": ["at"]}, "leave out first_only"),
        ({"first_only": ["actoin"]}, "'actoin'"),
        ({"first_only": ["row"]}, "per_row"),
        ({"first_only": "at"}, "list of names"),
        ({"first_only": ["at"], "fields": ["action"]}, "names 'at', but the batch has action"),
        ({"first_only": ["at"], "view": gt.Transitions()}, "leave out first_only"),
    ],
    ids=str,
)
def test_a_replay_refuses_steps_that_fields_cannot_have(options, says):
    with Rows(np.random.default_rng(0), 8).store as store, pytest.raises((ArgumentError, FieldError), match=says):
        replay_of(store, Uniform(seed=0), 4, **options)


def test_windows_with_offsets_are_values():
    one, other = (
        gt.Windows(offsets={"b": np.array([0, 2]), "a": range(2)}),
        gt.Windows(offsets={"a": [0, 1], "b": (0, 2)}),
    )
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)
    assert one != gt.Windows(offsets={"a": [1, 0], "b": [0, 2]})
    mask = np.ones((5, 3), bool)
    assert one.mask_of("b", mask).shape == (5, 2) and one.mask_of("c", mask).shape == (5,)
    assert gt.Windows(3).mask_of("b", mask) is mask
    with pytest.raises(ArgumentError, match=r"\(B, 3\), found \(5, 4\)"):
        one.mask_of("b", np.ones((5, 4), bool))
