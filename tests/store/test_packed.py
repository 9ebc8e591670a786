"""Packed fields: values one behind the other, bounds of sequences, and fields joined for a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpo
import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError, StaleKeyError

N = 5


@pytest.fixture
def store() -> Iterator[gt.Store]:
    with grpo.new_store() as made:
        grpo.insert(made, range(N))
        with made.claim("answer", N) as claim:
            grpo.work(made, "answer", claim)
        yield made
        assert made.audit() == []


@pytest.fixture
def keys(store: gt.Store) -> gt.Keys:
    with store.claim("reward", N) as claim:
        return claim.keys


def read(store: gt.Store, keys: gt.Keys, output: Any = "torch", fields: Any = ("prompt", "id", "ids", "length")) -> Any:
    return gt.fetch(store, keys, fields=fields, output=output)


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_sequences_of_a_divided_axis_are_its_parts_and_of_others_the_rows(
    store: gt.Store, keys: gt.Keys, output: str
) -> None:
    rows = read(store, keys, output)
    kind = torch.Tensor if output == "torch" else np.ndarray
    parts = np.concatenate([[0], np.cumsum([grpo.lengths_of(i) for i in range(N)])])
    prompts = np.concatenate([[0], np.cumsum([len(grpo.prompt_of(i)) for i in range(N)])])
    for found, expected in (
        (rows.cu_seqlens_of("ids"), parts),
        (rows.cu_seqlens, parts),
        (rows.cu_seqlens_of("prompt"), prompts),
        (rows.cu_seqlens_of("id"), np.arange(N + 1)),
        (rows.lengths("answers"), np.full(N, grpo.ANSWERS)),
    ):
        assert isinstance(found, kind) and str(found.dtype).endswith("int32")
        assert found.tolist() == expected.tolist()
    places = np.concatenate([np.arange(length) for i in range(N) for length in grpo.lengths_of(i)])
    assert rows.position_ids("ids").tolist() == places.tolist()
    assert rows["ids"].tolist() == np.concatenate([grpo.ids_of(i) for i in range(N)]).tolist()
    assert rows["id"].tolist() == list(range(N))


def test_a_jagged_tensor_shares_the_memory_of_the_values(store: gt.Store, keys: gt.Keys) -> None:
    rows = read(store, keys)
    nested = rows.jagged("ids")
    assert nested.layout == torch.jagged and nested.values().data_ptr() == rows["ids"].data_ptr()
    assert [len(each) for each in nested.unbind()] == [length for i in range(N) for length in grpo.lengths_of(i)]
    with pytest.raises(FieldError, match="no axis"):
        rows.jagged("id")
    with pytest.raises(ArgumentError, match="output='torch'"):
        read(store, keys, "numpy").jagged("ids")


def test_values_that_are_kept_are_not_overwritten_by_later_ones(store: gt.Store, keys: gt.Keys) -> None:
    kept = [read(store, keys)["ids"] for _ in range(3)]
    assert len({each.data_ptr() for each in kept}) == 3
    assert all(torch.equal(each, kept[0]) for each in kept)


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_prompt_stands_in_front_of_each_answer_of_its_row(store: gt.Store, keys: gt.Keys, output: str) -> None:
    rows = read(store, keys, output)
    both = rows.joined("prompt", "ids")
    values, mask, places = [], [], []
    bounds = [0]
    for i in range(N):
        for item in range(grpo.ANSWERS):
            prompt, answer = grpo.prompt_of(i).tolist(), grpo.answer_of(i, item).tolist()
            values += prompt + answer
            mask += [False] * len(prompt) + [True] * len(answer)
            places += range(len(prompt) + len(answer))
            bounds.append(len(values))
    assert both.values.tolist() == values and both.mask.tolist() == mask
    assert both.position_ids.tolist() == places and both.cu_seqlens.tolist() == bounds
    assert len(both) == N * grpo.ANSWERS and both.max_seqlen == max(np.diff(bounds))
    assert both.part("ids", both.values).tolist() == rows["ids"].tolist()
    # Another order: the mask is of what was named last.
    assert rows.joined("ids", "prompt").mask.sum() == sum(len(grpo.prompt_of(i)) * grpo.ANSWERS for i in range(N))


def test_rows_without_answers_and_values_of_a_row_are_joined_too() -> None:
    fields = {
        "bos": gt.Field((), "int32"),
        "prompt": gt.Field(("prompt",), "int32"),
        "ids": gt.Field(("tokens",), "int32"),
        "n": gt.Field(("answers",), "int32", divides="tokens"),
    }
    with gt.Store.create(fields, capacity=8, span_bytes=1 << 16, reserve=False) as store:
        keys = store.insert(
            {
                "bos": np.array([1, 2], np.int32),
                "prompt": [[5, 6], [7]],
                "ids": [np.empty(0, np.int32), [8, 9, 10]],
                "n": [np.empty(0, np.int32), [1, 0, 2]],
            }
        )
        rows = gt.fetch(store, keys, output="numpy")
        both = rows.joined("bos", "prompt", "ids")
        assert both.values.tolist() == [2, 7, 8, 2, 7, 2, 7, 9, 10]
        assert both.cu_seqlens.tolist() == [0, 3, 5, 9]
        assert rows.joined("bos", "prompt").values.tolist() == [1, 5, 6, 2, 7]
        assert rows.joined("n", "ids").values.tolist() == [1, 8, 0, 2, 9, 10]
        empty = gt.fetch(store, keys[:1], output="numpy").joined("prompt", "ids")
        assert len(empty) == 0 and len(empty.values) == 0


class _Causal(torch.nn.Module):
    """One layer of attention over packed sequences, each of which sees itself alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = torch.nn.Embedding(1000, 16), torch.nn.Embedding(64, 16)
        self.qkv, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        of = torch.bucketize(torch.arange(len(ids)), cu_seqlens[1:], right=True)
        sees = (of[:, None] == of[None]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        seen = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=sees[None])[0]
        logits: torch.Tensor = self.head(x + seen)
        return logits


