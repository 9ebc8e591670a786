"""The command line: look at stores, fill them from datasets, run jobs, plan, measure, remove what was left behind.

`app.py` is the command, every other file adds some of its parts, in the order in which the help shows them.
"""

from geartrain.cli import importing, inspecting, machine, jobs, planning  # noqa: F401, I001
from geartrain.cli.app import app

__all__ = ["app"]
