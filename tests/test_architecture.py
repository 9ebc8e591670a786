"""ARCHITECTURE.md's picture is true: every file is in it, imports go down, and files form no circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "geartrain"
NATIVE = ROOT / "native"
# The facade, the command's entry and the border to the native layer are no rooms.
OUTSIDE = {"__init__", "__main__", "_native"}


def picture(name: str) -> dict[str, int]:
    """Each room with its line in the fenced block, counted from the bottom."""
    block = re.search(rf"```{name}\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    assert block, f"ARCHITECTURE.md has no block {name}"
    lines = [line.split() for line in block.group(1).splitlines() if line.strip()]
    return {part: len(lines) - i for i, line in enumerate(lines) for part in line}


PYTHON_FILES = sorted(SOURCE.rglob("*.py"))
LIBRARY_FILES = [path for path in PYTHON_FILES if path.is_relative_to(PACKAGE)]
NATIVE_FILES = sorted(
    p for p in NATIVE.rglob("*") if p.suffix in (".cc", ".h") and p.relative_to(NATIVE).parts[0] != "tests"
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in PYTHON_FILES}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree but those that hold no name: parsing and walking are most of these tests."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, NAMING)]


NAMING = (
    ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
)  # fmt: skip


@cache
def imported(path: Path) -> frozenset[str]:
    """The project's modules that a file names in its imports, those for type checkers and inside functions too."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name.split(".")[0].startswith("geartrain"))


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_python_imports_go_down() -> None:
    layers = picture("layers")
    for path in LIBRARY_FILES:
        mine = room(module_name(path))
        if mine in OUTSIDE:
            continue
        assert mine in layers, f"{path.name} is not in the picture"
        for module in imported(path):
            other = room(module)
            if module.split(".")[0] == "geartrain_bench":
                assert mine == "tools", f"{path} imports a benchmark"
            elif other not in OUTSIDE - {"__init__"} and other != mine:
                assert other != "__init__", f"{path} imports from the facade; name the room"
                assert layers[other] < layers[mine], f"{path} imports {module}, which is not below it"


def test_every_room_of_the_picture_is_there() -> None:
    for name in picture("layers"):
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists(), name


