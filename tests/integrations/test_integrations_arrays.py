"""Dicts of NumPy arrays, array files, and torch datasets."""

from __future__ import annotations

import importlib.util
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imports import assert_rows, imported, rows, store_name
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from geartrain import Field, Store
from geartrain.errors import ArgumentError, MissingDependencyError, SourceError
from geartrain.integrations import export_store, import_dataset, open_source
from geartrain.integrations.datasets import array_files

RNG = np.random.default_rng(0)
OBS = RNG.normal(size=(4, 6, 3)).astype(np.float32)
ACTION = RNG.integers(0, 9, size=(4, 6))
TASK = np.arange(4, dtype=np.uint8)


def padded(lengths: list[int]) -> list[dict[str, np.ndarray]]:
    return [{"obs": OBS[i, :length], "action": ACTION[i, :length], "task": TASK[i]} for i, length in enumerate(lengths)]


def test_padded_arrays_become_rows_of_their_lengths() -> None:
    data = {"obs": OBS, "action": ACTION, "task": TASK}
    with imported(data) as store:
        assert_rows(store, padded([6] * 4))
    with imported(data, lengths=np.array([6, 2, 1, 5])) as store:
        assert store.max_length == 6
        assert_rows(store, padded([6, 2, 1, 5]))


def test_nested_arrays_are_flattened_and_untimed_ones_kept_whole() -> None:
    data = {"obs": {"a": OBS, "b": ACTION}, "goal": OBS[:, 0]}
    with imported(data, untimed=["goal"]) as store:
        assert store.fields["goal"].per_row
        expected = [{"obs.a": OBS[i], "obs.b": ACTION[i], "goal": OBS[i, 0]} for i in range(4)]
        assert_rows(store, expected)


@pytest.mark.parametrize("booleans", [False, True])
def test_flat_arrays_are_cut_after_each_end(booleans: bool) -> None:
    data = {"obs": OBS.reshape(24, 3), "action": ACTION.reshape(24)}
    ends: np.ndarray = np.array([5, 6, 20])
    if booleans:
        flags = np.zeros(24, bool)
        flags[ends - 1] = True
        ends = flags
    with imported(data, ends=ends) as store:
        cuts = [(0, 5), (5, 6), (6, 20), (20, 24)]
        assert_rows(store, [{name: array[a:b] for name, array in data.items()} for a, b in cuts])


