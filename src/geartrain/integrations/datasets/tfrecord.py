"""Record files of TFDS (TFRecord, ArrayRecord), and the `tf.train.Example` in each record.

A TFRecord file is a sequence of

    uint64 length | uint32 masked crc32c of length | length bytes | uint32 masked crc32c of the bytes

This module reads it and verifies both checksums with the `crc32c` package. The `tfrecord` package would not verify
them. It would also register `tensorflow.Example` in protobuf's process-wide pool, and TensorFlow could not be imported
afterwards. ArrayRecord files are read by Google's `array_record`, which verifies its own checksums.

protobuf decodes `tf.train.Example` from a description built here, in a pool of its own.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from geartrain.core.extras import require
from geartrain.errors import SourceError

_CRC_DELTA = 0xA282EAD8


def tfrecords(path: Path) -> Iterator[bytes]:
    """Every record of a TFRecord file, one in memory at a time.

    Raises:
        SourceError: the file ends inside a record, or a checksum is wrong; names the record.
        MissingDependencyError: crc32c is not installed.
    """
    crc32c: Callable[[bytes], int] = require("crc32c", "geartrain[rlds]", "Reading TFRecord files").crc32c
    size = path.stat().st_size
    with path.open("rb") as file:
        number = 0
        while header := file.read(12):
            where = f"{path}: record {number}"
            if len(header) < 12:
                raise SourceError(f"{where}: the file ends inside the record's header")
            length, length_crc = struct.unpack("<QI", header)
            if _masked(crc32c(header[:8])) != length_crc:
                raise SourceError(
                    f"{where}: the checksum of its length is wrong: the file is damaged, compressed, "
                    f"or not a TFRecord file"
                )
            if file.tell() + length + 4 > size:
                raise SourceError(f"{where}: the file ends inside the record's {length:,} bytes")
            data = file.read(length)
            (data_crc,) = struct.unpack("<I", file.read(4))
            if _masked(crc32c(data)) != data_crc:
                raise SourceError(f"{where}: the checksum of its {length:,} bytes is wrong")
            yield data
            number += 1


def array_records(path: Path) -> Iterator[bytes]:
    """Every record of an ArrayRecord file, in order, with a few read ahead.

    Raises:
        SourceError: the file is damaged; names the record.
        MissingDependencyError: array_record is not installed.
    """
    module = require("array_record.python.array_record_module", "geartrain[rlds]", "Reading ArrayRecord files")
    try:
        # Without these options every core reads 16 MB ahead.
        reader = module.ArrayRecordReader(str(path), options="readahead_buffer_size:4M,max_parallelism:1")
    except (RuntimeError, ValueError) as error:
        raise SourceError(f"{path}: cannot be opened as ArrayRecord: {error}") from error
    number = 0
    try:
        while reader.ok() and number < reader.num_records():
            yield reader.read()
            number += 1
        if not reader.ok():
            raise SourceError(f"{path}: record {number} or what comes before it is damaged")
    except (RuntimeError, IndexError) as error:
        raise SourceError(f"{path}: record {number}: {error}") from error
    finally:
        with contextlib.suppress(RuntimeError):  # a reader that failed says so once more
            reader.close()


def parse_example(data: bytes) -> Any:
    """The features of a serialized `tf.train.Example`: name -> Feature.

    Raises:
        ValueError: the bytes are no such message.
        MissingDependencyError: protobuf is not installed.
    """
    example = _example_class()()
    try:
        example.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError has moved between its versions
        raise ValueError(f"the record is no tf.train.Example: {error}") from error
    return example.features.feature


@functools.cache
def _example_class() -> Callable[[], Any]:
    """The message class, equal on the wire to TensorFlow's, unknown to its pool."""
    purpose = "Decoding TFDS records"
    descriptor = require("google.protobuf.descriptor_pb2", "geartrain[rlds]", purpose)
    pools = require("google.protobuf.descriptor_pool", "geartrain[rlds]", purpose)
    factory = require("google.protobuf.message_factory", "geartrain[rlds]", purpose)
    kind = descriptor.FieldDescriptorProto
    file = descriptor.FileDescriptorProto(name="geartrain/example.proto", package="tensorflow", syntax="proto3")

    def message(parent: Any, name: str, fields: list[tuple[str, int, int, bool, str]]) -> Any:
        made = parent.add(name=name)
        for field_name, number, field_type, repeated, type_name in fields:
            made.field.add(
                name=field_name,
                number=number,
                type=field_type,
                label=kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL,
                type_name=type_name or None,
            )
        return made

    top = file.message_type
    message(top, "BytesList", [("value", 1, kind.TYPE_BYTES, True, "")])
    message(top, "FloatList", [("value", 1, kind.TYPE_FLOAT, True, "")])
    message(top, "Int64List", [("value", 1, kind.TYPE_INT64, True, "")])
    lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    feature = message(
        top,
        "Feature",
        [
            (name, number, kind.TYPE_MESSAGE, False, f".tensorflow.{kind_name}")
            for number, (name, kind_name) in enumerate(lists, 1)
        ],
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    entries = ".tensorflow.Features.FeatureEntry"
    features = message(top, "Features", [("feature", 1, kind.TYPE_MESSAGE, True, entries)])
    entry = message(
        features.nested_type,
        "FeatureEntry",
        [
            ("key", 1, kind.TYPE_STRING, False, ""),
            ("value", 2, kind.TYPE_MESSAGE, False, ".tensorflow.Feature"),
        ],
    )
    entry.options.map_entry = True
    message(top, "Example", [("features", 1, kind.TYPE_MESSAGE, False, ".tensorflow.Features")])
    pool = pools.DescriptorPool()
    pool.Add(file)
    made: Callable[[], Any] = factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
    return made


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _CRC_DELTA) & 0xFFFFFFFF
