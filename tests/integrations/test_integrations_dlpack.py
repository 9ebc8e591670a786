"""Batches for JAX and CuPy: the same bytes, in the same memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, MissingDependencyError

torch = pytest.importorskip("torch")


@pytest.fixture
def replay(store_name: Callable[[], str]):
    fields = {
        "x": gt.Field((3,), "float32"),
        "half": gt.Field((), "bfloat16"),
        "id": gt.Field((), "int64", per_row=True),
    }
    with gt.Store.create(store_name(), fields, max_length=9, capacity=8) as store:
        x = np.random.default_rng(0).normal(size=(8, 9, 3)).astype("f")
        half = torch.arange(72).view(8, 9).to(torch.bfloat16)
        store.insert({"x": x, "half": half, "id": np.arange(8)}, lengths=np.arange(1, 9))
        with gt.Replay(store, gt.selection.Prioritized(seed=0, beta=0.5), 4, window=5, num_batches=3) as made:
            yield made


def test_jax_gets_the_batch_in_place(replay: gt.Replay) -> None:
    jax = pytest.importorskip("jax")
    from geartrain.integrations.jax import as_jax, jax_batches

    batch = replay.sample()
    arrays = as_jax(batch)
    assert isinstance(arrays["x"], jax.Array)
    assert arrays["x"].unsafe_buffer_pointer() == batch["x"].data_ptr()
    np.testing.assert_array_equal(np.asarray(arrays["x"]), batch["x"].numpy())
    assert arrays["half"].dtype == jax.numpy.bfloat16
    assert arrays["mask"].dtype == bool
    np.testing.assert_array_equal(np.asarray(arrays["mask"]), batch.mask.numpy())
    assert arrays["id"].tolist() == batch["id"].tolist()
    total = jax.jit(lambda b: (b["x"].sum(-1) * b["mask"]).sum())({"x": arrays["x"], "mask": arrays["mask"]})
    assert float(total) == pytest.approx(float((batch["x"].sum(-1) * batch.mask).sum()), rel=1e-5)
    for named in jax_batches(replay):
        assert len(named["rows"]) == 4


def test_without_the_framework_the_line_that_installs_it(replay: gt.Replay) -> None:
    batch = replay.sample()
    try:
        import jax  # noqa: F401
    except ImportError:
        from geartrain.integrations.jax import as_jax

        with pytest.raises(MissingDependencyError, match=r"geartrain\[jax\]"):
            as_jax(batch)
    try:
        import cupy  # noqa: F401
    except ImportError:
        from geartrain.integrations.cupy import as_cupy

        with pytest.raises(MissingDependencyError, match="pip install cupy"):
            as_cupy(batch)


def test_cupy_takes_no_batch_of_the_host(replay: gt.Replay) -> None:
    pytest.importorskip("cupy")
    from geartrain.integrations.cupy import as_cupy

    with pytest.raises(ArgumentError, match="host memory"):
        as_cupy(replay.sample())
