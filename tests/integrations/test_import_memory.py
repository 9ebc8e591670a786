"""Memory of an import: data sets several times larger than a process may hold, for every format that has files.

RLIMIT_DATA limits what a process allocates: its heap and its private mappings, among them a copy of the store if there
was one. The store's own pages are shared with its file and do not count.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.actors import recorded_fields
from geartrain.integrations import export_store

EPISODES, STEPS, WIDTH = 128, 1024, 256
#: What an import may allocate beyond the imported modules, in MB, of a data set of 128 MB.
ALLOWED_MB = 40

IMPORT = """
import resource, sys
import h5py, numpy as np, pyarrow.parquet
from geartrain.integrations import import_dataset

def megabytes(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) // 1024

if sys.argv[4] == "minari":
    import minari
private = megabytes("RssAnon")
most = (megabytes("VmData") + int(sys.argv[3])) << 20
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
with import_dataset(sys.argv[1], sys.argv[2], progress=False) as store:
    assert len(store) == int(sys.argv[5]), len(store)
    mapped, private = megabytes("RssFile"), megabytes("RssAnon") - private
    assert mapped >= store.nbytes >> 20, mapped
    assert private <= int(sys.argv[3]), private
"""


def steps(index: int) -> np.ndarray:
    return np.full((STEPS, WIDTH), index, np.float32)


def make_store(path: Path) -> gt.Store:
    fields = recorded_fields({"obs": gt.Field((WIDTH,), "float32"), "action": gt.Field((2,), "float32")})
    fields |= {"reward": gt.Field((), "float32"), "truncated": gt.Field((), "bool")}
    store = gt.Store.create(path / "source.gt", fields, max_length=STEPS, capacity=EPISODES)
    for index in range(EPISODES):
        rest = {name: np.zeros((1, STEPS, *field.shape), field.numpy_dtype) for name, field in fields.items()}
        store.insert({**rest, "obs": steps(index)[None]}, threads=1)
    return store


def make_minari(path: Path) -> Path:
    with make_store(path) as store:
        export_store(store, path / "minari", format="minari", repeat_last_obs=True, progress=False)
    return path / "minari"


def make_lerobot(path: Path) -> Path:
    with make_store(path) as store:
        export_store(store, path / "lerobot", format="lerobot", fps=10, task="hold", progress=False)
    return path / "lerobot"


def make_d4rl(path: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    count = EPISODES * STEPS
    with h5py.File(path / "data.hdf5", "w") as file:
        obs = file.create_dataset("observations", (count, WIDTH), "float32", chunks=(64, WIDTH), compression="lzf")
        for index in range(EPISODES):
            obs[index * STEPS : (index + 1) * STEPS] = index
        file["actions"], file["rewards"] = np.zeros((count, 2), np.float32), np.zeros(count, np.float32)
        file["terminals"] = np.arange(count) % STEPS == STEPS - 1
    return path / "data.hdf5"


def make_long_d4rl(path: Path) -> Path:
    """All steps in one episode, as in a file without flags."""
    h5py = pytest.importorskip("h5py")
    file = make_d4rl(path)
    with h5py.File(file, "r+") as opened:
        opened["terminals"][...] = False
    return file


def make_npz(path: Path, save: Callable[..., None] = np.savez) -> Path:
    save(path / "data.npz", obs=np.stack([steps(index) for index in range(EPISODES)]))
    return path / "data.npz"


def make_compressed_npz(path: Path) -> Path:
    return make_npz(path, np.savez_compressed)


def make_parquet(path: Path) -> Path:
    """One row group of equal values, which the file holds once and the memory as often as they stand in rows."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = arrow.array(np.ones(EPISODES * STEPS * WIDTH, np.float32))
    lists = arrow.FixedSizeListArray.from_arrays(values, WIDTH)
    edges = arrow.array(np.arange(0, (EPISODES + 1) * STEPS, STEPS, dtype=np.int32))
    parquet.write_table(arrow.table({"obs": arrow.ListArray.from_arrays(edges, lists)}), path / "data.parquet")
    return path / "data.parquet"


def make_rlds(path: Path) -> Path:
    tfrecord = pytest.importorskip("tfrecord.writer")
    folder = path / "rlds"
    folder.mkdir()
    shape = {"dimensions": [str(WIDTH)]}
    steps_of = {"observation": {"tensor": {"shape": shape, "dtype": "float32", "encoding": "bytes"}}}
    sequence = {"sequence": {"feature": {"featuresDict": {"features": steps_of}}, "length": "-1"}}
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": {"steps": sequence}}}))
    info = {"name": "toy", "splits": [{"name": "train", "shardLengths": [str(EPISODES)]}]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    writer = tfrecord.TFRecordWriter(str(folder / "toy-train.tfrecord-00000-of-00001"))
    for index in range(EPISODES):
        writer.write({"steps/observation": ([each.tobytes() for each in steps(index)], "byte")})
    writer.close()
    return folder


FORMATS = {
    "d4rl": make_d4rl,
    "npz": make_npz,
    "npz, compressed": make_compressed_npz,
    "minari": make_minari,
    "parquet": make_parquet,
    "lerobot": make_lerobot,
    "rlds": make_rlds,
}


#: Formats whose files are read as another one's are, or take seconds to write.
SLOW = {"npz, compressed", "lerobot", "minari", "rlds", "npz"}


def import_limited(source: Path, into: Path, format: str) -> subprocess.CompletedProcess[str]:
    words = [str(source), str(into), str(ALLOWED_MB), format, str(EPISODES)]
    return subprocess.run(
        [sys.executable, "-c", IMPORT, *words],
        check=False,
        # Without arenas, allocators and stacks of threads that reserve more than they use.
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


def test_an_episode_larger_than_memory_is_refused_by_name(tmp_path: Path) -> None:
    done = import_limited(make_long_d4rl(tmp_path), tmp_path / "imported.gt", "d4rl")
    last = done.stderr.splitlines()[-1]
    assert "SourceError" in last and "data.hdf5: episodes 0 to 0" in last
    assert "does not fit into memory, where an import holds one episode at a time" in last
    assert not (tmp_path / "imported.gt").exists()


@pytest.mark.parametrize(
    "format",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in FORMATS],
)
def test_a_data_set_larger_than_memory_is_imported(format: str, tmp_path: Path) -> None:
    done = import_limited(FORMATS[format](tmp_path), tmp_path / "imported.gt", format)
    assert done.returncode == 0, done.stderr
    with gt.Store.open(tmp_path / "imported.gt", mode="r") as store:
        name = "obs.state" if format == "lerobot" else "obs"
        last = gt.fetch(store, store.keys()[-1:], fields=[name], output="numpy")[name]
        assert (np.asarray(last) == (1 if format == "parquet" else EPISODES - 1)).all()
