"""The API reference explains what it shows: docs/api names the objects, their docstrings are the text."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import geartrain.errors

griffe = pytest.importorskip("griffe")

ROOT = Path(__file__).parent.parent
PAGES = sorted(page.stem for page in (ROOT / "docs" / "api").glob("*.md") if page.stem != "index")
WITHOUT_EXAMPLE = {"as_cupy"}  # needs a GPU
GUIDES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "first-hour").glob("*.md")]


@functools.cache
def package() -> Any:
    """The package as the site's generator reads it."""
    loader = griffe.GriffeLoader(
        search_paths=[str(ROOT / "src")],
        extensions=griffe.load_extensions(str(ROOT / "release" / "docstrings.py")),
        docstring_parser="google",
        docstring_options={"warn_unknown_params": False, "warn_missing_types": False},
    )
    loader.load("geartrain")
    loader.resolve_aliases(implicit=True, external=False)
    return loader.modules_collection


@functools.cache
def published(page: str) -> list[Any]:
    """What a page of docs/api shows, and what is inside of it."""
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    found = {}
    for name, options in re.findall(r"^::: ([\w.]+)((?:\n .*)*)", text, re.MULTILINE):
        for one in shown(package()[name]):
            found[one.path] = one
            if "members: false" in options:
                break
    return list(found.values())


def shown(one: Any) -> Iterator[Any]:
    one = one.final_target if one.is_alias else one
    if one.docstring is None or not one.path.startswith("geartrain"):
        return  # the site leaves out what has no docstring
    yield one
    if one.is_module or one.is_class:
        for name, member in one.all_members.items():
            if member.is_public and not member.is_module and (not one.exports or name in one.exports):
                yield from shown(member)


def is_error(one: Any) -> bool:
    return one.path.startswith("geartrain.errors")


def descriptions(one: Any) -> set[str]:
    """The parameters that docstrings describe; the attributes of a dataclass are its parameters."""
    sections = list(one.docstring.parsed)
    found = set()
    if one.is_class:
        found |= {name for name, member in one.all_members.items() if member.is_attribute and member.docstring}
        init = one.all_members.get("__init__")
        if init is not None and init.docstring:
            sections += init.docstring.parsed
    for section in sections:
        if section.kind.value in ("parameters", "other parameters", "attributes"):
            found |= {name.strip("* ") for item in section.value for name in item.name.split(",")}
    return found


def undescribed(one: Any) -> list[str]:
    names = {parameter.name.strip("*") for parameter in one.parameters} - {"self", "cls"}
    return sorted(name for name in names - descriptions(one) if not name.startswith("_"))


def raised(one: Any) -> set[str]:
    """The errors of geartrain that a function's own body raises."""
    lines = one.filepath.read_text().splitlines()[one.lineno - 1 : one.endlineno]
    body = ast.parse("\n".join(["if True:", *lines]) if lines[0].startswith(" ") else "\n".join(lines))
    found = {node.exc.func.id for node in ast.walk(body) if is_raise(node)}  # type: ignore[attr-defined]
    return found & set(vars(geartrain.errors))


def is_raise(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)


@pytest.mark.parametrize("page", PAGES)
def test_a_docstring_begins_with_a_sentence_that_stands_alone(page: str) -> None:
    for one in published(page):
        first = one.docstring.value.partition("\n")[0]
        assert re.fullmatch(r"[A-Z0-9`\"(*].*[.:]", first), f"{one.path}: {first!r}"
        assert not re.match(r"(See|As) `?[\w.]+`?", first), f"{one.path} only says {first!r}"


@pytest.mark.parametrize("page", PAGES)
def test_every_parameter_is_described(page: str) -> None:
    callables = [one for one in published(page) if (one.is_function or one.is_class) and not is_error(one)]
    missing = {one.path: undescribed(one) for one in callables if undescribed(one)}
    assert not missing, "\n".join(f"{path}: {', '.join(names)}" for path, names in missing.items())


@pytest.mark.parametrize("page", PAGES)
def test_the_errors_of_a_function_are_named(page: str) -> None:
    missing = {}
    for one in published(page):
        if one.is_function:
            unnamed = {name for name in raised(one) if name not in one.docstring.value}
            missing.update({one.path: unnamed} if unnamed else {})
    assert not missing, "\n".join(f"{path} raises {', '.join(sorted(names))}" for path, names in missing.items())


@pytest.mark.parametrize("page", PAGES)
def test_classes_and_functions_of_guides_have_an_example(page: str) -> None:
    """tests/test_docs.py runs them. An example may stand at a class, at its methods, or where an object is made."""
    guides = "\n".join(guide.read_text() for guide in GUIDES)
    everything = published(page)
    examples = "\n".join(one.docstring.value for one in everything if ">>> " in one.docstring.value)
    needed = [
        one
        for one in everything
        if (one.is_class and not is_error(one))
        or (one.is_function and one.parent.is_module and re.search(rf"\b{one.name}\(", guides))
    ]
    missing = [one.path for one in needed if one.name not in WITHOUT_EXAMPLE and not has_example(one, examples)]
    assert not missing, "\n".join(missing)


def has_example(one: Any, examples: str) -> bool:
    members = [member for member in one.members.values() if not member.is_alias] if one.is_class else []
    own = any(each.docstring and ">>> " in each.docstring.value for each in (one, *members))
    return own or re.search(rf"^ *(>>>|\.\.\.) .*\b{one.name}\b|^{one.name}\(", examples, re.MULTILINE) is not None


def test_no_docstring_only_points_elsewhere() -> None:
    """A method that overrides has no docstring, and so that of what it overrides, or says where it differs."""
    found = []
    for path in sorted((ROOT / "src" / "geartrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                if text.startswith("See "):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)
