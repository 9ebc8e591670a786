"""Tasks of a store: work that is done once per row, the order of tasks, and the checks of both.

A `RowPlan` is the schema of a store with axes or tasks: all fields with the task that writes each, the named axes with
the task that sets the lengths of each, and the tasks in the order of segments: the user's, with the last task at the
end. Task number 0 is the insert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from geartrain.core.arguments import check_flag, did_you_mean, shown, some_of
from geartrain.core.schema import KINDS, MAX_AXES, MAX_FIELDS, Field, check_fields, check_label, spanned_field
from geartrain.errors import FieldError, SchemaError

MAX_TASKS = 64
_KEEP_PARTIAL, _REWRITABLE, _LAST = 1, 2, 4  # segment.h's TaskFlags


@dataclass(frozen=True, init=False)
class Task:
    """Work that is done once for each row, by whichever process claims the row.

    A row is due for a task when the tasks it comes `after` are done. A process claims due rows and puts the task's
    fields, drops the row, or releases it (docs/tasks.md).

    Args:
        fields: the fields that the task writes, all of them together; by default none. The one task that no other comes
            after is the last one and has no fields: a replay draws its rows, and the row is freed.
        after: name of a task, or several. By default the task may begin as soon as the row is inserted.
        keep_partial: what was appended to a row stays if its process dies or releases it, and the next claim goes on
            from there (`row.partial`).
        rewritable: `Store.put` may replace the fields after the task was done.

    Raises:
        SchemaError: the fields are none, or `after` is not a name or several.
        ArgumentError: a flag is neither True nor False.

    Examples:
        >>> Task({"reward": Field(("answers",), "float32")}, after="answer").after
        ('answer',)
    """

    fields: dict[str, Field]
    after: tuple[str, ...]
    keep_partial: bool
    rewritable: bool

    def __init__(
        self,
        fields: Mapping[str, Field] | None = None,
        *,
        after: str | Sequence[str] = (),
        keep_partial: bool = False,
        rewritable: bool = False,
    ) -> None:
        own = {} if fields is None or (isinstance(fields, Mapping) and not fields) else check_fields(fields)
        names = (after,) if isinstance(after, str) else after
        if not isinstance(names, tuple | list):
            raise SchemaError(f"after is the name of a task, or a tuple of names, found {shown(after)}")
        labels = tuple(dict.fromkeys(check_label("a task", name) for name in names))
        object.__setattr__(self, "fields", {name: field.once_a_row() for name, field in own.items()})
        object.__setattr__(self, "after", labels)
        object.__setattr__(self, "keep_partial", check_flag("keep_partial", keep_partial))
        object.__setattr__(self, "rewritable", check_flag("rewritable", rewritable))

    def __hash__(self) -> int:
        return hash((tuple(self.fields.items()), self.after, self.keep_partial, self.rewritable))


@dataclass(frozen=True)
class Axis:
    """A named axis of a store: the number of the task that sets its lengths, and the field that divides it."""

    name: str
    owner: int
    divided_by: str | None


@dataclass(frozen=True)
class RowPlan:
    """The schema of a store with axes or tasks.

    Attributes:
        fields: all fields, those of the insert first.
        writer: number of the task that writes each field.
        axes: in the order of their numbers, from 1 on.
        tasks: in the order of their numbers, from 1 on; the last one is last.
    """

    fields: dict[str, Field]
    writer: dict[str, int]
    axes: tuple[Axis, ...]
    tasks: dict[str, Task]

    def number(self, task: object) -> int:
        """A task's number. Raises `SchemaError` for an unknown one."""
        names = list(self.tasks)
        if not isinstance(task, str) or task not in self.tasks:
            raise SchemaError(f"no task {shown(task)} in the store; it has {some_of(names)}{did_you_mean(task, names)}")
        return names.index(task) + 1

    def axis(self, name: object) -> int:
        """An axis's number. Raises `SchemaError` for an unknown one."""
        names = [axis.name for axis in self.axes]
        if not isinstance(name, str) or name not in names:
            raise SchemaError(f"no axis {shown(name)} in the store; it has {some_of(names)}{did_you_mean(name, names)}")
        return names.index(name) + 1

    def divided_into(self, axis: str) -> str | None:
        """The axis whose items are the parts that a field divides an axis into; None if it is not divided."""
        divider = self.axes[self.axis(axis) - 1].divided_by
        return None if divider is None else self.fields[divider].axis

    @cached_property
    def field_numbers(self) -> dict[str, int]:
        """Numbers of the fields, from 0 on."""
        return {name: number for number, name in enumerate(self.fields)}

    @cached_property
    def _by_task(self) -> list[dict[str, Field]]:
        found: list[dict[str, Field]] = [{} for _ in range(len(self.tasks) + 1)]
        for name, field in self.fields.items():
            found[self.writer[name]][name] = field
        return found

    def fields_of(self, task: int) -> Mapping[str, Field]:
        """The fields that a task writes; 0 is the insert."""
        return self._by_task[task]

    def in_spans(self, name: str) -> bool:
        """Whether a field's values lie in spans, and not in a column."""
        field = self.fields[name]
        return self.writer[name] != 0 or field.axis is not None or field.kind != "array"

    def before(self, task: int) -> set[int]:
        """Numbers of all tasks that must be done before a task is due, the insert included."""
        if task == 0:
            return set()
        names = list(self.tasks)
        return {0, *(names.index(name) + 1 for name in _all_before(names[task - 1], self.tasks))}

    def check_fields(self, names: Iterable[object]) -> None:
        """Raises `FieldError` for names that are none of fields."""
        for name in names:
            if not isinstance(name, str) or name not in self.fields:
                raise FieldError(
                    f"the store has no field {shown(name)}; it has {some_of(self.fields)}"
                    f"{did_you_mean(name, self.fields)}"
                )

    def readable(self, task: int) -> list[str]:
        """Fields that are there when a task is due: those of the insert and of the tasks before."""
        before = self.before(task)
        return [name for name in self.fields if self.writer[name] in before]

    def check_readable(self, task: int, name: object) -> None:
        """Raises `FieldError` for what is no field, or one that may not be there when a task is due."""
        label, known = list(self.tasks)[task - 1], self.readable(task)
        if not isinstance(name, str) or name not in self.fields:
            by_place = isinstance(name, slice) or hasattr(name, "__index__")
            rows = ". Iterate over its rows: for row in claim, or (row,) = claim where it has one"
            raise FieldError(
                f"a claim of {label!r} has the fields {some_of(known)}, not {shown(name)}"
                f"{rows if by_place else did_you_mean(name, known)}"
            )
        if name not in known:
            writer = list(self.tasks)[self.writer[name] - 1]
            raise FieldError(
                f"the field {name!r} may not be there yet: {label!r} does not come after {writer!r}, which writes it"
            )

    def appended_axis(self, task: int) -> int:
        """Number of the axis that appends to a task extend; 0 if they cannot.

        It is the axis that a field of the task divides, else the only axis whose lengths the task sets.
        """
        return self._appended[task]

    @cached_property
    def _appended(self) -> list[int]:
        return [self._appended_by(task) for task in range(len(self.tasks) + 1)]

    def _appended_by(self, task: int) -> int:
        mine = [number for number, axis in enumerate(self.axes, 1) if axis.owner == task]
        divided = [number for number in mine if self.axes[number - 1].divided_by is not None]
        found = divided or mine
        return found[0] if task != 0 and len(found) == 1 else 0

    @cached_property
    def appendable(self) -> list[tuple[list[str], str | None]]:
        """Of each task the fields that appends write, and the field that divides their axis."""
        found: list[tuple[list[str], str | None]] = []
        for task, number in enumerate(self._appended):
            axis = self.axes[number - 1] if number else None
            names = [name for name, field in self._by_task[task].items() if axis and field.axis == axis.name]
            found.append((names, axis.divided_by if axis else None))
        return found

    def places(self) -> list[tuple[int, int, int, int]]:
        """Of each field the numbers that segments have: axis, task, the axis it divides, kind."""
        numbers = {axis.name: number for number, axis in enumerate(self.axes, 1)}
        return [
            (
                0 if field.axis is None else numbers[field.axis],
                self.writer[name],
                0 if field.divides is None else numbers[field.divides],
                KINDS.index(field.kind),
            )
            for name, field in self.fields.items()
        ]

    def records(self) -> list[tuple[str, list[int], int]]:
        """Of each task what segments have: name, numbers of the tasks it comes after, flags."""
        names = list(self.tasks)
        return [
            (
                name,
                [names.index(other) + 1 for other in task.after],
                _KEEP_PARTIAL * task.keep_partial + _REWRITABLE * task.rewritable + _LAST * (name == names[-1]),
            )
            for name, task in self.tasks.items()
        ]


