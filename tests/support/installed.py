"""A folder of installed packages, for processes that are to find geartrain as a user's do."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FINDER = """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "geartrain" and {missing}:
            raise ModuleNotFoundError("no module geartrain in this test")
        return importlib.util.spec_from_file_location(name, "{path}") if name == "geartrain" else None
sys.meta_path.insert(0, Finder)
"""


def metadata(folder: Path) -> Path:
    """A folder of installed packages with geartrain's metadata, as pyproject.toml has it, and none of its modules."""
    record = folder / "geartrain-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: geartrain\nVersion: 0.1.0\n")
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    text = ""
    for group, points in groups.items():
        text += f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
    (record / "entry_points.txt").write_text(text)
    return folder


def site(tmp_path: Path, package: str = "") -> Path:
    """A folder of installed packages: geartrain's metadata, and `geartrain_autoload`.

    With `package`, geartrain itself is that text, or is missing where it is "missing".
    """
    folder = metadata(tmp_path / "site")
    (folder / "geartrain_autoload").symlink_to(ROOT / "src" / "geartrain_autoload")
    if package:
        # Before all other finders: an editable install may have one of its own that would find the real package.
        (folder / "broken.py").write_text(package)
        (folder / "sitecustomize.py").write_text(FINDER.format(path=folder / "broken.py", missing=package == "missing"))
    return folder
