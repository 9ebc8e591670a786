"""Typer application, and the display of errors."""

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
    """Prints an error as one line on stderr, not as a traceback."""
    try:
        yield
    except GeartrainError as error:
        die(str(error))


def die(message: str, code: int = 1) -> NoReturn:
    """Prints it on stderr, and exits."""
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)
