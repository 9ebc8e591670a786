"""`geartrain-ditask`: DI-engine's `ditask`, extended by geartrain's message queue and its options."""

from __future__ import annotations

import copy
import sys
from typing import Any

from geartrain.errors import GeartrainError, MissingDependencyError
from geartrain.integrations.di_engine.message_queue import further, install
from geartrain.integrations.di_engine.options import MQ_TYPES


def main(arguments: list[str] | None = None) -> None:
    """Runs `ditask`. An error of geartrain's is one line on stderr, and exit status 1."""
    try:
        command()(args=arguments, prog_name="geartrain-ditask")
    except GeartrainError as error:
        sys.exit(f"geartrain-ditask: {error}")


def command() -> Any:
    """DI-engine's click command with three more options. Raises `MissingDependencyError`."""
    install()
    try:
        import click
        from ding.entry.cli_ditask import _cli_ditask, cli_ditask
    except ImportError as error:
        raise MissingDependencyError(f"ditask needs what DI-engine requires: {error}") from error

    def run(**given: Any) -> Any:
        ours = {name: given.pop(name) for name in ("init_method", "local_cuda_devices", "cuda_device_map")}
        token = further.set({**ours, "any_port": given["ports"] is None})
        try:
            return _cli_ditask(**given)
        finally:
            further.reset(token)

    more = [
        click.Option(
            ["--init-method"],
            help="Where nodes find each other: tcp://host:port, env:// or file:///path. Node 0 starts a tcp store.",
        ),
        click.Option(["--local-cuda-devices"], help="GPUs of this process, e.g. 0,1. Default: all it sees."),
        click.Option(
            ["--cuda-device-map"],
            help="Which GPU goes with which of a peer's: <peer node id>_<local GPU>_<peer GPU>,... e.g. 1_0_1,2_0_2",
        ),
    ]
    parameters = [copy.copy(parameter) for parameter in cli_ditask.params] + more
    for parameter in parameters:
        if parameter.name == "mq_type":
            parameter.help = f"Class of message queue: nng, redis, {', '.join(MQ_TYPES)}. Default: geartrain."
            parameter.default = "geartrain"
    return click.Command(
        "geartrain-ditask", params=parameters, callback=run, context_settings=cli_ditask.context_settings
    )
