"""Checks of options that name files, made while the command line is parsed and before any work begins."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from geartrain.core.extras import require

_PLOTS = (".png", ".svg", ".pdf")


def output_file(path: Path | None) -> Path | None:
    """A file that can be written, which is tried: one that is there is opened, another one created and removed."""
    if path is not None:
        there = os.path.lexists(_named(path))
        try:
            # Not blocking: a FIFO without a reader is refused.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | (0 if there else os.O_CREAT | os.O_EXCL), 0o666)
            os.close(descriptor)
            if not there:
                path.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return path


def plot_file(path: Path | None) -> Path | None:
    """The same, of a kind that can be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if path is not None:
        output_file(path)
        if path.suffix.lower() not in _PLOTS:
            raise typer.BadParameter(f"{path} is none of {', '.join(_PLOTS)}, which plots are drawn as")
        require("matplotlib", "geartrain[plot]", "A plot")
    return path


def output_folder(path: Path | None) -> Path | None:
    """A folder that is there, or can be created in one that is, which is tried."""
    if path is not None and not _named(path).is_dir():
        try:
            path.mkdir()
            path.rmdir()
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be created: {error.strerror}") from None
    return path


def input_file(path: Path | None) -> Path | None:
    """A regular file that can be read."""
    if path is not None:
        if not _named(path).is_file():
            raise typer.BadParameter(f"there is no file {path}")
        if not os.access(path, os.R_OK):
            raise typer.BadParameter(f"{path} cannot be read")
    return path


def _named(path: Path) -> Path:
    if str(path) in ("", "."):
        raise typer.BadParameter("a path is needed, found an empty one")
    return path
