"""Segments of stores: creation with checked limits, replacement of a dead run's segment, comparison of schemas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import geartrain._native as _native
from geartrain.core.arguments import (
    capacity_of,
    check_choice,
    check_flag,
    check_real,
    check_text,
    check_whole,
    did_you_mean,
    leave_out,
    optional,
    shown,
    some_of,
    timeout,
)
from geartrain.core.dtypes import dtype_of_code
from geartrain.core.schema import (
    Field,
    check_fields,
    check_max_length,
    fields_of_stored,
    plain,
    schema_difference,
    stored_schema,
)
from geartrain.core.shared_files import Trust, leftovers
from geartrain.core.tasks import RowPlan, Task, plan_difference, plan_of_stored, row_plan
from geartrain.errors import (
    ArgumentError,
    FieldError,
    GeartrainError,
    IncompatibleStoreError,
    StaleStoreError,
    StoreError,
    StoreExistsError,
    StoreMissingError,
)
from geartrain.store.anonymous import is_anonymous

#: One of REMOVERS, or "lowest:FIELD" or "highest:FIELD" of a field that is one number a row.
Remover = str
#: What a full disk does to the commits of a store with a journal.
JournalFull = Literal["wait", "error"]
#: What a store keeps a priority for.
PriorityPer = Literal["row", "step"]
#: What rows and steps get that are stored without a priority: 1, or the largest priority that was given so far.
NewPriority = Literal["one", "max"]
REMOVERS = ("fifo", "lifo", "lowest_priority", "least_recently_sampled", "most_sampled")
_NUMBERS = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64",
)  # fmt: skip
#: What the names of stores in files usually end with.
_FILE_SUFFIXES = (".gt", ".store")
#: Numbers of the segment format, which follow those of REMOVERS.
_BY_FIELD = {"lowest": 5, "highest": 6}


def check_name(name: object) -> str:
    """A store's name, or its path, as text. Raises `ArgumentError`."""
    try:
        return check_text("the name of a store", os.fspath(name))  # type: ignore[call-overload]
    except (TypeError, ArgumentError):
        raise ArgumentError(
            f"a store's name is a word such as 'replay', or a path with a slash; found {shown(name)}"
        ) from None


def path_hint(name: str) -> str:
    """The end of a message about a store's name that looks like a file's, and lacks the slash that makes it one."""
    if "/" in name or not (name.endswith(_FILE_SUFFIXES) or os.path.lexists(name)):
        return ""
    return f". A name without a slash is a segment of shared memory; the file in this directory is {'./' + name!r}"


def _folder_hint(name: str) -> str:
    """The end of a message about a store in a file whose directory is missing."""
    folder = Path(name).parent
    if "/" not in name or folder.is_dir():
        return ""
    return (
        f". A name with a slash is a file, and there is no directory {str(folder)!r}: make it, or take a name without "
        "a slash, which is a segment of shared memory"
    )


def remover_number(remover: object, fields: Mapping[str, Field]) -> int:
    """A remover as segments have it.

    Raises:
        ArgumentError: it is none; FieldError: it goes by a field that the store lacks or that is no number a row.
    """
    if isinstance(remover, str) and remover in REMOVERS:
        return REMOVERS.index(remover)
    order, colon, name = remover.partition(":") if isinstance(remover, str) else ("", "", "")
    if not colon or order not in _BY_FIELD:
        raise ArgumentError(
            f"remover is one of {', '.join(REMOVERS)}, 'lowest:FIELD' or 'highest:FIELD', found {shown(remover)} "
            f"(for any other order see Store.evict){did_you_mean(remover, REMOVERS)}"
        )
    if name not in fields:
        raise FieldError(
            f"the remover {remover!r} needs the field {name!r}; the store has {', '.join(fields)}"
            f"{did_you_mean(name, fields)}"
        )
    if not fields[name].per_row or fields[name].shape or fields[name].dtype not in _NUMBERS:
        raise FieldError(
            f"the remover {remover!r} goes by one number a row, Field((), dtype, per_row=True) of integers, bool, "
            f"float32 or float64; {name!r} is {fields[name]}"
        )
    return _BY_FIELD[order] | list(fields).index(name) << 8


def remover_of(number: int, names: Sequence[str]) -> Remover:
    """What `remover_number` made the number of, in a store of these fields."""
    for order, code in _BY_FIELD.items():
        if number & 0xFF == code:
            return f"{order}:{names[number >> 8]}"
    return REMOVERS[number]


