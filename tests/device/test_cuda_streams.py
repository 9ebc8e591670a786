"""Streams that `CudaDevice` makes current and undoes, by a torch that only notes which is: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest

import geartrain.device.cuda_device as cuda_device
from geartrain.device.cuda_device import CudaDevice


class Stream:
    def __init__(self, raw: int) -> None:
        self.cuda_stream = raw


class FakeTorch:
    """torch.cuda and torch._C of one thread."""

    def __init__(self, current: Stream) -> None:
        self.current, self.index, self.contexts = current, 0, 0

    def _cuda_getDevice(self) -> int:  # noqa: N802
        return self.index

    def _cuda_getCurrentRawStream(self, index: int) -> int:  # noqa: N802
        return self.current.cuda_stream

    def current_stream(self, device: Any) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @property
    def cuda(self) -> Any:
        return self

    def stream(self, stream: Stream) -> str:
        self.contexts += 1
        return "torch's own context"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    made = object.__new__(CudaDevice)  # without CUDA
    fake: Any = FakeTorch(Stream(7))
    made.index, made.device, made.hip, made._streams = 0, fake, False, {}
    made._torch = made._cuda = made._known = fake
    made.set_stream = fake.set_stream
    return made


def current(device: CudaDevice) -> int:
    return int(device._cuda.current.cuda_stream)


def test_the_stream_of_before_is_back_whatever_happened_within(device: CudaDevice) -> None:
    one, two = Stream(8), Stream(9)
    with device.on(one):
        assert current(device) == 8
        with device.on(two), device.on(one):
            assert current(device) == 8
        assert current(device) == 8
        with device.on(one):  # it is: nothing to undo
            assert current(device) == 8
        assert current(device) == 8
        with pytest.raises(KeyError), device.on(two):
            raise KeyError
        assert current(device) == 8
    assert current(device) == 7
    device._cuda.index = 1  # another device is current
    assert device.on(one) == "torch's own context" and device._cuda.contexts == 1


def test_the_mode_of_capture_is_back_and_exchanged_only_where_the_thread_has_not_entered(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [0]

    def exchange(mode: int) -> int:
        modes.append(mode)
        return modes[-2]

    monkeypatch.setattr(cuda_device, "_exchange_capture_mode", exchange)
    one = Stream(8)
    with pytest.raises(KeyError), device.entered(one):
        assert modes[-1] == cuda_device.RELAXED and current(device) == 8
        with device.entered(one):
            assert len(modes) == 2
        raise KeyError
    assert modes == [0, cuda_device.RELAXED, 0] and current(device) == 7
    device.hip = True
    with device.entered(one):
        assert current(device) == 8
    assert len(modes) == 3
