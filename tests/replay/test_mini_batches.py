"""Mini- and micro-batches of packed batches, against plain loops over lists, on simulated ranks too."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import grpo
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError

FIELDS = {
    "id": gt.Field((), "int64"),
    "name": gt.Text(),
    "prompt": gt.Field(("prompt",), "int32"),
    "ids": gt.Field(("tokens",), "int32"),
    "mask": gt.Field(("tokens",), "bool"),
    "hidden": gt.Field(("tokens", 2), "float32"),
    "length": gt.Field(("answers",), "int32", divides="tokens"),
    "uid": gt.Field(("answers",), "int64"),
    "says": gt.Text("answers"),
    "pixels": gt.Field(("pixels",), "uint8"),  # divided like tokens
    "picture": gt.Field(("answers",), "int32", divides="pixels"),
    "steps": gt.Field(("steps",), "int16"),  # divided otherwise
    "turn": gt.Field(("turns",), "int32", divides="steps"),
}


class Answer(NamedTuple):
    tokens: int
    pixels: int


class Prompt(NamedTuple):
    prompt: int
    answers: list[Answer]
    turns: list[int]


def row_of(number: int, drawn: Prompt) -> dict[str, Any]:
    """The values of a row as lists, those of an answer in a list of their own."""
    uids = [100 * number + item for item in range(len(drawn.answers))]
    return {
        "id": number,
        "name": f"row {number}",
        "prompt": [-number - k for k in range(drawn.prompt)],
        "ids": [[1000 * uid + k for k in range(its.tokens)] for uid, its in zip(uids, drawn.answers, strict=True)],
        "mask": [[(uid + k) % 3 != 0 for k in range(its.tokens)] for uid, its in zip(uids, drawn.answers, strict=True)],
        "hidden": [[[uid, k] for k in range(its.tokens)] for uid, its in zip(uids, drawn.answers, strict=True)],
        "length": [its.tokens for its in drawn.answers],
        "uid": uids,
        "says": [f"answer {uid}" for uid in uids],
        "pixels": [[(uid + k) % 256 for k in range(its.pixels)] for uid, its in zip(uids, drawn.answers, strict=True)],
        "picture": [its.pixels for its in drawn.answers],
        "steps": [number + k for k in range(sum(drawn.turns))],
        "turn": drawn.turns,
    }


def flat(lists: Any) -> list[Any]:
    return [each for inner in lists for each in inner]


NESTED = ("ids", "mask", "hidden", "pixels")
OF_ROW, OF_ANSWER = ("id", "name"), ("length", "uid", "says", "picture")


def batches_of(rows: list[dict[str, Any]], output: Any, *shares: list[int]) -> list[Any]:
    """A batch of all rows, and batches of some."""
    with gt.Store.create(FIELDS, capacity=64, span_bytes=1 << 20, reserve=False) as store:
        given = {name: [flat(row[name]) if name in NESTED else row[name] for row in rows] for name in FIELDS}
        given["hidden"] = [np.array(flat(row["hidden"]), np.float32).reshape(-1, 2) for row in rows]
        keys = store.insert(given)
        return [gt.fetch(store, keys[share], output=output) for share in (list(range(len(rows))), *shares)]


def ranked(rows: list[dict[str, Any]], ranks: list[int], replicas: int, step: int = 0, output: str = "numpy") -> Any:
    """What each replica's batch is, as the builder of ranks makes it."""
    shares = [[place for place, rank in enumerate(ranks) if rank == me] for me in range(replicas)]
    if replicas > 1:  # the order of a batch is its own
        shares = [share[1::2] + share[::2] for share in shares]
    whole, *batches = batches_of(rows, output, *shares)
    whole.mini_batches(1)
    for me, (batch, share) in enumerate(zip(batches, shares, strict=True)):
        places = np.array(share, np.int64)
        mine = dataclasses.replace(whole._lengths, replica=np.array(ranks), me=me, replicas=replicas, places=places)
        object.__setattr__(batch, "_lengths", mine)
        object.__setattr__(batch, "step", step)
    return batches


