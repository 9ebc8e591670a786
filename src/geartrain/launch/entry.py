"""Entry point of a job's process: `python -m geartrain.launch.entry`. The environment contains its `ProcessSpec`."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

from geartrain.core.processes import die_with_parent


def main() -> None:
    """Runs the function that the specification names, or becomes the command."""
    spec = json.loads(os.environ["GEARTRAIN_PROCESS"])
    die_with_parent(spec["parent"])  # holds for the command that this process becomes, too
    if not isinstance(spec["run"], str):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored signals stay so; interrupts are the launcher's affair
        try:
            os.execvp(spec["run"][0], spec["run"])
        except OSError as error:
            sys.exit(f"{spec['run'][0]}: {error.strerror}")
    sys.path[:0] = [entry for entry in spec["path"] if entry not in sys.path]
    from geartrain.launch.context import context
    from geartrain.launch.job import find_or_exit

    own = context()
    function = find_or_exit(spec["run"])
    try:
        function(own, **spec["args"])
    except Exception as error:
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))  # from the function on
        sys.exit(1)
    finally:
        own.ends()


if __name__ == "__main__":
    main()
