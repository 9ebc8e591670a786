"""Search of the built documentation site, as its search box ranks pages: mkdocs-material's worker, in Python.

The worker indexes sections by lunr: titles count a thousand times as much as text, and the length of a section does not
count. Every word of a query also finds the words that begin with it; of a
hyphenated word only the last part does. Scores rise when a page's own title matches, and
with the share of the query's words that a section has. Pages are ranked by their best section.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lunr.builder

HYPHEN = "\0"


class SiteSearch:
    """The search box of the site that was built into a folder."""

    def __init__(self, site: Path) -> None:
        found = json.loads((site / "search" / "search_index.json").read_text())
        self._separator = re.compile(found["config"]["separator"])
        self._fields = list(found["config"]["fields"])
        builder = lunr.builder.Builder()
        builder.b(0)
        assert found["config"]["pipeline"] == []
        builder.ref("location")
        for name, options in found["config"]["fields"].items():
            builder.field(name, boost=options["boost"])
        self._articles: dict[str, str] = {}
        for doc in found["docs"]:
            page = doc["location"].partition("#")[0]
            self._articles.setdefault(page, doc["location"])
            tokens = {name: self._tokens(doc.get(name)) for name in self._fields}
            builder.add({"location": doc["location"], **tokens}, {"boost": doc.get("boost", 1)})
        self._index = builder.build()

    def pages(self, query: str) -> list[str]:
        """Pages that the search box lists, the best first, as paths of the site."""
        clauses = []
        for word in query.lower().split():
            if word.startswith(("+", "-")):  # an operator: words that must, or must not, be there
                clauses.append(word)
            else:  # the query's own lexer ends words at hyphens, and "*" stands behind the last of them
                for part in self._split(word.replace("-", HYPHEN)):
                    *exact, last = part.split(HYPHEN)
                    clauses += [*exact, f"{last}*"]
        wanted = [clause.rstrip("*") for clause in clauses if not clause.startswith("-")]
        scores: dict[str, float] = {}
        for hit in self._index.search(" ".join(clauses)):
            words = list(hit["match_data"].metadata)
            matched = sum(any(word.startswith(one) for word in words) for one in wanted)
            page = hit["ref"].partition("#")[0]
            boost = (self._articles[page] == hit["ref"]) + matched / len(wanted)
            score = hit["score"] * (1 + boost**2)
            scores[page] = max(scores.get(page, 0.0), score)
        return sorted(scores, key=lambda page: -scores[page])

    def _tokens(self, value: Any) -> list[str] | None:
        """Words of a field, whose markup ends them."""
        if value is None:
            return None
        texts = value if isinstance(value, list) else re.split(r"<[^>]*>", value)
        return [token.lower() for text in texts for token in self._split(text)]

    def _split(self, text: str) -> list[str]:
        return [part for part in self._separator.split(text) if part]


__all__ = ["SiteSearch"]