def row_plan(fields: Mapping[str, Field], tasks: Mapping[str, Task] | None) -> RowPlan | None:
    """The plan of a store with these fields of the insert and these tasks; None if it has neither axes nor tasks.

    Raises:
        SchemaError: they do not fit together; says what to write.
    """
    own = check_fields(fields)
    if tasks is None and all(field.axis is None and field.kind == "array" for field in own.values()):
        return None
    ordered = _ordered({} if tasks is None else _checked(tasks))
    everything = {name: field.once_a_row() for name, field in own.items()}
    writer = dict.fromkeys(everything, 0)
    for number, (label, described) in enumerate(ordered.items(), 1):
        for name, field in described.fields.items():
            if name in everything:
                raise SchemaError(
                    f"the field {name!r} of the task {label!r} is also one of "
                    f"{'the insert' if writer[name] == 0 else f'the task {list(ordered)[writer[name] - 1]!r}'}: give "
                    f"one of them another name"
                )
            everything[name], writer[name] = field, number
    if len(everything) > MAX_FIELDS:
        raise SchemaError(
            f"a store has at most {MAX_FIELDS} fields, and these are {len(everything)} with those of the tasks"
        )
    plan = RowPlan(everything, writer, _axes(everything, writer, ordered), ordered)
    for number, (name, task) in enumerate(ordered.items(), 1):
        if task.keep_partial and plan.appended_axis(number) == 0:
            raise SchemaError(
                f"the task {name!r} keeps what was appended, and nothing can be: appends extend the one axis whose "
                f"lengths the task sets, or the axis that its field with divides= cuts"
            )
    return plan


