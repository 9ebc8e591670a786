"""Integrations: dataset importers and exporters, other libraries' replay buffers, JAX and CuPy arrays, DI-engine.

- `import_dataset(source, into)` imports a dataset into a new store.
- `ingest` imports into an existing store, and `open_source` only reads the episodes.
- `export_store(store, path)` writes a store as a dataset.
- `sb3`, `torchrl`, `lerobot`, `rlinf` and `jax` have replay buffers over a store.
- `jax` and `cupy` give batches as their arrays.
- `di_engine` has a message queue for DI-engine.

Optional packages are imported on first use.
"""

from geartrain.integrations.datasets.episode import Episode, Extent, Source
from geartrain.integrations.datasets.exporter import EXPORT_FORMATS, ExportReport, export_store
from geartrain.integrations.datasets.importer import FORMATS, ImportReport, import_dataset, ingest, open_source

__all__ = [
    "EXPORT_FORMATS",
    "FORMATS",
    "Episode",
    "ExportReport",
    "Extent",
    "ImportReport",
    "Source",
    "export_store",
    "import_dataset",
    "ingest",
    "open_source",
]
