"""The first thing a process of a job does: `python -m geartrain.launch.entry`, with its order in the environment."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the function that the order names, or becomes the command."""
    order = json.loads(os.environ["GEARTRAIN_PART"])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also of the command that it becomes
    if os.getppid() != order["parent"]:  # the launcher was gone before
        os._exit(1)
    if not isinstance(order["run"], str):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored signals stay so; Ctrl-C is the launcher's affair
        try:
            os.execvp(order["run"][0], order["run"])
        except OSError as error:
            sys.exit(f"{order['run'][0]}: {error.strerror}")
    sys.path[:0] = [entry for entry in order["path"] if entry not in sys.path]
    from geartrain.launch.context import part
    from geartrain.launch.job import find

    mine = part()
    function = find(order["run"])
    try:
        function(mine, **order["args"])
    except Exception as error:
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))  # from the function on
        sys.exit(1)


if __name__ == "__main__":
    main()