def check_values(fields: Any, rows: list[dict[str, Any]], chosen: list[tuple[int, int]] | None) -> None:
    """All values of some answers, and of the rows they belong to; None: of all rows, whole."""
    by_id = {row["id"]: row for row in rows}
    there = np.asarray(fields["id"]).tolist()
    if chosen is None:
        of_rows = {number: list(range(len(by_id[number]["uid"]))) for number in there}
    else:
        of_rows = {number: [item for row, item in chosen if row == number] for number, _ in chosen}
    assert list(of_rows) == there
    of_answer: list[dict[str, Any]] = [
        {name: by_id[number][name][item] for name in (*NESTED, *OF_ANSWER)}
        for number, items in of_rows.items()
        for item in items
    ]
    for name in OF_ROW:
        assert list(fields[name]) == [by_id[number][name] for number in there]
    for name in OF_ANSWER:
        assert list(fields[name]) == [each[name] for each in of_answer]
    for name in NESTED:
        assert np.asarray(fields[name]).tolist() == flat(each[name] for each in of_answer)
        lengths = [len(each[name]) for each in of_answer]
        assert np.asarray(fields.cu_seqlens_of(name)).tolist() == np.cumsum([0, *lengths]).tolist()
        assert np.asarray(fields.position_ids(name)).tolist() == flat(range(length) for length in lengths)
    for name, axis in (("prompt", "prompt"), ("steps", "steps"), ("turn", "turns")):
        assert np.asarray(fields[name]).tolist() == flat(by_id[number][name] for number in there)
        assert np.asarray(fields.lengths(axis)).tolist() == [len(by_id[number][name]) for number in there]
    turns = flat(by_id[number]["turn"] for number in there)
    assert np.asarray(fields.cu_seqlens_of("steps")).tolist() == np.cumsum([0, *turns]).tolist()
    assert np.asarray(fields.lengths("answers")).tolist() == [len(items) for items in of_rows.values()]
    tokens = [sum(by_id[number]["length"][item] for item in items) for number, items in of_rows.items()]
    assert np.asarray(fields.lengths("tokens")).tolist() == tokens
    both = fields.joined("prompt", "ids")
    with_prompts = [
        by_id[number]["prompt"] + by_id[number]["ids"][item] for number, items in of_rows.items() for item in items
    ]
    assert np.asarray(both.values).tolist() == flat(with_prompts)
    assert np.asarray(both.part("ids", both.values)).tolist() == np.asarray(fields["ids"]).tolist()
    for name, to, repeats in (
        ("uid", "ids", [each["length"] for each in of_answer]),
        ("id", "tokens", tokens),
        ("id", "turn", [len(by_id[number]["turn"]) for number in there]),
    ):
        expected = np.repeat(np.asarray(fields[name]), repeats).tolist()
        assert np.asarray(fields.expand(name, to=to)).tolist() == expected
        if name == "uid":
            assert np.asarray(fields.expand(fields[name], to=to)).tolist() == expected


answers = st.lists(st.builds(Answer, st.integers(0, 5), st.integers(0, 2)), max_size=4)
prompts = st.builds(Prompt, st.integers(0, 3), answers, st.lists(st.integers(0, 2), max_size=2))


