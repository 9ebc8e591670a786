"""Axes and tasks of a store: what is refused at the door and with which words, and what a process that joins finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, IncompatibleStoreError, SchemaError
from geartrain.integrations.datasets.exporter import export_store

PROMPT = {"prompt": gt.Field(("prompt",), "int32")}


def tokens(dtype: str) -> gt.Field:
    return gt.Field(("tokens",), dtype)


def answers(dtype: str, **options: Any) -> gt.Field:
    return gt.Field(("answers",), dtype, **options)


def length(axis: str = "tokens") -> gt.Field:
    return answers("int32", divides=axis)


def create(fields: Any = PROMPT, tasks: Any = None, **options: Any) -> gt.Store:
    return gt.Store.create(fields, tasks=tasks, **{"capacity": 8, "span_bytes": 1 << 16, "reserve": False, **options})


TRAIN = {"train": gt.Task(after="answer")}
GRPO = {
    "answer": gt.Task({"ids": tokens("int32"), "length": length(), "text": gt.Text("answers")}, keep_partial=True),
    "reward": gt.Task({"reward": answers("float32")}, after="answer", rewritable=True),
    "ref": gt.Task({"ref": tokens("float32")}, after="answer"),
    "train": gt.Task(after=("ref", "reward")),
}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"a": gt.Task(after="b"), "b": gt.Task(after="a")}, "'a' comes after itself: a after b after a"),
        ({"a": gt.Task({"x": answers("int8")}, after="a"), "t": gt.Task(after="a")}, "'a' comes after itself"),
        ({"answer": gt.Task({"ids": tokens("int32")}), "t": gt.Task(after="anwser")}, "did you mean 'answer'"),
        ({"a": gt.Task({"x": tokens("int8")})}, r"needs one last task.*write 'train': gt.Task\(after='a'\)"),
        (
            {"a": gt.Task({"x": tokens("int8")}), "b": gt.Task({"y": answers("int8")}), "t": gt.Task(after="a")},
            r"write 't': gt.Task\(after=\('a', 'b'\)\)",
        ),
        ({"a": gt.Task(), "b": gt.Task()}, "one last task, and 'a', 'b' have no fields"),
        ({"a": gt.Task({"prompt": tokens("int8")}), "t": gt.Task(after="a")}, "'prompt' of the task 'a' is also one"),
        (
            {"a": gt.Task({"x": tokens("int8")}), "b": gt.Task({"x": tokens("int8")}, after="a"), **TRAIN},
            "comes after 'answer', which is no task",
        ),
        (
            {
                "a": gt.Task({"x": tokens("int8")}),
                "b": gt.Task({"x": tokens("int8")}, after="a"),
                "t": gt.Task(after="b"),
            },
            "'x' of the task 'b' is also one of the task 'a'",
        ),
        (
            {
                "a": gt.Task({"x": tokens("int8")}),
                "b": gt.Task({"y": tokens("int8")}),
                "t": gt.Task(after=("a", "b")),
            },
            "axis 'tokens' is written by the task 'a', the task 'b', and none of them comes before",
        ),
        (
            {"a": gt.Task({f"f{i}": gt.Field((f"axis{i}",), "int8") for i in range(8)}), "t": gt.Task(after="a")},
            "at most 8 axes, these are 9",
        ),
        (
            {"a": gt.Task({"x": tokens("int8"), "n": length(), "m": length()}), "t": gt.Task(after="a")},
            "'n' and 'm' both divide the axis 'tokens'",
        ),
        ({"a": gt.Task({"n": length("tokens")}), "t": gt.Task(after="a")}, "'n' divides 'tokens', which is no axis"),
        (
            {
                "a": gt.Task({"x": tokens("int8")}),
                "b": gt.Task({"n": length()}, after="a"),
                "t": gt.Task(after="b"),
            },
            "'n' of the task 'b' divides the axis 'tokens', whose lengths the task 'a' sets",
        ),
        (
            {
                "a": gt.Task(
                    {
                        "x": tokens("int8"),
                        "n": length(),
                        "m": gt.Field(("turns",), "int32", divides="answers"),
                    }
                ),
                "t": gt.Task(after="a"),
            },
            "a divided axis divides no other",
        ),
        ({"a": gt.Task({"x": gt.Field((), "int8")}, keep_partial=True), "t": gt.Task(after="a")}, "nothing can be"),
        ({"t": gt.Task(keep_partial=True)}, "the last task 't' has no fields"),
        ({}, "tasks is a dict of geartrain.Task"),
        ({"": gt.Task()}, "a task has a name of 1 to 63 bytes"),
        ({"a": "b"}, "the task 'a' must be a geartrain.Task"),
        ({f"t{i}": gt.Task() for i in range(65)}, "at most 64 tasks"),
    ],
)
def test_tasks_that_do_not_fit_together_are_refused_with_what_to_write(tasks: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        create(tasks=tasks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gt.Field(("tokens",), "int8", per_row=True), "leave out per_row=True"),
        (lambda: gt.Field(("",), "int8"), "an axis has a name"),
        (lambda: gt.Field(("a" * 64,), "int8"), "1 to 63 bytes"),
        (lambda: gt.Field((3, "tokens"), "int8"), r"begin with the name of one axis.*found \(3, 'tokens'\)"),
        (lambda: gt.Field(("answers", "tokens"), "int8"), r"the name of one axis.*found \('answers', 'tokens'\)"),
        (lambda: gt.Field(("tokens", *range(1, 9)), "int8"), "at most 8 axes"),
        (lambda: gt.Field(("answers",), "int64", divides="tokens"), "'int32', divides='tokens'"),
        (lambda: gt.Field((), "int32", divides="tokens"), "one length for each item of another axis"),
        (lambda: gt.Field(("tokens",), "int32", divides="tokens"), "of another axis"),
        (lambda: gt.Text(""), "an axis has a name"),
        (lambda: gt.Task({"x": "int8"}), "must be a geartrain.Field"),  # type: ignore[dict-item]
        (lambda: gt.Task(after={"a": 1}), "after is the name of a task"),  # type: ignore[arg-type]
        (lambda: gt.Task(after=(1,)), "a task has a name"),  # type: ignore[arg-type]
    ],
)
def test_fields_and_tasks_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "leave out max_length=4"),
        ({"capacity": None, "capacity_steps": 4}, "leave out capacity_steps"),
        ({"capacity": None, "capacity_bytes": 1 << 20}, "leave out capacity_bytes"),
        ({"max_rows": 4}, "leave out max_rows"),
        ({"max_age_s": 4}, "leave out max_age_s"),
        ({"remover": "lifo"}, "leave out remover='lifo'"),
        ({"priority_per": "step"}, "leave out priority_per='step'"),
        ({"span_bytes": None}, "span_bytes= is missing.*'prompt'"),
        ({"span_bytes": 100}, "span_bytes must be at least 4096"),
    ],
)
def test_options_that_mean_nothing_for_rows_with_axes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        create(**options)


def test_a_store_without_axes_takes_no_span_bytes() -> None:
    with pytest.raises(ArgumentError, match="neither axes nor strings nor tasks: leave out span_bytes=65536"):
        create({"x": gt.Field((), "int8", per_row=True)})


def test_who_joins_finds_fields_axes_and_tasks_as_they_were_given(name: str) -> None:
    fields = {**PROMPT, "id": gt.Field((2,), "int64"), "raw": gt.Bytes()}
    with gt.Store.create(name, fields, tasks=GRPO, capacity=8, span_bytes=1 << 16) as store:
        with gt.Store.open(name, fields, tasks=GRPO, create="missing", adopt=True, capacity=8) as other:
            assert other.fields == store.fields
            assert list(other.tasks) == ["answer", "reward", "ref", "train"]
            assert other.tasks["train"].after == ("reward", "ref") and other.tasks["reward"].rewritable
            assert other.axes == ("prompt", "tokens", "answers")
            assert other.fields["text"] == gt.Text("answers") and other.fields["id"].per_row
            assert other.options["max_times_sampled"] == 1 and other.options["span_bytes"] == 1 << 16


@pytest.mark.parametrize(
    ("fields", "tasks", "message"),
    [
        (PROMPT, None, "has axes or tasks|has a field|no field"),
        ({"prompt": gt.Field((), "int32", per_row=True)}, None, "has axes or tasks, asked for none"),
        (PROMPT, {**GRPO, "ref": gt.Task({"ref": tokens("float32")}, after="reward")}, "'ref' comes after"),
        (PROMPT, {**GRPO, "reward": gt.Task({"reward": answers("float32")}, after="answer")}, "rewritable=True"),
        (PROMPT, {**GRPO, "sift": gt.Task(), "train": gt.Task(after=("ref", "reward", "sift"))}, "no task 'sift'"),
        ({"prompt": gt.Field(("question",), "int32")}, GRPO, "field 'prompt' is Field"),
        ({"prompt": gt.Text()}, GRPO, r"asked for Text\(\)"),
    ],
)  # fmt: skip
def test_who_joins_with_other_axes_or_tasks_is_told_the_difference(
    name: str, fields: Any, tasks: Any, message: str
) -> None:
    with gt.Store.create(name, PROMPT, tasks=GRPO, capacity=8, span_bytes=1 << 16):
        with pytest.raises(IncompatibleStoreError, match=message):
            gt.Store.open(name, fields, tasks=tasks)


def test_axes_without_tasks_commit_with_the_insert_and_keep_rows() -> None:
    with create() as store:
        keys = store.insert({"prompt": [[1, 2], [3]]})
        assert len(store) == 2 and store.tasks == {} and store.options["max_times_sampled"] is None
        assert store.delete(keys[0]) == 0
        assert len(store) == 1 and store.audit() == []
        with pytest.raises(ArgumentError, match="has no tasks"):
            store.claim("answer")


REFUSED: dict[str, Callable[[gt.Store], object]] = {
    "row": lambda store: store.row(),
    "rows": lambda store: store.rows(2),
    "recorder": lambda store: store.recorder(),
    "agent_recorder": lambda store: store.agent_recorder(2),
    "write": lambda store: store.write(store.keys(), {"prompt": [1]}),
    "export": lambda store: export_store(store, "/tmp/geartrain-nowhere", format="npz"),
    "column": lambda store: store.column("prompt"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_rows_with_axes_cannot_do_yet_is_refused_by_name(call: str) -> None:
    with create() as store:
        with pytest.raises(ArgumentError, match=r"has axes|with axes|own length in each row"):
            REFUSED[call](store)
