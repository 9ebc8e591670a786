"""The README and the pages under docs/ tell the truth: their code runs, their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

import geartrain

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_code_on_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = preloaded.run([sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=patience(100))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(geartrain.__path__, "geartrain.")]
    return [name for name in found if "_native" not in name and "__main__" not in name and "peer_worker" not in name]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
