"""ARCHITECTURE.md's picture is true: every file is in it, and imports go down."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "geartrain"
NATIVE = ROOT / "native"
# The doors of the package and the border to the native layer are not parts.
DOORS = {"__init__", "__main__", "_native"}


def picture(name: str) -> dict[str, int]:
    """Each part with its line in the fenced block, counted from the bottom."""
    block = re.search(rf"```{name}\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    assert block, f"ARCHITECTURE.md has no block {name}"
    lines = [line.split() for line in block.group(1).splitlines() if line.strip()]
    return {part: len(lines) - i for i, line in enumerate(lines) for part in line}


def python_part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix(".pyi")


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "geartrain":
            below = node.module.split(".")[1:]
            parts |= {below[0]} if below else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            parts |= {a.name.split(".")[1] for a in node.names if a.name.startswith("geartrain.")}
    return parts


PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
NATIVE_FILES = sorted(
    p for p in NATIVE.rglob("*") if p.suffix in (".cc", ".h") and p.relative_to(NATIVE).parts[0] != "tests"
)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_imports_go_down(path: Path) -> None:
    layers = picture("layers")
    part = python_part(path)
    if part in DOORS:
        return
    assert part in layers, f"{path.name} is not in the picture"
    for other in imported_parts(path) - DOORS - {part}:
        if (PACKAGE / f"{other}.py").exists() or (PACKAGE / other).is_dir():
            assert layers[other] < layers[part], f"{part} imports {other}, which is not below it"


def native_includes(path: Path) -> list[str]:
    return re.findall(r'#include "([^"]+)"', path.read_text())


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of more than one node that all reach each other (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in edges.get(node, set()):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in order:
            visit(node)
    return found


@pytest.mark.parametrize("path", NATIVE_FILES, ids=lambda p: str(p.relative_to(NATIVE)))
def test_native_includes_go_down(path: Path) -> None:
    layers = picture("native-layers")
    room = path.relative_to(NATIVE).parts[0]
    assert room in layers, f"{path.relative_to(NATIVE)} lies in no room of the picture"
    for included in native_includes(path):
        assert (NATIVE / included).is_file(), f"{included} is not named from native/"
        other = included.split("/")[0]
        assert other in layers, f"{included} is not in the picture"
        assert other == room or layers[other] < layers[room], f"{room} includes {included}, which is not below it"


def test_native_files_form_no_circle() -> None:
    """x.h and x.cc are one file here: what either includes, both need."""
    edges: dict[str, set[str]] = {}
    for path in NATIVE_FILES:
        stem = str(path.relative_to(NATIVE).with_suffix(""))
        edges.setdefault(stem, set()).update({other.rsplit(".")[0] for other in native_includes(path)} - {stem})
    assert circles(edges) == []


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(edges) == [{"a", "b", "c"}]


def test_every_native_file_is_compiled() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    for path in NATIVE_FILES:
        if path.suffix == ".cc":
            assert re.search(rf"\b{re.escape(path.name)}\b", cmake), f"{path.relative_to(NATIVE)} is in no target"


def test_native_code_knows_no_python_outside_its_bindings() -> None:
    for path in NATIVE_FILES:
        if path.relative_to(NATIVE).parts[0] != "python":
            assert not re.search(r"Python\.h|nanobind|torch/", path.read_text()), path


def test_no_wheel_is_built_for_the_machine_that_builds_it() -> None:
    for path in [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *NATIVE_FILES]:
        assert "march=" + "native" not in path.read_text(), path


def test_no_file_has_a_name_that_says_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "manager", "misc"}
    for tree in ("src", "native", "tests", "examples"):
        for path in (ROOT / tree).rglob("*"):
            assert path.stem not in empty, path
