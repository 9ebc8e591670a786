"""MkDocs hooks of the documentation site: pages that lie outside docs/, sections of other files, links to sources.

- README.md is the home page. ARCHITECTURE.md, CHANGELOG.md and CONTRIBUTING.md are pages too.
- docs/tutorial.ipynb is the page tutorial.md, with its saved output.
- Each page of docs/recipes is in the navigation, below recipes.md.
- Search leads to guides: decisions, notes, pages of measurements and the changelog are not in its index, and the API
  and the architecture rank below guides.
- A line `<!-- include: ARCHITECTURE.md "Guarantees" -->` is replaced by that section of that file, so that nothing is
  written twice.
- Links are relative to the file that they stand in, as any viewer of the repository follows them. Those to files that
  are no pages lead to extra.sources, or are the file's name alone where that is not set.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Pages that are made of files outside docs/, by the path in the site.
OUTSIDE = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
# Patterns of pages that search does not find, and of pages that it ranks lower, with the factor of their scores.
NOT_SEARCHED = re.compile(r"(decisions|notes|benchmarks)/|(changelog|contributing|bench-rpc-rl)\.md")
RANKED_LOWER = {
    **{"api/": 0.2, "architecture.md": 0.05, "results.md": 0.05, "migration.md": 0.2, "index.md": 0.2},
    **{"coming-from-": 0.5, "di-engine.md": 0.5, "exporters.md": 0.5, "devices.md": 0.5, "transport.md": 0.5},
    **{"tutorial.md": 0.5, "benchmarks.md": 0.3},
}
_CODE = re.compile(r"(^```.*?^```[^\n]*\n)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_INCLUDE = re.compile(r'^<!-- include: (\S+) "([^"]+)" -->$', re.MULTILINE)


def on_config(config: Any) -> Any:
    """Adds the recipes to the navigation, below their index."""
    recipes = sorted(f"recipes/{path.name}" for path in (ROOT / "docs" / "recipes").glob("*.md"))
    for section in config.nav:
        if "Recipes" in section:
            section["Recipes"] += recipes
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that no file in docs/ is."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
    files.append(File.generated(config, "tutorial.md", content=notebook_as_markdown(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page with the sections that it includes, and with links that lead somewhere from the site."""
    site_path = page.file.src_uri
    if NOT_SEARCHED.match(site_path):
        page.meta["search"] = {"exclude": True}
    for prefix, factor in RANKED_LOWER.items():
        if site_path.startswith(prefix):
            page.meta["search"] = {"boost": factor}
    source = OUTSIDE.get(site_path, f"docs/{site_path}")

    def included(found: re.Match[str]) -> str:
        text = section((ROOT / found[1]).read_text(), found[2], found[1])
        return with_site_links(text, found[1], site_path, config.extra["sources"], files)

    return _INCLUDE.sub(included, with_site_links(markdown, source, site_path, config.extra["sources"], files))


def section(text: str, title: str, name: str) -> str:
    """What stands below the heading of that title, up to the next one of its level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |^#{{1,2}} |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise PluginError(f"{name} has no section {title!r}")
    return found[2].strip() + "\n"


def with_site_links(markdown: str, source: str, site_path: str, sources: str, files: Any) -> str:
    """The same text, links of the file `source` turned into those of the page `site_path`."""

    def link(found: re.Match[str]) -> str:
        image, text, target = found[1], found[2], found[3]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / inside).exists():
            raise PluginError(f"{source} links to {target}, which is not there")
        place = next((page for page, file in OUTSIDE.items() if file == inside), None)
        if inside == "docs/tutorial.ipynb":
            place = inside.removeprefix("docs/")
        elif inside.startswith("docs/"):
            place = "decisions/README.md" if inside == "docs/decisions" else inside.removeprefix("docs/")
        if place is None or files.get_file_from_path(place) is None:
            if image:
                raise PluginError(f"{source} shows {target}, which is not in docs/")
            return f"[{text}]({sources.rstrip('/')}/{inside})" if sources else text
        if text == posixpath.basename(path):
            text = text.removesuffix(".md").lower()  # the site has pages, not files
        relative = posixpath.relpath(place, posixpath.dirname(site_path) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    pieces = _CODE.split(markdown)
    return "".join(piece if i % 2 else _LINK.sub(link, piece) for i, piece in enumerate(pieces))


def notebook_as_markdown(notebook: dict[str, Any]) -> str:
    """Cells as prose, code, and the text that the code printed; pictures are left out."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        said = "".join(
            "".join(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in cell["outputs"]
        )
        if said:
            parts.append(f"```text\n{said.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
