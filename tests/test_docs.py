"""The README and the pages under docs/ tell the truth: their code runs, their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

import geartrain
import geartrain.errors

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


#: Recipes that start processes with torch, or train for seconds.
SLOW = {"ppo-remote-actors.md", "sac-actors.md", "dqn-per.md", "hindsight.md", "r2d2.md"}
RUN = [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name in SLOW)) for p in PAGES if blocks(p)]


@pytest.mark.parametrize("page", RUN)
def test_the_code_on_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    # Stores on pages have plain names, which others on this host may use.
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments, "TMPDIR": str(tmp_path)}
        done = preloaded.run([sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=patience(100))
    assert done.returncode == 0, done.stderr
    if page.name == "README.md":  # three times the return of random actions
        assert float(done.stdout.split()[-1]) > 66, done.stdout


@pytest.mark.slow
def test_the_page_of_language_models_runs_under_torchrun_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "page.py"
    step = "            optimizer.step()\n"
    told = "            open(f'rank{os.environ[\"RANK\"]}', 'a').write(f'{len(batch)} ') if group else None\n"
    page = "\n".join(blocks(ROOT / "docs/first-hour/llm.md"))
    assert step in page
    script.write_text("import os\n" + page.replace(step, step + told))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, timeout=patience(100), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    rows = [[int(n) for n in (tmp_path / f"rank{rank}").read_text().split()] for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) > 1 and {a + b for a, b in zip(*rows, strict=True)} == {4}


@pytest.mark.slow
def test_the_job_of_the_recipe_for_torchrun_goes_on_with_more_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    page = (ROOT / "docs/recipes/torchrun.md").read_text()
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


def test_slurms_script_on_the_page_is_the_one_that_is_generated(tmp_path: Path) -> None:
    page = textwrap.dedent((ROOT / "docs/recipes/slurm.md").read_text().replace("\n    ", "\n"))
    (job,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (arguments,) = re.findall(r"^geartrain (generate slurm .*) > ppo.sbatch$", page, re.MULTILINE)
    (tmp_path / "ppo.py").write_text("\n".join(blocks(ROOT / "docs/recipes/ppo-remote-actors.md")))
    (tmp_path / "ppo.toml").write_text(job)
    command = [sys.executable, "-m", "geartrain", *arguments.split()]
    done = preloaded.run(command, cwd=tmp_path, timeout=patience(100))
    assert done.returncode == 0, done.stderr
    asked = [line for line in done.stdout.splitlines() if line.startswith("#SBATCH")]
    assert shown.splitlines() == [line for line in asked if "--chdir" not in line]  # the folder it was made in


def test_the_containers_of_the_recipe_share_a_store(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs/recipes/docker.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "compose.yaml").read_text())
    scripts = re.findall(r"^```py\n# job/(\w+.py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in scripts] == ["actor.py", "learner.py"]
    for name, script in scripts:
        (tmp_path / name).write_text(script)
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        how = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments}}
        pipe = subprocess.PIPE
        with preloaded.Popen([sys.executable, "learner.py"], stdout=pipe, stderr=pipe, text=True, **how) as learner:
            while learner.poll() is None and not any(Path(segments).iterdir()):
                time.sleep(0.01)  # until the store is there: one that actors make alone ends with them
            actor = preloaded.run([sys.executable, "actor.py"], timeout=patience(100), **how)
            said, errors = learner.communicate(timeout=patience(100))
    assert (actor.returncode, learner.returncode) == (0, 0), actor.stderr + errors
    assert said.startswith("20 batches from ")


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


def test_every_page_is_in_the_sites_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        if not path.startswith(("decisions/", "notes/", "recipes/")):  # which release/site_hooks.py lists
            assert re.search(rf" {re.escape(path)}$", site, re.MULTILINE), f"{path} is not in mkdocs.yml"


def public_errors() -> list[str]:
    found = {name: value for name, value in vars(geartrain.errors).items() if isinstance(value, type)}
    return [name for name, value in found.items() if issubclass(value, geartrain.errors.GeartrainError)]


def test_every_error_has_an_entry_with_its_remedy_and_no_other_has() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(public_errors())
    assert all(what.strip() for _, what in rows)


def test_messages_that_the_troubleshooting_quotes_are_those_of_the_code() -> None:
    """An ellipsis stands for values, and for what is left out."""
    quoted = re.findall(r"^```text\n(\w+): (.*)\n```", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 6
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "native").rglob("*.cc")]
    code = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in files))  # literals that stand side by side
    for error, message in quoted:
        assert error in public_errors()
        for part in filter(None, (part.strip() for part in message.split("…"))):
            assert part in code, f"{error}: {part!r} is no message"


def block_of_deployment(language: str) -> str:
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "docs/deployment.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def test_the_pod_of_the_page_on_deployment_is_valid_for_kubernetes() -> None:
    yaml, validator = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
    pod = yaml.safe_load(block_of_deployment("yaml"))
    validator.validate(pod, "1.29", strict=True)
    mounted = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    (memory,) = (each["name"] for each in pod["spec"]["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory")
    assert mounted[memory] == "/dev/shm"


def test_the_unit_of_the_page_on_deployment_is_valid_for_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / "trainer.service"
    unit.write_text(block_of_deployment("ini").replace("/opt/geartrain/bin/geartrain", sys.executable))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=patience(60), check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in geartrain.__all__:
        # An object, or the module that shows all of its public names.
        assert re.search(rf"^::: geartrain\.(.*\.)?{name}$", pages, re.MULTILINE), name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without a warning."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=patience(200), check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


# What people type, and pages one of which has to come first.
SEARCHES = {
    "prioritized replay": "selection recipes/",
    "priority": "selection store replay",
    "n-step": "replay",
    "frame stack": "replay",
    "action mask": "recipes/",
    "HER": "replay recipes/",
    "R2D2": "recipes/",
    "burn-in": "recipes/ replay",
    "LSTM state": "recipes/ replay",
    "delta_timestamps": "recipes/ replay coming-from-lerobot",
    "action chunk": "recipes/ replay",
    "DDP": "first-hour/ddp collectives-torch ranks recipes/",
    "multi node": "first-hour/hosts clusters recipes/ deployment",
    "Slurm": "deployment clusters launch recipes/",
    "Docker": "deployment install recipes/",
    "Kubernetes": "deployment clusters",
    "SIGBUS": "troubleshooting",
    "shared memory full": "troubleshooting sizing",
    "resume": "checkpoints recipes/",
    "checkpoint": "checkpoints",
    "variable length": "first-hour/llm replay recipes/",
    "padding": "replay first-hour/llm",
    "GRPO": "first-hour/llm selection recipes/",
    "tokens": "first-hour/llm recipes/",
    "strings": "store glossary",
    "images": "store replay gpu first-hour/robots importers",
    "episodes": "importers store actors first-hour/buffer",
    "off-policy": "first-hour/buffer recipes/",
    "D4RL": "importers first-hour/robots",
    "Minari": "importers first-hour/robots",
    "LeRobot": "coming-from-lerobot importers first-hour/robots",
    "PPO": "recipes/",
    "rate limiter": "store",
    "evict": "store",
    "memory usage": "sizing troubleshooting",
    "fork": "store troubleshooting guarantees",
    "DataLoader": "replay",
    "weights": "weights",
    "timeout": "troubleshooting",
    "kill -9": "troubleshooting guarantees store",
    "uint8": "gpu store first-hour/gpu replay",
    "GPU": "gpu first-hour/gpu",
    "autoreset": "store actors environments",
    "importance sampling": "selection",
    "TD error": "selection",
    "sum tree": "selection",
    "overlap": "replay",
    "deterministic": "replay",
    "learning starts": "replay",
    "dict observation": "store actors",
    "replay ratio": "store sizing",
    "save replay buffer": "store checkpoints",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_hit_of_the_sites_search_answers_it(site: Path) -> None:
    pytest.importorskip("lunr")
    from site_search import SiteSearch

    search = SiteSearch(site)
    found = {term: [page.removesuffix(".html") for page in search.pages(term)[:3]] for term in SEARCHES}
    wrong = [
        f"{term}: {hits}, and not {SEARCHES[term]}"
        for term, hits in found.items()
        if not (hits and any(_is(hits[0], page) for page in SEARCHES[term].split()))
    ]
    assert not wrong, "\n".join(wrong)


def _is(page: str, wanted: str) -> bool:
    return page.startswith(wanted) if wanted.endswith("/") else page == wanted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_loads_nothing_from_elsewhere_and_shows_the_sections_that_it_includes(site: Path) -> None:
    # The site works without a network, and tells nobody who reads it.
    home = (site / "index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?https?://[^>]*', home)
    for shown, where in (
        ("for you if", "index.html"),
        ("A row's life", "concepts.html"),
        ("no torn row is returned", "guarantees.html"),
    ):
        assert shown in (site / where).read_text()


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
