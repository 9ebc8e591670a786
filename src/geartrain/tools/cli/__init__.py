"""The command line: look at stores, fill them from datasets, run jobs, plan, measure, remove what was left behind.

`app.py` is the command, every other file adds some of its parts, in the order in which the help shows them.
"""

import geartrain.tools.cli.import_dataset as importing  # noqa: F401, I001
import geartrain.tools.cli.inspect_remove as inspecting  # noqa: F401
import geartrain.tools.cli.doctor_bench as machine  # noqa: F401
import geartrain.tools.cli.jobs as jobs  # noqa: F401
import geartrain.tools.cli.plan as planning  # noqa: F401
from geartrain.tools.cli.app import app

__all__ = ["app"]