#: What the names of segments' files begin with.
_PREFIX = "geartrain."
#: Steps of a store with priority_per="step", at most.
MAX_STEPS = 2**32 - 16


class CreateOptions(TypedDict, total=False):
    """The options of `Store.create`, which documents them, for type checkers."""

    max_length: int | None
    capacity: int | None
    capacity_steps: int | None
    capacity_bytes: int | None
    max_rows: int | None
    remover: Remover
    max_times_sampled: int | None
    max_age_s: float | None
    priority_fraction_bits: int
    priority_per: PriorityPer
    new_priority: NewPriority
    persist: bool | None
    reserve: bool
    trust: Trust
    timeout_s: float
    journal: str | os.PathLike[str] | None
    journal_sync_s: float | None
    journal_full: JournalFull | None
    tasks: Mapping[str, Task] | None
    span_bytes: int | None


def create_segment(
    name: str,
    fields: Mapping[str, Field],
    *,
    max_length: int | None,
    capacity: int | None,
    capacity_steps: int | None,
    capacity_bytes: int | None,
    max_rows: int | None,
    remover: Remover,
    max_times_sampled: int | None,
    max_age_s: float | None,
    priority_fraction_bits: int,
    priority_per: PriorityPer,
    new_priority: NewPriority,
    persist: bool | None,
    reserve: bool,
    trust: Trust,
    timeout_s: float,
    tasks: Mapping[str, Task] | None,
    span_bytes: int | None,
) -> _native.Store:
    """Checks the options and creates the segment; see `Store.create`."""
    fields = check_fields(fields)
    plan = row_plan(fields, tasks)
    if plan is not None:
        _refuse_for_spans(
            plan,
            max_length=max_length,
            capacity_steps=capacity_steps,
            capacity_bytes=capacity_bytes,
            max_rows=max_rows,
            max_age_s=max_age_s,
            remover=None if remover == "fifo" else remover,
            priority_per=None if priority_per == "row" else priority_per,
        )
        fields, max_length = plan.fields, None
        if max_times_sampled is None and plan.tasks:
            max_times_sampled = 1
    spans = _span_bytes(plan, span_bytes)
    max_length = 1 if plan is not None else check_max_length(fields, max_length)
    number = remover_number(remover, fields)
    per_step = check_choice("priority_per", priority_per, ("row", "step")) == "step"
    takes_max = check_choice("new_priority", new_priority, ("one", "max")) == "max"
    if per_step:
        by_priority = remover == "lowest_priority" and remover
        leave_out("with priority_per='step' rows have no priorities to be removed by", remover=by_priority)
    specs = [
        (field, dtype.code, dtype.itemsize, timed and plan is None, shape)
        for field, dtype, timed, shape in stored_schema(
            fields if plan is None else {field: plain(spec) for field, spec in fields.items()}, max_length
        )
    ]

    def rows_within(nbytes: int) -> int:
        rows = _native.rows_within(specs, nbytes, number, per_step)
        if rows == 0:
            one = _native.segment_bytes(specs, 1, number, per_step)
            raise ArgumentError(f"capacity_bytes is {nbytes}, and a store of one row alone takes {one}")
        return rows

    rows = capacity_of(max_length, capacity, capacity_steps, capacity_bytes, rows_within)
    if per_step and rows * max_length > MAX_STEPS:
        raise ArgumentError(
            f"priority_per='step' has room for {MAX_STEPS} steps, so that the sum of their 32-bit priorities is exact "
            f"in 64; {rows} rows of {max_length} are {rows * max_length}"
        )
    age_s = optional(check_real, "max_age_s", max_age_s, None, 1e9, above=0)
    if hint := path_hint(name):
        import logging

        logging.getLogger(__name__).warning("the store %r is created in shared memory%s", name, hint)
    try:
        return _native.Store.create(
            name,
            specs,
            rows,
            optional(check_whole, "max_rows", max_rows, 1, 2**32 - 1) or 0,
            number,
            optional(check_whole, "max_times_sampled", max_times_sampled, 1, 2**32 - 1) or 0,
            0 if age_s is None else max(1, int(age_s * 1e9)),
            check_whole("priority_fraction_bits", priority_fraction_bits, 0, 32),
            "/" in name if persist is None else check_flag("persist", persist),
            check_flag("reserve", reserve),
            timeout(timeout_s),
            trust,
            per_step,
            takes_max,
            [] if plan is None else plan.places(),
            [] if plan is None else [axis.name for axis in plan.axes],
            [] if plan is None else plan.records(),
            spans,
        )
    except StoreExistsError:
        raise StoreExistsError(_describe_existing(name, trust)) from None
    except StoreMissingError as error:
        raise StoreMissingError(f"{error}{_folder_hint(name)}") from None


