"""D4RL-layout HDF5: the cut, the names, and how much of a file is in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from imports import assert_rows, imported, rows, store_name

from geartrain.errors import SourceError
from geartrain.integrations import import_dataset, open_source
from geartrain.integrations.datasets.d4rl import D4rlSource


def write(path: Path, ends: list[int], steps: int, **more: Any) -> dict[str, np.ndarray]:
    """A file whose episodes end with the steps `ends`: terminals and time-outs by turns."""
    rng = np.random.default_rng(0)
    data: dict[str, Any] = {
        "observations": rng.normal(size=(steps, 3)).astype(np.float32),
        "actions": rng.normal(size=(steps, 2)).astype(np.float32),
        "rewards": rng.normal(size=steps).astype(np.float32),
        "terminals": np.zeros(steps, bool),
        "timeouts": np.zeros(steps, bool),
    }
    for index, end in enumerate(ends):
        data["terminals" if index % 2 == 0 else "timeouts"][end] = True
    data.update(more)
    data = {name: array for name, array in data.items() if array is not None}
    with h5py.File(path, "w") as file:
        for name, array in data.items():
            file.create_dataset(name, data=array)
    return data


def episodes(data: dict[str, np.ndarray], cuts: list[tuple[int, int]]) -> list[dict[str, np.ndarray]]:
    names = {
        "obs": "observations",
        "action": "actions",
        "reward": "rewards",
        "terminated": "terminals",
        "truncated": "timeouts",
    }
    return [{stored: data[name][start:stop] for stored, name in names.items() if name in data} for start, stop in cuts]


def test_the_terminal_step_is_the_last_of_its_own_episode(tmp_path: Path) -> None:
    # An importer that cuts before the flag gives its episode's last step to the next one.
    data = write(tmp_path / "d.hdf5", [4, 6, 11], 12)
    with imported(tmp_path / "d.hdf5") as store:
        assert_rows(store, episodes(data, [(0, 5), (5, 7), (7, 12)]))
        for row in rows(store):
            ends = row["terminated"] | row["truncated"]
            assert ends[-1]
            assert not ends[:-1].any()


def test_no_step_is_lost_or_told_twice(tmp_path: Path) -> None:
    data = write(tmp_path / "d.hdf5", [0, 1, 7, 30], 40)
    with imported(tmp_path / "d.hdf5") as store:
        joined = np.concatenate([row["obs"] for row in rows(store)])
    assert joined.tobytes() == data["observations"].tobytes()


def test_the_unfinished_episode_at_the_end_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    data = write(tmp_path / "d.hdf5", [4], 9)
    with imported(tmp_path / "d.hdf5") as store:
        assert_rows(store, episodes(data, [(0, 5), (5, 9)]))
    with imported(tmp_path / "d.hdf5", keep_unfinished=False) as store:
        assert_rows(store, episodes(data, [(0, 5)]))


def test_timeouts_may_be_missing_or_ignored(tmp_path: Path) -> None:
    data = write(tmp_path / "without.hdf5", [4, 6, 8], 9, timeouts=None)
    with imported(tmp_path / "without.hdf5") as store:
        assert "truncated" not in store.fields
        assert_rows(store, episodes(data, [(0, 5), (5, 9)]))
    data = write(tmp_path / "with.hdf5", [4, 6, 8], 9)
    with imported(tmp_path / "with.hdf5", timeouts=False) as store:
        assert_rows(store, episodes(data, [(0, 5), (5, 9)]))


def test_a_step_limit_that_is_not_flagged_can_be_given(tmp_path: Path) -> None:
    data = write(tmp_path / "d.hdf5", [2], 12, timeouts=None)
    cuts = [(0, 3), (3, 7), (7, 11), (11, 12)]
    with imported(tmp_path / "d.hdf5", episode_steps=4) as store:
        assert_rows(store, episodes(data, cuts))
    with imported(tmp_path / "d.hdf5", episode_steps=4, keep_unfinished=False) as store:
        assert_rows(store, episodes(data, cuts[:-1]))
    data = write(tmp_path / "e.hdf5", [2], 11, timeouts=None)
    with imported(tmp_path / "e.hdf5", episode_steps=4, keep_unfinished=False) as store:
        assert_rows(store, episodes(data, cuts[:-1]))  # the last one is whole, so it stays


def test_flags_and_rewards_may_come_as_columns_of_floats(tmp_path: Path) -> None:
    flags = np.zeros((9, 1), np.float32)
    flags[5] = 1
    rewards = np.arange(9, dtype=np.float64).reshape(9, 1)
    write(tmp_path / "d.hdf5", [], 9, terminals=flags, timeouts=None, rewards=rewards)
    with imported(tmp_path / "d.hdf5", fields=["terminated", "reward"]) as store:
        first, second = rows(store)
    assert first["terminated"].tolist() == [False] * 5 + [True]
    assert second["reward"].tolist() == [6.0, 7.0, 8.0]


def test_the_observation_after_the_last_step_comes_along_where_the_file_has_it(tmp_path: Path) -> None:
    following = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    more = {"next_observations": following, "infos/qpos": np.arange(18.0).reshape(9, 2)}
    data = write(tmp_path / "d.hdf5", [4, 8], 9, **more, **{"metadata/algorithm": b"sac"})
    with imported(tmp_path / "d.hdf5") as store:
        expected = episodes(data, [(0, 5), (5, 9)])
        assert_rows(store, [{**e, "final_obs": following[i]} for e, i in zip(expected, (4, 8), strict=True)])
    with imported(tmp_path / "d.hdf5", fields=["next_obs", "infos.qpos"]) as store:
        first, _ = rows(store)
        assert first["next_obs"].tobytes() == following[:5].tobytes()
        assert first["infos.qpos"].tobytes() == more["infos/qpos"][:5].tobytes()


def test_a_file_larger_than_one_read_is_put_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.integrations.datasets.d4rl.SLICE_BYTES", 26 * 10)  # 10 steps a read
    monkeypatch.setattr("geartrain.integrations.datasets.d4rl._FLAGS_PER_READ", 7)
    data = write(tmp_path / "d.hdf5", [2, 4, 8, 30, 33, 40], 41)
    with imported(tmp_path / "d.hdf5") as store:
        assert_rows(store, episodes(data, [(0, 3), (3, 5), (5, 9), (9, 31), (31, 34), (34, 41)]))


def test_an_episode_is_named_by_its_steps_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "d.hdf5", [4, 30], 31)
    message = r"episode 1 \(steps 5 to 30\): has 26 steps, .* holds 10"
    with pytest.raises(SourceError, match=message):
        import_dataset(tmp_path / "d.hdf5", store_name(), max_length=10, progress=False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"terminals": None}, "lacks terminals; it has actions, observations, rewards, timeouts"),
        ({"actions": np.zeros((5, 2))}, r"actions has shape \(5, 2\), rewards has 9 steps"),
        ({"rewards": np.zeros(0)}, "holds no step"),
    ],
)
def test_a_file_of_another_layout_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    write(tmp_path / "d.hdf5", [4], 9, **more)
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path / "d.hdf5")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d.hdf5", [4], 9)
    path = tmp_path / "cut.hdf5"
    path.write_bytes((tmp_path / "d.hdf5").read_bytes()[:1500])
    with pytest.raises(SourceError, match=r"cut\.hdf5: cannot be read: OSError: .*truncated.* \(expected HDF5\)"):
        open_source(path)
    with pytest.raises(SourceError, match="episode_steps is 0"):
        D4rlSource(tmp_path / "d.hdf5", episode_steps=0)


def test_a_chunk_that_cannot_be_read_is_named_by_its_episodes(tmp_path: Path) -> None:
    path = tmp_path / "d.hdf5"
    write(path, [4], 9)
    with h5py.File(path, "a") as file:
        del file["actions"]
        file.create_dataset("actions", data=np.zeros((9, 2)), chunks=(9, 2), fletcher32=True)
        chunk = file["actions"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"episodes 0 to 1 \(steps 0 to 8\) of actions: cannot be read"):
        import_dataset(path, store_name(), progress=False)


def test_memory_stays_bounded_while_a_large_file_is_read(tmp_path: Path) -> None:
    # 400,000 steps of 256 bytes: 102 MB. The peak is taken in a process of its own, after imports.
    with h5py.File(tmp_path / "large.hdf5", "w") as file:
        steps = 400_000
        file.create_dataset("observations", (steps, 63), "float32", fillvalue=1.0)
        file.create_dataset("actions", (steps, 1), "float32", fillvalue=1.0)
        file.create_dataset("rewards", data=np.ones(steps, np.float32))
        ends = np.zeros(steps, bool)
        ends[999::1000] = True
        file.create_dataset("terminals", data=ends)
    script = (
        "import sys, resource, h5py\n"
        "from geartrain.integrations.datasets.d4rl import D4rlSource\n"
        "source = D4rlSource(sys.argv[1])\n"
        "next(iter(source))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "total = sum(e.timed['obs'].nbytes for e in source)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(total, (after - before) * 1024)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "large.hdf5")],
        capture_output=True,
        text=True,
        check=True,
    )
    total, grown = map(int, out.stdout.split())
    assert total == 400_000 * 63 * 4
    assert grown < 40e6  # one slice of 16 MiB is let go only when the next one is there
