"""LeRobotDataset folders: v3.0 with many episodes in a file, v2.1 with one."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from imports import assert_rows, imported, rows, store_name
from PIL import Image

from geartrain.errors import SourceError
from geartrain.integrations import import_dataset, open_source
from geartrain.integrations.datasets.images import decode_image

LENGTHS = [4, 7, 1, 5]
VIDEO = {"dtype": "video", "shape": [48, 64, 3], "names": ["height", "width", "channels"]}


def feature(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": None}


FEATURES = {
    "observation.state": feature("float32", 3),
    "observation.grid": feature("float32", 2, 2),
    "action": feature("float64", 2),
    "next.reward": feature("float32", 1),
    "next.done": feature("bool", 1),
    "timestamp": feature("float32", 1),
    "frame_index": feature("int64", 1),
    "episode_index": feature("int64", 1),
    "index": feature("int64", 1),
    "task_index": feature("int64", 1),
}


def episodes() -> list[dict[str, np.ndarray]]:
    """Columns of each episode, under LeRobot's names."""
    found = []
    start = 0
    for index, length in enumerate(LENGTHS):
        rng = np.random.default_rng(index)
        found.append(
            {
                "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
                "observation.grid": rng.normal(size=(length, 2, 2)).astype(np.float32),
                "action": rng.normal(size=(length, 2)),
                "next.reward": rng.normal(size=length).astype(np.float32),
                "next.done": np.arange(length) == length - 1,
                "timestamp": (np.arange(length) / 30).astype(np.float32),
                "frame_index": np.arange(length),
                "episode_index": np.full(length, index),
                "index": np.arange(start, start + length),
                "task_index": np.full(length, index % 2),
            }
        )
        start += length
    return found


