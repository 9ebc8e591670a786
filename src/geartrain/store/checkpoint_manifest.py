"""Checks of a checkpoint's manifest: every entry that a reader uses is there, of its type, and agrees with the others.

A checksum tells damage; it does not tell whether whoever wrote the file knew the format. After these checks a reader
may index, multiply and allocate by the manifest: what it asks for is bounded by files that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geartrain.core.schema import MAX_AXIS, check_fields, fields_of_stored
from geartrain.errors import ArgumentError, CheckpointError

_MOST_ROWS = 2**32 - 16
_REMOVERS = ("fifo", "lifo", "lowest_weight", "least_recently_sampled", "most_sampled")
_REMOVERS_BY_FIELD = ("lowest:", "highest:")


class _WrongError(ValueError):
    """What is wrong with an entry."""


def check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Checks a manifest of version 1 to 3, checksum aside.

    Raises:
        CheckpointError: naming the file and the entry.
    """
    try:
        _check(manifest)
    except (_WrongError, ArgumentError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _check(manifest: Mapping[str, Any]) -> None:
    row_bytes = _check_fields(_entry(manifest, "fields", list))
    options = _entry(manifest, "options", dict)
    capacity = _number(options, "capacity", 1, _MOST_ROWS)
    _number(options, "max_rows", 1, capacity)
    _number(options, "weight_fraction_bits", 0, 32)
    _entry(options, "persist", bool)
    remover = _entry(options, "remover", str)
    if remover not in _REMOVERS and not remover.startswith(_REMOVERS_BY_FIELD):
        raise _WrongError(f"remover is {options['remover']!r}")
    if options.get("max_times_sampled") is not None:
        _number(options, "max_times_sampled", 1, 2**32 - 1)
    age_s = options.get("max_age_s")
    if age_s is not None and not (type(age_s) in (int, float) and 0 < age_s <= 1e9):
        raise _WrongError(f"max_age_s is {age_s!r}")
    known = {"capacity", "max_rows", "remover", "max_times_sampled", "max_age_s", "weight_fraction_bits", "persist"}
    per_step = manifest["version"] == 3
    if per_step and options.get("priority_per") != "step":
        raise _WrongError(f"priority_per is {options.get('priority_per')!r}, and version 3 has priorities of steps")
    if unknown := set(options) - known - ({"priority_per"} if per_step else set()):
        raise _WrongError(f"options has {sorted(unknown)[0]!r}, which no store has")
    rows = _number(manifest, "rows", 0, capacity)
    _number(manifest, "next_sequence", 1, 2**64 - 1)
    _entry(manifest, "created", str)
    for counter, value in _entry(manifest, "counters", dict).items():
        if type(value) is not int or not 0 <= value < 2**64:
            raise _WrongError(f"the counter {counter!r} is {value!r}")
    files = _entry(manifest, "files", dict)
    for name, about in files.items():
        _check_file(name, about)
    _bytes_of(files, "rows.bin", capacity * (48 if manifest["version"] == 1 else 56))
    if manifest["version"] == 1:
        for number, nbytes in enumerate(row_bytes):
            _bytes_of(files, f"field-{number:02d}.bin", rows * nbytes)
        return
    _check_identity(manifest)
    if per_step and ("steps.bin" not in files or files["steps.bin"]["bytes"] % 4):
        raise _WrongError("the priorities of steps are not in 'steps.bin'")
    for chunk in _entry(manifest, "chunks", list):
        if not isinstance(chunk, dict):
            raise _WrongError("chunks has an entry that is no object")
        in_chunk = _number(chunk, "rows", 1, capacity)
        _bytes_of(files, _entry(chunk, "file", str), in_chunk * sum(row_bytes))


def _check_fields(stored: list[Any]) -> list[int]:
    """Bytes of a row's block in each field."""
    for entry in stored:
        if not isinstance(entry, dict):
            raise _WrongError("fields has an entry that is no object")
        shape, timed = _entry(entry, "shape", list), _entry(entry, "timed", bool)
        _entry(entry, "name", str)
        _entry(entry, "dtype", str)
        if not all(type(n) is int and 1 <= n <= MAX_AXIS for n in shape) or (timed and not shape):
            raise _WrongError(f"field {entry['name']!r} has the shape {shape!r}")
    names = [entry["name"] for entry in stored]
    if len(set(names)) != len(names):
        raise _WrongError("fields has a name twice")
    described = [(entry["name"], entry["dtype"], entry["timed"], entry["shape"]) for entry in stored]
    if len({shape[0] for _, _, timed, shape in described if timed}) > 1:
        raise _WrongError("the fields with time have rows of different lengths")
    fields, max_length = fields_of_stored(described)
    try:
        check_fields(fields)
    except UnicodeEncodeError:
        raise _WrongError("the name of a field is no text") from None
    return [field.block_nbytes(max_length) for field in fields.values()]


def _check_file(name: str, about: Any) -> None:
    if not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise _WrongError(f"files has {name!r}, which is not the name of a file in its directory")
    if not isinstance(about, dict):
        raise _WrongError(f"files says nothing of {name!r}")
    nbytes = _number(about, "bytes", 0, 2**63 - 1)
    piece_bytes = _number(about, "piece_bytes", 1, 2**40)
    checksums = _entry(about, "crc32", list)
    if len(checksums) != -(-nbytes // piece_bytes) or not all(type(crc) is int for crc in checksums):
        raise _WrongError(f"{name!r} has {len(checksums)} checksums for {nbytes} bytes")


def _check_identity(manifest: Mapping[str, Any]) -> None:
    identity = _entry(_entry(manifest, "store", dict), "id", str)
    for what, text, digits in (("id", _entry(manifest, "id", str), 64), ("store's id", identity, 16)):
        if not 0 < len(text) <= digits or not set(text) <= set("0123456789abcdef"):
            raise _WrongError(f"the {what} is {text[:80]!r}")


def _entry(content: Mapping[str, Any], key: str, kind: type) -> Any:
    found = content.get(key)
    if not isinstance(found, kind):
        raise _WrongError(f"{key} is {str(found)[:80]!r}")
    return found


def _number(content: Mapping[str, Any], key: str, least: int, most: int) -> int:
    found = content.get(key)
    if type(found) is not int or not least <= found <= most:
        raise _WrongError(f"{key} is {str(found)[:80]!r}, it must be a whole number from {least} to {most}")
    return found


def _bytes_of(files: Mapping[str, Any], name: str, nbytes: int) -> None:
    if name not in files or files[name]["bytes"] != nbytes:
        found = files[name]["bytes"] if name in files else "none"
        raise _WrongError(f"{name!r} must have {nbytes} bytes for the rows that are in it, it has {found}")
