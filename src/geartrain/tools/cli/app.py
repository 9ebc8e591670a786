"""Typer application, and the mapping of errors to lines and exit codes.

A command checks all of its arguments before it begins to work. If it fails, it prints one line on stderr and exits with
one of these codes:

    1    the operation failed: a file or store is missing or holds something else, or a peer is lost
    2    an argument is wrong in any state of this machine (`ArgumentError`, or typer's own checks)
    130  Ctrl-C
    143  SIGTERM, in a command that cleans up before it ends (`ended_by_sigterm`)

Commands raise exceptions. Only `_Commands.main` maps them to codes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import math
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import markup
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from geartrain.core.printable import never_fails, printable
from geartrain.errors import ArgumentError, GeartrainError, JobError

#: typer has a copy of click in newer versions and depends on it in older ones; this is the base of either's refusals.
ClickException: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
_MOST_INTEGER = 2**63 - 1
_EXAMPLE = "Example: "
#: Characters of an example's line, which ends with a backslash within 80 columns.
_WIDE = 68


class _Commands(TyperGroup):
    """The root of all commands, which shows every error the same way."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Parses, runs, and exits with the code that the error stands for."""
        for stream in (sys.stdout, sys.stderr):
            never_fails(stream)
        alone = options.pop("standalone_mode", True)
        options["standalone_mode"] = False
        if not alone:
            return super().main(*args, **options)
        try:
            sys.exit(super().main(*args, **options) or 0)
        except ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(error.exit_code)
            _refuse(error.format_message(), error.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            _refuse("stopped by Ctrl-C", 130)
        except ArgumentError as error:
            _refuse(str(error), 2)
        except JobError as error:  # with the last lines of the process that died
            _refuse(str(error), 1, lines=True)
        except (GeartrainError, OSError) as error:
            _refuse(str(error) or type(error).__name__, 1)


class _Command(TyperCommand):
    """A command whose numbers are finite, whose integers fit 64 bits, and whose words are UTF-8."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        """As typer's. A paragraph of the help is filled to the terminal's width, whatever its lines are here."""
        super().__init__(*args, help=_filled(help), **options)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses, then checks every value."""
        rest = super().parse_args(ctx, args)
        parameter: Any
        for parameter in self.params:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else [given]:
                if isinstance(value, float) and not math.isfinite(value):
                    raise typer.BadParameter(f"must be a finite number, found {value}", ctx=ctx, param=parameter)
                if isinstance(value, int) and abs(value) > _MOST_INTEGER:
                    raise typer.BadParameter(f"must fit 64 bits, found {value}", ctx=ctx, param=parameter)
                if isinstance(value, str | Path) and not _is_utf8(str(value)):
                    raise typer.BadParameter(f"must be UTF-8, found {value!a}", ctx=ctx, param=parameter)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; typer would end it without a word after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            die("stopped by Ctrl-C", 130)


class Commands(typer.Typer):
    """A set of commands with the checks of `_Command`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """As typer's."""
        return super().command(name, **{"cls": _Command, **options})


def _filled(help: str | None) -> str | None:
    """Each paragraph as one line, but for those that begin with \\b and for examples, which can be copied."""
    if help is None:
        return None
    return "\n\n".join(map(_paragraph, inspect.cleandoc(help).split("\n\n")))


def _paragraph(text: str) -> str:
    if text.startswith("\b"):
        return text
    text = text.replace("\n", " ")
    if not text.startswith(_EXAMPLE):
        return text
    words = textwrap.wrap(text.removeprefix(_EXAMPLE), _WIDE, break_long_words=False, break_on_hyphens=False)
    return f"\b\n{_EXAMPLE.strip()}\n  " + " \\\n      ".join(words)


app = Commands(
    cls=_Commands,
    help="The data plane for training large models with reinforcement learning.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(emoji=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"geartrain {importlib.metadata.version('geartrain')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    pass


def die(message: str, code: int = 1) -> NoReturn:
    """Prints it on stderr, and exits."""
    print_error(message)
    raise typer.Exit(code)


class Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Has SIGTERM end the command as Ctrl-C does, with what was begun removed, and the exit code 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminated(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the removal
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except Terminated:
        die("stopped by SIGTERM", 128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def escape(text: str, lines: bool = False) -> str:
    """Text from elsewhere for `out`: markup and control characters, but for `lines`' ends, are shown, not obeyed."""
    return markup.escape(printable(text, lines))


def print_error(message: str, lines: bool = False) -> None:
    """Prints it on stderr without markup and emoji, control characters escaped (but line ends where `lines`)."""
    shown = printable(message.rstrip(), lines)
    console = Console(stderr=True, emoji=False, highlight=False, markup=False)
    console.print(Text.assemble(("error:", "red"), " ", shown), soft_wrap=True)


def _refuse(message: str, code: int, lines: bool = False) -> NoReturn:
    print_error(message, lines)
    sys.exit(code)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def print_json(found: Any) -> None:
    """Prints it as JSON on stdout, for programs."""
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


def make_table(*headers: str, **options: Any) -> Table:
    """A table with those columns. In a narrow terminal long names and paths go on in the next line."""
    return Table(*(Column(header, overflow="fold") for header in headers), **options)
