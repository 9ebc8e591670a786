"""Tasks against a slow model of lists and dicts: any sequence of calls leaves the same rows in both.

Calls come from two handles of this process and from children that are killed. The region is small: what rows an insert
or put without room sets back is the model's to say, how many is the store's.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import patience
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_calls import replay_of
from segments import kill

import geartrain as gt
from geartrain.errors import (
    FieldError,
    NoSpaceError,
    NotEnoughRowsError,
    SchemaError,
    StaleClaimError,
    StaleKeyError,
    WaitTimeoutError,
)

FIELDS = {"id": gt.Field((), "int64"), "prompt": gt.Field(("prompt",), "int32"), "note": gt.Text()}
TASKS = {
    "answer": gt.Task(
        {
            "ids": gt.Field(("tokens",), "int32"),
            "length": gt.Field(("answers",), "int32", divides="tokens"),
            "why": gt.Text("answers"),
            "by": gt.Field((), "int16"),
        },
        keep_partial=True,
    ),
    "think": gt.Task({"steps": gt.Field(("steps", 2), "int16")}),
    "reward": gt.Task({"reward": gt.Field(("answers",), "float32")}, after="answer", rewritable=True),
    "look": gt.Task(after="reward"),
    "train": gt.Task(after=("look", "think")),
}
WORK = tuple(TASKS)[:-1]
READS = {"answer": (), "think": (), "reward": ("answer",), "look": ("answer", "reward")}
APPENDED = {"answer": "ids", "think": "steps"}
AXES = {"prompt": "prompt", "ids": "tokens", "length": "answers", "why": "answers", "reward": "answers"}
UNIT = 64
_numbers = itertools.count()

lengths_strategy = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 400))


def units(*arrays: int, strings: tuple[tuple[int, int], ...] = ()) -> int:
    """Units of a span that has arrays of so many bytes and fields of strings (number, bytes of all)."""
    pieces = [*arrays, *(4 * (items + 1) + text for items, text in strings)]
    return 1 + sum(-(-piece // UNIT) for piece in pieces)


@dataclass
class Word:
    """A task of a row. `holder` is the claim's number while it is claimed."""

    state: str = "open"
    holder: int = 0
    deaths: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    parts: list[tuple[int, Any, bool]] = field(default_factory=list)  # item, values, whether it is done

    def units(self, task: str) -> int:
        if self.parts:
            return sum(units(np.asarray(values).nbytes) for _, values, _ in self.parts)
        if self.state != "done" or task == "look":
            return 0
        if task != "answer":
            return units(np.asarray(*self.values.values()).nbytes)
        why = self.values["why"]
        text = sum(len(each.encode()) for each in why)
        return units(4 * len(self.values["ids"]), 4 * len(why), 2, strings=((len(why), text),))


@dataclass
class Row:
    """A row of the store."""

    key: tuple[int, int]
    values: dict[str, Any]
    words: dict[str, Word] = field(default_factory=lambda: {task: Word() for task in WORK})
    place: tuple[int, int] | None = None  # step and place in it, of a batch that keeps its rows

    @property
    def committed(self) -> bool:
        return all(self.words[task].state == "done" for task in TASKS["train"].after)

    @property
    def selectable(self) -> bool:
        return self.committed and self.place is None

    def due(self, task: str) -> bool:
        before = all(self.words[each].state == "done" for each in TASKS[task].after)
        return before and self.words[task].state == "open"

    def value(self, name: str) -> Any:
        return next(
            values[name] for values in (self.values, *(w.values for w in self.words.values())) if name in values
        )

    def known_length(self, axis: str) -> int:
        return len(self.value({"prompt": "prompt", "tokens": "ids", "answers": "length"}[axis]))

    def units(self) -> int:
        insert = units(4 * len(self.values["prompt"]), strings=((1, len(self.values["note"].encode())),))
        return insert + sum(word.units(task) for task, word in self.words.items())


@dataclass(eq=False)
class Held:
    """A claim, and the rows that it was made of."""

    number: int
    task: str
    claim: gt.Claim
    keys: list[tuple[int, int]]
    handle: int
    lengths: dict[str, list[int]]
    ended: bool = False
    read: dict[str, list[Any]] = field(default_factory=dict)


def keys_of(keys: list[tuple[int, int]]) -> gt.Keys:
    return gt.Keys(np.array([row for row, _ in keys]), np.array([generation for _, generation in keys]))