#: Bytes of a region of spans, at least.
LEAST_SPAN_BYTES = 4096


def _refuse_for_spans(plan: RowPlan, **options: object) -> None:
    """Raises `ArgumentError` for an option that means nothing where rows have axes or tasks."""
    why = (
        "have no steps, stay until they are drawn, dropped or deleted, and lie in capacity= rows and span_bytes= bytes"
    )
    leave_out(f"rows of a store with {'tasks' if plan.tasks else 'axes'} {why}", **options)


def _span_bytes(plan: RowPlan | None, span_bytes: int | None) -> int:
    """The bytes of the region of spans; 0 for a store without axes and tasks."""
    if plan is None:
        leave_out("this store has neither axes nor strings nor tasks", span_bytes=span_bytes)
        return 0
    if span_bytes is None:
        inside = [name for name in plan.fields if plan.in_spans(name)]
        if not inside:
            return LEAST_SPAN_BYTES
        raise ArgumentError(
            f"span_bytes= is missing: the bytes that the fields of different lengths take in all rows together "
            f"({', '.join(map(repr, inside))}). For example 4096 rows of 100 kB: span_bytes=410_000_000"
        )
    return check_whole("span_bytes", span_bytes, LEAST_SPAN_BYTES, 2**46 - 1)


def creation_options(plan: RowPlan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Store.create` for a store of a plan, given the options of one as `Store.options` has them."""
    implied = ("max_rows", "remover", "max_age_s", "priority_per")  # a store with axes or tasks takes no others
    return {
        "fields": plan.fields_of(0),
        "tasks": plan.tasks or None,
        **{name: value for name, value in options.items() if name not in implied},
    }


def plan_of_segment(native: _native.Store) -> RowPlan | None:
    """The axes and tasks of a store, with all its fields; None if it has neither."""
    about = native.describe()
    return plan_of_described(about) if "axes" in about else None


def plan_of_described(about: Mapping[str, Any]) -> RowPlan:
    """The same of what the native store, or a peer, says of it: `fields`, `places`, `axes` and `tasks`."""
    plain_fields, _ = fields_of_stored(
        (name, dtype_of_code(code), timed, shape) for name, code, shape, timed in about["fields"]
    )
    return plan_of_stored(plain_fields, about["places"], about["axes"], about["tasks"])


def stored_schema_of(native: _native.Store) -> dict[str, Any]:
    """The fields of a store as JSON, for manifests; with axes, strings or tasks their numbers as well."""
    about = native.describe()
    return {
        "fields": [
            {"name": name, "shape": list(shape), "dtype": dtype_of_code(code).name, "timed": timed}
            for name, code, shape, timed in about["fields"]
        ],
        **{name: [list(each) for each in about[name]] for name in ("places", "axes", "tasks") if name in about},
    }


def schema_of_segment(native: _native.Store) -> tuple[dict[str, Field], int]:
    """The fields of a store, in their order, and its longest row in steps."""
    plan = plan_of_segment(native)
    if plan is not None:
        return plan.fields, 1
    return fields_of_stored(
        (name, dtype_of_code(code), timed, shape) for name, code, shape, timed in native.describe()["fields"]
    )


def attach(name: str, *, adopt: bool, timeout_s: float, trust: Trust) -> _native.Store:
    """Joins a segment; see `Store.open`. If it is missing, the error lists the existing stores."""
    try:
        return _native.Store.attach(name, adopt, False, timeout_s, trust)
    except StoreMissingError as error:
        hint = ". Store.create makes one, or Store.open(..., fields, create='missing') where there may be none"
        raise StoreMissingError(f"{error}{hint}{_stores_here(name)}") from None


def read_only(name: str, *, adopt: bool, timeout_s: float, trust: Trust) -> _native.Store:
    """A segment that is read and not joined; see `Store.open`. Raises as `attach`."""
    native = peek(name, trust, timeout_s=timeout_s)
    if not adopt and not native.closed_in_order() and not native.live_clients() and not native.closed_in_order():
        path, rows = native.describe()["path"], native.committed_count()
        native.close(False)
        raise StaleStoreError(
            f"{path} holds {rows} rows of a run whose processes have all ended without closing it: an import that was "
            f"not finished, for example"
        )
    return native


def peek(name: str, trust: Trust = "user", *, timeout_s: float = 1.0) -> _native.Store:
    """Looks at a segment, living or dead, without joining it. Raises as `attach`."""
    try:
        return _native.Store.attach(name, False, True, timeout_s, trust)
    except StoreMissingError as error:
        raise StoreMissingError(f"{error}{_stores_here(name)}") from None


def _stores_here(wanted: str) -> str:
    if "/" in wanted:
        return _folder_hint(wanted)
    hint = path_hint(wanted)
    newest_first = sorted(leftovers(f"{_PREFIX}*"), key=_changed_at, reverse=True)
    names = [path.name.removeprefix(_PREFIX) for path in newest_first]
    named = [name for name in names if not is_anonymous(name)]
    if not named:
        return f"{hint}. There is no store here"
    return f"{hint}. The stores here are {some_of(named)}{did_you_mean(wanted, named)}"


def _changed_at(path: Path) -> float:
    """When a file was last changed, in seconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _describe_existing(name: str, trust: Trust) -> str:
    try:
        rows = peek(name, trust).committed_count()
    except (GeartrainError, OSError) as error:  # another user's, another build's, or no segment at all
        return f"the name {name!r} is taken: {error}. Choose another name"
    return (
        f"a store named {name!r} exists already ({_native.segment_path(name)}, {rows} rows). "
        f"Join it with Store.open({name!r}), or read it with mode='r'. If nobody needs its rows, "
        f"Store.open(..., create='replace') or `geartrain remove {name}` deletes them{path_hint(name)}"
    )


def remove_unused(name: str, trust: Trust = "user") -> None:
    """Removes the segment of that name if no living process uses it.

    Raises:
        StoreExistsError: one does, or this process may not remove it.
    """
    if not Path(_native.segment_path(name)).exists():
        return
    peeked = peek(name, trust)
    users = peeked.live_clients()
    if users:
        raise StoreExistsError(
            f"the store {name!r} is in use by {users} process{'es' if users > 1 else ''}; it can only be joined"
        )
    if not peeked.unlink() and Path(_native.segment_path(name)).exists():
        raise StoreExistsError(
            f"the store {name!r} cannot be replaced: {_native.segment_path(name)} may be removed by its owner alone, "
            f"or its directory is read-only. Choose another name"
        )


def remove_left(name: str, is_mine: Callable[[_native.Store], bool], trust: Trust = "user") -> None:
    """Removes the segment of that name if no process uses it, and it is the caller's or has no rows."""
    try:
        peeked = peek(name, trust)
        if (is_mine(peeked) or not _has_rows(peeked)) and not peeked.live_clients():
            peeked.unlink()
    except StoreError:  # none, or none to be removed: creating one says so
        return


def _has_rows(native: _native.Store) -> bool:
    """Whether a store has rows that can be drawn, are under way, or that batches have kept."""
    if native.committed_count():
        return True
    figures = native.task_figures() if "axes" in native.describe() else {}
    return bool(figures.get("under_way") or figures.get("kept"))


def check_schema(
    name: str,
    wanted: Mapping[str, Field],
    max_length: int | None,
    native: _native.Store,
    tasks: Mapping[str, Task] | None = None,
) -> None:
    """Compares a store's schema with the one asked for; any `max_length` will do where None was.

    Raises:
        IncompatibleStoreError: they differ; says in what.
    """
    fields, (found, longest) = check_fields(wanted), schema_of_segment(native)
    plan, stored = row_plan(fields, tasks), plan_of_segment(native)
    if plan is not None and stored is not None:
        fields = plan.fields
    elif plan is not None or stored is not None:
        has, asked = ("axes or tasks", "none") if stored is not None else ("neither axes nor tasks", "some")
        raise IncompatibleStoreError(f"the store {name!r} has {has}, asked for {asked}: pass its tasks= and fields")
    if fields != found:  # their order means nothing: fields are found by name
        raise IncompatibleStoreError(
            f"the store {name!r} has another schema than asked for: {schema_difference(fields, found)}. A store's "
            f"fields are those it was created with: for others create a new one, and insert the rows that `fetch` gets "
            f"from it"
        )
    if plan is not None and stored is not None and (difference := plan_difference(plan, stored)):
        raise IncompatibleStoreError(f"the store {name!r} has other tasks than asked for: {difference}")
    if max_length is not None and check_whole("max_length", max_length) != longest:
        raise IncompatibleStoreError(
            f"the store {name!r} has rows of at most {longest} steps, asked for max_length={max_length}"
        )
