"""Checks of a checkpoint's manifest: required entries, their types, and that they agree with each other.

A checksum detects damage. It does not detect a program that wrote the format wrongly. After these checks a reader may
index, multiply and allocate by the manifest's numbers, because the sizes of existing files bound them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geartrain.core.arguments import shown
from geartrain.core.json_values import entry, object_entries, whole_entry
from geartrain.core.schema import KINDS, MAX_AXIS, Field, check_fields, fields_of_stored
from geartrain.core.tasks import RowPlan, plan_of_stored, row_plan
from geartrain.errors import CheckpointError, SchemaError
from geartrain.store.saved_parts import TASK_COUNTERS, TASK_FIGURES

_MOST_ROWS = 2**32 - 16
_REMOVERS = ("fifo", "lifo", "lowest_priority", "least_recently_sampled", "most_sampled")
_REMOVERS_BY_FIELD = ("lowest:", "highest:")


def check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Checks a manifest, checksum aside.

    Raises:
        CheckpointError: naming the file and the entry.
    """
    try:
        _check(manifest)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def check_stored_schema(content: Mapping[str, Any]) -> list[int]:
    """Checks the fields of a manifest; returns the bytes of a row's block in each. Raises `ValueError`."""
    stored = object_entries(content, "fields")
    for each in stored:
        shape, timed = entry(each, "shape", list), entry(each, "timed", bool)
        entry(each, "name", str)
        entry(each, "dtype", str)
        if not all(type(n) is int and 1 <= n <= MAX_AXIS for n in shape) or (timed and not shape):
            raise ValueError(f"field {each['name']!r} has the shape {shown(shape)}")
    names = [each["name"] for each in stored]
    if len(set(names)) != len(names):
        raise ValueError("fields has a name twice")
    if len({each["shape"][0] for each in stored if each["timed"]}) > 1:
        raise ValueError("the fields with time have rows of different lengths")
    fields, max_length = _plain_fields(content)
    try:
        check_fields(fields)
    except UnicodeEncodeError:
        raise ValueError("the name of a field is no text") from None
    return [field.block_nbytes(max_length) for field in fields.values()]


def check_stored_options(content: Mapping[str, Any]) -> int:
    """Checks the limits in a manifest; returns the capacity.

    Raises:
        ValueError: what is wrong with an entry.
    """
    options = entry(content, "options", dict)
    capacity = whole_entry(options, "capacity", 1, _MOST_ROWS)
    whole_entry(options, "max_rows", 1, capacity)
    whole_entry(options, "priority_fraction_bits", 0, 32)
    entry(options, "persist", bool)
    remover = entry(options, "remover", str)
    if remover not in _REMOVERS and not remover.startswith(_REMOVERS_BY_FIELD):
        raise ValueError(f"remover is {shown(remover)}")
    if options.get("max_times_sampled") is not None:
        whole_entry(options, "max_times_sampled", 1, 2**32 - 1)
    age_s = options.get("max_age_s")
    if age_s is not None and not (type(age_s) in (int, float) and 0 < age_s <= 1e9):
        raise ValueError(f"max_age_s is {shown(age_s)}")
    known = {"capacity", "max_rows", "remover", "max_times_sampled", "max_age_s", "priority_fraction_bits", "persist"}
    kinds = {"priority_per": ("row",) if "places" in content else ("row", "step"), "new_priority": ("one", "max")}
    for name, values in kinds.items():
        if options.get(name) not in values:
            raise ValueError(f"{name} is {shown(options.get(name))}")
    if "places" in content:
        whole_entry(options, "span_bytes", 1, 2**46)
        known.add("span_bytes")
    if unknown := set(options) - known - set(kinds):
        raise ValueError(f"options has {shown(min(unknown))}, which no store has")
    return capacity


def _check(manifest: Mapping[str, Any]) -> None:
    row_bytes = check_stored_schema(manifest)
    capacity = check_stored_options(manifest)
    _check_identity(manifest)
    whole_entry(manifest, "max_priority", 0, 2**32 - 1)
    rows = whole_entry(manifest, "rows", 0, capacity)
    whole_entry(manifest, "next_sequence", 1, 2**64 - 1)
    entry(manifest, "created", str)
    for counter, value in entry(manifest, "counters", dict).items():
        if type(value) is not int or not 0 <= value < 2**64:
            raise ValueError(f"the counter {counter!r} is {shown(value)}")
    files = entry(manifest, "files", dict)
    for name, about in files.items():
        _check_file(name, about)
    of_parts = "places" in manifest
    _bytes_of(files, "rows.bin", 56 * whole_entry(manifest, "listed_rows", rows if of_parts else capacity, capacity))
    for chunk in object_entries(manifest, "chunks"):
        nbytes = whole_entry(chunk, "bytes", 1, 2**63 - 1)
        if not of_parts and nbytes % sum(row_bytes):
            raise ValueError(f"a chunk has {nbytes} bytes, which are no whole rows of {sum(row_bytes)}")
        _bytes_of(files, entry(chunk, "file", str), nbytes)
    if of_parts:
        tasks = entry(manifest, "tasks", list)
        _bytes_of(files, "parts.bin", 96 * whole_entry(manifest, "parts", 0, capacity * (len(tasks) + 1)))
        check_stored_plan(manifest, len(row_bytes))
        check_task_state(entry(manifest, "state", dict), len(tasks))
    elif manifest["options"]["priority_per"] == "step" and (
        "steps.bin" not in files or files["steps.bin"]["bytes"] % 4
    ):
        raise ValueError("the priorities of steps are not in 'steps.bin'")


