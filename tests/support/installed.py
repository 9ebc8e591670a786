"""A folder of installed packages, for processes that are to find geartrain's entry point as a user's do."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUP = "torch.backends"
FINDER = """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "geartrain" and {missing}:
            raise ModuleNotFoundError("no module geartrain in this test")
        return importlib.util.spec_from_file_location(name, "{path}") if name == "geartrain" else None
sys.meta_path.insert(0, Finder)
"""


def site(tmp_path: Path, package: str = "") -> Path:
    """A folder of installed packages in which geartrain's entry point is what pyproject.toml says it is.

    With `package`, geartrain itself is that text, or is missing where it is "missing".
    """
    folder = tmp_path / "site"
    record = folder / "geartrain-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: geartrain\nVersion: 0.1.0\n")
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (record / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
    (folder / "geartrain_autoload").symlink_to(ROOT / "src" / "geartrain_autoload")
    if package:
        # Before all other finders: an editable install may have one of its own that would find the real package.
        (folder / "broken.py").write_text(package)
        (folder / "sitecustomize.py").write_text(FINDER.format(path=folder / "broken.py", missing=package == "missing"))
    return folder
