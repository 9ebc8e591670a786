"""JAX arrays over batches on a GPU, and weights published from one: `pytest tests/gpu/test_integrations_gpu.py`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import patience

import geartrain.device.kernels as kernels
import geartrain.weights as weights

torch = pytest.importorskip("torch")
reason = kernels.why_not_viable()
pytestmark = pytest.mark.skipif(
    reason is not None or kernels.interpreting(), reason=f"no GPU to run on: {reason or 'TRITON_INTERPRET is set'}"
)

# A process of its own: JAX takes most of a GPU's memory where it is not told otherwise.
IN_JAX = """
import sys
import jax, numpy as np, torch
import geartrain as gt
from device_batches import filled_store
from geartrain.integrations.jax import as_jax
from geartrain.replay.device import Convert, DeviceOptions
from geartrain.selection import Uniform

if jax.default_backend() != "gpu":
    sys.exit("no GPU that JAX can use: " + jax.default_backend())
convert = {"pixels": Convert("bfloat16", 1 / 255)}
with filled_store(sys.argv[1], rows=200, capacity=200, max_length=20) as store:
    with gt.Replay(store, Uniform(seed=1), 32, window=5, device=DeviceOptions("cuda", convert=convert)) as replay:
        for _ in range(5):
            torch.cuda._sleep(20_000_000)  # the stream that the batch is taken on is behind
            batch = replay.sample()
            arrays = as_jax(batch)
            assert {device.platform for device in arrays["x"].devices()} == {"gpu"}
            assert arrays["x"].unsafe_buffer_pointer() == batch["x"].data_ptr()
            total = jax.jit(lambda x: x.sum(axis=(1, 2)))(arrays["x"])
            np.testing.assert_allclose(np.asarray(total), batch["x"].sum((1, 2)).cpu().numpy(), rtol=1e-4, atol=1e-4)
            assert arrays["pixels"].dtype == jax.numpy.bfloat16
            pixels = np.asarray(arrays["pixels"].astype("float32"))
            np.testing.assert_array_equal(pixels, batch["pixels"].float().cpu().numpy())
            np.testing.assert_array_equal(np.asarray(arrays["mask"]), batch.mask.cpu().numpy())
        kept = arrays["x"]
        copy = batch["x"].cpu().numpy()
        del batch, arrays
        for _ in range(10):
            replay.sample()
    np.testing.assert_array_equal(np.asarray(kept), copy)  # the array holds the memory of its batch
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_jax_reads_batches_in_place(store_name: Callable[[], str]) -> None:
    paths = [str(Path(__file__).parent.parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", IN_JAX, store_name()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(90), check=False)
    if "no GPU that JAX can use" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal"


def test_weights_are_published_from_the_gpu_as_its_stream_leaves_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 200, device="cuda")
    actor = torch.nn.Linear(300, 200, device="cuda").requires_grad_(False)
    on_host = torch.nn.Linear(300, 200)
    half = torch.zeros(1000, 7, dtype=torch.bfloat16, device="cuda")
    with weights.Publisher("p", directory=tmp_path) as publisher, weights.Reader("p", directory=tmp_path) as reader:
        with torch.cuda.stream(torch.cuda.Stream()):
            for version in range(1, 4):
                torch.cuda._sleep(50_000_000)  # the optimizer's step is behind
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(version)
                    half.fill_(version)
                publisher.publish(version, {"model": model.state_dict(), "half": half.t()})
                read = reader.latest()
                assert read.version == version
                assert not read["model"]["weight"].is_cuda
                assert torch.equal(read["half"], torch.full((7, 1000), version, dtype=torch.bfloat16))
                actor.load_state_dict(read["model"])
                on_host.load_state_dict(read["model"])
                assert torch.equal(actor.weight, model.weight)
                assert torch.equal(on_host.weight, model.weight.cpu())