def test_logits_and_gradients_of_joined_sequences_equal_those_of_each_alone(store: gt.Store, keys: gt.Keys) -> None:
    rows = read(store, keys)
    both, model = rows.joined("prompt", "ids"), _Causal()
    logits = both.part("ids", model(both.values, both.position_ids, both.cu_seqlens))
    logits.square().sum().backward()
    packed = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()

    alone = []
    for i in range(N):
        for item in range(grpo.ANSWERS):
            ids = torch.from_numpy(np.concatenate([grpo.prompt_of(i), grpo.answer_of(i, item)]))
            out = model(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
            alone.append(out[len(grpo.prompt_of(i)) :])
    expected = torch.cat(alone)
    assert logits.shape == (len(rows["ids"]), 11)
    torch.testing.assert_close(logits, expected)
    expected.square().sum().backward()
    for each, grad in zip(model.parameters(), packed, strict=True):
        torch.testing.assert_close(each.grad, grad, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_joined_or_taken_apart_is_refused(store: gt.Store, keys: gt.Keys) -> None:
    rows = read(store, keys, fields=("prompt", "ids", "log_prob", "length"))
    both = rows.joined("prompt", "ids")
    for call, error, says in (
        (rows.joined, ArgumentError, "at least one"),
        (lambda: rows.joined("ids", "ids"), ArgumentError, "once"),
        (lambda: rows.joined("prompt", "log_prob"), ArgumentError, "one dtype"),
        (lambda: rows.joined("prompt", "reward"), FieldError, "no field 'reward'"),
        (lambda: rows["promt"], FieldError, "did you mean 'prompt'"),
        (lambda: rows.lengths("pages"), SchemaError, "no axis 'pages'"),
        (lambda: both.part("log_prob", both.values), ArgumentError, "'prompt', 'ids' were joined"),
        (lambda: both.part("ids", both.values[1:]), ArgumentError, "one entry for each joined value"),
        (lambda: both.part("ids", both.values[None]), ArgumentError, r"values\[0\]"),
    ):
        with pytest.raises(error, match=says):
            call()


def test_cu_seqlens_of_several_axes_names_what_to_ask_for() -> None:
    fields = {"a": gt.Field(("one",), "int32"), "b": gt.Field(("two",), "int32")}
    with gt.Store.create(fields, capacity=4, span_bytes=1 << 14, reserve=False) as store:
        keys = store.insert({"a": [[1, 2]], "b": [[3]]})
        with pytest.raises(ArgumentError, match="cu_seqlens_of"):
            _ = gt.fetch(store, keys).cu_seqlens
        assert gt.fetch(store, keys, fields=["b"]).cu_seqlens.tolist() == [0, 1]
        with pytest.raises(FieldError, match="'one'"):
            gt.fetch(store, keys, fields=["b"]).lengths("one")


def test_every_dtype_and_wide_items_are_read_as_they_were_written() -> None:
    names = ["bfloat16", "float16", "bool", "int64", "float8_e4m3fn", "complex64"]
    fields = {name: gt.Field(("tokens", 2, 3), name) for name in names}
    with gt.Store.create(fields, capacity=4, span_bytes=1 << 16, reserve=False) as store:
        given = {
            name: [torch.arange(6 * n).reshape(n, 2, 3).to(getattr(torch, name)) for n in (2, 0, 3)] for name in names
        }
        rows = gt.fetch(store, store.insert(given))
        for name in names:
            assert rows[name].dtype == getattr(torch, name) and tuple(rows[name].shape) == (5, 2, 3)
            assert rows[name].to(torch.complex64).equal(torch.cat(given[name]).to(torch.complex64))


# --- fetch by key -----------------------------------------------------------------------------------------------------


def test_fields_of_a_task_that_is_not_done_are_refused_by_its_name(store: gt.Store, keys: gt.Keys) -> None:
    assert len(read(store, keys)["ids"])
    with pytest.raises(FieldError, match=r"'reward' is not done for 5 of 5 rows.*'reward'"):
        gt.fetch(store, keys, fields=["ids", "reward"])


def test_rows_that_were_dropped_are_stale_or_left_out(store: gt.Store, keys: gt.Keys) -> None:
    with store.claim("reward", 2) as claim:
        gone = claim.keys
        claim.drop()
    with pytest.raises(StaleKeyError, match="2 of 5 keys are stale"):
        read(store, keys)
    rows = gt.fetch(store, keys, fields=["id"], on_stale="drop")
    assert rows["id"].tolist() == [2, 3, 4] and len(rows.keys) == 3
    assert len(gt.fetch(store, gone, fields=["id"], on_stale="drop")) == 0


@pytest.mark.parametrize(
    "options", [{"window": 3}, {"pad": "right"}, {"out": {}}, {"ends": [0] * N}, {"path": "staged"}]
)
def test_options_of_padded_batches_are_refused(store: gt.Store, keys: gt.Keys, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="read whole into memory of their own"):
        gt.fetch(store, keys, fields=["id"], **options)
