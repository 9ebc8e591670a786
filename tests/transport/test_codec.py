"""Values survive the way there and back; whatever else comes is one named error, and executes nothing."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geartrain.core.dtypes import DTYPES, numpy_dtype, torch_dtype
from geartrain.errors import MessageError, UntrustedPeerError
from geartrain.transport.codec import MAX_DEPTH, Message, decode, encode, pack

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def there_and_back(value: Any, **options: Any) -> Any:
    return decode(pack(encode(value, **options)), **options)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type all the way down; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=20_000)
)
PLAIN_DTYPES = [numpy_dtype(d) for d in DTYPES.values() if d.numpy_name]
ARRAYS = st.builds(
    lambda shape, dtype, seed: (
        np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    ),
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
    st.sampled_from([d for d in PLAIN_DTYPES if d != np.bool_]),
    st.integers(0, 2**32),
)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.booleans())
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.frozensets(KEYS, max_size=5)
        | st.sets(KEYS, max_size=5)
    ),
    max_leaves=25,
)


@QUICK
@given(VALUES)
def test_a_value_comes_back_as_it_was_with_its_types(value: Any) -> None:
    assert same(there_and_back(value), value)


@QUICK
@given(st.binary(max_size=200), st.lists(st.binary(max_size=50), max_size=3))
def test_arbitrary_bytes_are_a_value_or_a_named_error(header: bytes, buffers: list[bytes]) -> None:
    with contextlib.suppress(MessageError, UntrustedPeerError):
        decode(Message.make(header, buffers))


@QUICK
@given(VALUES, st.data())
def test_damaged_messages_are_a_value_or_a_named_error(value: Any, data: st.DataObject) -> None:
    payload = encode(value)
    header = bytearray(payload.header)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(header) - 1))
        header[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    buffers = [bytes(b) for b in payload.buffers][: data.draw(st.integers(0, 3))]
    for candidate in (bytes(header), bytes(header[:cut])):
        with contextlib.suppress(MessageError, UntrustedPeerError):
            decode(Message.make(candidate, buffers))


def test_big_arrays_are_not_copied_on_either_side() -> None:
    array = np.arange(100_000, dtype=np.float32)
    payload = encode({"obs": array, "more": b"x" * 10_000})
    assert payload.buffers[0].ctypes.data == array.ctypes.data
    assert len(payload.header) < 200
    message = pack(payload)
    decoded = decode(message)["obs"]
    assert decoded.ctypes.data == message.buffers[0].ctypes.data
    assert decoded.flags.writeable
    del message
    assert (decoded == array).all()


@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (3, 4), (2000,), (20, 100), (1,) * 32])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "float32", "int64", "complex128"])
def test_an_array_comes_back_laid_out_as_a_new_one(shape: tuple[int, ...], dtype: str) -> None:
    array = np.ones(shape, dtype)
    for sent in (array, np.array(array, order="F"), np.repeat(array[None], 3, axis=0)[1, ...]):
        came = decode(pack(encode((b"not aligned" * 500, sent))))[1]
        np.testing.assert_array_equal(came, array, strict=True)
        assert came.strides == array.strides or array.size == 0
        assert came.flags.aligned == (came.ctypes.data % came.dtype.alignment == 0)
        for flag in ("c_contiguous", "f_contiguous", "writeable"):
            assert getattr(came.flags, flag) == getattr(array.flags, flag), flag


def test_tensors_come_back_with_dtype_shape_and_bits() -> None:
    torch = pytest.importorskip("torch")
    for spec in DTYPES.values():
        dtype = torch_dtype(spec)
        for shape in ((), (0,), (3, 0, 2), (7,), (5, 3, 200)):
            raw = torch.randint(0, 2 if spec.name == "bool" else 256, (*shape, spec.itemsize), dtype=torch.uint8)
            value = raw.view(dtype)[..., 0].clone()
            found = there_and_back([value])[0]
            assert found.dtype == dtype, spec
            assert found.shape == value.shape
            assert found.is_contiguous()
            bits = [t.contiguous().view(-1).view(torch.uint8) if t.numel() else torch.empty(0) for t in (found, value)]
            assert torch.equal(*bits), spec
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base.T, base[:, ::2], base[1:], torch.view_as_complex(base.reshape(12, 2)).conj()):
        assert torch.equal(there_and_back(view), view)
    trained = torch.nn.Linear(3, 2)
    state = there_and_back(dict(trained.state_dict()))
    assert all(torch.equal(state[name], value) for name, value in trained.state_dict().items())
    assert not there_and_back(trained.weight).requires_grad


def test_more_arrays_than_a_message_has_buffers_go_through() -> None:
    arrays = [np.full(200, i, np.float64) for i in range(5000)]
    found = there_and_back(arrays)
    assert all((a == b).all() for a, b in zip(arrays, found, strict=True))


def test_scalars_of_numpy_keep_their_type() -> None:
    for value in (np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1 + 2j), np.float64(math.pi)):
        found = there_and_back(value)
        assert type(found) is type(value)
        assert found == value


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Thing:
    """An object that only pickle can send."""

    def __init__(self, array: Any) -> None:
        self.array = array


@pytest.mark.parametrize(
    "value", [Colour.RED, Point(1, 2), object(), np.array(["a"]), np.array([None]), np.dtype("f4"), range(3), len]
)
def test_what_the_format_does_not_know_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(MessageError, match=r"pickle"):
        encode([value])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.array(["ab"]), "NumPy array of dtype <U2"),
        (np.array([b"ab"]), r"NumPy array of dtype \|S2"),
        (np.array([None, 1]), r"NumPy array of dtype \|O"),
        (np.arange(3, dtype=">f4"), "NumPy array of dtype >f4, whose byte order is not this machine's,"),
        (np.arange(300, dtype=">u8"), "NumPy array of dtype >u8, whose byte order"),
        (np.array(["2026-01-01"], "datetime64[D]"), r"NumPy array of dtype <M8\[D\]"),
        (np.zeros(2, [("x", "f4"), ("y", "i8")]), r"NumPy array of dtype \|V12"),
        (np.arange(3, dtype=np.longdouble), "NumPy array of dtype <f16"),
        (np.ma.masked_array([1, 2]), "NumPy array of dtype <i8 and type MaskedArray"),
    ],
)
def test_an_array_that_only_pickle_sends_is_named_with_what_to_send_instead(value: Any, what: str) -> None:
    with pytest.raises(MessageError, match=f"a {what}.*pickle.*; send ") as refused:
        encode({"observation": value})
    instead = eval(str(refused.value).rpartition("; send ")[2], {"np": np, "value": value})  # ours, of this test
    assert there_and_back(instead) is not None


def test_a_tensor_that_only_pickle_sends_is_named_with_what_to_send_instead() -> None:
    torch = pytest.importorskip("torch")
    values = {
        "Tensor of dtype torch.float32 and layout torch.sparse_coo": torch.eye(3).to_sparse(),
        "Tensor of dtype torch.float32 and layout torch.sparse_csr": torch.eye(3).to_sparse_csr(),
        "Tensor of dtype torch.quint8": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    }
    for what, value in values.items():
        with pytest.raises(MessageError, match=f"a {what}.*pickle.*; send ") as refused:
            encode((value,))
        instead = eval(str(refused.value).rpartition("; send ")[2], {"torch": torch, "value": value})
        assert torch.allclose(there_and_back(instead), value.dequantize() if value.is_quantized else value.to_dense())


def test_pickle_is_used_and_taken_only_where_it_is_allowed() -> None:
    thing = Thing(np.arange(1000.0))
    payload = encode({"thing": thing, "colour": Colour.RED, "point": Point(1, 2)}, pickle=True)
    assert payload.buffers[0].ctypes.data == thing.array.ctypes.data  # out of band
    found = decode(pack(payload), pickle=True)
    assert (found["thing"].array == thing.array).all()
    assert found["colour"] is Colour.RED
    assert found["point"] == Point(1, 2)
    with pytest.raises(UntrustedPeerError, match="pickle"):
        decode(pack(payload))


def test_tensors_inside_objects_go_out_of_band_too() -> None:
    torch = pytest.importorskip("torch")
    thing = Thing(torch.randn(3, 500).to(torch.bfloat16))
    payload = encode(thing, pickle=True)
    assert len(payload.header) < 1000
    assert torch.equal(decode(pack(payload), pickle=True).array, thing.array)


def test_nesting_has_a_limit_on_both_sides() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert same(there_and_back(deep), deep)
    with pytest.raises(MessageError, match="deeper"):
        encode([deep])
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(MessageError, match="contain themselves"):
        encode(itself)
    with pytest.raises(MessageError, match="too deep"):
        decode(Message.make(b"l\x01\0\0\0" * 100_000 + b"N", []))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"l\xff\xff\xff\xff",  # four thousand million values in no bytes
        b"s\xff\xff\xff\xffabc",
        b"i\0\0",
        b"NN",
        b"B\x05\0\0\0\0\0\0\0",
        b"m\x01\0\0\0l\0\0\0\0N",  # a list as a key
        b"s\x02\0\0\0\xff\xfe",  # not UTF-8
        b"a\x0c\x01\x01" + (2**62).to_bytes(8, "little"),
        b"a\x0c\x02\x01" + (0).to_bytes(8, "little") + (2**63).to_bytes(8, "little"),
        b"a\x0c\x03\x01" + (2**40).to_bytes(8, "little") * 2 + (0).to_bytes(8, "little"),
        b"a\xc8\0\x01",
        b"g\x0c\x01\x01" + (1).to_bytes(8, "little") + b"\0" * 4,
        b"?",
    ],
)
def test_messages_that_lie_are_refused(header: bytes) -> None:
    with pytest.raises(MessageError):
        decode(Message.make(header, []))


def test_text_that_is_not_unicode_and_huge_numbers_are_refused_by_the_sender() -> None:
    with pytest.raises(MessageError, match="surrogate"):
        encode("\ud800")
    with pytest.raises(MessageError, match="bytes at most"):
        encode(1 << 600_000)


# The format of version 1. A change of it needs a new protocol version (native/transport/security/handshake.h).
GOLDEN = {
    "none": (None, "4e"),
    "call": (("add", (1, -2), {"x": 0.5}), "740300000073030000006164647402000000690100000000000000"
             "69feffffffffffffff6d0100000073010000007864000000000000e03f"),
    "array": (np.array([[1, 2]], np.int16), "6105020101000000000000000200000000000000" "01000200"),
    "big": (2**64, "4909000000000000000000000001"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_the_format_do_not_change(name: str) -> None:
    value, golden = GOLDEN[name]
    assert encode(value).header.hex() == golden
    assert same(decode(Message.make(bytes.fromhex(golden), [])), value)


def test_a_tensor_elsewhere_is_refused_in_objects_too_not_moved_silently() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        elsewhere = torch.empty(3, device="cuda:1")  # no memory, and no GPU needed

    class Local:  # pickle cannot name it, cloudpickle can
        tensor = elsewhere

    for value in (collections.UserList([elsewhere]), [{"a": collections.UserList([[elsewhere]])}], Local):
        with pytest.raises(MessageError, match="a pickled object has a tensor on cuda:1"):
            encode(value, pickle=True)
    with pytest.raises(MessageError, match=r"a pickled object has a tensor on cuda:1|the tensor is on"):
        encode(elsewhere, pickle=True)
