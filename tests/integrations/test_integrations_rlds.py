"""RLDS datasets in TFDS's folders: TFRecord and ArrayRecord, without TensorFlow.

The records are written with the `tfrecord` and `array_record` packages, so that what is tested against
is not this project's own idea of the formats.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from imports import assert_rows, imported, rows, store_name
from PIL import Image
from tfrecord.writer import TFRecordWriter

from geartrain.errors import MissingDependencyError, SourceError, StoreMissingError
from geartrain.integrations import import_dataset, open_source
from geartrain.integrations.datasets.tfrecord import array_records, parse_example, tfrecords
from geartrain.store.store import Store

LENGTHS = [4, 1, 6, 3]
Features = dict[str, tuple[Any, str]]


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    # As protobuf prints JSON: 64-bit numbers are strings, an empty shape is an empty object.
    dimensions = {"dimensions": [str(n) for n in shape]} if shape else {}
    return {"tensor": {"shape": dimensions, "dtype": dtype, "encoding": encoding}}


def features_dict(**features: Any) -> dict[str, Any]:
    return {"featuresDict": {"features": features}}


def dataset_of(steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    steps = {"sequence": {"feature": steps, "length": "-1"}}
    return features_dict(steps=steps, **more)


def folder(
    path: Path,
    features: dict[str, Any],
    records: list[Features],
    *,
    kind: str = "tfrecord",
    shards: tuple[int, ...] = (),
    split: str = "train",
) -> Path:
    """A TFDS version folder with these records, `shards[i]` of them in shard i."""
    shards = shards or (len(records),)
    path.mkdir(parents=True, exist_ok=True)
    (path / "features.json").write_text(json.dumps(features))
    info = {"name": "toy", "fileFormat": kind, "splits": []}
    if (path / "dataset_info.json").exists():
        info = json.loads((path / "dataset_info.json").read_text())
    info["splits"].append({"name": split, "shardLengths": [str(n) for n in shards]})
    (path / "dataset_info.json").write_text(json.dumps(info))
    rest = list(records)
    for index, count in enumerate(shards):
        file = path / f"toy-{split}.{kind}-{index:05d}-of-{len(shards):05d}"
        part, rest = rest[:count], rest[count:]
        if kind == "tfrecord":
            writer = TFRecordWriter(str(file))
            for record in part:
                writer.write(record)
        else:
            writer = ArrayRecordWriter(str(file), "group_size:1")
            for record in part:
                writer.write(TFRecordWriter.serialize_tf_example(record))
        writer.close()
    return path


PLAIN = dataset_of(
    features_dict(
        observation=features_dict(state=tensor("float32", 3), grid=tensor("uint8", 2, 2)),
        action=tensor("float64", 2),
        reward=tensor("float32"),
        is_first=tensor("bool"),
        is_terminal=tensor("bool"),
        counter=tensor("int64"),
    ),
    episode_metadata=features_dict(success=tensor("bool")),
)


def plain() -> tuple[list[Features], list[dict[str, np.ndarray]]]:
    records, expected = [], []
    for index, length in enumerate(LENGTHS):
        rng = np.random.default_rng(index)
        row = {
            "obs.state": rng.normal(size=(length, 3)).astype(np.float32),
            "obs.grid": rng.integers(0, 256, size=(length, 2, 2), dtype=np.uint8),
            "action": rng.normal(size=(length, 2)).astype(np.float32).astype(np.float64),
            "reward": rng.normal(size=length).astype(np.float32),
            "is_first": np.arange(length) == 0,
            "is_terminal": np.arange(length) == length - 1,
            "counter": -np.arange(length),
            "episode_metadata.success": np.asarray(bool(index % 2)),
        }
        expected.append(row)
        records.append(
            {
                "steps/observation/state": (row["obs.state"].ravel(), "float"),
                "steps/observation/grid": (row["obs.grid"].ravel().astype(int), "int"),
                "steps/action": (row["action"].ravel(), "float"),
                "steps/reward": (row["reward"], "float"),
                "steps/is_first": (row["is_first"].astype(int), "int"),
                "steps/is_terminal": (row["is_terminal"].astype(int), "int"),
                "steps/counter": (row["counter"], "int"),
                "episode_metadata/success": (int(row["episode_metadata.success"]), "int"),
            }
        )
    return records, expected


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_episodes_come_back_byte_for_byte(kind: str, tmp_path: Path) -> None:
    records, expected = plain()
    path = folder(tmp_path / "1.0.0", PLAIN, records, kind=kind, shards=(1, 2, 1))
    for place in (path, tmp_path):  # the version's folder, or the dataset's
        with imported(place) as store:
            assert store.max_length == max(LENGTHS)
            assert_rows(store, expected)


def test_a_known_length_saves_the_pass_that_would_find_it(tmp_path: Path) -> None:
    records, expected = plain()
    path = folder(tmp_path, PLAIN, records)
    assert open_source(path).episodes == 4
    with imported(path, max_length=6) as store:
        assert_rows(store, expected)


def test_an_episode_without_steps_is_left_out(tmp_path: Path) -> None:
    features = dataset_of(features_dict(rgb=image("uint8", -1, -1, 3), action=tensor("float32", 2)))
    pixels = np.zeros((8, 6, 3), np.uint8)
    empty: Features = {"steps/rgb": ([], "byte"), "steps/action": ([], "float")}
    full: Features = {"steps/rgb": ([encoded(pixels, "PNG")], "byte"), "steps/action": ([1.0, 2.0], "float")}
    with imported(folder(tmp_path, features, [empty, full])) as store:
        assert_rows(store, [{"rgb": pixels[None], "action": np.array([[1, 2]], np.float32)}])


def test_several_splits_must_be_told_apart(tmp_path: Path) -> None:
    records, expected = plain()
    folder(tmp_path, PLAIN, records[:3])
    folder(tmp_path, PLAIN, records[3:], split="val")
    with pytest.raises(SourceError, match="has several splits: choose split= from train, val, or 'all'"):
        open_source(tmp_path)
    with pytest.raises(SourceError, match="has no split 'test'"):
        open_source(tmp_path, split="test")
    with imported(tmp_path, split="val") as store:
        assert_rows(store, expected[3:])
    with imported(tmp_path, split="all") as store:
        assert_rows(store, expected)


def test_packed_tensors_fixed_sequences_and_labels_are_decoded(tmp_path: Path) -> None:
    features = dataset_of(
        features_dict(
            raw=tensor("uint8", 2, 3, encoding="bytes"),
            small=tensor("float64", 4, encoding="zlib"),
            big=tensor("uint64"),
            pair={"sequence": {"feature": tensor("int32"), "length": "2"}},
            label={"classLabel": {"numClasses": "10"}},
            is_last=tensor("bool"),
        )
    )
    rng = np.random.default_rng(0)
    row = {
        "raw": rng.integers(0, 256, size=(3, 2, 3), dtype=np.uint8),
        "small": rng.normal(size=(3, 4)),
        "big": np.array([1, 2**63, 2**64 - 1], np.uint64),
        "pair": np.arange(6, dtype=np.int32).reshape(3, 2),
        "label": np.array([3, 1, 2]),
        "is_last": np.array([False, False, True]),
    }
    record = {
        "steps/raw": ([step.tobytes() for step in row["raw"]], "byte"),
        "steps/small": ([zlib.compress(step.tobytes()) for step in row["small"]], "byte"),
        "steps/big": (row["big"].view(np.int64), "int"),
        "steps/pair/ragged_flat_values": (row["pair"].ravel(), "int"),
        "steps/pair/ragged_row_lengths_0": ([2, 2, 2], "int"),
        "steps/label": (row["label"], "int"),
        "steps/is_last": (row["is_last"].astype(int), "int"),
    }
    with imported(folder(tmp_path, features, [record])) as store:
        assert_rows(store, [row])


def encoded(pixels: np.ndarray, format: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=format)
    return buffer.getvalue()


def image(dtype: str | None, *shape: int) -> dict[str, Any]:
    spec = {"shape": {"dimensions": [str(n) for n in shape]}}
    return {"image": {**spec, "dtype": dtype} if dtype else spec}


def test_images_are_decoded(tmp_path: Path) -> None:
    features = dataset_of(
        features_dict(
            rgb=image("uint8", 8, 6, 3),
            any=image(None, -1, -1, 3),
            jpeg=image("uint8", 8, 6, 3),
            grey=image("uint8", 8, 6, 1),
            deep=image("uint16", 8, 6, 1),
            depth=image("float32", 8, 6, 1),
        )
    )
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, size=(3, 8, 6, 3), dtype=np.uint8)
    deep = rng.integers(0, 65536, size=(3, 8, 6), dtype=np.uint16)
    depth = rng.normal(size=(3, 8, 6)).astype(np.float32)
    flat = np.full((8, 6, 3), 90, np.uint8)
    record = {
        "steps/rgb": ([encoded(step, "PNG") for step in rgb], "byte"),
        "steps/any": ([encoded(step, "PNG") for step in rgb], "byte"),
        "steps/jpeg": ([encoded(flat, "JPEG")] * 3, "byte"),
        "steps/grey": ([encoded(step[..., 0], "PNG") for step in rgb], "byte"),
        "steps/deep": ([encoded(step, "PNG") for step in deep], "byte"),
        "steps/depth": ([encoded(step[..., None].view(np.uint8), "PNG") for step in depth], "byte"),
    }
    with imported(folder(tmp_path, features, [record])) as store:
        (row,) = rows(store)
    assert row["rgb"].tobytes() == rgb.tobytes() == row["any"].tobytes()
    assert np.abs(row["jpeg"].astype(int) - 90).max() <= 2
    assert row["grey"].tobytes() == rgb[..., 0].tobytes()
    assert row["deep"][..., 0].tobytes() == deep.tobytes()
    assert row["depth"][..., 0].tobytes() == depth.tobytes()


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    features = dataset_of(features_dict(rgb=image("uint8", 8, 6, 3)))
    pixels = encoded(np.zeros((8, 6, 3), np.uint8), "PNG")
    for bad, why in ((b"", "is empty"), (b"junk", "cannot be decoded"), (pixels[:45], "cannot be decoded")):
        path = folder(tmp_path / why[:3] / str(len(bad)), features, [{"steps/rgb": ([pixels, bad], "byte")}])
        message = f"toy-train.tfrecord-00000-of-00001 record 0: field 'rgb': the image {why}"
        with pytest.raises(SourceError, match=message):
            import_dataset(path, store_name(), progress=False)


def test_text_is_refused_with_the_fields_that_can_be_had(tmp_path: Path) -> None:
    features = dataset_of(
        features_dict(
            action=tensor("float32", 2),
            say={"text": {}},
            words={"sequence": {"feature": tensor("int64"), "length": "-1"}},
            note=tensor("string"),
        )
    )
    record = {
        "steps/action": (np.arange(4.0), "float"),
        "steps/say": ([b"go", b"stop"], "byte"),
        "steps/note": ([b"", b""], "byte"),
    }
    path = folder(tmp_path, features, [record])
    with pytest.raises(SourceError, match=r"say \(text\); words \(a seq.*; note \(text\).*stored: action"):
        open_source(path)
    expected = [{"action": np.arange(4, dtype=np.float32).reshape(2, 2)}]
    for options in ({"skip_unsupported": True}, {"fields": ["action"]}):
        with imported(path, **options) as store:
            assert_rows(store, expected)


def test_an_episode_that_does_not_fit_is_named_by_its_file_and_record(tmp_path: Path) -> None:
    records, _ = plain()
    records[3]["steps/reward"] = (np.zeros(2), "float")
    path = folder(tmp_path / "a", PLAIN, records, shards=(2, 2))
    name = store_name()
    message = r"-00001-of-00002 record 1: field 'reward': holds 2 values, features\.json promises 3"
    with pytest.raises(SourceError, match=message):
        import_dataset(path, name, progress=False)
    with pytest.raises(StoreMissingError):
        Store.open(name)
    del records[3]["steps/reward"]
    path = folder(tmp_path / "b", PLAIN, records, shards=(2, 2))
    with pytest.raises(SourceError, match="record 1: field 'reward': the record has no 'steps/reward'"):
        import_dataset(path, name, progress=False)


def test_a_missing_shard_or_record_is_noticed(tmp_path: Path) -> None:
    records, _ = plain()
    path = folder(tmp_path / "a", PLAIN, records, shards=(2, 1, 1))
    (path / "toy-train.tfrecord-00001-of-00003").unlink()
    with pytest.raises(SourceError, match="1 of 3 shards are missing, the first is number 00001"):
        open_source(path)
    path = folder(tmp_path / "b", PLAIN, records)
    info = json.loads((path / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = ["5"]
    (path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(SourceError, match=r"holds 4 records, dataset_info\.json promises 5"):
        import_dataset(path, store_name(), progress=False)


@pytest.mark.parametrize("place", ["length", "data", "end"])
def test_a_damaged_record_is_named(place: str, tmp_path: Path) -> None:
    records, _ = plain()
    path = folder(tmp_path, PLAIN, records)
    file = path / "toy-train.tfrecord-00000-of-00001"
    data = bytearray(file.read_bytes())
    (first,) = struct.unpack_from("<Q", data)
    second = 12 + first + 4
    if place == "length":
        data[second] ^= 1
    elif place == "data":
        data[second + 40] ^= 1
    else:
        del data[-3:]
    file.write_bytes(data)
    message = {
        "length": "record 1: the checksum of its length is wrong",
        "data": "record 1: the checksum of its .* bytes is wrong",
        "end": "record 3: the file ends inside",
    }[place]
    with pytest.raises(SourceError, match=message):
        list(tfrecords(file))


def test_a_damaged_array_record_is_an_error(tmp_path: Path) -> None:
    records, _ = plain()
    path = folder(tmp_path, PLAIN, records, kind="array_record")
    file = path / "toy-train.array_record-00000-of-00001"
    assert len(list(array_records(file))) == 4
    data = bytearray(file.read_bytes())
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match="toy-train"):
        list(array_records(file))
    data[120] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(SourceError, match="toy-train"):
        list(array_records(file))


def test_bytes_that_are_no_example_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no tf\.train\.Example"):
        parse_example(b"\xff\xff\xff")


def test_a_folder_that_is_no_rlds_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "flat", features_dict(image=image("uint8", 8, 8, 3)), [])
    with pytest.raises(SourceError, match="has no 'steps', so this is no RLDS dataset"):
        open_source(path)
    path = folder(tmp_path / "riegeli", PLAIN, [])
    (path / "toy-train.tfrecord-00000-of-00001").rename(path / "toy-train.riegeli-00000-of-00001")
    with pytest.raises(SourceError, match="riegeli files are not read, only tfrecord and array_record"):
        open_source(path)


@pytest.mark.parametrize(
    ("package", "kind"),
    [("crc32c", "tfrecord"), ("array_record.python.array_record_module", "array_record")],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    package: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path, PLAIN, plain()[0], kind=kind)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'geartrain\[rlds\]'"):
        import_dataset(path, store_name(), progress=False)


def test_tensorflow_may_be_imported_afterwards() -> None:
    # Its own description of tensorflow.Example goes into protobuf's process-wide pool, which refuses a
    # second one of the same name from another file.
    script = (
        "from geartrain.integrations.datasets.tfrecord import parse_example\n"
        "parse_example(b'')\n"
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "file = descriptor_pb2.FileDescriptorProto(name='tensorflow/core/example/example.proto')\n"
        "file.package = 'tensorflow'\n"
        "file.message_type.add(name='Example')\n"
        "descriptor_pool.Default().Add(file)\n"
        "descriptor_pool.Default().FindMessageTypeByName('tensorflow.Example')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
