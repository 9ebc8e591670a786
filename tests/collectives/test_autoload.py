"""The entry point that torch loads: it does nothing unless asked to, and never breaks `import torch`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from deadlines import patience
from installed import GROUP, ROOT, site

tomllib = pytest.importorskip("tomllib")
pytest.importorskip("torch")


def python(folder: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GEARTRAIN_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**clean, "PYTHONPATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )


def test_without_the_variable_torch_is_as_it_was(tmp_path: Path) -> None:
    done = python(
        site(tmp_path),
        """
        import sys, time, torch, geartrain_autoload
        import torch.distributed as dist
        assert dist.init_process_group.__module__ == "torch.distributed.distributed_c10d"
        assert not hasattr(dist.init_process_group, "_geartrain")
        assert "geartrain" not in sys.modules and "geartrain" not in dist.Backend.backend_list
        taken = []
        for _ in range(100):
            before = time.perf_counter()
            geartrain_autoload.autoload()
            taken.append(time.perf_counter() - before)
        assert sorted(taken)[50] < 1e-3, taken
        assert "geartrain" not in sys.modules
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_with_the_variable_every_way_to_the_default_is_geartrains(tmp_path: Path) -> None:
    done = python(
        site(tmp_path),
        """
        import sys, torch
        assert "geartrain" not in sys.modules, "import torch loads nothing of geartrain but the entry point"
        import torch.distributed as dist
        from torch.distributed import distributed_c10d, device_mesh
        assert dist.init_process_group is distributed_c10d.init_process_group is device_mesh.init_process_group
        assert dist.init_process_group.__name__ == "init_process_group"
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        assert dist.get_backend() == "fake" and "geartrain" not in sys.modules, "other backends are left alone"
        dist.destroy_process_group()
        for arguments in [(), ("gloo",), ("GLOO",), ("cpu:gloo",), (None,), ("geartrain",)]:
            dist.init_process_group(*arguments, store=dist.HashStore(), rank=0, world_size=1)
            assert dist.get_backend() == "geartrain", arguments
            group = dist.group.WORLD
            dist.all_reduce(torch.ones(3))
            assert group.counters()["operations"] == 1
            dist.destroy_process_group()
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
        ours = "geartrain.collectives.torch_backend.process_group"
        assert type(init_device_mesh("cpu", (1,)).get_group()).__module__ == ours
        assert type(dist.new_group([0], backend="gloo")).__module__ != ours
        """,
        GEARTRAIN_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_a_warning_and_torch_goes_on(tmp_path: Path) -> None:
    done = python(
        site(tmp_path, "missing"),
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "gloo"
        """,
        GEARTRAIN_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stderr
    assert "GEARTRAIN_ALLREDUCE is set, and has no effect" in done.stderr


def test_a_package_that_does_not_import_is_an_error_of_the_group_not_of_torch(tmp_path: Path) -> None:
    # Going on with Gloo here would leave the ranks whose package is whole waiting for this one.
    done = python(
        site(tmp_path, "raise OSError('_native.so: undefined symbol')"),
        """
        import torch, torch.distributed as dist
        assert torch.ones(2).sum() == 2
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except RuntimeError as error:
            assert "undefined symbol" in str(error) and "unset GEARTRAIN_ALLREDUCE" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        GEARTRAIN_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stderr


def test_an_entry_point_that_fails_inside_is_a_warning(tmp_path: Path) -> None:
    done = python(
        site(tmp_path),
        """
        import warnings
        import geartrain_autoload
        def broken(): raise KeyError("boom")
        geartrain_autoload._wrap_init_process_group = broken
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            import torch
        assert torch.ones(2).sum() == 2
        assert any("boom" in str(w.message) for w in seen), seen
        """,
        GEARTRAIN_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_carries_the_module() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (target,) = settings["project"]["entry-points"][GROUP].values()
    assert f"src/{target.split(':')[0]}" in settings["tool"]["scikit-build"]["wheel"]["packages"]
