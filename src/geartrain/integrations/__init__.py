"""Importers: datasets in other people's formats become stores of raw columns.

`import_dataset(source, into)` is what most people want; `ingest` fills a store of one's own, and
`open_source` gives the episodes alone. One file per format, each with one optional dependency that is
imported on use.

Two are of other kinds: `environments` are simulators for actors, and `di_engine` puts geartrain's transports under
DI-engine.
"""

from geartrain.integrations.datasets.episode import Episode, Extent, Source
from geartrain.integrations.datasets.importer import FORMATS, Report, import_dataset, ingest, open_source

__all__ = [
    "Episode",
    "Extent",
    "FORMATS",
    "Report",
    "Source",
    "import_dataset",
    "ingest",
    "open_source",
]