def circles(edges: dict[str, frozenset[str]]) -> list[list[str]]:
    """Strongly connected components of more than one file (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == name:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def test_files_form_no_circle() -> None:
    edges = {name: frozenset(imported(path)) & FILES.keys() - {name} for name, path in FILES.items()}
    # The facade names everything by strings and under TYPE_CHECKING; nothing imports it.
    edges["geartrain"] = frozenset()
    assert [circle for circle in circles(edges) if circle[0] not in CIRCLES_TO_OPEN] == []


def test_a_circle_would_be_found() -> None:
    edges = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(edges) == [["a", "b", "c"]]


def test_a_class_name_stands_once() -> None:
    seen: dict[str, str] = {}
    twice = []
    for name, path in FILES.items():
        if not name.startswith("geartrain."):
            continue
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and node.col_offset == 0 and not node.name.startswith("_"):
                if node.name in seen:
                    twice.append(f"{node.name}: {seen[node.name]} and {name}")
                seen[node.name] = name
    assert [clash for clash in twice if clash.split(":")[0] not in NAMES_TO_PART] == []


@cache
def private_names(path: Path) -> frozenset[str]:
    """Private functions, classes and attributes that a file defines."""
    found = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(name for name in found if name.startswith("_") and not name.startswith("__"))


def test_private_names_stay_in_their_file() -> None:
    inherited = private_names(FILES["geartrain.core.lifetime"])  # by each class with a `close`
    private = frozenset[str]().union(*(private_names(path) for path in PYTHON_FILES)) - FOREIGN - inherited
    used = []
    for path in PYTHON_FILES:
        others, place = private - private_names(path), path.relative_to(SOURCE)
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in others:
                used.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("geartrain"):
                names = [one.name for one in node.names if one.name.startswith("_") and one.name != "_native"]
                used += [f"{place}:{node.lineno}: {name}" for name in names]
    assert used == []


#: Names of other projects that look like ours: of named tuples, of DI-engine's Parallel, and of torchrl's writers.
FOREIGN = {"_active", "_fields", "_event_loop", "_storage"}
#: Debts; these lists only get shorter.
CIRCLES_TO_OPEN: set[str] = set()
NAMES_TO_PART: set[str] = set()


def test_only_tools_and_benchmarks_use_the_native_testing_functions() -> None:
    bound = re.findall(r'module\.def\("(\w+)"', (NATIVE / "python" / "testing.cc").read_text())
    assert bound
    for name, path in FILES.items():
        if re.search(rf"_native\.({'|'.join(bound)})\b", path.read_text()):
            assert name.startswith(("geartrain.tools.", "geartrain_bench.")), name


def native_includes(path: Path) -> list[str]:
    return re.findall(r'#include "([^"]+)"', path.read_text())


def test_native_includes_go_down() -> None:
    layers = picture("native-layers")
    for path in NATIVE_FILES:
        mine = path.relative_to(NATIVE).parts[0]
        assert mine in layers, f"{path.relative_to(NATIVE)} lies in no room of the picture"
        for included in native_includes(path):
            assert (NATIVE / included).is_file(), f"{path}: {included} is not named from native/"
            other = included.split("/")[0]
            assert other in layers, f"{included} is not in the picture"
            assert other == mine or layers[other] < layers[mine], f"{path} includes {included}, which is not below it"


def test_native_files_form_no_circle() -> None:
    """x.h and x.cc are one file here: what either includes, both need."""
    edges: dict[str, frozenset[str]] = {}
    for path in NATIVE_FILES:
        stem = str(path.relative_to(NATIVE).with_suffix(""))
        needed = {included.rsplit(".")[0] for included in native_includes(path)} - {stem}
        edges[stem] = edges.get(stem, frozenset()) | needed
    assert circles(edges) == []


_NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
_CLASS = re.compile(
    r"\b(?:struct|class|union|enum)\s+(?:(?:class|struct)\s+)?(?:alignas\([^)]*\)\s*|\[\[.*?\]\]\s*)*"
    r"(\w[\w:]*)(?:\s+final)?\s*(?::[^:].*)?$",
    re.DOTALL,
)


def native_classes(code: str) -> list[str]:
    """Classes and enums that C++ code defines in named namespaces, qualified: those that other files may clash with."""
    found = []
    scopes: list[str] = []  # names of namespaces; "" for what hides its classes: classes, functions, `namespace {`
    head = ""
    for token in re.split(r"([{};])", _NO_CODE.sub(" ", code)):
        if token == "{":
            namespace = re.search(r"\bnamespace\s*([\w:]*)\s*$", head)
            defined = _CLASS.search(head)
            if defined and all(scopes):
                found.append("::".join([*scopes, defined.group(1)]))
            scopes.append(namespace.group(1) if namespace else "")
        elif token == "}":
            scopes.pop()
        head = token
    assert not scopes, "braces do not match"
    return found


# The module and the native tests are programs of their own: tests have no bindings.
@pytest.mark.parametrize("left_out", ["tests", "python"])
def test_a_native_class_stands_once_in_a_program(left_out: str) -> None:
    """Two definitions of one name are undefined behaviour that no linker tells: either may stand for both."""
    places: dict[str, list[str]] = {}
    for path in sorted(NATIVE.rglob("*")):
        inside = path.relative_to(NATIVE)
        if path.suffix in (".cc", ".h") and inside.parts[0] != left_out:
            for name in native_classes(path.read_text()):
                places.setdefault(name, []).append(str(inside))
    assert len(places) > 150, "most classes were overlooked"
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_native_class_that_stands_twice_would_be_found() -> None:
    code = """
    #define OPEN {
    namespace a::b {
    struct Declared;
    /* struct Said { */ // struct Told {
    template <typename T> class First final : public Base<T> { struct Inner { char brace = '{'; }; };
    enum class Second : uint8_t { one = 1'000 };
    struct alignas(64) Third { const char* text = "struct Quoted {"; } third;
    struct Third* returned(struct Given given) { struct Local {}; return nullptr; }
    namespace { struct Hidden {}; }
    }
    union Fourth {};
    """
    assert native_classes(code) == ["a::b::First", "a::b::Second", "a::b::Third", "Fourth"]


def test_a_one_sided_backend_is_named_in_its_folder_only() -> None:
    folder = PACKAGE / "transport" / "one_sided"
    backends = [path.name for path in folder.iterdir() if (path / "__init__.py").is_file()]
    assert backends
    for path in LIBRARY_FILES:
        if path.parent.parent != folder and path.name != "doctor.py":
            assert not re.search("|".join(backends), path.read_text(), re.IGNORECASE), path


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