def plan_of_stored(
    fields: Mapping[str, Field],
    places: Iterable[tuple[int, int, int, int]],
    axes: Sequence[tuple[str, int, int]],
    tasks: Sequence[tuple[str, int, int]],
) -> RowPlan:
    """The plan of an existing segment. `fields` are plain ones as the records have them, without axes.

    Args:
        fields, places: in the order of the segment.
        axes: name, number of the task that sets the lengths, number of the field that divides it from 1 on.
        tasks: name, the tasks it comes after as bits, all of them; flags.
    """
    names = list(fields)
    found: dict[str, Field] = {}
    writer: dict[str, int] = {}
    for (name, field), (axis, task, divides, kind) in zip(fields.items(), places, strict=True):
        on, cut = (axes[each - 1][0] if each else None for each in (axis, divides))
        found[name], writer[name] = spanned_field(field.shape, field.dtype, on, cut, KINDS[kind]), task
    ordered: dict[str, Task] = {}
    for number, (name, after, flags) in enumerate(tasks, 1):
        own = {field: found[field] for field in names if writer[field] == number}
        before = [other for other in range(len(tasks)) if after >> other & 1]
        # Of the tasks before it those that no other of them comes after.
        direct = [other for other in before if not any(tasks[each][1] >> other & 1 for each in before)]
        ordered[name] = Task(
            own,
            after=[tasks[other][0] for other in direct],
            keep_partial=bool(flags & _KEEP_PARTIAL),
            rewritable=bool(flags & _REWRITABLE),
        )
    named = tuple(Axis(name, owner, names[divided - 1] if divided else None) for name, owner, divided in axes)
    return RowPlan(found, writer, named, ordered)


def plan_difference(wanted: RowPlan, found: RowPlan) -> str:
    """The first difference between two plans with equal fields, in words; empty if there is none."""
    for name, task in wanted.tasks.items():
        if name not in found.tasks:
            return f"it has no task {name!r}"
        other = found.tasks[name]
        for flag in ("keep_partial", "rewritable"):
            if getattr(task, flag) != getattr(other, flag):
                return f"the task {name!r} has {flag}={getattr(other, flag)}, asked for {getattr(task, flag)}"
        if _all_before(name, wanted.tasks) != _all_before(name, found.tasks):
            return f"the task {name!r} comes after {other.after}, asked for {task.after}"
        mine, theirs = wanted.fields_of(wanted.number(name)), found.fields_of(found.number(name))
        if set(mine) != set(theirs):
            return f"the task {name!r} writes {some_of(theirs)}, asked for {some_of(mine)}"
    unasked = next((name for name in found.tasks if name not in wanted.tasks), None)
    return "" if unasked is None else f"it has a task {unasked!r} that was not asked for"


def _checked(tasks: Any) -> dict[str, Task]:
    if not isinstance(tasks, Mapping) or not tasks:
        raise SchemaError(
            f"tasks is a dict of geartrain.Task by name, such as {{'train': Task()}}, found {shown(tasks)}"
        )
    if len(tasks) > MAX_TASKS:
        raise SchemaError(f"a store has at most {MAX_TASKS} tasks, {len(tasks)} were given")
    for name, task in tasks.items():
        check_label("a task", name)
        if not isinstance(task, Task):
            raise SchemaError(f"the task {name!r} must be a geartrain.Task, found {shown(task)}")
        for other in task.after:
            if other not in tasks:
                raise SchemaError(
                    f"the task {name!r} comes after {other!r}, which is no task; the tasks are {some_of(tasks)}"
                    f"{did_you_mean(other, tasks)}"
                )
    return dict(tasks)