class Case(NamedTuple):
    """Rows of a global batch, how they lie on replicas, and how they are cut."""

    rows: list[dict[str, Any]]
    ranks: list[int]
    replicas: int
    n: int
    most: int
    of: Any

    @classmethod
    def drawn(cls, data: st.DataObject) -> Case:
        rows = [row_of(i, each) for i, each in enumerate(data.draw(st.lists(prompts, min_size=1, max_size=6)))]
        replicas = data.draw(st.sampled_from([1, 1, 2, 3]))
        return cls(
            rows,
            data.draw(st.lists(st.integers(0, replicas - 1), min_size=len(rows), max_size=len(rows))),
            replicas,
            data.draw(st.sampled_from([each for each in range(1, len(rows) + 1) if len(rows) % each == 0])),
            data.draw(st.integers(1, 12)),
            data.draw(st.sampled_from(["tokens", ("prompt", "tokens"), "answers", ("tokens", "pixels"), "prompt"])),
        )

    def sequences(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Row and answer, or row and -1 where rows are the sequences."""
        if self.of == "prompt":
            return [(number, -1) for number in numbers]
        return [(number, item) for number in numbers for item in range(len(self.rows[number]["uid"]))]

    def sequences_in(self, micro: Any) -> list[tuple[int, int]]:
        if self.of == "prompt":
            return [(number, -1) for number in np.asarray(micro["id"]).tolist()]
        return [(uid // 100, uid % 100) for uid in np.asarray(micro["uid"]).tolist()]

    def items(self, sequence: tuple[int, int]) -> int:
        row, item = self.rows[sequence[0]], sequence[1]
        counted = {"prompt": len(row["prompt"]), "answers": 1}
        if item >= 0:
            counted |= {"tokens": len(row["ids"][item]), "pixels": len(row["pixels"][item])}
        return sum(counted[axis] for axis in ([self.of] if isinstance(self.of, str) else self.of))

    def check_micro_batches(self, micros: list[Any], me: int, numbers: list[int]) -> None:
        """The micro-batches of a replica, which has the rows `numbers` of the mini-batch."""
        expected, found = self.sequences(numbers), []
        for micro in micros:
            its = self.sequences_in(micro)
            check_values(micro, self.rows, None if self.of == "prompt" else its)
            assert len(micro) == len(its) and micro.last is (micro is micros[-1])
            items = [self.items(each) for each in its]
            assert sum(items) <= self.most or len(items) == 1
            if micro.weight == 1.0:
                assert its or not expected
                found += its
                continue
            assert micro.weight == 0.0
            others = expected or self.sequences(i for i, rank in enumerate(self.ranks) if rank == me)
            lengths = [self.items(each) for each in others]
            assert items == [min([each for each in lengths if each] or lengths)] if others else items == []
        assert sorted(found) == sorted(expected)

    def most_micro_batches(self, numbers: list[int]) -> int:
        """How many any packing makes at most that opens no micro-batch before it must."""
        items = [self.items(each) for each in self.sequences(numbers)]
        short = [each for each in items if each <= self.most]
        return len(items) - len(short) + (2 * sum(short) // self.most + 1 if short else 0)


@pytest.mark.filterwarnings("ignore:a sequence has")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_each_row_is_in_one_mini_batch_an_epoch_and_each_sequence_in_one_micro_batch(data: st.DataObject) -> None:
    case = Case.drawn(data)
    rows, n = case.rows, case.n
    batches = ranked(rows, case.ranks, case.replicas, output=data.draw(st.sampled_from(["torch", "numpy"])))
    seen: list[int] = []
    for minis in zip(*(batch.mini_batches(n, epochs=2, seed=5) for batch in batches), strict=True):
        mine = [np.asarray(mini["id"]).tolist() for mini in minis]
        everyone = flat(mine)
        seen += everyone
        for me, mini in enumerate(minis):
            check_values(mini, rows, None)
            assert all(case.ranks[number] == me for number in mine[me])
            assert len(mini) == mini.total("rows") == n == len(everyone)
            assert mini.total("mask") == sum(sum(flat(rows[number]["mask"])) for number in everyone)
            assert mini.total("tokens") == sum(len(flat(rows[number]["ids"])) for number in everyone)
            assert mini.total("answers") == sum(len(rows[number]["uid"]) for number in everyone)
        cut = [list(mini.micro_batches(max_items=case.most, of=case.of)) for mini in minis]
        assert {len(micros) for micros in cut} <= {len(cut[0])}
        assert len(cut[0]) <= max(case.most_micro_batches(numbers) for numbers in mine)
        for me, micros in enumerate(cut):
            case.check_micro_batches(micros, me, mine[me])
    every = list(range(len(rows)))
    assert sorted(seen[: len(rows)]) == every and sorted(seen[len(rows) :]) == every


def plain_rows(answers_of: list[list[int]], prompt: int = 2) -> list[dict[str, Any]]:
    """Rows whose answers have so many tokens."""
    return [row_of(i, Prompt(prompt, [Answer(each, 1) for each in its], [1])) for i, its in enumerate(answers_of)]


def numbers_of(batches: list[Any], **options: Any) -> list[list[int]]:
    """Rows of each mini-batch, over all replicas."""
    minis = zip(*(batch.mini_batches(4, **options) for batch in batches), strict=True)
    return [sorted(flat(np.asarray(mini["id"]).tolist() for mini in each)) for each in minis]


def test_the_rows_of_a_mini_batch_follow_from_seed_step_and_epoch_on_any_number_of_ranks() -> None:
    rows = plain_rows([[1 + i % 3] for i in range(16)])
    alone = numbers_of(ranked(rows, [0] * 16, 1, step=3), epochs=2, seed=7)
    assert alone[:4] != alone[4:]
    for replicas in (2, 3, 4, 8):
        ranks = [i * 5 % replicas for i in range(16)]
        assert numbers_of(ranked(rows, ranks, replicas, step=3), epochs=2, seed=7) == alone
    assert alone[:4] == [[2, 8, 12, 13], [4, 9, 14, 15], [0, 6, 10, 11], [1, 3, 5, 7]]  # on all machines and versions
    for step, seed in ((4, 7), (3, 8)):
        assert numbers_of(ranked(rows, [0] * 16, 1, step=step), epochs=2, seed=seed) != alone


def test_micro_batches_of_a_rank_are_balanced_and_the_same_each_time() -> None:
    rows = plain_rows([[(7 * i + 3 * k) % 40 + 1 for k in range(4)] for i in range(16)])
    batches = ranked(rows, [i % 2 for i in range(16)], 2)

    def cut() -> list[list[list[int]]]:
        return [
            [np.asarray(micro["uid"]).tolist() for micro in mini.micro_batches(max_items=100, of="tokens")]
            for batch in batches
            for mini in batch.mini_batches(16)
        ]

    first = cut()
    assert first == cut()
    for micros in first:
        items = [sum(rows[uid // 100]["length"][uid % 100] for uid in micro) for micro in micros]
        assert max(items) - min(items) <= 8


def test_micro_batches_hold_max_items_where_equal_ones_would_not() -> None:
    [batch] = ranked(plain_rows([[6, 6, 4, 4, 4]]), [0], 1)  # longest first: 6 + 4 + 4 and 6 + 4
    [mini] = batch.mini_batches(1)
    assert [sorted(micro["length"].tolist()) for micro in mini.micro_batches(max_items=12, of="tokens")] == [
        [6, 6],
        [4, 4, 4],
    ]


def test_more_micro_batches_than_a_rank_needs_hold_max_items_too() -> None:
    tight = [9, 6, 6, 6, 5, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 3, 3, 3, 1]  # 8 micro-batches; longest first 9 do not do
    batches = ranked(plain_rows([tight, [11] * 9]), [0, 1], 2)
    micros = [
        list(mini.micro_batches(max_items=11, of="tokens")) for batch in batches for mini in batch.mini_batches(2)
    ]
    lengths = [micro["length"].tolist() for micro in micros[0]]
    assert len(micros[0]) == len(micros[1]) == 9 and all(micro.weight == 1 for micro in micros[0])
    assert sorted(flat(lengths), reverse=True) == tight and max(map(sum, lengths)) <= 11


def test_longer_sequences_stand_alone_with_one_warning_a_batch() -> None:
    [batch] = ranked(plain_rows([[9, 1, 2], [8, 3]]), [0, 0], 1)
    with pytest.warns(UserWarning, match=r"9 items of tokens, more than max_items=5") as told:
        for mini in batch.mini_batches(2, epochs=2):
            lengths = [sorted(micro["length"].tolist()) for micro in mini.micro_batches(max_items=5, of="tokens")]
            assert sorted(lengths) == [[1, 3], [2], [8], [9]] or sorted(lengths) == [[1, 2], [3], [8], [9]]
    assert len(told) == 1


def test_ranks_without_rows_or_sequences_make_as_many_micro_batches() -> None:
    rows = plain_rows([[3, 2], [], [5, 5], [5]])
    batches = ranked(rows, [0, 1, 2, 2], 4)  # the second has a row without answers, the last none
    cut = [list(mini.micro_batches(max_items=5, of="tokens")) for batch in batches for mini in batch.mini_batches(4)]
    assert [[micro.weight for micro in micros] for micros in cut] == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert [micro["length"].tolist() for micro in cut[0]] == [[3], [2], [2]]
    for empty in (*cut[1], *cut[3]):
        assert (
            len(empty) == 0 and empty["ids"].shape == (0,) and empty.joined("prompt", "ids").cu_seqlens.tolist() == [0]
        )
    # A rank whose rows are in another mini-batch repeats its shortest sequence.
    batches = ranked(rows, [0, 0, 1, 1], 2)
    for minis in zip(*(batch.mini_batches(1) for batch in batches), strict=True):
        cut = [list(mini.micro_batches(max_items=5, of="tokens")) for mini in minis]
        assert len(cut[0]) == len(cut[1])
        other = 0 if len(minis[1]["id"]) else 1
        assert all(micro.weight == 0 and micro["length"].tolist() == [[2], [5]][other] for micro in cut[other])


def test_a_mini_batch_without_sequences_has_no_micro_batches() -> None:
    batches = ranked(plain_rows([[], []]), [0, 1], 2)
    for batch in batches:
        [mini] = batch.mini_batches(2)
        assert list(mini.micro_batches(max_items=5, of="tokens")) == [] and mini.total("mask") == 0
        assert len(list(mini.micro_batches(max_items=5, of="prompt"))) == 1


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda batch: batch.mini_batches(3), ArgumentError, r"n must divide the 4 rows .* found 3"),
        (lambda batch: batch.mini_batches(0), ArgumentError, r"found 0"),
        (lambda batch: batch.mini_batches(8), ArgumentError, r"found 8"),
        (lambda batch: batch.mini_batches(2.0), ArgumentError, r"n must be a whole number"),
        (lambda batch: batch.mini_batches(2, epochs=0), ArgumentError, r"epochs must be at least 1"),
        (lambda batch: batch.mini_batches(2, seed=-1), ArgumentError, r"seed must be at least 0"),
        (lambda batch: cut(batch, max_items=0), ArgumentError, r"max_items must be at least 1, found 0"),
        (lambda batch: cut(batch, max_items=None), ArgumentError, r"max_items must be a whole number"),
        (
            lambda batch: cut(batch, max_items=5),
            ArgumentError,
            r"there are 3: pass of= as one of tokens, pixels, steps",
        ),
        (lambda batch: cut(batch, max_items=5, of="token"), SchemaError, r"no axis 'token'.*tokens"),
        (lambda batch: cut(batch, max_items=5, of="ids"), SchemaError, r"no axis 'ids'"),
        (lambda batch: cut(batch, max_items=5, of=()), ArgumentError, r"of is an axis, or several"),
        (lambda batch: cut(batch, max_items=5, of=7), ArgumentError, r"of is an axis, or several"),
        (lambda batch: cut(batch, max_items=5, of=("tokens", "tokens")), ArgumentError, r"each of them once"),
        (lambda batch: cut(batch, max_items=5, of=("tokens", 7)), SchemaError, r"no axis 7"),
        (
            lambda batch: cut(batch, max_items=5, of=("tokens", "steps")),
            ArgumentError,
            r"'steps' has sequences of 'turns'",
        ),
        (lambda batch: mini_of(batch).total("ids"), FieldError, r"no total of 'ids'.*mask, .*tokens, .*rows"),
        (lambda batch: mini_of(batch).total(["mask"]), FieldError, r"no total of \['mask'\]"),
        (lambda batch: micro_of(batch)["reward"], FieldError, r"'reward'"),
        (lambda batch: micro_of(batch).expand("says"), FieldError, r"'says' has strings"),
        (lambda batch: micro_of(batch).expand("prompt"), FieldError, r"one value for each item of 'prompt'"),
        (lambda batch: micro_of(batch).expand("uid", to="prompt"), FieldError, r"expanded to 'prompt'"),
        (lambda batch: micro_of(batch).expand("uid", to="id"), ArgumentError, r"'id' has no axis"),
        (lambda batch: micro_of(batch).expand("uid", to="nothing"), SchemaError, r"no axis 'nothing'"),
        (lambda batch: micro_of(batch).expand(np.zeros(99)), ArgumentError, r"found shape \(99,\)"),
        (lambda batch: micro_of(batch).expand(7), ArgumentError, r"found 7"),
        (lambda batch: mini_of(batch).expand("uid"), ArgumentError, r"there are 3: pass to="),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(call: Any, error: type[Exception], match: str) -> None:
    [batch] = ranked(plain_rows([[1, 2], [3], [4], [5, 6]]), [0] * 4, 1)
    with pytest.raises(error, match=match):
        call(batch)


def mini_of(batch: Any) -> Any:
    return next(batch.mini_batches(4))


def cut(batch: Any, **options: Any) -> Any:
    return mini_of(batch).micro_batches(**options)


def micro_of(batch: Any) -> Any:
    return next(cut(batch, max_items=100, of="tokens"))


def test_fields_that_a_batch_lacks_are_refused() -> None:
    with grpo.new_store() as store:
        keys = grpo.insert(store, range(4))
        [mini] = gt.fetch(store, keys, fields=["prompt"]).mini_batches(4)  # type: ignore[attr-defined]
        assert [len(micro) for micro in mini.micro_batches(max_items=100)] == [4]  # the only axis
        with pytest.raises(FieldError, match="no field of the axis 'tokens'"):
            mini.micro_batches(max_items=100, of="tokens")
        with pytest.raises(FieldError, match="no total of 'tokens'"):
            mini.total("tokens")


def test_copies_of_a_batch_are_cut_alike_and_one_batch_many_times() -> None:
    [batch] = ranked(plain_rows([[i + 1, 3] for i in range(8)]), [0] * 8, 1, step=2, output="torch")

    def told(one: Any) -> list[Any]:
        return [
            (micro["ids"].tolist(), micro.expand("uid").tolist(), micro["says"], mini.total("mask"))
            for mini in one.mini_batches(4, epochs=2)
            for micro in mini.micro_batches(max_items=9, of="tokens")
        ]

    first = told(batch)
    assert len(first) > 8 and told(batch) == first
    for other in (batch.to("cpu"), batch.clone(), pickle.loads(pickle.dumps(batch))):
        assert other.step == 2 and told(other) == first


def test_values_are_gathered_on_the_device_of_the_batch() -> None:
    [batch] = ranked(plain_rows([[3, 2], [1]]), [0] * 2, 1, output="torch")
    moved = batch.to("meta")  # it has shapes and no values
    with pytest.raises(NotImplementedError):
        moved["ids"].tolist()
    next(batch.mini_batches(2))  # which counts what is True
    object.__setattr__(moved, "_lengths", batch._lengths)
    [mini] = moved.mini_batches(2)
    for micro in mini.micro_batches(max_items=100, of="tokens"):
        for found in (micro["ids"], micro["hidden"], micro.expand("uid"), micro.cu_seqlens, micro.rows):
            assert found.device.type == "meta"
        assert micro["ids"].shape == (6,) and micro.expand("uid").shape == (6,)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "float16", "bfloat16", "float64"]
)
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_values_of_all_dtypes_are_gathered(dtype: str, output: Any) -> None:
    fields = {"x": gt.Field(("n", 2), dtype), "y": gt.Field((3,), dtype)}
    with gt.Store.create(fields, capacity=8, span_bytes=1 << 16, reserve=False) as store:
        values = torch.arange(12).reshape(6, 2).remainder(3).to(getattr(torch, dtype))
        keys = store.insert({"x": values, "y": values[:3].reshape(2, 3)}, lengths=[4, 2])
        batch = gt.fetch(store, keys, output=output)
        [mini] = batch.mini_batches(2)  # type: ignore[attr-defined]
        [first, second] = mini.micro_batches(max_items=4)
        for micro, rows in ((first, slice(0, 4)), (second, slice(4, 6))):
            assert micro["x"].dtype == batch["x"].dtype and micro["y"].shape == (1, 3)
            assert micro["x"].tolist() == batch["x"][rows].tolist()


# --- training ---------------------------------------------------------------------------------------------------


def new_model(number: int = 0) -> torch.nn.Module:
    """A model whose weights and results are whole numbers, so that sums are exact in any order."""
    random = torch.Generator().manual_seed(number)
    model = torch.nn.ModuleList([torch.nn.Embedding(64, 4), torch.nn.Embedding(64, 4), torch.nn.Linear(4, 1)]).double()
    for weights in model.parameters():
        weights.data = torch.randint(-3, 4, weights.shape, generator=random).double()
    return model


def results(model: Any, values: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """One number for each token, which depends on the tokens before it in its sequence alone."""
    hidden = model[0](values % 64) + model[1](positions)
    bounds = cu_seqlens.tolist()
    seen = [hidden[begin:end].cumsum(0) for begin, end in itertools.pairwise(bounds)]
    return model[2](torch.cat([hidden[:0], *seen]))[:, 0]  # type: ignore[no-any-return]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]


def plain_training(model: Any, rows: list[dict[str, Any]]) -> tuple[float, list[torch.Tensor]]:
    """Answer by answer, without padding, packing or balance."""
    model.zero_grad()
    total = sum(sum(flat(row["mask"])) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        for ids, mask, uid in zip(row["ids"], row["mask"], row["uid"], strict=True):
            values = torch.tensor(row["prompt"] + ids)
            new = results(model, values, torch.arange(len(values)), torch.tensor([0, len(values)]))[
                -len(ids) or len(values) :
            ]
            loss = loss + (new * (uid % 7) * torch.tensor(mask, dtype=torch.float64)).sum()
    (loss / total).backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_training_on_micro_batches_is_training_on_each_answer_alone(replicas: int) -> None:
    rows = plain_rows([[(3 * i + 5 * k) % 9 for k in range(i % 4)] for i in range(24)], prompt=3)
    for row in rows:
        row["prompt"] = [each % 64 for each in row["prompt"]]
    ranks = [min(i % 5, replicas - 1) for i in range(24)]  # the first ones have fewer
    batches = ranked(rows, ranks, replicas, output="torch")
    model = new_model()
    weights_seen = set()
    for minis in zip(*(batch.mini_batches(8, epochs=2) for batch in batches), strict=True):
        members = sorted(flat(mini["id"].tolist() for mini in minis))
        expected_loss, expected = plain_training(model, [rows[number] for number in members])
        losses, averaged = 0.0, [torch.zeros_like(each) for each in expected]
        for mini in minis:
            model.zero_grad()
            for micro in mini.micro_batches(max_items=20, of=("prompt", "tokens")):
                both = micro.joined("prompt", "ids")
                new = both.part("ids", results(model, both.values, both.position_ids, both.cu_seqlens))
                loss = (new * micro.expand("uid").remainder(7) * micro["mask"]).sum()
                (micro.weight * replicas * loss / mini.total("mask")).backward()
                losses += micro.weight * float(loss.detach())
                weights_seen.add(micro.weight)
            for sums, each in zip(averaged, gradients(model), strict=True):
                sums.add_(each / replicas)  # as DDP does
        assert losses == expected_loss  # whole numbers: to the bit
        for found, each in zip(averaged, expected, strict=True):
            torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)
    assert weights_seen == ({1.0} if replicas == 1 else {0.0, 1.0})


def test_gradients_flow_through_expanded_values() -> None:
    [batch] = ranked(plain_rows([[3, 1], [2]]), [0] * 2, 1, output="torch")
    [mini] = batch.mini_batches(2)
    [micro] = mini.micro_batches(max_items=100, of="tokens")
    assert micro.rows.tolist() == [0, 0, 1]
    values = torch.ones(3, requires_grad=True)
    micro.expand(values).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [3.0, 1.0, 2.0]
