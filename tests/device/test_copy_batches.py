"""Copies in batches: what the driver is given, in each of the forms that it has the call in. No GPU is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from geartrain.device.copy_batches import INVALID_VALUE, NOT_SUPPORTED, Attributes, CopyBatches

Call = tuple[str, list[int], list[int], list[int], int]


class Driver:
    """Has the calls that it is made with, and notes what they were given."""

    def __init__(self, *forms: str, code: int = 0) -> None:
        self.calls: list[Call] = []
        self.attributes: list[tuple[int, int]] = []
        self._code = code
        for form in forms:
            setattr(self, form, lambda *given, form=form: self._batch(form, *given))

    def _batch(self, form: str, targets: Any, sources: Any, sizes: Any, count: Any, attributes: Any, *rest: Any) -> int:
        first, kinds, *failed, stream = rest
        assert kinds.value == 1
        assert first._obj.value == 0
        assert len(failed) == (form == "cuMemcpyBatchAsync")  # where the first form tells which copy has failed
        words = ctypes.c_uint64 * count.value
        given = [list(words.from_address(pointer.value)) for pointer in (targets, sources, sizes)]
        self.calls.append((form, *given, stream.value))  # type: ignore[arg-type]
        self.attributes.append((attributes._obj.source_order, attributes._obj.flags))
        return self._code

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append(("cuMemcpyHtoDAsync_v2", [target.value], [source.value], [size.value], stream.value or 0))
        return 1 if size.value == 666 else 0


BOTH = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")


def submit(batches: CopyBatches, stream: int = 77, sizes: tuple[int, ...] = (30, 40)) -> None:
    count = len(sizes)
    words = [np.arange(1, count + 1, dtype=np.uint64) * factor for factor in (1000, 2**40)]
    batches.submit(words[0], words[1], np.array(sizes, np.uint64), stream)


@pytest.mark.parametrize(("forms", "taken"), [(BOTH, BOTH[1]), (BOTH[:1], BOTH[0]), (BOTH[1:], BOTH[1])])
def test_one_call_for_all_pieces_in_the_form_that_there_is(forms: tuple[str, ...], taken: str) -> None:
    driver = Driver(*forms)
    batches = CopyBatches(driver)
    submit(batches)
    submit(batches, sizes=())
    assert driver.calls == [(taken, [1000, 2000], [2**40, 2**41], [30, 40], 77)]
    assert driver.attributes == [(1, 1)], "in the stream's order, beside kernels"


@pytest.mark.parametrize(("forms", "stream"), [((), 77), (BOTH, 0), (BOTH, 1)])
def test_without_it_and_on_the_legacy_stream_each_piece_is_a_call(forms: tuple[str, ...], stream: int) -> None:
    driver = Driver(*forms)
    submit(CopyBatches(driver), stream)
    assert driver.calls == [
        ("cuMemcpyHtoDAsync_v2", [1000], [2**40], [30], stream),
        ("cuMemcpyHtoDAsync_v2", [2000], [2**41], [40], stream),
    ]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, INVALID_VALUE])
def test_a_driver_that_has_the_call_and_does_not_take_it_is_asked_once(code: int) -> None:
    driver = Driver(*BOTH, code=code)
    batches = CopyBatches(driver)
    submit(batches)
    submit(batches)
    assert [form for form, *_ in driver.calls] == [BOTH[1], *["cuMemcpyHtoDAsync_v2"] * 4]


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync_v2: error 700"):
        submit(CopyBatches(Driver(*BOTH, code=700)))
    with pytest.raises(RuntimeError, match="cuMemcpyHtoDAsync: error 1"):
        submit(CopyBatches(Driver()), sizes=(30, 666))


def test_the_attributes_lie_as_the_drivers_header_has_them() -> None:
    places = [getattr(Attributes, name).offset for name, _ in Attributes._fields_]  # type: ignore[misc]
    assert (ctypes.sizeof(Attributes), places) == (24, [0, 4, 12, 20])
