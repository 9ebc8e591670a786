"""The gather kernel moves what native/fetch/fetch.cc moves, to the bit, for every shape, alignment, dtype and
window."""

from __future__ import annotations

import json

import pytest
from deadlines import patience
from interpreter import interpreted

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch

import geartrain as gt
import geartrain.device.kernels.gather_order as gather_order
from geartrain.device.kernels import interpreting
from geartrain.replay.device.options import Convert
from geartrain.replay.device.target import gather_plan_of
from geartrain.replay.fetch_plan import FetchPlan


def test_random_batches_are_those_of_the_native_code() -> None:
    assert json.loads(interpreted("gather_cases.py", "0", "5", timeout_s=patience(110))) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_random_batches_are_those_of_the_native_code() -> None:
    assert json.loads(interpreted("gather_cases.py", "1000", "500", timeout_s=patience(890))) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rows_chosen_and_gathered_on_a_device_are_those_of_the_host() -> None:
    assert int(interpreted("device_selection_cases.py", timeout_s=patience(890))) > 30


@pytest.mark.slow
def test_a_store_that_does_not_change_is_copied_once_and_drawn_on_the_device() -> None:
    assert int(interpreted("device_selection_cases.py", "rule", timeout_s=patience(110))) == 39


def test_elements_are_as_wide_as_steps_allow(store_name) -> None:
    fields = {
        "aligned": gt.Field((4,), "float32"),
        "odd": gt.Field((11,), "float32"),
        "bytes": gt.Field((75,), "uint8"),
        "words": gt.Field((84,), "uint8"),
        "once": gt.Field((3,), "float64", per_row=True),
    }
    with gt.Store.create(store_name(), fields, max_length=8, capacity=4) as store:
        plan = gather_plan_of(FetchPlan.make(store, None, 3, "left", "torch", 1), {}, False)
    kinds = {field.name: (field.kind[1], field.kind[5]) for field in plan.fields}
    assert kinds == {
        "aligned": (8, True), "odd": (4, False), "bytes": (1, False), "words": (4, False), "once": (8, False),
    }  # fmt: skip


def test_every_byte_of_a_window_has_a_slot(store_name) -> None:
    with gt.Store.create(store_name(), {"x": gt.Field((11,), "float32")}, max_length=2000, capacity=2) as store:
        for window in (1, 2, 20, 21, 22, 1000, 1999):
            plan = gather_plan_of(FetchPlan.make(store, None, window, "left", "torch", 1), {}, False)
            pieces = sum(field == 0 for field, _ in plan.slots)
            assert pieces * plan.chunk >= 44 * window + 127 > (pieces - 1) * plan.chunk or plan.chunk == 1024
            assert plan.arena(7).nbytes >= 7 * (44 * window + window + 17)


def test_conversion_is_float32_arithmetic_rounded_once() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    made = Convert("bfloat16", 1 / 255, -0.5).apply(pixels)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, (pixels.float() * (1 / 255) + -0.5).to(torch.bfloat16))
    real = torch.zeros(256, dtype=torch.bool)
    assert not Convert("float16", 1.0, 3.0).apply(pixels, real).any(), "there is no offset where there is no step"


@pytest.mark.skipif(interpreting() or torch.cuda.is_available(), reason="only where nothing can run the kernel")
def test_what_reads_host_memory_is_named_in_the_ptx_test() -> None:
    """The constants that tests/device/test_kernels.py compiles with are those of a launch."""
    assert gather_order.warps_of(1024, gather_order.NVIDIA) == 2
    assert gather_order.warps_of(4096, gather_order.NVIDIA) == 4
    assert gather_order.warps_of(2048, gather_order.AMD) == 2
