"""The command itself: what its parts are added to, and how an error is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from geartrain.errors import GeartrainError

app = typer.Typer(
    help="The data plane for training large models with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Shows what was refused as one line on stderr, not as a traceback."""
    try:
        yield
    except GeartrainError as error:
        die(str(error))


def die(message: str, code: int = 1) -> NoReturn:
    """Says it on stderr, and ends."""
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)
