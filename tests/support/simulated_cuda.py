"""CUDA tensors without CUDA: torch's tensors that say so, on simulated devices whose streams lag behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import geartrain.collectives.torch_backend.device_groups as device_groups
import geartrain.collectives.torch_backend.process_group as process_group
from geartrain.tools.testing import SimulatedDevice


class SimulatedCudaTensor(torch.Tensor):
    """A tensor in host memory that says it is on "cuda:N"; so do its views. Contiguous ones only.

    What writes or reads it "on the device" has to be given to the simulated device (`SimulatedDevice.run`).
    """

    index = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The tensor's memory, as on the device of that index."""
        kind = type(f"OnCuda{index}", (cls,), {"index": index})
        return tensor.as_subclass(kind)

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)


def simulate(monkeypatch: pytest.MonkeyPatch, devices: list[SimulatedDevice]) -> None:
    """Makes them the CUDA devices of the backend "geartrain", by index. Futures know of no device: torch would look."""
    made = process_group.TorchWork

    def work(*given: Any, **named: Any) -> Any:
        return made(*given, **{**named, "devices": ()})

    monkeypatch.setattr(process_group, "TorchWork", work)
    monkeypatch.setattr(device_groups, "open_device", lambda device: devices[device.index])


def write(device: SimulatedDevice, tensor: torch.Tensor, values: torch.Tensor) -> None:
    """A kernel: later."""
    device.run(lambda: tensor.as_subclass(torch.Tensor).copy_(values))


def read(device: SimulatedDevice, tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel sees that is launched now; waits for it."""
    seen: list[Any] = []
    device.run(lambda: seen.append(tensor.as_subclass(torch.Tensor).clone()))
    device.sync(device.record())
    return seen[0]
