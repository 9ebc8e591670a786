"""Minari datasets made here, in every layout, and read back from stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import pytest
from imports import assert_rows, imported, rows
from minari.data_collector import EpisodeBuffer

from geartrain.errors import SourceError
from geartrain.integrations import open_source

LENGTHS = [5, 1, 9]
LAYOUTS = ["hdf5", "arrow", "parquet"]
BOX = gym.spaces.Box(-10, 10, (3,), np.float32)

pytestmark = pytest.mark.filterwarnings("ignore")  # Minari warns about every field left empty


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def make(
    layout: str,
    observations: list[Any],
    actions: list[Any],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    **more: Any,
) -> list[dict[str, np.ndarray]]:
    """A dataset `toy/<layout>-v0`; returns the plain fields of each episode as rows have them."""
    buffers, expected = [], []
    for index, length in enumerate(LENGTHS):
        rng = np.random.default_rng(index)
        truncations = np.zeros(length, bool)
        truncations[-1] = index % 2 == 0
        terminations = np.zeros(length, bool)
        terminations[-1] = index % 2 == 1
        rewards = rng.normal(size=length)
        buffers.append(
            EpisodeBuffer(
                id=index,
                observations=observations[index],
                actions=actions[index],
                rewards=list(rewards),
                terminations=list(terminations),
                truncations=list(truncations),
                infos=more.get("infos", [None] * 3)[index],
            )
        )
        expected.append({"reward": rewards, "terminated": terminations, "truncated": truncations})
    minari.create_dataset_from_buffers(
        f"toy/{layout}-v0",
        buffers,
        observation_space=observation_space,
        action_space=action_space,
        data_format=layout,
    )
    return expected


def boxes(seed: int, extra: int, width: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n + extra, width)).astype(np.float32) for n in LENGTHS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dataset_comes_back_byte_for_byte(layout: str, tmp_path: Path) -> None:
    observations, actions = boxes(0, 1), boxes(1, 0)
    expected = make(layout, observations, actions, BOX, BOX)
    for index, row in enumerate(expected):
        row["obs"] = observations[index][:-1]
        row["final_obs"] = observations[index][-1]
        row["action"] = actions[index]
    for path in (tmp_path / f"toy/{layout}-v0", tmp_path / f"toy/{layout}-v0/data", f"toy/{layout}-v0"):
        with imported(path, format="minari" if isinstance(path, str) else "auto") as store:
            assert store.max_length == max(LENGTHS)
            assert_rows(store, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_observations_and_infos_come_when_asked_for(layout: str, tmp_path: Path) -> None:
    observations = boxes(0, 1)
    infos = [{"speed": list(np.arange(n + 1.0)), "pose": {"xy": boxes(2, 1, 2)[i]}} for i, n in enumerate(LENGTHS)]
    make(layout, observations, boxes(1, 0), BOX, BOX, infos=infos)
    fields = ["next_obs", "speed=infos.speed", "infos.pose"]
    with imported(tmp_path / f"toy/{layout}-v0", fields=fields) as store:
        expected = [
            {
                "next_obs": observations[i][1:],
                "speed": np.arange(n * 1.0),
                "infos.pose.xy": infos[i]["pose"]["xy"][:n],
            }
            for i, n in enumerate(LENGTHS)
        ]
        assert_rows(store, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dict_and_tuple_spaces_are_flattened_with_dots(layout: str, tmp_path: Path) -> None:
    state, table = boxes(0, 1), [np.arange(2 * (n + 1)).reshape(-1, 2) for n in LENGTHS]
    grip, push = [np.arange(n) % 3 for n in LENGTHS], boxes(1, 0)
    make(
        layout,
        [{"state": s, "table": {"x.y": t}} for s, t in zip(state, table, strict=True)],
        [(g, p) for g, p in zip(grip, push, strict=True)],
        gym.spaces.Dict(state=BOX, table=gym.spaces.Dict({"x.y": gym.spaces.Box(0, 99, (2,), np.int64)})),
        gym.spaces.Tuple([gym.spaces.Discrete(3), BOX]),
    )
    fields = ["obs", "action", "final_obs.table"]
    with imported(tmp_path / f"toy/{layout}-v0", fields=fields) as store:
        expected = [
            {
                "obs.state": state[i][:-1],
                "obs.table.x.y": table[i][:-1],
                "action.0": grip[i],
                "action.1": push[i],
                "final_obs.table.x.y": table[i][-1],
            }
            for i in range(3)
        ]
        assert_rows(store, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_are_decoded(layout: str, tmp_path: Path) -> None:
    images = [np.full((n + 1, 32, 40, 3), 40 * i + 20, np.uint8) for i, n in enumerate(LENGTHS)]
    for frames in images:  # one frame that is larger as a JPEG, so that they are not all of one size
        frames[0] = np.arange(40, dtype=np.uint8)[:, None] * 5
    make(layout, images, boxes(1, 0), gym.spaces.Box(0, 255, (32, 40, 3), np.uint8), BOX)
    with imported(tmp_path / f"toy/{layout}-v0", fields=["obs"]) as store:
        assert store.fields["obs"].shape == (32, 40, 3)
        for row, image in zip(rows(store), images, strict=True):
            assert row["obs"].shape == image[:-1].shape
            assert np.abs(row["obs"].astype(int) - image[:-1]).max() <= 2  # JPEG


def test_text_is_refused_or_left_out(tmp_path: Path) -> None:
    texts = [["go"] * (n + 1) for n in LENGTHS]
    observations = [{"x": x, "say": say} for x, say in zip(boxes(0, 1), texts, strict=True)]
    space = gym.spaces.Dict(x=BOX, say=gym.spaces.Text(5))
    make("hdf5", observations, boxes(1, 0), space, BOX)
    path = tmp_path / "toy/hdf5-v0"
    with pytest.raises(SourceError, match=r"obs\.say \(a Text space\).*can be stored: action, final_obs\.x"):
        open_source(path)
    with imported(path, skip_unsupported=True) as store:
        assert "obs.x" in store.fields
        assert "obs.say" not in store.fields


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_episode_whose_pieces_may_be_out_of_order_is_refused(layout: str, tmp_path: Path) -> None:
    # Arrow and Parquet write 32,768 rows at a time, and Minari does not ask for their order.
    steps = 32_768
    buffer = EpisodeBuffer(
        id=0,
        observations=np.zeros((steps + 1, 1), np.float32),
        actions=np.arange(steps, dtype=np.float32)[:, None],
        rewards=np.arange(steps, dtype=np.float64),
        terminations=np.zeros(steps, bool),
        truncations=np.zeros(steps, bool),
    )
    space = gym.spaces.Box(0, np.inf, (1,), np.float32)
    minari.create_dataset_from_buffers(
        "toy/long-v0", [buffer], observation_space=space, action_space=space, data_format=layout
    )
    source = open_source(tmp_path / "toy/long-v0", fields=["action", "reward"])
    if layout == "hdf5":
        (episode,) = source
        assert episode.timed["reward"].tobytes() == np.arange(steps, dtype=np.float64).tobytes()
    else:
        with pytest.raises(SourceError, match=r"episode_0: it is stored in 2 pieces, whose order"):
            next(iter(source))


def test_an_episode_that_disagrees_with_its_metadata_is_named(tmp_path: Path) -> None:
    import h5py

    make("hdf5", boxes(0, 1), boxes(1, 0), BOX, BOX)
    with h5py.File(tmp_path / "toy/hdf5-v0/data/main_data.hdf5", "a") as file:
        file["episode_2"].attrs["total_steps"] = 30
    message = "episode_2: field 'obs' has 10 steps, its metadata promise 31"
    with pytest.raises(SourceError, match=message), imported(tmp_path / "toy/hdf5-v0"):
        pass


def test_a_dataset_that_minari_does_not_know_is_refused(tmp_path: Path) -> None:
    make("hdf5", boxes(0, 1), boxes(1, 0), BOX, BOX)
    metadata = tmp_path / "toy/hdf5-v0/data/metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "minari_version": "99.0"}))
    with pytest.raises(SourceError, match=r"metadata\.json: .*99\.0.*that the installed Minari reads"):
        open_source(tmp_path / "toy/hdf5-v0")
    with pytest.raises(SourceError, match=r"no/such-v0: no Minari dataset; looked for a folder"):
        open_source("no/such-v0", format="minari")