def stored(episode: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under the names that rows have, without what says only where a frame is."""
    names = {"next.reward": "reward", "next.done": "done"}
    return {
        names.get(key, key.replace("observation.", "obs.")): values
        for key, values in episode.items()
        if key not in ("index", "episode_index", "frame_index")
    }


def nested(values: np.ndarray) -> pa.Array:
    """Lists as LeRobot writes them: of fixed size for a vector, plain ones for a matrix."""
    if values.ndim == 1:
        return pa.array(values)
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return pa.array(values.tolist(), pa.list_(pa.list_(pa.from_numpy_dtype(values.dtype))))


def table(columns: dict[str, Any]) -> pa.Table:
    return pa.table({key: nested(v) if isinstance(v, np.ndarray) else v for key, v in columns.items()})


def v3(root: Path, files: list[list[int]], data: list[dict[str, Any]], **features: Any) -> Path:
    """A v3.0 folder with the episodes `files[i]` in data file i."""
    info = {
        "codebase_version": "v3.0",
        "fps": 30,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "features": {**FEATURES, **features},
    }
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    rows_of_meta = [
        {
            "episode_index": index,
            "length": LENGTHS[index],
            "data/chunk_index": 0,
            "data/file_index": number,
            "tasks": ["pick"],
        }
        for number, indices in enumerate(files)
        for index in indices
    ]
    pq.write_table(pa.Table.from_pylist(rows_of_meta), root / "meta/episodes/chunk-000/file-000.parquet")
    for number, indices in enumerate(files):
        path = root / f"data/chunk-000/file-{number:03d}.parquet"
        tables = [table(data[index]) for index in indices]
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for part in tables:
                writer.write_table(part)
    return root


@pytest.mark.parametrize("files", [[[0, 1, 2, 3]], [[0, 1], [2], [3]]])
def test_a_v3_dataset_comes_back_byte_for_byte(files: list[list[int]], tmp_path: Path) -> None:
    data = episodes()
    with imported(v3(tmp_path, files, data)) as store:
        assert store.max_length == max(LENGTHS)
        assert_rows(store, [stored(episode) for episode in data])


def test_an_episode_may_span_batches_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = episodes()
    v3(tmp_path, [[0, 1], [2, 3]], data)
    # The first frames of episode 2 move to the end of the file before, as a careless split would leave it.
    whole = [pq.read_table(tmp_path / f"data/chunk-000/file-{i:03d}.parquet") for i in range(2)]
    joined = pa.concat_tables(whole)
    pq.write_table(joined.slice(0, 9), tmp_path / "data/chunk-000/file-000.parquet")
    pq.write_table(joined.slice(9), tmp_path / "data/chunk-000/file-001.parquet")
    monkeypatch.setattr("geartrain.integrations.datasets.lerobot._BATCH_BYTES", 3 * 57)  # three frames a batch
    with imported(tmp_path) as store:
        assert_rows(store, [stored(episode) for episode in data])


@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_a_v2_dataset_comes_back_byte_for_byte(version: str, tmp_path: Path) -> None:
    data = episodes()
    info = {
        "codebase_version": version,
        "chunks_size": 3,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": FEATURES,
    }
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    lines = [{"episode_index": i, "tasks": ["pick"], "length": n} for i, n in enumerate(LENGTHS)]
    (tmp_path / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for index, columns in enumerate(data):
        path = tmp_path / f"data/chunk-{index // 3:03d}/episode_{index:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(columns), path)
    with imported(tmp_path) as store:
        assert_rows(store, [stored(episode) for episode in data])


def test_text_is_refused_with_the_fields_that_can_be_had(tmp_path: Path) -> None:
    data = episodes()
    v3(tmp_path, [[0, 1, 2, 3]], data, **{"observation.words": {"dtype": "string", "shape": [1], "names": None}})
    message = r"obs\.words \(dtype string\).*these can be stored: action, done, .*obs\.state"
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)
    with pytest.raises(SourceError, match="string"):
        open_source(tmp_path, fields=["obs", "action"])
    with imported(tmp_path, fields=["obs.state", "action"]) as store:
        assert_rows(
            store,
            [{"obs.state": e["observation.state"], "action": e["action"]} for e in data],
        )
    with imported(tmp_path, skip_unsupported=True) as store:
        assert_rows(store, [stored(episode) for episode in data])


def test_a_video_without_times_or_a_path_is_refused(tmp_path: Path) -> None:
    v3(tmp_path, [[0, 1, 2, 3]], episodes(), **{"observation.images.top": VIDEO})
    with pytest.raises(SourceError, match=r"meta/info\.json: has videos, and lacks the feature timestamp, fps or"):
        open_source(tmp_path)
    with imported(tmp_path, fields=["obs.state"]) as store:
        assert_rows(store, [{"obs.state": e["observation.state"]} for e in episodes()])


def test_the_place_of_a_frame_is_stored_when_asked_for(tmp_path: Path) -> None:
    data = episodes()
    v3(tmp_path, [[0, 1, 2, 3]], data)
    with imported(tmp_path, fields=["frame_index", "n=index"]) as store:
        assert_rows(store, [{"frame_index": e["frame_index"], "n": e["index"]} for e in data])


@pytest.mark.parametrize("shape", [[8, 6, 3], [3, 8, 6]])
@pytest.mark.parametrize("embedded", [True, False])
def test_images_in_the_tables_are_decoded(shape: list[int], embedded: bool, tmp_path: Path) -> None:
    data: list[dict[str, Any]] = list(episodes())
    pixels = []
    for index, length in enumerate(LENGTHS):
        frames = np.random.default_rng(index).integers(0, 256, size=(length, 8, 6, 3), dtype=np.uint8)
        pixels.append(frames)
        cells = []
        for frame, image in enumerate(frames):
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, format="PNG")
            path = f"images/{index}-{frame}.png"
            if not embedded:
                (tmp_path / "images").mkdir(exist_ok=True)
                (tmp_path / path).write_bytes(buffer.getvalue())
            cells.append({"bytes": buffer.getvalue() if embedded else None, "path": path})
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        data[index]["observation.image"] = pa.array(cells, kind)
    spec = {"dtype": "image", "shape": shape, "names": None}
    v3(tmp_path, [[0, 1], [2, 3]], data, **{"observation.image": spec})
    with imported(tmp_path, fields=["obs.image"]) as store:
        for row, frames in zip(rows(store), pixels, strict=True):
            assert row["obs.image"].tobytes() == frames.tobytes()
    with imported(tmp_path, fields=["obs.image"], image_layout="chw") as store:
        for row, frames in zip(rows(store), pixels, strict=True):
            assert np.array_equal(row["obs.image"], frames.transpose(0, 3, 1, 2))
    with imported(tmp_path, fields=["obs.image"], image_size="4x3") as store:
        halved = [frames.reshape(-1, 4, 2, 3, 2, 3).mean((2, 4)) for frames in pixels]
        for row, frames in zip(rows(store), halved, strict=True):
            assert row["obs.image"].shape == frames.shape
            assert np.abs(row["obs.image"] - frames).mean() < 30  # the filter is wider than two pixels


def test_an_episode_that_disagrees_with_meta_is_named(tmp_path: Path) -> None:
    data = episodes()
    data[2] = {key: np.repeat(values, 2, axis=0) for key, values in data[2].items()}
    v3(tmp_path, [[0, 1], [2, 3]], data)
    message = r"episode 2 \(data/chunk-000/file-001.parquet\): has 2 frames .*, meta promises 1"
    with pytest.raises(SourceError, match=message):
        import_dataset(tmp_path, store_name(), progress=False)


def test_a_missing_value_is_named(tmp_path: Path) -> None:
    data: list[dict[str, Any]] = list(episodes())
    v3(tmp_path, [[0, 1, 2, 3]], data)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    whole = pq.read_table(path)
    actions = whole.column("action").to_pylist()
    actions[5] = None
    column = pa.array(actions, pa.list_(pa.float64(), 2))
    pq.write_table(whole.set_column(whole.schema.get_field_index("action"), "action", column), path)
    with pytest.raises(SourceError, match=r"episode 1 \(.*field 'action': 1 of 7 values are missing"):
        import_dataset(tmp_path, store_name(), progress=False)


def test_missing_files_columns_and_episodes_are_noticed(tmp_path: Path) -> None:
    v3(tmp_path / "a", [[0, 1], [2, 3]], episodes())
    (tmp_path / "a/data/chunk-000/file-001.parquet").unlink()
    with pytest.raises(SourceError, match=r"file-001\.parquet is missing, meta/ speaks of it"):
        open_source(tmp_path / "a")

    v3(tmp_path / "b", [[0, 1], [2, 3]], episodes())
    path = tmp_path / "b/data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    with pytest.raises(SourceError, match="has no column action"):
        import_dataset(tmp_path / "b", store_name(), progress=False)

    v3(tmp_path / "c", [[0, 1], [2, 3]], episodes())
    path = tmp_path / "c/data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).slice(0, 1), path)
    with pytest.raises(SourceError, match="the data files hold 3 episodes, meta promises 4"):
        import_dataset(tmp_path / "c", store_name(), progress=False)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    v3(tmp_path, [[0, 1, 2, 3]], episodes())
    path = tmp_path / "data/chunk-000/file-000.parquet"
    data = bytearray(path.read_bytes())
    data[20:600] = bytes(580)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"file-000\.parquet: frame 0 or later"):
        import_dataset(tmp_path, store_name(), progress=False)


def test_versions_that_are_not_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    for version in ("v1.6", "v4.0", None):
        (tmp_path / "meta/info.json").write_text(json.dumps({"codebase_version": version, "features": {}}))
        with pytest.raises(SourceError, match=rf"LeRobotDataset {version}; v3\.0, v2\.1 and v2\.0 are read"):
            open_source(tmp_path)
    (tmp_path / "meta/info.json").write_text("{")
    with pytest.raises(SourceError, match=r"meta/info\.json: it is not the JSON"):
        open_source(tmp_path)


def png_16(channels: int) -> bytes:
    """A PNG file of 16 bits a value."""
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    pixels = b"".join(b"\0" + bytes(64 * channels * 2) for _ in range(48))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 64, 48, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_of_16_bits_are_not_cut_to_8(channels: int, dtype: str) -> None:
    """Pillow opens those of colours, or with alpha, in modes of 8 bits."""
    with pytest.raises(ValueError, match="8 bits a value"):
        decode_image(png_16(channels), 3, dtype, "lerobot")
