"""Fetch into tensors on a device: the bytes of a fetch into host memory, on the caller's stream."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
import geartrain.replay.device.fetch as device_fetch
from geartrain.errors import ArgumentError, PinError, StaleKeyError, StoreClosedError

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from device_fetches import check_equal, check_random_fetches, fetching_to, make_store, outputs_for  # noqa: E402
from interpreter import interpreted  # noqa: E402

from geartrain.tools.testing import SimulatedDevice  # noqa: E402

PATHS = ["gather", "copy", "staged"]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(3)
    with fetching_to(made):
        yield made


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with make_store(store_name(), 1) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_what_arrives_is_what_the_host_gets(
    store: gt.Store, store_name: Callable[[], str], device: SimulatedDevice, path: Any
) -> None:
    with make_store(store_name(), 2, rows=5) as other:
        for seed in range(24):
            check_random_fetches([store, other][: 1 + seed % 2], seed, path, device.finish)
        assert (device.gathers > 0) == (path == "gather")
        assert len(device.registered) == (0 if path == "staged" else 2), "pinned until the stores are closed"
    assert len(device.registered) == (0 if path == "staged" else 1)
    store.close()
    assert not device.registered


def test_the_kernel_itself_gathers_what_the_host_gets() -> None:
    assert int(interpreted("device_fetches.py", "3", timeout_s=patience(110))) == 3


@pytest.mark.parametrize("path", PATHS)
def test_later_work_of_the_callers_stream_finds_the_rows(store: gt.Store, device: SimulatedDevice, path: Any) -> None:
    keys = store.keys()[:9]
    host = gt.fetch(store, keys, window=5)
    streams, seen = [device.new_stream(), device.new_stream()], torch.zeros(9, 5, 11)
    for turn in range(6):
        out, stream = outputs_for(host), streams[turn % 2]
        device.host_waits.clear()
        with device.on(stream):
            gt.fetch(store, keys, window=5, out=out, path=path)
            seen.zero_()
            device.run(lambda x=out["x"]: seen.copy_(x))
            device.sync(device.record())
        assert torch.equal(seen, host["x"])
        assert {name for _, name in device.host_waits} == {stream.name}, "no other stream is waited for"


def test_a_staged_fetch_does_not_wait_for_the_device(store: gt.Store) -> None:
    device = SimulatedDevice(1, chance=0)
    with fetching_to(device):
        keys = store.keys()[:9]
        host = gt.fetch(store, keys)
        out = outputs_for(host)
        found = gt.fetch(store, keys, out=out, path="staged")
        assert not device.host_waits
        assert not torch.equal(out["x"], host["x"])
        device.finish()
        check_equal(host, found, out)


@pytest.mark.parametrize("path", PATHS)
def test_stale_keys_are_told_as_on_the_host(store: gt.Store, device: SimulatedDevice, path: Any) -> None:
    keys = store.keys()[:6]
    out = outputs_for(gt.fetch(store, keys))
    store.delete(keys[2:4])
    refused = r"2 of 6 keys are stale: their rows were overwritten or removed \(first: row 2\)"
    with pytest.raises(StaleKeyError, match=refused):
        gt.fetch(store, keys)
    with pytest.raises(StaleKeyError, match=refused):
        gt.fetch(store, keys, out=out, path=path)
    with pytest.raises(StaleKeyError, match="cannot be dropped from the caller's own"):
        gt.fetch(store, keys, out=out, path=path, on_stale="drop")
    left = keys[4:]
    check_after(device, store, left, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_stale_key_of_any_of_several_stores_is_told(
    store: gt.Store, store_name: Callable[[], str], device: SimulatedDevice, path: Any, which: int
) -> None:
    with make_store(store_name(), 2) as other:
        both = [store, other]
        keys = gt.Keys.join([each.keys()[:3] for each in both])
        out = outputs_for(gt.fetch(both, keys))
        both[which].delete(both[which].keys()[1:2])
        with pytest.raises(StaleKeyError, match="1 of 6 keys are stale"):
            gt.fetch(both, keys, out=out, path=path)


def check_after(device: SimulatedDevice, store: gt.Store, keys: gt.Keys, path: Any) -> None:
    host = gt.fetch(store, keys)
    out = outputs_for(host)
    found = gt.fetch(store, keys, out=out, path=path)
    device.finish()
    check_equal(host, found, out)


@pytest.mark.parametrize(("path", "call"), [("gather", "gather"), ("copy", "copy_many")])
def test_a_row_that_is_overwritten_before_the_device_comes_to_it_is_stale(
    store: gt.Store, path: Any, call: str
) -> None:
    device = SimulatedDevice(1, chance=0)  # as late as the host allows
    given = getattr(device, call)

    def overwritten(*args: Any, **named: Any) -> None:
        given(*args, **named)
        store.delete(keys[1:2])

    with fetching_to(device):
        keys = store.keys()[:4]
        out = outputs_for(gt.fetch(store, keys))
        setattr(device, call, overwritten)
        with pytest.raises(StaleKeyError, match="1 of 4 keys"):
            gt.fetch(store, keys, out=out, path=path)
        device.finish()
        assert all((tensor.view(torch.uint8) == 0xA7).all() for tensor in out.values()), "nothing is handed over"


def test_a_step_that_a_row_does_not_have_is_told_as_on_the_host(store: gt.Store, device: SimulatedDevice) -> None:
    keys, lengths = store.keys(), store.status()["length"]
    steps = int(lengths.min())
    keys = keys[lengths == steps]
    host = gt.fetch(store, keys, window=3)
    for path in PATHS:
        refused = f"window 0 ends at step {steps}, its row has steps 0 to {steps - 1}"
        with pytest.raises(ArgumentError, match=refused):
            ends = np.full(len(keys), steps)
            gt.fetch(store, keys, window=3, ends=ends, out=outputs_for(host), path=path)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="ends at step 17, rows have steps 0 to 16"):
            ends = np.full(len(keys), 17)
            gt.fetch(store, keys, window=3, ends=ends, out=outputs_for(host), path=path)  # type: ignore[arg-type]


def test_windows_that_the_cpu_places_are_staged(store: gt.Store, device: SimulatedDevice) -> None:
    keys = store.keys()[:7]
    for windows in (gt.Windows(4, at="start"), gt.Windows(1, whole=True)):
        host = gt.fetch(store, keys, window=windows)
        out = outputs_for(host)
        found = gt.fetch(store, keys, window=windows, out=out)
        device.finish()
        check_equal(host, found, out)
        with pytest.raises(ArgumentError, match="use path='staged'"):
            gt.fetch(store, keys, window=windows, out=out, path="gather")
        with pytest.raises(ArgumentError, match="use path='staged'"):
            gt.fetch(store, keys, window=windows, out=out, path="copy")
    host = gt.fetch(store, keys, window=4, starts=[0] * 7)
    out = outputs_for(host)
    found = gt.fetch(store, keys, window=4, starts=[0] * 7, out=out)
    device.finish()
    check_equal(host, found, out)
    assert device.gathers == 0


@pytest.mark.parametrize("path", PATHS)
def test_no_keys_make_an_empty_batch(store: gt.Store, device: SimulatedDevice, path: Any) -> None:
    host = gt.fetch(store, store.keys()[:0], window=3)
    out = outputs_for(host)
    check_equal(host, gt.fetch(store, store.keys()[:0], window=3, out=out, path=path), out)


def test_what_does_not_fit_is_refused_at_the_door(store: gt.Store) -> None:
    keys = store.keys()[:4]
    fields = ["x", "group"]
    x, group = torch.zeros(4, 17, 11), torch.zeros(4, dtype=torch.uint64)
    away = torch.zeros(4, 17, 11, device="meta")

    def refused(message: str, out: Any, **named: Any) -> None:
        with pytest.raises(ArgumentError, match=message):
            gt.fetch(store, keys, fields=fields, out=out, **named)

    refused(r"found out\['x'\] in meta, out\['group'\] in host memory", {"x": away, "group": group})
    refused("output='numpy' has no arrays", {"x": away, "group": group.to("meta")}, output="numpy")
    refused("batches go to 'cuda' or 'cuda:N'", {"x": away, "group": group.to("meta")})
    refused("leave out path='gather'", {"x": x, "group": group}, path="gather")
    refused("path is one of 'auto', 'gather', 'copy', 'staged'", {"x": x, "group": group}, path="fast")
    with fetching_to(SimulatedDevice(1)):
        refused("must be float32", {"x": x.double(), "group": group})
        refused("must be float32", {"x": x[:3], "group": group})
        refused("C-contiguous", {"x": torch.zeros(4, 11, 17).transpose(1, 2), "group": group})
        with pytest.raises(ArgumentError, match="row 24 is beyond the store's capacity of 24"):
            gt.fetch(store, gt.Keys([24] * 4, [1] * 4), fields=fields, out={"x": x, "group": group}, path="gather")
        store.close()
        with pytest.raises(StoreClosedError):
            gt.fetch(store, keys, fields=fields, out={"x": x, "group": group})


def test_what_cannot_be_pinned_is_staged_or_refused(store: gt.Store, caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedDevice(1, most_pinned=1000)
    with fetching_to(device):
        check_after(device, store, store.keys()[:3], "auto")
        assert "staged through the CPU" in caplog.text
        assert device.gathers == 0
        with pytest.raises(PinError, match="cannot be pinned"):
            check_after(device, store, store.keys()[:3], "gather")
        with pytest.raises(PinError, match="cannot be pinned"):
            check_after(device, store, store.keys()[:3], "copy")


def test_threads_fetch_at_once_and_closing_waits_for_none(store: gt.Store, device: SimulatedDevice) -> None:
    keys = store.keys()
    host = gt.fetch(store, keys, window=6)
    failures: list[BaseException] = []

    def work(path: Any) -> None:
        try:
            for _ in range(10):
                out = outputs_for(host)
                found = gt.fetch(store, keys, window=6, out=out, path=path)
                device.sync(device.record())
                check_equal(host, found, out)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(path,)) for path in PATHS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert not failures
    assert 1 <= len(store.kept[device_fetch.FetchTargets]._kept) <= 2 * len(PATHS)
    store.close()
    assert not device.registered


def test_kinds_of_batches_beyond_a_number_are_not_kept(store: gt.Store, device: SimulatedDevice) -> None:
    keys = store.keys()[:2]
    for window in range(1, 2 * device_fetch.MOST_KEPT):
        out = outputs_for(gt.fetch(store, keys, window=window))
        gt.fetch(store, keys, window=window, out=out, path="gather")
    kept = store.kept[device_fetch.FetchTargets]
    assert len(kept._kept) == len(kept._pins) == device_fetch.MOST_KEPT


def test_a_store_that_is_dropped_unpins_its_segment(store_name: Callable[[], str], device: SimulatedDevice) -> None:
    store = make_store(store_name(), 1)
    check_after(device, store, store.keys()[:3], "gather")
    assert device.registered
    del store
    gc.collect()
    assert not device.registered