def test_array_files_say_the_same_as_arrays(tmp_path: Path) -> None:
    data = {"obs": OBS, "action": ACTION, "task": TASK, "lengths": np.array([6, 2, 1, 5])}
    np.savez(tmp_path / "data.npz", **data)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in data.items():
        np.save(folder / f"{name}.npy", array)
    for path in (tmp_path / "data.npz", folder):
        with imported(path) as store:
            assert_rows(store, padded([6, 2, 1, 5]))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_read_an_episode_at_a_time(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "_SMALL_BYTES", 0)  # as of archives larger than memory
    unusual = {"by_columns": np.asfortranarray(OBS), "goal": OBS[:, 0], "big_endian": ACTION.astype(">i4")}
    save(tmp_path / "data.npz", obs=OBS, action=ACTION, task=TASK, lengths=np.array([6, 2, 1, 5]), **unusual)
    with imported(tmp_path / "data.npz", untimed="goal") as store:
        expected = padded([6, 2, 1, 5])
        for index, episode in enumerate(expected):
            length = len(episode["obs"])
            episode |= {"by_columns": OBS[index, :length], "goal": OBS[index, 0]}
            episode["big_endian"] = ACTION[index, :length].astype(np.int32)
        assert_rows(store, expected)
    source = open_source(tmp_path / "data.npz", fields="obs")
    assert [len(episode.timed["obs"]) for numbers in ([1, 3], [0], [2]) for episode in source.read(numbers)] == [
        2,
        5,
        6,
        1,
    ]
    save(tmp_path / "flat.npz", obs=OBS.reshape(24, 3), ends=np.array([5, 20, 24]))
    with imported(tmp_path / "flat.npz") as store:
        assert_rows(store, [{"obs": each} for each in np.split(OBS.reshape(24, 3), [5, 20])])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_is_named_also_where_the_damage_is_in_values(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "_SMALL_BYTES", 0)
    file = tmp_path / "data.npz"
    obs = RNG.integers(0, 256, (4, 6, 100), np.uint8)
    save(file, obs=obs)
    sound, refused = file.read_bytes(), 0
    begin, end = sound.index(b"NUMPY") if save is np.savez else 60, sound.index(b"PK\x01\x02")
    for place in np.linspace(begin, end - 1, 40).astype(int).tolist():
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        try:
            with imported(file) as store:  # some bits of zlib's data mean nothing
                assert_rows(store, [{"obs": each} for each in obs])
        except SourceError as error:
            refused += 1
            assert f"{file}: array 'obs'" in str(error)
    assert refused >= 38


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"a": OBS, "b": ACTION[:3]}, {}, "disagree on their first axis: {'a': 4, 'b': 3}"),
        ({"a": OBS, "b": ACTION[:, :2]}, {}, "disagree on their second axis"),
        ({"a": OBS}, {"lengths": np.array([1, 2])}, r"4 episodes need as many lengths"),
        ({"a": OBS}, {"lengths": np.array([1, 7, 2, 3])}, "episode 1: length 7"),
        ({"a": OBS}, {"ends": np.array([3, 2])}, "ends must rise"),
        ({"a": OBS}, {"ends": np.array([9])}, "ends must rise"),
        ({"a": OBS}, {"ends": np.zeros(3, bool)}, "4 steps need as many ends"),
        ({"a": OBS}, {"ends": [1], "lengths": [1]}, "lengths are for padded arrays"),
        ({"a": OBS}, {"untimed": ["b"]}, "untimed names no field: b"),
        ({"a": np.array(["x"])}, {}, r"a \(dtype <U1\)"),
        ({}, {}, "holds no array"),
    ],
)
def test_arrays_that_do_not_agree_are_refused(data: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(data, **options)


class Episodes(Dataset[Any]):
    """Items of different lengths, as dicts of tensors."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        length = self.lengths[index]
        generator = torch.Generator().manual_seed(index)
        return {
            "obs": {"state": torch.rand(length, 3, generator=generator)},
            "action": torch.arange(length) + index,
            "task": index,
        }

    def expected(self) -> list[dict[str, np.ndarray]]:
        return [
            {
                "obs.state": item["obs"]["state"].numpy(),
                "action": item["action"].numpy(),
                "task": np.asarray(item["task"]),
            }
            for item in (self[i] for i in range(len(self)))
        ]


def test_a_map_style_dataset_becomes_rows() -> None:
    dataset = Episodes([3, 5, 1])
    with imported(dataset) as store:
        assert store.max_length == 5
        assert_rows(store, dataset.expected())


def test_a_known_length_saves_the_pass_that_would_find_it() -> None:
    dataset = Episodes([3, 5, 1])
    with imported(dataset, max_length=8):
        assert dataset.reads == 1 + 3  # the first item for its names and shapes, then each of them


def test_an_iterable_dataset_becomes_rows() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (Episodes([3, 5, 1])[i] for i in range(3))

    with imported(Stream()) as store:
        assert_rows(store, Episodes([3, 5, 1]).expected())


def test_what_can_be_read_only_once_is_read_only_once() -> None:
    items = Episodes([3, 5, 1])
    with imported((items[i] for i in range(3)), capacity=3, max_length=5) as store:
        assert_rows(store, items.expected())
    with pytest.raises(SourceError, match="can be read only once, and was; give max_length"):
        import_dataset((items[i] for i in range(3)), store_name(), progress=False)


def test_tuples_get_names_and_samples_need_no_time() -> None:
    images = torch.rand(5, 2, 4, 4)
    labels = torch.arange(5)
    with imported(TensorDataset(images, labels), names=["image", "label"], untimed=True) as store:
        assert store.max_length == 1
        expected = [{"image": images[i].numpy(), "label": labels[i].numpy()} for i in range(5)]
        assert_rows(store, expected)
    with imported(TensorDataset(images, labels)) as store:
        assert not store.fields["0"].per_row
        assert store.fields["1"].per_row


def test_named_tuples_name_their_fields() -> None:
    step = namedtuple("step", ["obs", "reward"])
    items = [step(torch.ones(3, 2) * i, np.arange(3.0)) for i in range(2)]
    with imported(items) as store:
        expected = [{"obs": item.obs.numpy(), "reward": item.reward} for item in items]
        assert_rows(store, expected)


def test_padded_items_say_how_long_they_are() -> None:
    items = [{"obs": torch.rand(6, 2), "n": length} for length in (4, 6)]
    with imported(items, length="n") as store:
        assert_rows(store, [{"obs": items[0]["obs"][:4].numpy()}, {"obs": items[1]["obs"].numpy()}])


def test_an_item_that_differs_is_named() -> None:
    items: list[dict[str, Any]] = [{"obs": torch.zeros(3, 2)} for _ in range(4)]
    for odd, message in (
        ({"image": torch.zeros(3, 2)}, "item 2: has no field 'obs', which item 0 has; it has image"),
        ({"obs": torch.zeros(3, 5)}, r"item 2: field 'obs' has steps of shape \(5,\)"),
        ({"obs": torch.zeros(3, 2, dtype=torch.float64)}, "item 2: field 'obs' has dtype float64"),
    ):
        with pytest.raises(SourceError, match=message):
            import_dataset([*items[:2], odd, items[3]], store_name(), progress=False)


def test_an_item_that_cannot_be_made_is_named() -> None:
    class Broken(Episodes):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 2:
                raise ValueError("the frame is lost")
            return super().__getitem__(index)

    with pytest.raises(SourceError, match="Broken: item 2: the dataset raised ValueError: the frame is lost"):
        import_dataset(Broken([3, 5, 1]), store_name(), max_length=5, progress=False)


def test_bfloat16_needs_ml_dtypes_or_is_stored_as_it_is() -> None:
    items = [{"x": torch.rand(4, 2).to(torch.bfloat16)} for _ in range(2)]
    if importlib.util.find_spec("ml_dtypes") is None:
        with pytest.raises(MissingDependencyError, match=r"field 'x' is bfloat16.*pip install ml_dtypes"):
            import_dataset(items, store_name(), progress=False)
        return
    with imported(items) as store:
        assert store.fields["x"].dtype == "bfloat16"
        for row, item in zip(rows(store), items, strict=True):
            assert row["x"].tobytes() == item["x"].view(torch.uint16).numpy().tobytes()


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(SourceError, match="int is neither a path, a dict of arrays nor a dataset"):
        open_source(5)
    with pytest.raises(SourceError, match="list: holds no item"):
        open_source([])


def test_options_take_numbers_and_flags_of_numpy(tmp_path: Path) -> None:
    with Store.create({"obs": Field((2,), "float32")}, max_length=3, capacity=2) as store:
        store.insert({"obs": np.zeros((2, 3, 2), np.float32)})
        made = export_store(store, tmp_path / "rows.npz", progress=np.False_, compress=np.True_)
    assert made.rows == 2
    with pytest.raises(ArgumentError, match="compress of the npz exporter is a bool, found 1"):
        export_store(tmp_path / "rows.npz", tmp_path / "other.npz", progress=False, compress=np.int64(1))
