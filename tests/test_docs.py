"""The README and the pages under docs/ tell the truth: their code runs, their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

import geartrain

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_code_on_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    # Stores on pages have plain names, which others on this host may use.
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments, "TMPDIR": str(tmp_path)}
        done = preloaded.run([sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=patience(100))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_page_of_language_models_runs_under_torchrun_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "page.py"
    told = "open(f'rank{rank}', 'w').write(f'{replay.step} batches of {len(batch)} rows')"
    script.write_text(
        "\n".join(blocks(ROOT / "docs/first-hour/llm.md")).replace("replay.close()", told + "\nreplay.close()")
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, timeout=patience(100), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["4 batches of 8 rows"] * 2


@pytest.mark.slow
def test_the_job_of_the_page_on_checkpoints_goes_on_with_more_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    page = (ROOT / "docs/checkpoints.md").read_text()
    (script,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    commands = re.findall(r"^torchrun (--standalone .* train.py) +# (step .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments}
        for arguments, said in commands:
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", *arguments.split()],
                cwd=tmp_path, env=environment, timeout=patience(100), capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_example_is_in_the_index_of_examples() -> None:
    index = (ROOT / "examples" / "README.md").read_text()
    assert not [path.name for path in (ROOT / "examples").glob("*.py") if f"({path.name})" not in index]


def test_code_on_pages_fits_a_window_of_1400_pixels() -> None:
    """120 columns (docs/site.css)."""
    for page in PAGES:
        for code in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            assert not [line for line in code.splitlines() if len(line) > 120], page


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("priority", "store.md"),
        ("prioritized replay", "selection.md"),
        ("n-step", "replay.md"),
        ("frame stack", "replay.md"),
        ("rate limiter", "store.md"),
        ("all-to-all", "ranks.md"),
        ("FSDP", "ranks.md"),
        ("pinned memory", "gpu.md"),
        ("checkpoint", "checkpoints.md"),
        ("resharding", "checkpoints.md"),
        ("vectorised environment", "actors.md"),
        ("publish/subscribe", "rpc.md"),
        ("server-side batching", "rpc.md"),
        ("heartbeat", "transport.md"),
        ("reducer", "collectives.md"),
        ("DDP", "collectives-torch.md"),
    ],
)
def test_a_search_for_the_usual_term_finds_the_page(words: str, page: str) -> None:
    assert words.lower() in (ROOT / "docs" / page).read_text().lower()
    assert page in (ROOT / "docs" / "index.md").read_text()


def test_every_page_is_in_the_index_and_in_the_sites_navigation() -> None:
    index, site = (ROOT / "docs" / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        if path.startswith(("decisions/", "notes/")):
            continue
        assert path == "index.md" or path.startswith("api/") or f"({path})" in index, path
        assert re.search(rf" {re.escape(path)}$", site, re.MULTILINE), f"{path} is not in mkdocs.yml"


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in geartrain.__all__:
        # An object, or the module that shows all of its public names.
        assert re.search(rf"^::: geartrain\.(.*\.)?{name}$", pages, re.MULTILINE), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=patience(200), check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    # Nothing is loaded from elsewhere: the site works without a network, and tells nobody who reads it.
    home = (tmp_path / "index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?https?://[^>]*', home)
    for shown, where in (("A row's life", "concepts.html"), ("no torn row is returned", "guarantees.html")):
        assert shown in (tmp_path / where).read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_runs_from_top_to_bottom() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=int(patience(200)), kernel_name="python3").execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "return of ten episodes" in said


def modules() -> dict[str, Path]:
    """Each module of the package with its file."""
    found = {}
    for one in pkgutil.walk_packages(geartrain.__path__, "geartrain."):
        spec = one.module_finder.find_spec(one.name)  # type: ignore[call-arg]
        if "_native" not in one.name and "__main__" not in one.name and spec and spec.origin:
            found[one.name] = Path(spec.origin)
    return found


def test_every_module_can_be_imported() -> None:
    for name in modules():
        importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name, path in modules().items() if ">>> " in path.read_text()])
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