def _all_before(task: str, tasks: Mapping[str, Task]) -> set[str]:
    """The tasks that must be done before a task is due."""
    found: set[str] = set()
    left = list(tasks[task].after)
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += tasks[each].after
    return found


def _ordered(tasks: dict[str, Task]) -> dict[str, Task]:
    """The tasks with the last one at the end, once there is exactly one."""
    if not tasks:
        return {}
    for name in tasks:
        if name in _all_before(name, tasks):
            raise SchemaError(f"the task {name!r} comes after itself: {' after '.join(_circle(name, tasks))}")
    followed = {other for task in tasks.values() for other in task.after}
    ends = [name for name in tasks if name not in followed]
    empty = [name for name in ends if not tasks[name].fields]
    if len(empty) > 1:
        raise SchemaError(
            f"a store has one last task, and {some_of(map(repr, empty))} have no fields and nothing after them: a row "
            f"is freed after its last task. Merge them, or let one come after the other"
        )
    if len(ends) > 1 or not empty:
        after = tuple(name for name in ends if name not in empty)
        name = empty[0] if empty else "train" if "train" not in tasks else "last"
        both = (*tasks[name].after, *after) if empty else after
        shown_after = repr(both[0]) if len(both) == 1 else repr(both)
        raise SchemaError(
            f"a store needs one last task, which has no fields and comes after all others: a replay draws its rows, "
            f"which are freed then. Nothing comes after {some_of(map(repr, after))}: write "
            f"{name!r}: gt.Task(after={shown_after})"
        )
    last = empty[0]
    if tasks[last].rewritable or tasks[last].keep_partial:
        raise SchemaError(f"the last task {last!r} has no fields: leave out keep_partial and rewritable")
    return {**{name: task for name, task in tasks.items() if name != last}, last: tasks[last]}


def _circle(name: str, tasks: Mapping[str, Task]) -> list[str]:
    """The names along a way from a task back to itself."""
    ways = [[name]]
    while True:
        way = ways.pop(0)
        for other in tasks[way[-1]].after:
            if other == name:
                return [*way, name]
            if other not in way:
                ways.append([*way, other])


def _axes(fields: Mapping[str, Field], writer: Mapping[str, int], tasks: Mapping[str, Task]) -> tuple[Axis, ...]:
    """The named axes in the order in which they first occur, each with the task that sets its lengths."""
    names = list(dict.fromkeys(field.axis for field in fields.values() if field.axis is not None))
    if len(names) > MAX_AXES:
        raise SchemaError(f"a store has at most {MAX_AXES} axes, these are {len(names)}: {some_of(names)}")
    labels = ["the insert", *(f"the task {name!r}" for name in tasks)]
    by_number = [set(), *({list(tasks).index(each) + 1 for each in _all_before(name, tasks)} for name in tasks)]
    found: dict[str, Axis] = {}
    for axis in names:
        with_it = list(dict.fromkeys(writer[name] for name, field in fields.items() if field.axis == axis))
        owners = [one for one in with_it if all(one in (0, other) or one in by_number[other] for other in with_it)]
        if not owners:
            raise SchemaError(
                f"the axis {axis!r} is written by {some_of(labels[each] for each in with_it)}, and none of them comes "
                f"before the others: the first one sets its length in a row. Let the others come after it, or give "
                f"them an axis of their own"
            )
        found[axis] = Axis(axis, owners[0], None)
    for name, field in fields.items():
        if field.divides is None:
            continue
        assert field.axis is not None
        axis = field.divides
        if axis not in found:
            raise SchemaError(
                f"the field {name!r} divides {axis!r}, which is no axis of a field; the axes are {some_of(names)}"
                f"{did_you_mean(axis, names)}"
            )
        if (other := found[axis].divided_by) is not None:
            raise SchemaError(f"the fields {other!r} and {name!r} both divide the axis {axis!r}: one may")
        if writer[name] != found[axis].owner or found[field.axis].owner != writer[name]:
            raise SchemaError(
                f"the field {name!r} of {labels[writer[name]]} divides the axis {axis!r}, whose lengths "
                f"{labels[found[axis].owner]} sets, into the items of {field.axis!r}, whose lengths "
                f"{labels[found[field.axis].owner]} sets: all three belong to one task"
            )
        found[axis] = Axis(axis, found[axis].owner, name)
    for name, field in fields.items():
        if field.divides is not None and field.axis is not None and found[field.axis].divided_by is not None:
            raise SchemaError(
                f"the field {name!r} has the axis {field.axis!r}, which {found[field.axis].divided_by!r} divides, and "
                f"divides {field.divides!r}: a divided axis divides no other"
            )
    return tuple(found.values())


__all__ = ["Axis", "RowPlan", "Task", "plan_difference", "plan_of_stored", "row_plan"]