def listed(values: Any) -> Any:
    return values if isinstance(values, list | str) else np.asarray(values).tolist()


class TasksModel(RuleBasedStateMachine):
    """Rows in the order of their inserts, by key."""

    @initialize(capacity=st.integers(2, 8), span_units=st.integers(64, 160), rows=st.integers(0, 8))
    def create(self, capacity: int, span_units: int, rows: int) -> None:
        self.name = f"test-{os.getpid()}-tasks-model-{next(_numbers)}"
        self.capacity = capacity
        self.stores = [
            gt.Store.create(
                self.name, FIELDS, tasks=TASKS, capacity=capacity, span_bytes=UNIT * span_units, reserve=False
            ),
            gt.Store.open(self.name),
        ]
        self.region = self.stores[0].stats()["free_span_bytes"]
        self.kept_from_inserts = span_units // 16
        self.rows: dict[tuple[int, int], Row] = {}
        self.gone: list[tuple[int, int]] = []
        self.held: list[Held] = []
        self.ids, self.claims = itertools.count(), itertools.count(1)
        self.figures = {task: dict.fromkeys(("done", "released", "deaths", "set_back"), 0) for task in TASKS}
        self.counts = dict.fromkeys(("dropped", "deleted", "given_up", "set_back", "inserted"), 0)
        self.finished = False
        for _ in range(min(rows, capacity)):
            self.insert_rows(self.stores[0], [next(self.ids) % 5], True)

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            store.close()
        if hasattr(self, "name"):
            assert not os.path.exists(f"/dev/shm/geartrain.{self.name}")

    # --- what the model does ------------------------------------------------------------------------------------

    def remove(self, key: tuple[int, int]) -> None:
        del self.rows[key]
        self.gone.append(key)

    def holds(self, held: Held, i: int) -> bool:
        row = self.rows.get(held.keys[i])
        return row is not None and row.words[held.task].state == "claimed" and (
            row.words[held.task].holder == held.number
        )  # fmt: skip

    def open_again(self, row: Row, task: str) -> None:
        row.words[task].state = "open"
        if not TASKS[task].keep_partial:
            row.words[task].parts = []

    def release_one(self, row: Row, task: str) -> None:
        self.open_again(row, task)
        self.figures[task]["released"] += 1

    def drop_one(self, key: tuple[int, int]) -> None:
        self.remove(key)
        self.counts["dropped"] += 1

    def die(self, key: tuple[int, int], task: str) -> None:
        word = self.rows[key].words[task]
        self.open_again(self.rows[key], task)
        self.figures[task]["deaths"] += 1
        word.deaths += 1
        if word.deaths == 3:
            self.counts["given_up"] += 1
            self.remove(key)

    def done(self, row: Row, task: str, values: dict[str, Any]) -> None:
        row.words[task] = Word("done", values=values)
        self.figures[task]["done"] += 1

    def may_be_set_back(self, newer_than: tuple[int, int]) -> list[Row]:
        """Newest first. After the end of inserts no task is done again that is done for all rows."""
        order = list(self.rows)
        over = {
            task
            for task in WORK
            if self.finished and all(row.words[task].state == "done" for row in self.rows.values())
        }
        return [
            row
            for key in reversed(order[order.index(newer_than) + 1 :])
            if not (row := self.rows[key]).committed
            and all(word.state != "claimed" for word in row.words.values())
            and any(word.units(task) for task, word in row.words.items())
            and not any(row.words[task].state == "done" for task in over)
        ]

    def set_back(self, row: Row) -> None:
        for task, word in row.words.items():
            self.figures[task]["set_back"] += word.state == "done"
            row.words[task] = Word()
        self.counts["set_back"] += 1

    def space_bytes(self) -> int:
        return self.region - UNIT * sum(row.units() for row in self.rows.values())

    def set_back_some(self, first: tuple[int, int] | None) -> None:
        """What a write whose first row is this one has set back: the newest ones, as many as the store says."""
        number = self.stores[0].stats()["set_back"] - self.counts["set_back"]
        assert number == 0 or first is not None
        if first is not None:
            rows = self.may_be_set_back(first)
            assert number <= len(rows)
            for row in rows[:number]:
                self.set_back(row)

    def lacks_room(self, needed: int, kept: int = 0) -> bool:
        """Whether a span may be without room: free blocks, of which there is one more than spans at most, are small."""
        spans = 1
        for row in self.rows.values():
            spans += 1 + sum(max(len(word.parts), word.state == "done") for word in row.words.values())
        return self.space_bytes() - UNIT * kept < UNIT * spans * (needed * 33 // 32)

    @contextmanager
    def room_for(self, held: Held, needs: dict[int, int]) -> Iterator[list[int]]:
        """A write of rows of a claim that need so many units. Gives a list of the rows that were written, after it."""
        valid = [i for i in needs if self.holds(held, i)]
        wrote: list[int] = []
        first = held.keys[valid[0]] if valid else None
        try:
            yield wrote
        except (WaitTimeoutError, NoSpaceError) as error:
            self.set_back_some(first)
            its = held.claim
            owned = self.stores[held.handle].native.owned_rows(
                list(TASKS).index(held.task) + 1, its.keys.row, its.keys.generation, its._claims
            )
            wrote += [i for i in valid if not owned[i]]
            assert wrote == valid[: len(wrote)] and len(wrote) < len(valid)
            stuck = valid[len(wrote)]
            taken = sum(needs[i] for i in wrote)  # of what is not in the model yet
            assert self.lacks_room(needs[stuck] + taken), "there was room, or it was made in vain"
            assert self.may_be_set_back(held.keys[stuck]) == [], "rows that could make room were not set back"
            if isinstance(error, NoSpaceError):
                # Nothing but the row itself, and what was inserted, takes room.
                others = [row for key, row in self.rows.items() if key != held.keys[stuck]]
                assert wrote == [] and not any(row.committed for row in others)
                assert not any(word.units(task) for row in others for task, word in row.words.items())
        else:
            self.set_back_some(first)
            wrote += valid

    def some_keys(self, data: st.DataObject, most: int = 4) -> list[tuple[int, int]]:
        known = list(self.rows) + self.gone[-4:]
        return data.draw(st.lists(st.sampled_from(known), max_size=most, unique=True)) if known else []

    def a_store(self, data: st.DataObject) -> gt.Store:
        return self.stores[data.draw(st.integers(0, 1))]

    def a_claim(self, data: st.DataObject, tasks: tuple[str, ...] = WORK) -> Held | None:
        found = [held for held in self.held if held.task in tasks]
        return data.draw(st.sampled_from(found)) if found else None

    # --- what may be called -------------------------------------------------------------------------------------

    @rule(data=st.data(), prompts=st.lists(lengths_strategy, min_size=1, max_size=3))
    def insert(self, data: st.DataObject, prompts: list[int]) -> None:
        prompts = prompts[: max(1, self.capacity // 2)]  # in one piece
        self.insert_rows(self.a_store(data), prompts, data.draw(st.booleans()))

    def insert_rows(self, store: gt.Store, prompts: list[int], flat: bool) -> None:
        new = []
        for size in prompts:
            number = next(self.ids)
            prompt = (number + np.arange(size)).tolist()
            new.append({"id": number, "prompt": prompt, "note": "ä" * (number % 40)})
        fields: dict[str, Any] = {name: [each[name] for each in new] for name in FIELDS}
        lengths = None
        if flat:
            fields["prompt"] = np.array([token for each in new for token in each["prompt"]], np.int32)
            lengths = prompts
        free = self.capacity - len(self.rows)
        rows = [Row((0, 0), values) for values in new]
        needed = [row.units() for row in rows]
        try:
            keys = store.insert(fields, lengths=lengths, timeout_s=0)
        except NoSpaceError:
            assert UNIT * (sum(needed) + self.kept_from_inserts) >= self.region
        except WaitTimeoutError:
            assert free < len(new) or self.lacks_room(sum(needed), self.kept_from_inserts)
        else:
            assert free >= len(new)
            self.counts["inserted"] += len(new)
            for row, index, generation in zip(rows, keys.row.tolist(), keys.generation.tolist(), strict=True):
                assert (index, generation) not in self.rows and (index, generation) not in self.gone
                row.key = index, generation
                self.rows[row.key] = row

    def a_due_task(self, data: st.DataObject) -> str:
        due = [task for task in WORK if any(row.due(task) for row in self.rows.values())]
        return data.draw(st.sampled_from(due or WORK))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), most=st.integers(1, 4), limit=st.sampled_from([None, None, 1, 30]))
    def claim(self, data: st.DataObject, most: int, limit: int | None) -> None:
        held = self.claim_rows(data, self.a_due_task(data), most, limit)
        if held is not None:
            self.held.append(held)
        if len(self.held) > 3:
            self.forget(self.held[0])

    def claim_rows(self, data: st.DataObject, task: str, most: int, limit: int | None) -> Held | None:
        of = data.draw(st.sampled_from(["prompt", "tokens", "answers"] if READS[task] else ["prompt"]))
        expected: list[Row] = []
        items = 0
        for row in self.rows.values():
            if not row.due(task):
                continue
            its = row.known_length(of)
            if len(expected) == most or (expected and limit is not None and items + its > limit):
                break
            items += its
            expected.append(row)
        handle = data.draw(st.integers(0, 1))
        counted = {} if limit is None else {"max_items": limit, "of": of}
        claim = self.stores[handle].claim(task, most, **counted, output=data.draw(st.sampled_from(["numpy", "torch"])))
        found = list(zip(claim.keys.row.tolist(), claim.keys.generation.tolist(), strict=True))
        assert found == [row.key for row in expected]
        assert bool(claim) == bool(expected)
        if not found:
            return None
        axes = ["prompt", *(["tokens", "answers"] if READS[task] else [])]
        lengths = {axis: [row.known_length(axis) for row in expected] for axis in axes}
        held = Held(next(self.claims), task, claim, found, handle, lengths)
        for row in expected:
            row.words[task].state, row.words[task].holder = "claimed", held.number
        for axis in axes:
            assert listed(claim.lengths(axis)) == lengths[axis]
        return held

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        held = self.a_claim(data)
        assert held is not None
        names = [*FIELDS, *(name for before in READS[held.task] for name in TASKS[before].fields)]
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)):
            values = held.claim[name]
            axis = AXES.get(name)
            sizes = np.ones(len(held.keys), int) if axis is None else np.array(held.lengths[axis])
            ends = np.cumsum(sizes)
            assert len(values) == ends[-1]
            first = name not in held.read
            if first:
                held.read[name] = [None] * len(held.keys)
            for i, row in enumerate(held.claim):
                mine = listed(values[ends[i] - sizes[i] : ends[i]])
                if self.holds(held, i):
                    if first:
                        held.read[name][i] = self.rows[held.keys[i]].value(name)
                    expected = held.read[name][i]
                    assert mine == (listed(expected) if axis is not None else [expected])
                    its = row[name]
                    assert (listed(its)) == listed(expected)

    @precondition(lambda self: any(held.task in APPENDED for held in self.held))
    @rule(
        data=st.data(),
        item=st.integers(0, 2),
        size=lengths_strategy,
        is_done=st.booleans(),
    )
    def append(self, data: st.DataObject, item: int, size: int, is_done: bool) -> None:
        held = self.a_claim(data, ("answer", "think"))
        assert held is not None
        i = data.draw(st.integers(0, len(held.keys) - 1))
        row = list(held.claim)[i]
        first = next(self.ids)
        if held.task == "answer":
            values: Any = np.arange(first, first + size, dtype=np.int32)
            given = {"ids": torch.from_numpy(values), "item": item, "done": is_done}
        else:
            item, is_done = 0, False
            values = np.arange(first, first + 2 * size, dtype=np.int16).reshape(size, 2)
            given = {"steps": values}
        if not self.holds(held, i):
            with pytest.raises(StaleClaimError, match="not claimed"):
                row.append(**given, timeout_s=0)
            return
        with self.room_for(held, {i: units(values.nbytes)}) as wrote:
            row.append(**given, timeout_s=0)
        if wrote:
            word = self.rows[held.keys[i]].words[held.task]
            word.parts.append((item, values, is_done))
            word.deaths = 0

    @precondition(lambda self: any(held.task in APPENDED for held in self.held))
    @rule(data=st.data())
    def look_at_a_partial_row(self, data: st.DataObject) -> None:
        held = self.a_claim(data, ("answer", "think"))
        assert held is not None
        i = data.draw(st.integers(0, len(held.keys) - 1))
        row = list(held.claim)[i]
        if not self.holds(held, i):
            with pytest.raises(StaleClaimError):
                row.partial  # noqa: B018
            return
        parts = self.rows[held.keys[i]].words[held.task].parts
        items = sorted({item for item, _, _ in parts})
        partial = row.partial
        assert partial.items == tuple(items) and bool(partial) == bool(parts)
        assert partial.done == {item for item, _, is_done in parts if is_done}
        merged = {item: np.concatenate([v for it, v, _ in parts if it == item]).tolist() for item in items}
        assert {k: listed(v) for k, v in partial[APPENDED[held.task]].items()} == merged
        assert partial.lengths == {item: len(values) for item, values in merged.items()}

    def new_values(self, data: st.DataObject, task: str, row: Row) -> dict[str, Any]:
        number = next(self.ids)
        if task == "think":
            return {
                "steps": np.arange(2 * (size := data.draw(lengths_strategy)), dtype=np.int16).reshape(size, 2) + number
            }
        if task == "reward":
            return {"reward": np.float32(number) + np.arange(row.known_length("answers"), dtype=np.float32)}
        if task == "look":
            return {}
        length = data.draw(st.lists(lengths_strategy, max_size=3))
        return {
            "ids": np.arange(number, number + sum(length), dtype=np.int32),
            "length": length,
            "why": [f"{number} " * (i + 1) for i in range(len(length))],
            "by": number % 1000,
        }

    def values_for_gone(self, held: Held, i: int) -> dict[str, Any]:
        """What is given for a row that is lost: only its lengths matter."""
        if held.task == "think":
            return {"steps": np.zeros((1, 2), np.int16)}
        if held.task == "reward":
            return {"reward": np.zeros(held.lengths["answers"][i], np.float32)}
        if held.task == "look":
            return {}
        return {"ids": np.zeros(2, np.int32), "length": [1, 1], "why": ["", "x"], "by": 1}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), flat=st.booleans())
    def put_a_claim(self, data: st.DataObject, flat: bool) -> None:
        held = self.a_claim(data)
        assert held is not None
        self.put_all(data, held, flat)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), most=st.integers(1, 4), times=st.integers(1, 4))
    def work(self, data: st.DataObject, most: int, times: int) -> None:
        """A claimer that puts at once what it claims."""
        for _ in range(times):
            held = self.claim_rows(data, self.a_due_task(data), most, None)
            if held is not None:
                self.put_all(data, held, True)
                self.forget(held)

    def put_all(self, data: st.DataObject, held: Held, flat: bool) -> None:
        n = len(held.keys)
        each = [
            self.new_values(data, held.task, self.rows[held.keys[i]])
            if self.holds(held, i)
            else self.values_for_gone(held, i)
            for i in range(n)
        ]
        given: dict[str, Any] = {name: [values[name] for values in each] for name in each[0]}
        if flat and held.task == "reward":
            given["reward"] = np.concatenate(given["reward"])
        skipped: gt.Keys | None = None
        lost = [held.keys[i] for i in range(n) if not self.holds(held, i)]
        with self.room_for(held, {i: Word("done", values=each[i]).units(held.task) for i in range(n)}) as wrote:
            skipped = held.claim.put(**given, timeout_s=0)
            held.ended = True
        if skipped is not None:
            assert list(zip(skipped.row.tolist(), skipped.generation.tolist(), strict=True)) == lost
        for i in wrote:
            self.done(self.rows[held.keys[i]], held.task, each[i])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def put_a_row(self, data: st.DataObject) -> None:
        held = self.a_claim(data)
        assert held is not None
        i = data.draw(st.integers(0, len(held.keys) - 1))
        row = list(held.claim)[i]
        if not self.holds(held, i):
            with pytest.raises(StaleClaimError, match="not claimed"):
                row.put(self.values_for_gone(held, i), timeout_s=0)
            return
        values = self.new_values(data, held.task, self.rows[held.keys[i]])
        with self.room_for(held, {i: Word("done", values=values).units(held.task)}) as wrote:
            row.put(values, timeout_s=0)
        for _ in wrote:
            self.done(self.rows[held.keys[i]], held.task, values)

    @precondition(lambda self: any(held.task in APPENDED for held in self.held))
    @rule(data=st.data(), length_given=st.booleans())
    def put_what_was_appended(self, data: st.DataObject, length_given: bool) -> None:
        held = self.a_claim(data, ("answer", "think"))
        assert held is not None
        i = data.draw(st.integers(0, len(held.keys) - 1))
        row = list(held.claim)[i]
        if not self.holds(held, i):
            rest = {"why": [], "by": 1} if held.task == "answer" else {}
            with pytest.raises(StaleClaimError):
                row.put(rest, timeout_s=0)
            return
        parts = self.rows[held.keys[i]].words[held.task].parts
        if not parts:
            return
        order = sorted(range(len(parts)), key=lambda k: parts[k][0])
        merged = np.concatenate([parts[k][1] for k in order])
        given: dict[str, Any] = {}
        if held.task == "answer":
            items = {item for item, _, _ in parts}
            length = [sum(len(v) for it, v, _ in parts if it == item) for item in range(max(items) + 1)]
            given = {"why": [f"{each}" for each in length], "by": 3}
            if length_given:
                given["length"] = length
            elif len(items) < len(length):
                with pytest.raises(SchemaError, match="nothing was appended to number"):
                    row.put(given, timeout_s=0)
                return
            values = {"ids": merged, "length": length, "why": given["why"], "by": 3}
        else:
            values = {"steps": merged}
        with self.room_for(held, {i: Word("done", values=values).units(held.task)}) as wrote:
            row.put(given, timeout_s=0)
        for _ in wrote:
            self.done(self.rows[held.keys[i]], held.task, values)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["drop", "release"]), whole=st.booleans())
    def give_up(self, data: st.DataObject, how: str, whole: bool) -> None:
        held = self.a_claim(data)
        assert held is not None
        n = len(held.keys)
        which = range(n) if whole else [data.draw(st.integers(0, n - 1))]
        mine = [i for i in which if self.holds(held, i)]
        if not whole:
            assert getattr(list(held.claim)[which[0]], how)() == bool(mine)
        elif how == "release" and held.ended:
            assert held.claim.release() == 0
        else:
            assert getattr(held.claim, how)() == n - len(mine)
            held.ended = True
        for i in mine:
            if how == "drop":
                self.drop_one(held.keys[i])
            else:
                self.release_one(self.rows[held.keys[i]], held.task)

    def forget(self, held: Held) -> None:
        held.claim.release()
        for i in range(0 if held.ended else len(held.keys)):
            if self.holds(held, i):
                self.release_one(self.rows[held.keys[i]], held.task)
        if held in self.held:
            self.held.remove(held)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        keys = self.some_keys(data, 2)
        there = [key for key in keys if key in self.rows]
        assert self.a_store(data).delete(keys_of(keys)) == len(keys) - len(there)
        for key in there:
            self.remove(key)
        self.counts["deleted"] += len(there)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        chosen = self.some_keys(data)
        keys = [key for key in self.rows if key in chosen] + [key for key in chosen if key not in self.rows]
        rows = [self.rows.get(key) for key in keys]
        each = [
            np.zeros(2, np.float32)
            if row is None or row.words["answer"].state != "done"
            else self.new_values(data, "reward", row)["reward"]
            for row in rows
        ]
        done = [i for i, row in enumerate(rows) if row and row.words["reward"].state == "done" and row.place is None]
        skipped: gt.Keys | None = None
        try:
            skipped = self.a_store(data).put(keys_of(keys), "reward", {"reward": each}, timeout_s=0)
        except (WaitTimeoutError, NoSpaceError):
            assert done
        # Rows behind the first one may be set back for it, and are skipped then.
        self.set_back_some(keys[done[0]] if done else None)
        done = [i for i in done if rows[i].words["reward"].state == "done"]  # type: ignore[union-attr]
        if skipped is None:
            done = done[: next((k for k, i in enumerate(done) if not self.has_reward(keys[i], each[i])), len(done))]
        else:
            lost = [key for i, key in enumerate(keys) if i not in done]
            assert list(zip(skipped.row.tolist(), skipped.generation.tolist(), strict=True)) == lost
        for i in done:
            self.rows[keys[i]].words["reward"].values = {"reward": each[i]}
        for key, row in self.rows.items():
            assert row.words["reward"].state != "done" or self.has_reward(key, row.value("reward"))

    def has_reward(self, key: tuple[int, int], reward: Any) -> bool:
        found = gt.fetch(self.stores[0], keys_of([key]), fields=["reward"], output="numpy")["reward"]
        return bool(np.array_equal(found, reward))

    @precondition(lambda self: any(row.selectable for row in self.rows.values()))
    @rule(data=st.data(), most=st.integers(1, 4))
    def draw(self, data: st.DataObject, most: int) -> None:
        committed = [row for row in self.rows.values() if row.selectable][:most]
        if not committed:
            return
        n = len(committed)
        with gt.Replay(self.a_store(data), gt.selection.Fifo(), n, prefetch=0, output="numpy") as replay:
            self.check_values(replay.sample(), committed)
        for row in committed:
            self.remove(row.key)

    def kept_by(self, step: int) -> list[Row]:
        return sorted((row for row in self.rows.values() if row.place and row.place[0] == step), key=lambda r: r.place)

    @precondition(lambda self: any(row.committed for row in self.rows.values()))
    @rule(data=st.data(), n=st.integers(1, 2), step=st.integers(0, 1), dies=st.booleans())
    def draw_and_keep(self, data: st.DataObject, n: int, step: int, dies: bool) -> None:
        rows = self.kept_by(step)
        if [row.place for row in rows] != [(step, place) for place in range(n)]:
            for row in rows:
                row.place = None
            rows = [row for row in self.rows.values() if row.selectable][:n]

        def drawn(store: gt.Store) -> Any:
            options: Any = {"prefetch": 0, "output": "numpy", "timeout_s": 0, "keep": "saved"}
            with replay_of(store, gt.selection.Fifo(), n, **options) as replay:
                replay.load_state_dict({**replay.state_dict(), "step": step})
                return replay.sample()

        def body(store: gt.Store) -> bytes:
            if len(rows) == n:
                self.check_values(drawn(store), rows)
            else:
                with pytest.raises((NotEnoughRowsError, WaitTimeoutError)):
                    drawn(store)
            return b"x"

        if dies:
            kill(self.child(body)[0])
            self.a_store(data).reap()
        else:
            body(self.a_store(data))
        for place, row in enumerate(rows if len(rows) == n else []):
            row.place = step, place

    @precondition(lambda self: any(row.place for row in self.rows.values()))
    @rule(data=st.data(), step=st.integers(0, 1))
    def save(self, data: st.DataObject, step: int) -> None:
        known = [row.key for row in self.rows.values() if row.place and row.place[0] <= step]
        assert self.a_store(data).native.free_taken(step) == len(known)
        for key in known:
            self.remove(key)

    def check_values(self, batch: Any, rows: list[Row]) -> None:
        names = [*FIELDS, *(name for task in TASKS.values() for name in task.fields)]
        for name in names:
            values = [row.value(name) for row in rows]
            flat = values if name in ("id", "note", "by") else [x for each in values for x in listed(each)]
            assert listed(batch[name]) == flat, name
        assert listed(batch.lengths("tokens")) == [len(row.value("ids")) for row in rows]
        assert np.diff(batch.cu_seqlens_of("ids")).tolist() == [x for row in rows for x in row.value("length")]

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(), task=st.sampled_from(WORK), most=st.integers(1, 2), act=st.sampled_from(["", "append", "put"])
    )
    def a_claimer_dies(self, data: st.DataObject, task: str, most: int, act: str) -> None:
        rows = [row for row in self.rows.values() if row.due(task)][:most]
        act = "" if act == "append" and task not in APPENDED else act
        values = {row.key: self.new_values(data, task, row) for row in rows}
        part = (
            (np.arange(3, dtype=np.int32) if task == "answer" else np.zeros((3, 2), np.int16))
            if act == "append"
            else None
        )

        def body(store: gt.Store) -> bytes:
            claim = store.claim(task, most)
            assert len(claim) == len(rows)
            for row in itertools.islice(claim, 1):
                try:
                    if act == "append":
                        row.append({APPENDED[task]: part}, timeout_s=0)
                    elif act == "put":
                        row.put(values[rows[0].key], timeout_s=0)
                except (WaitTimeoutError, NoSpaceError):
                    return b"f"
            return b"x"

        child, heard = self.child(body)
        kill(child)
        self.a_store(data).reap()
        for row in rows:
            row.words[task].state = "claimed"
        if rows:
            self.set_back_some(rows[0].key)
        for k, row in enumerate(rows):
            if k == 0 and act == "append" and heard == b"x":
                row.words[task].parts.append((0, part, False))
                row.words[task].deaths = 0
            if k == 0 and act == "put" and heard == b"x":
                self.done(row, task, values[row.key])
            else:
                self.die(row.key, task)

    def child(self, body: Callable[[gt.Store], bytes]) -> tuple[int, bytes]:
        """A process that does something with a handle of its own, says a byte and waits until it is killed."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store = gt.Store.open(self.name)
                os.write(writer, body(store))
                signal.pause()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        assert select.select([reader], [], [], patience(60))[0]
        heard = os.read(reader, 1)
        os.close(reader)
        assert heard, "the child failed"
        return child, heard

    @precondition(lambda self: self.rows)
    @rule()
    def reopen_after_a_kill(self) -> None:
        """All handles are closed but those of a process that is killed: what it leaves is adopted."""
        child, _ = self.child(lambda store: b"x")
        for store in self.stores:
            store.close()
        for row in self.rows.values():
            for task, word in row.words.items():
                if word.state == "claimed":
                    self.release_one(row, task)
        self.held.clear()
        kill(child)
        self.stores = [gt.Store.open(self.name, adopt=True), gt.Store.open(self.name)]

    @precondition(lambda self: self.rows)
    @rule()
    def rebuild(self) -> None:
        self.stores[0].native.rebuild()

    @precondition(lambda self: not self.finished)
    @rule()
    def finish(self) -> None:
        self.stores[0].finish()
        self.finished = True

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        store = self.stores[0]
        assert store.audit() == []
        stats, under_way = store.stats(), sum(not row.committed for row in self.rows.values())
        assert stats["under_way"] == under_way
        kept = sum(row.place is not None for row in self.rows.values())
        assert stats["committed"] == len(store) == len(self.rows) - under_way - kept
        assert stats["kept"] == kept
        assert stats["free"] == self.capacity - len(self.rows)
        assert {name: stats[name] for name in self.counts} == self.counts
        assert (stats["revoked"], stats["free_span_bytes"]) == (0, self.space_bytes())
        expected = {}
        for task, figures in self.figures.items():
            if task == "train":
                left = len(self.rows) - kept
                now = {"due": left - under_way, "claimed": 0, "remaining": left}
            else:
                words = [row.words[task] for row in self.rows.values()]
                now = {
                    "due": sum(row.due(task) for row in self.rows.values()),
                    "claimed": sum(word.state == "claimed" for word in words),
                    "remaining": sum(word.state != "done" for word in words),
                }
            expected[task] = {**now, **figures}
        expected["train"]["done"] = stats["sampled"]
        found = store.task_stats()
        assert [(task, found[task]) for task in TASKS] == [(task, expected[task]) for task in TASKS], (found, expected)
        for number, task in enumerate(WORK, 1):
            assert store.native.is_over(number) == (self.finished and expected[task]["remaining"] == 0)

    @invariant()
    def the_rows_are_the_models(self) -> None:
        committed = [row for row in self.rows.values() if row.selectable]
        keys = self.stores[1].keys()
        assert list(zip(keys.row.tolist(), keys.generation.tolist(), strict=True)) == [row.key for row in committed]
        if committed:
            self.check_values(gt.fetch(self.stores[1], keys, output="numpy"), committed)
        for step in range(3):
            if rows := self.kept_by(step):
                keys = keys_of([row.key for row in rows])
                assert self.stores[0].native.taken(step)[0].tolist() == keys.row.tolist()
                self.check_values(gt.fetch(self.stores[0], keys, output="numpy"), rows)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), task=st.sampled_from(("answer", "think", "reward")))
    def fetch(self, data: st.DataObject, task: str) -> None:
        keys = self.some_keys(data)
        if not keys:
            return
        names = ["id", *TASKS[task].fields]
        there = [self.rows[key] for key in keys if key in self.rows]

        def fetched() -> Any:
            return gt.fetch(self.a_store(data), keys_of(keys), fields=names, output="numpy", on_stale="drop")

        if any(row.words[task].state != "done" for row in there):
            with pytest.raises(FieldError, match="is not done"):
                fetched()
        else:
            batch = fetched()
            for name in names:
                values = [row.value(name) for row in there]
                flat = values if name in ("id", "by") else [x for each in values for x in listed(each)]
                assert listed(batch[name]) == flat

    @invariant()
    def a_key_of_a_row_that_went_is_stale_for_good(self) -> None:
        if self.gone:
            with pytest.raises(StaleKeyError):
                gt.fetch(self.stores[0], keys_of(self.gone[-1:]), fields=["id"])


TasksModel.TestCase.settings = settings(
    max_examples=16,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestTasksAgainstTheirModel(TasksModel.TestCase):
    """Sixteen sequences of up to forty calls, always the same."""


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestTasksAgainstTheirModelAtLength(TasksModel.TestCase):
    """Many more, and new ones each time."""

    settings = settings(TasksModel.TestCase.settings, max_examples=300, stateful_step_count=80, derandomize=False)
