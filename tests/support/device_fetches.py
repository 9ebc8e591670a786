"""Fetches into tensors on a device, compared with those into host memory.

TRITON_INTERPRET=1 python tests/support/device_fetches.py COUNT gathers by the kernel in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import geartrain as gt
import geartrain.replay.fetch as fetch_module
from geartrain.core.dtypes import DTYPES, torch_dtype

FIELDS = {
    "x": gt.Field((11,), "float32"),
    "pixels": gt.Field((3, 5), "uint8"),
    "half": gt.Field((2,), "bfloat16"),
    "small": gt.Field((4,), "float8_e4m3fn"),
    "wide": gt.Field((3,), "complex64"),
    "done": gt.Field((), "bool"),
    "group": gt.Field((), "uint64", per_row=True),
}


def make_store(name: str, seed: int, rows: int = 24, **options: Any) -> gt.Store:
    """Rows of random bytes and lengths."""
    rng = np.random.default_rng(seed)
    store = gt.Store.create(name, FIELDS, max_length=17, capacity=rows, **options)
    values = {}
    for field, spec in FIELDS.items():
        shape = (rows, *spec.block_shape(17))
        dtype = DTYPES[spec.dtype]
        raw = rng.integers(0, 2 if dtype.name == "bool" else 100, (*shape, dtype.itemsize), dtype=np.uint8)
        values[field] = torch.from_numpy(raw).view(torch_dtype(dtype)).view(shape)
    store.insert(values, lengths=rng.integers(1, 18, rows), versions=rng.integers(0, 99, rows))
    return store


def outputs_for(batch: gt.Batch, device: str | None = None) -> dict[str, Any]:
    """Tensors like a batch's, with other bytes in them."""
    made: dict[str, Any] = {}
    for name, values in batch.fields.items():
        raw = torch.full((values.nbytes,), 0xA7, dtype=torch.uint8, device=device)  # type: ignore[union-attr]
        made[name] = raw.view(values.dtype).view(values.shape)  # type: ignore[arg-type]
    return made


def check_equal(host: gt.Batch, found: gt.Batch, out: dict[str, Any]) -> None:
    """That the caller's tensors hold the host's bytes, and the batch is over them."""
    assert host.keys == found.keys
    assert list(found) == list(out)
    for name, values in host.fields.items():
        assert found[name] is out[name]
        assert torch.equal(values.view(torch.uint8), out[name].cpu().view(torch.uint8)), name
    for name in ("mask", "start", "length", "version"):
        mine, theirs = getattr(host, name), getattr(found, name)
        assert theirs.dtype == mine.dtype
        assert theirs.device == next(iter(out.values())).device
        assert torch.equal(mine, theirs.cpu()), name
    assert found.probability is None
    assert found.importance_weights is None


@contextmanager
def fetching_to(device: Any) -> Iterator[None]:
    """Within, tensors in host memory that a fetch is given count as memory of a simulated device."""
    kept = fetch_module._device_of
    fetch_module._device_of = lambda out, output: device  # type: ignore[assignment]
    try:
        yield
    finally:
        fetch_module._device_of = kept


def check_random_fetches(
    stores: list[gt.Store], seed: int, path: Any, finish: Callable[[], object], device: str | None = None
) -> None:
    """Some rows of one store or of all: whole rows and windows, padded left and right, by steps and without."""
    rng = np.random.default_rng(seed)
    keys = gt.Keys.join([store.keys() for store in stores])
    keys = keys[rng.integers(0, len(keys), int(rng.integers(1, 20)))]
    where: Any = stores if len(stores) > 1 else stores[0]
    lengths = gt.fetch(where, keys).length.numpy()
    asked: dict[str, Any] = {"pad": ["left", "right"][seed % 2]}
    if seed % 3:
        asked["window"] = int(rng.integers(1, 22))
    if seed % 3 == 2:
        asked["ends"] = (rng.random(len(keys)) * lengths).astype(int)
    if seed % 4 == 0:
        asked["fields"] = ["group", "pixels"]
    host = gt.fetch(where, keys, **asked)
    out = outputs_for(host, device)
    found = gt.fetch(where, keys, **asked, out=out, path=path)
    finish()
    check_equal(host, found, out)


def main(count: int) -> int:
    """On a simulated device that runs the kernels in Triton's interpreter."""
    from geartrain.tools.testing import SimulatedDevice

    device = SimulatedDevice(kernels=True)
    name = f"test-device-fetches-{os.getpid()}"
    with make_store(name, 1) as store, make_store(f"{name}-2", 2, rows=5) as other, fetching_to(device):
        for seed in range(count):
            check_random_fetches([store, other][: 1 + seed % 2], seed, "gather", device.finish)
        assert device.gathers >= count
    assert not device.registered
    print(count)
    return count


if __name__ == "__main__":
    main(int(sys.argv[1]))
