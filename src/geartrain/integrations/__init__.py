"""Integrations: dataset importers, JAX and CuPy arrays, and a message queue for DI-engine.

`import_dataset(source, into)` imports a dataset of another format into a new store; `ingest` fills an existing store,
and `open_source` gives the episodes alone. One file per format, each with one optional dependency that is imported on
use.
"""

from geartrain.integrations.datasets.episode import Episode, Extent, Source
from geartrain.integrations.datasets.importer import FORMATS, ImportReport, import_dataset, ingest, open_source

__all__ = [
    "Episode",
    "Extent",
    "FORMATS",
    "ImportReport",
    "Source",
    "import_dataset",
    "ingest",
    "open_source",
]
