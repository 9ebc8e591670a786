"""Command line: inspect and remove stores, import and export datasets, run jobs, plan, benchmark.

`app.py` is the application. Every other file registers subcommands, in the order of the help.
"""

import geartrain.tools.cli.import_dataset as importing  # noqa: F401, I001
import geartrain.tools.cli.export_dataset as exporting  # noqa: F401
import geartrain.tools.cli.inspect_remove as inspecting  # noqa: F401
import geartrain.tools.cli.checkpoint as saving  # noqa: F401
import geartrain.tools.cli.top as watching  # noqa: F401
import geartrain.tools.cli.doctor_bench as machine  # noqa: F401
import geartrain.tools.cli.jobs as jobs  # noqa: F401
import geartrain.tools.cli.generate as generating  # noqa: F401
import geartrain.tools.cli.plan as planning  # noqa: F401
from geartrain.tools.cli.app import app

__all__ = ["app"]
