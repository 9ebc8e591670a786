"""The starter of unmodified scripts: it changes what it starts, and `import torch` nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from deadlines import patience
from installed import ROOT, metadata, site

tomllib = pytest.importorskip("tomllib")
pytest.importorskip("torch")

STARTER = ("-m", "geartrain_autoload")


def python(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GEARTRAIN_", "TORCH_DEVICE_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, "PYTHONPATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )


def started(folder: Path, text: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    return python(folder, *STARTER, str(script), *arguments, **env)


@pytest.mark.slow(reason="the distribution has no entry point of torch's, which the next test sees")
def test_import_torch_works_where_the_metadata_is_visible_and_the_modules_are_not(tmp_path: Path) -> None:
    # As of an editable installation on another interpreter's PYTHONPATH: .pth files are not read there.
    folder = metadata(tmp_path / "site")
    for installed in Path(pytest.importorskip("torch").__file__).parents[1].iterdir():
        if "geartrain" not in installed.name and installed.suffix != ".pth":
            (folder / installed.name).symlink_to(installed)
    done = python(
        folder,
        "-S",  # no packages but those of the folder
        "-c",
        """
from importlib.metadata import distribution
from importlib.util import find_spec
assert distribution("geartrain").entry_points, "the metadata is visible"
assert find_spec("geartrain") is find_spec("geartrain_autoload") is None, "the modules are not"
import torch
assert torch.ones(2).sum() == 2
""",
        GEARTRAIN_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stderr


def test_the_distribution_asks_torch_for_nothing_and_carries_the_starter() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not [group for group in settings["project"].get("entry-points", {}) if group.startswith("torch")]
    assert "src/geartrain_autoload" in settings["tool"]["scikit-build"]["wheel"]["packages"]


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), pytest.param("1", 0, marks=pytest.mark.slow)])
def test_a_job_that_names_another_backend_is_told_so_once_and_left_as_it_is(
    tmp_path: Path, rank: str, warnings: int
) -> None:
    done = started(
        site(tmp_path),
        """
        import os, sys, torch.distributed as dist
        assert hasattr(dist.init_process_group, "_geartrain")
        dist.Backend.register_backend("other", lambda *_: sys.exit("made"), devices=["cpu"])
        for os.environ["RANK"] in (os.environ["RANK"], "1"):
            try:
                dist.init_process_group("cpu:other", store=dist.HashStore(), rank=0, world_size=1)
            except SystemExit as end:
                print(end, "geartrain" in sys.modules)
        """,
        GEARTRAIN_ALLREDUCE="1",
        RANK=rank,
    )
    assert done.stdout == "made False\n" * 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "GEARTRAIN_ALLREDUCE is set, and has no effect on" in line]
    assert len(said) == warnings, done.stderr
    assert all("'cpu:other'" in line and 'name "geartrain" or none' in line for line in said)


def test_a_job_that_names_nccl_is_told_once_what_takes_part_and_which_variable_changes_it(tmp_path: Path) -> None:
    done = started(
        site(tmp_path),
        """
        import os, sys, torch, torch.distributed as dist
        for os.environ["GEARTRAIN_ALLREDUCE_CUDA"] in ("", "nccl", "staged", "yes"):
            for backend in ("nccl", "cpu:gloo,cuda:nccl") * 2:
                try:
                    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
                except ValueError as error:
                    print("ValueError", error)
                except Exception:  # this build of torch has no NCCL
                    print(backend, "torch's", "geartrain" in sys.modules)
                else:
                    dist.all_reduce(torch.ones(3))
                    group = dist.group.WORLD
                    print(backend, dist.get_backend(), group.options.cuda, group.counters()["operations"])
                    dist.destroy_process_group()
        """,
        RANK="0",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *["nccl torch's False", "cpu:gloo,cuda:nccl torch's False"] * 2,
        *["nccl torch's False", "cpu:gloo,cuda:nccl geartrain nccl 1"],
        *["nccl torch's True", "cpu:gloo,cuda:nccl geartrain nccl 1"],
        *["nccl geartrain staged 1", "cpu:gloo,cuda:nccl geartrain staged 1"] * 2,
        *["ValueError GEARTRAIN_ALLREDUCE_CUDA is staged or nccl, found 'yes'"] * 4,
    ], done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("geartrain: ")]
    wanted = [
        "nothing in init_process_group('nccl') takes part: collectives of CUDA tensors stay NCCL's. "
        "GEARTRAIN_ALLREDUCE_CUDA=staged lets all-reduces of CUDA tensors take part",
        "nothing in init_process_group('cpu:gloo,cuda:nccl') takes part: collectives of CUDA tensors stay NCCL's, "
        "those of CPU tensors Gloo's. GEARTRAIN_ALLREDUCE_CUDA=staged lets",
        "in init_process_group('nccl') all-reduces of CUDA tensors take part, staged through pinned memory, and so do "
        "collectives of CPU tensors; all other collectives of CUDA tensors stay NCCL's",
        "in init_process_group('cpu:gloo,cuda:nccl') all-reduces of CUDA tensors take part",
    ]
    assert len(lines) == len(wanted), done.stderr
    assert all(text in line for text, line in zip(wanted, lines, strict=True)), lines


@pytest.mark.parametrize("variable", ["", pytest.param("0", marks=pytest.mark.slow)])
def test_without_the_variable_torch_is_as_it_was(tmp_path: Path, variable: str) -> None:
    done = started(
        site(tmp_path),
        """
        import sys, time, torch, geartrain_autoload
        import torch.distributed as dist
        assert dist.init_process_group.__module__ == "torch.distributed.distributed_c10d"
        assert not hasattr(dist.init_process_group, "_geartrain")
        assert "geartrain" not in sys.modules and "geartrain" not in dist.Backend.backend_list
        geartrain_autoload.autoload()
        assert not hasattr(dist.init_process_group, "_geartrain") and "geartrain" not in sys.modules
        """,
        GEARTRAIN_ALLREDUCE=variable,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_with_the_starter_every_way_to_the_default_is_geartrains(tmp_path: Path) -> None:
    done = started(
        site(tmp_path),
        """
        import os, sys, torch
        assert "geartrain" not in sys.modules, "the starter loads nothing of geartrain but itself"
        assert os.environ["GEARTRAIN_ALLREDUCE"] == "1", "processes that this one starts may call autoload()"
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
    )
    assert done.returncode == 0, done.stderr


