"""What no store can hold is refused with what to do instead."""

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import IncompatibleStoreError, SchemaError
from geartrain.replay.fetch import fetch


@pytest.mark.parametrize("dtype", [bytes, str, object, "bytes", "str", "object", "S10", "U4"], ids=str)
def test_text_bytes_and_objects_are_refused_with_the_fields_to_use_instead(dtype):
    with pytest.raises(SchemaError, match=r"geartrain.Text\(\).*Field\(\(n,\), 'uint8', per_row=True\)"):
        gt.Field((), dtype)


def test_a_struct_is_refused_with_the_fields_to_make_of_it():
    with pytest.raises(SchemaError, match="a field of each of x, y"):
        gt.Field((), np.dtype([("x", "f4"), ("y", "i8")]))
    with pytest.raises(SchemaError, match="the store knows"):
        gt.Field((), "no such type")


def test_bytes_are_kept_as_the_advice_says(store_name):
    texts = [b"a prompt", b"", b"another, which is longer"]
    fields = {"text": gt.Field((32,), "uint8", per_row=True), "size": gt.Field((), "uint32", per_row=True)}
    with gt.Store.create(store_name(), fields, capacity=4) as store:
        padded = np.stack([np.frombuffer(text.ljust(32, b"\0"), np.uint8) for text in texts])
        keys = store.insert({"text": padded, "size": np.array([len(text) for text in texts], np.uint32)})
        found = fetch(store, keys, output="numpy")
        assert [row[:n].tobytes() for row, n in zip(found["text"], found["size"], strict=True)] == texts


def test_a_field_that_the_store_lacks_is_refused_with_the_way_to_add_it(store_name):
    name = store_name()
    fields = {"x": gt.Field((), "float32", per_row=True)}
    more = {**fields, "y": gt.Field((), "float32", per_row=True)}
    with gt.Store.create(name, fields, capacity=4) as store:
        keys = store.insert({"x": np.arange(3, dtype=np.float32)})
        with pytest.raises(IncompatibleStoreError, match="create a new one, and insert the rows"):
            gt.Store.open(name, more)
        with gt.Store.create(store_name(), more, capacity=4) as wider:
            rows = fetch(store, keys, output="numpy")
            wider.insert({"x": rows["x"], "y": np.zeros(3, np.float32)})
            assert wider.column("x")[wider.keys().row].tolist() == [0, 1, 2]
