"""CUDA IPC transfers through leased slots, on simulated devices: nothing is read early, kept, or lost."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import geartrain.device.cuda_ipc as cuda_ipc
import geartrain.device.cuda_runtime as cuda_runtime
from geartrain.core.dtypes import DTYPES
from geartrain.device.cuda_ipc import BLOCK, IpcReceiver, IpcSender, IpcSlot
from geartrain.errors import BusyError, MessageError, TransportError
from geartrain.tools.testing import SimulatedRuntime


class Pair:
    """Two ends with a runtime each, as in two processes."""

    def __init__(self, folder: Path, delay_s: float = 0.0, **limits: int) -> None:
        self.mine, self.theirs = SimulatedRuntime(folder, delay_s=delay_s), SimulatedRuntime(folder, delay_s=delay_s)
        self.sender, self.receiver = IpcSender(self.mine), IpcReceiver(self.theirs, **limits)

    def send(self, tensors: list[Any], device: int = 0) -> list[Any]:
        return self.take(*self.push(tensors, device))

    def push(self, tensors: list[Any], device: int = 0) -> tuple[IpcSlot, bytes, list[Any]]:
        offsets, end = cuda_ipc.layout([tensor.nbytes for tensor in tensors])
        slot = self.receiver.lease(end, device)
        token = self.sender.push(tensors[0].device if tensors else 0, slot.descriptor, tensors)
        return slot, token, [(DTYPES[t.dtype].code, t.shape, at) for t, at in zip(tensors, offsets, strict=True)]

    def take(self, slot: IpcSlot, token: bytes, forms: list[Any]) -> list[Any]:
        return self.receiver.take(slot, token, forms)

    def memory(self) -> int:
        return len(list(self.mine.folder.glob("memory-*")))


def test_what_is_pushed_is_taken(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    rng = np.random.default_rng(0)
    for shape in ((0,), (), (1,), (7, 3), (1000, 1001)):
        arrays = [rng.standard_normal(shape).astype(np.float32), rng.integers(0, 9, shape).astype(np.int64)]
        taken = pair.send([pair.mine.tensor(1, array) for array in arrays], device=0)
        for tensor, array in zip(taken, arrays, strict=True):
            assert tensor.device == 0
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_nothing_is_read_before_it_is_there_nor_written_before_it_was_read(tmp_path: Path) -> None:
    """Streams that lag behind: order is all there is. One slot is used again and again."""
    pair = Pair(tmp_path, delay_s=0.002)
    taken = []
    source = pair.mine.tensor(0, np.zeros(100_000, np.int64))
    for i in range(40):
        source.fill_(i)  # queued after the push before it, which must not see it
        taken += pair.send([source])
    source.fill_(-1)
    for i, tensor in enumerate(taken):
        assert (tensor.numpy() == i).all(), i
    assert pair.theirs.allocated == 1
    assert pair.mine.opened == 1


def test_slots_are_leased_again_when_they_fit_and_their_number_is_bounded(tmp_path: Path) -> None:
    pair = Pair(tmp_path, max_leased_bytes=8 * BLOCK, max_idle_bytes=3 * BLOCK)
    big, small = pair.receiver.lease(3 * BLOCK, 0), pair.receiver.lease(1, 0)
    with pytest.raises(BusyError, match="leased to this peer already"):
        pair.receiver.lease(5 * BLOCK, 0)
    other = pair.receiver.lease(1, 1)  # of another device
    assert pair.receiver.leased_bytes == 5 * BLOCK
    token = pair.sender.push(0, small.descriptor, [])
    pair.take(small, token, [])
    assert pair.receiver.lease(100, 0) is small
    pair.take(small, token, [])
    pair.take(big, pair.sender.push(0, big.descriptor, []), [])
    assert pair.receiver.idle_bytes <= 3 * BLOCK
    pair.take(other, pair.sender.push(0, other.descriptor, []), [])
    assert pair.receiver.leased_bytes == 0


def test_a_slot_whose_sender_gave_up_is_not_leased_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    slot, _, _ = pair.push([pair.mine.tensor(0, np.ones(5))])
    pair.receiver.abandon(slot)
    pair.receiver.abandon(slot)  # twice is once
    again = pair.receiver.lease(5, 0)
    assert again is not slot
    assert pair.memory() == 2  # CUDA wants it closed first
    pair.take(again, pair.sender.push(0, again.descriptor, []), [])
    assert pair.memory() == pair.mine.opened == 1


def test_the_end_of_either_gives_all_memory_back(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for size in (1, 5 * BLOCK, 1):
        pair.push([pair.mine.tensor(0, np.ones(size, np.uint8))])  # never taken
    pair.send([pair.mine.tensor(0, np.ones(3))])
    pair.sender.close()
    assert pair.mine.opened == 0
    pair.receiver.close()
    assert pair.memory() == 0
    with pytest.raises(TransportError, match="has ended"):
        pair.receiver.lease(1, 0)


def test_events_outlive_the_connection_and_are_used_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path, delay_s=0.01)
    slot, token, forms = pair.push([pair.mine.tensor(0, np.full(10, 3))])
    pair.sender.close()  # before the receiver has looked
    (tensor,) = pair.take(slot, token, forms)
    assert (tensor.numpy() == 3).all()
    before = len(list(tmp_path.glob("event-*")))
    pair.send([pair.mine.tensor(0, np.ones(10))])
    assert len(list(tmp_path.glob("event-*"))) == before


def test_memory_that_cannot_be_opened_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    receiver = IpcReceiver(SimulatedRuntime(tmp_path / "a"))
    mine = SimulatedRuntime(tmp_path / "b")
    slot = receiver.lease(10, 0)
    with pytest.raises(TransportError, match="cudaIpcOpenMemHandle on cuda:1: No such file"):
        IpcSender(mine).push(1, slot.descriptor, [mine.tensor(1, np.ones(1))])
    assert mine.opened == 0


def test_no_memory_is_a_named_error_and_costs_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.theirs.max_bytes = BLOCK
    with pytest.raises(TransportError, match="out of memory"):
        pair.receiver.lease(2 * BLOCK, 0)
    assert pair.receiver.leased_bytes == pair.memory() == 0


def test_what_cannot_be_in_a_slot_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    slot = pair.receiver.lease(1, 0)
    with pytest.raises(MessageError, match="do not fit"):
        pair.sender.push(0, slot.descriptor, [pair.mine.tensor(0, np.ones(BLOCK))])
    token = pair.sender.push(0, slot.descriptor, [])
    for forms in ([(12, (BLOCK,), 0)], [(12, (1,), -4)], [(12, (1,), slot.nbytes)]):
        one = pair.receiver.lease(1, 0)
        with pytest.raises(MessageError, match="not in a slot"):
            pair.take(one, token, forms)
    with pytest.raises(TransportError, match="event cannot be opened"):
        pair.take(slot, b"nonsense", [])
    assert pair.receiver.leased_bytes == 0


def test_many_slots_do_not_stay_open_for_ever(tmp_path: Path) -> None:
    pair = Pair(tmp_path, max_idle_bytes=0)
    pair.sender = IpcSender(pair.mine, max_open=4)
    for i in range(12):
        (tensor,) = pair.send([pair.mine.tensor(0, np.full(3, i))])
        assert (tensor.numpy() == i).all()
        assert pair.memory() <= 2  # the retired one is freed with the next
    assert pair.mine.opened <= 1


def test_nothing_is_freed_that_the_sender_has_open(tmp_path: Path) -> None:
    pair = Pair(tmp_path, max_idle_bytes=0)
    open_now: dict[int, bytes] = {}

    def watch(mine: Any, theirs: Any) -> None:
        freed, opens, closes = theirs.free, mine.open, mine.close

        def free(address: int) -> None:
            assert theirs.export(address) not in open_now.values()
            freed(address)

        def open_(handle: bytes) -> int:
            address = opens(handle)
            open_now[address] = handle
            return int(address)

        def close(address: int) -> None:
            del open_now[address]
            closes(address)

        theirs.free, mine.open, mine.close = free, open_, close

    for index in range(2):
        watch(pair.mine.device(index), pair.theirs.device(index))
    for i in range(8):
        pair.send([pair.mine.tensor(0, np.ones(3))], device=i % 2)
        slot, _, _ = pair.push([pair.mine.tensor(1, np.ones(3))])
        pair.receiver.abandon(slot)
    pair.sender.close()
    pair.receiver.close()
    assert pair.memory() == 0


def test_a_new_runtime_gets_no_events_of_one_that_is_gone(tmp_path: Path) -> None:
    for i in range(20):  # objects of one size: the next one is soon where the one before was
        (tmp_path / str(i)).mkdir()
        pair = Pair(tmp_path / str(i), max_idle_bytes=0)
        for value in range(2):
            (tensor,) = pair.send([pair.mine.tensor(0, np.full(3, value))])
            assert (tensor.numpy() == value).all()
        pair.sender.close()
        del pair, tensor
        gc.collect()


@pytest.mark.parametrize("others", [0, 1])
def test_of_several_cuda_runtimes_torchs_own_is_called(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """CuPy and JAX may load another copy; torch's libraries find theirs by what they are linked to."""
    torch = pytest.importorskip("torch")
    listed = ["/site/nvidia/cu13/lib/libcudart.so.13", "/usr/local/cuda/lib64/libcudart.so.13.0.96"][: 1 + others]
    opened: list[str] = []

    def library(path: str) -> Any:
        opened.append(path)
        return SimpleNamespace(cudaGetErrorString=SimpleNamespace(), cudaIpcOpenMemHandle=None)

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr("ctypes.CDLL", library)
    monkeypatch.setattr(Path, "read_text", lambda _: "".join(f"7f00-7f01 r-xp 0 08:01 42   {at}\n" for at in listed))
    cuda_runtime.CudaRuntime()._cudart()
    assert [Path(path).name for path in opened] == ["libc10_cuda.so" if others else "libcudart.so.13"]