def test_scripts_and_modules_are_run_as_python_runs_them(tmp_path: Path) -> None:
    folder = site(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (folder / "beside.py").write_text("HERE = True")
    text = """
        import multiprocessing, sys

        import beside

        def child(queue):
            queue.put(beside.HERE)

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            assert queue.get(timeout=60)
            process.join()
            print(sys.argv, __file__, flush=True)
            sys.exit(7)
        """
    found = started(folder, text, "--steps", "3", GEARTRAIN_ALLREDUCE="0")
    assert found.returncode == 7, found.stderr
    script = str(folder / "train.py")
    assert found.stdout.strip() == f"{[script, '--steps', '3']} {script}"
    as_module = python(folder, *STARTER, "-m", "train", "-x", GEARTRAIN_ALLREDUCE="0")
    assert as_module.returncode == 7, as_module.stderr
    assert as_module.stdout.strip() == f"{[script, '-x']} {script}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "usage:"), (("-m",), "usage:"), (("absent.py",), "no script 'absent.py'"), (("",), "usage:")],
)
def test_what_cannot_be_run_is_refused_in_a_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = python(site(tmp_path), *STARTER, *arguments)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_a_missing_package_is_an_error_of_the_start(tmp_path: Path) -> None:
    # Going on with Gloo here would leave the ranks whose package is whole waiting for this one.
    done = started(site(tmp_path, "missing"), "print('ran')")
    assert done.returncode == 1 and not done.stdout
    assert "geartrain's all-reduce cannot be used: " in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_package_that_does_not_import_is_an_error_of_the_group(tmp_path: Path) -> None:
    done = started(
        site(tmp_path, "raise OSError('_native.so: undefined symbol')"),
        """
        import torch, torch.distributed as dist
        assert torch.ones(2).sum() == 2
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except RuntimeError as error:
            assert "undefined symbol" in str(error) and "GEARTRAIN_ALLREDUCE=0 on all ranks" in str(error), error
        else:
            raise SystemExit("no error")
        """,
    )
    assert done.returncode == 0, done.stderr


def test_a_call_that_fails_inside_is_a_warning(tmp_path: Path) -> None:
    done = python(
        site(tmp_path),
        "-c",
        """
import warnings
import geartrain_autoload
def broken(): raise KeyError("boom")
geartrain_autoload.wrap_init_process_group = broken
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    geartrain_autoload.autoload()
assert any("boom" in str(w.message) for w in seen), seen
""",
        GEARTRAIN_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stderr