def check_stored_plan(manifest: Mapping[str, Any], fields: int) -> None:
    """Checks the axes and tasks in a manifest of so many fields. Raises `ValueError`."""
    places, axes, tasks = (entry(manifest, name, list) for name in ("places", "axes", "tasks"))
    for name, table, types in (
        ("places", places, (int, int, int, int)),
        ("axes", axes, (str, int, int)),
        ("tasks", tasks, (str, int, int)),
    ):
        for each in table:
            if not isinstance(each, list) or tuple(map(type, each)) != types or any(n < 0 for n in each[-2:]):
                raise ValueError(f"{name} has {shown(each)}")
    if len(places) != fields:
        raise ValueError(f"there are places of {len(places)} fields, and {fields} fields")
    if any(
        axis > len(axes) or task > len(tasks) or divides > len(axes) or kind >= len(KINDS) or min(axis, task) < 0
        for axis, task, divides, kind in places
    ) or any(owner > len(tasks) or divided > fields for _, owner, divided in axes):
        raise ValueError("the places of its fields are none")
    if any(after >> len(tasks) for _, after, _ in tasks):
        raise ValueError("a task comes after one that is none")
    try:
        plan = plan_of_manifest(manifest)
        wanted = row_plan(plan.fields_of(0), plan.tasks or None)
    except SchemaError as error:
        raise ValueError(str(error)) from None
    if wanted is None or (wanted.places(), wanted.axes, wanted.tasks) != (plan.places(), plan.axes, plan.tasks):
        raise ValueError("its fields, axes and tasks are not those of a store")


def plan_of_manifest(manifest: Mapping[str, Any]) -> RowPlan:
    """The axes and tasks of the store that a manifest is of, once they are checked. Raises `SchemaError`."""
    return plan_of_stored(_plain_fields(manifest)[0], manifest["places"], manifest["axes"], manifest["tasks"])


def schema_of_manifest(manifest: Mapping[str, Any]) -> tuple[dict[str, Field], int, RowPlan | None]:
    """Fields, longest row in steps, and axes and tasks of the store that a checked manifest is of."""
    if "places" not in manifest:
        return *_plain_fields(manifest), None
    plan = plan_of_manifest(manifest)
    return dict(plan.fields), 1, plan


def _plain_fields(manifest: Mapping[str, Any]) -> tuple[dict[str, Field], int]:
    return fields_of_stored((each["name"], each["dtype"], each["timed"], each["shape"]) for each in manifest["fields"])


def check_task_state(state: Mapping[str, Any], tasks: int) -> None:
    """Checks what `_native.Store.restore_task_state` takes. Raises `ValueError`."""
    whole_entry(state, "clock", -(2**63), 2**63 - 1)
    entry(state, "finished", bool)
    for name in ("saved_before", "next_row", "passed_before", "in_flight", *TASK_COUNTERS):
        whole_entry(state, name, 0, 2**64 - 1)
    if state["saved_before"] > 2**40:
        raise ValueError(f"saved_before is {state['saved_before']}")
    if state.get("max_stale", 0) is not None:
        whole_entry(state, "max_stale", 0, 2**63 - 1)
    figures = object_entries(state, "tasks")
    if len(figures) != tasks:
        raise ValueError(f"there are figures of {len(figures)} tasks, and {tasks} tasks")
    for each in figures:
        for name in TASK_FIGURES:
            whole_entry(each, name, 0, 2**64 - 1)


def _check_file(name: str, about: Any) -> None:
    if not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"files has {name!r}, which is not the name of a file in its directory")
    if not isinstance(about, dict):
        raise ValueError(f"files says nothing of {name!r}")
    nbytes = whole_entry(about, "bytes", 0, 2**63 - 1)
    piece_bytes = whole_entry(about, "piece_bytes", 1, 2**40)
    checksums = entry(about, "crc32", list)
    if len(checksums) != -(-nbytes // piece_bytes) or not all(type(crc) is int for crc in checksums):
        raise ValueError(f"{name!r} has {len(checksums)} checksums for {nbytes} bytes")


def _check_identity(manifest: Mapping[str, Any]) -> None:
    identity = entry(entry(manifest, "store", dict), "id", str)
    for what, text, digits in (("id", entry(manifest, "id", str), 64), ("store's id", identity, 16)):
        if not 0 < len(text) <= digits or not set(text) <= set("0123456789abcdef"):
            raise ValueError(f"the {what} is {text[:80]!r}")


def _bytes_of(files: Mapping[str, Any], name: str, nbytes: int) -> None:
    if name not in files or files[name]["bytes"] != nbytes:
        found = files[name]["bytes"] if name in files else "none"
        raise ValueError(f"{name!r} must have {nbytes} bytes for the rows that are in it, it has {found}")


__all__ = [
    "check_manifest",
    "check_stored_options",
    "check_stored_plan",
    "check_stored_schema",
    "check_task_state",
    "schema_of_manifest",
]
