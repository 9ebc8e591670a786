"""Schema of a store with axes, strings or tasks as JSON: what manifests of its journals and checkpoints have.

fields  of each its name, dtype, shape of an item, axis (null: none), the axis it divides (null: none), kind ("array",
        "text" or "bytes") and the number of the task that writes it; 0 is the insert
tasks   of each its name, the tasks it comes after, keep_partial and rewritable, in the order of their numbers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain.core.arguments import shown
from geartrain.core.json_values import entry, object_entries, whole_entry
from geartrain.core.schema import KINDS, spanned_field
from geartrain.core.tasks import MAX_TASKS, RowPlan, Task, row_plan
from geartrain.errors import GeartrainError


def stored_plan(plan: RowPlan) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "fields": [
            {
                "name": name,
                "dtype": field.dtype,
                "shape": list(field.shape),
                "axis": field.axis,
                "divides": field.divides,
                "kind": field.kind,
                "task": plan.writer[name],
            }
            for name, field in plan.fields.items()
        ],
        "tasks": [
            {
                "name": name,
                "after": list(task.after),
                "keep_partial": task.keep_partial,
                "rewritable": task.rewritable,
            }
            for name, task in plan.tasks.items()
        ],
    }


def plan_of_json(content: Mapping[str, Any]) -> RowPlan:
    """The plan that `stored_plan` made the JSON of. Raises `ValueError`."""
    stored = object_entries(content, "tasks")
    own: list[dict[str, Any]] = [{} for _ in range(min(len(stored), MAX_TASKS) + 1)]
    for each in object_entries(content, "fields"):
        name, kind = entry(each, "name", str), entry(each, "kind", str)
        shape = entry(each, "shape", list)
        axis, divides = entry(each, "axis", str | None), entry(each, "divides", str | None)
        if kind not in KINDS or not all(type(n) is int for n in shape):
            raise ValueError(f"field {name!r} is of the kind {shown(kind)} and the shape {shown(shape)}")
        task = whole_entry(each, "task", 0, len(own) - 1)
        if name in own[task]:
            raise ValueError("fields has a name twice")
        try:
            own[task][name] = spanned_field(tuple(shape), entry(each, "dtype", str), axis, divides, kind)
        except GeartrainError as error:
            raise ValueError(f"field {name!r}: {error}") from None
    tasks: dict[str, Task] = {}
    for each, fields in zip(stored, own[1:], strict=True):
        after = entry(each, "after", list)
        flags = {key: entry(each, key, bool) for key in ("keep_partial", "rewritable")}
        try:
            tasks[entry(each, "name", str)] = Task(fields, after=after, **flags)
        except GeartrainError as error:
            raise ValueError(f"the task {shown(each['name'])}: {error}") from None
    try:
        plan = row_plan(own[0], tasks or None)
    except (GeartrainError, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None
    if plan is None or [*plan.tasks] != [each["name"] for each in stored]:
        raise ValueError("its fields and tasks are those of no store with axes or tasks")
    return plan


__all__ = ["plan_of_json", "stored_plan"]
