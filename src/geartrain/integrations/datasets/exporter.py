"""Export of a store or checkpoint as a dataset: NPZ, a folder of NPY files, Parquet, Minari, LeRobot v3.

Rows are read and written one group at a time. A group is 16 MB or one row, which bounds memory however large the store
is. The export is written next to its destination under another name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import geartrain._native as _native
from geartrain.core.arguments import check_choice, check_flag, check_path, check_text, shown
from geartrain.core.progress import Progress
from geartrain.core.schema import Field
from geartrain.core.shared_files import FULL, Trust, check_trust, room_in
from geartrain.errors import ArgumentError, DatasetExistsError, GeartrainError, NoSpaceError, SourceError
from geartrain.integrations.datasets.arguments import casts_of, checked_options
from geartrain.integrations.datasets.episode import FieldChoice, choose
from geartrain.integrations.datasets.stored_rows import METADATA, StoredRows
from geartrain.integrations.datasets.writer import DatasetWriter
from geartrain.store.checkpoint_directory import sibling
from geartrain.store.checkpoint_format import sync_directory
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.recorder import EPISODES
from geartrain.store.store import Store

_log = logging.getLogger(__name__)

# Format -> module, class, and the ending that "auto" knows it by. A module is imported on use.
EXPORT_FORMATS = {
    "npz": ("geartrain.integrations.datasets.export_arrays", "NpzWriter", ".npz"),
    "npy": ("geartrain.integrations.datasets.export_arrays", "NpyWriter", None),
    "parquet": ("geartrain.integrations.datasets.export_parquet", "ParquetWriter", ".parquet"),
    "minari": ("geartrain.integrations.datasets.export_minari", "MinariWriter", None),
    "lerobot": ("geartrain.integrations.datasets.export_lerobot", "LeRobotWriter", None),
}


@dataclass(frozen=True)
class ExportReport:
    """Result of an export. `export_store` returns it.

    Attributes:
        rows: rows written. A row with several episodes counts once for each of them.
        steps: steps of all of them.
        nbytes: bytes of their values.
        overwritten: rows that were overwritten or removed before they were read; they are left out.
        still_open: rows that their writers were still extending. Their steps so far are written.
        left_out: fields that are not written, and why: not asked for, or not supported by the format.
        elapsed_s: duration, in seconds.
    """

    rows: int
    steps: int
    nbytes: int
    overwritten: int
    still_open: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        rate = self.nbytes / 1e6 / max(self.elapsed_s, 1e-9)
        text = (
            f"{self.rows:,} rows, {self.steps:,} steps, {self.nbytes / 1e6:,.1f} MB "
            f"in {self.elapsed_s:.1f} s ({rate:,.0f} MB/s)"
        )
        if self.overwritten:
            text += f"; {self.overwritten:,} were overwritten before they were read, and are left out"
        if self.still_open:
            text += f"; {self.still_open:,} were being extended"
        if self.left_out:
            text += f"; without {', '.join(f'{name} ({why})' for name, why in self.left_out.items())}"
        return text


def export_store(
    source: Store | Checkpoint | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    fields: FieldChoice = None,
    cast: Mapping[str, str] | Sequence[str] | str = (),
    skip_unsupported: bool = False,
    metadata: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    trust: Trust = "user",
    **options: Any,
) -> ExportReport:
    """Writes all rows of a store as a dataset of another format, one episode a row, oldest first.

    Rows with several episodes (`recorder(share_rows=True)`) are split into these. The dataset appears in one step,
    complete and flushed to its disk, or not at all. The store may be in use: it is opened read-only, and rows that are
    overwritten meanwhile are left out and counted.

    Args:
        source: a store, an open checkpoint, or the name or path of either.
        path: file or folder to write; its parent must exist.
        format: one of `EXPORT_FORMATS`; "auto" recognises .npz and .parquet.
        fields: fields to write: names, `"written=stored"` assignments, or {written: stored}. A name includes everything
            below it. All by default.
        cast: dtypes to convert, such as {"bfloat16": "float32"} or "bfloat16=float32".
        skip_unsupported: leave out fields that the format cannot hold, instead of raising. The report names them.
        metadata: also write `row.sequence`, `row.version`, `row.priority`, `row.times_sampled` and
            `row.inserted_at_ns`, as values once a row (npz, npy, parquet).
        overwrite: replace a dataset of this format. Nothing else is ever replaced: neither a folder with a file that is
            not of the format, nor a folder where the format is a file.
        progress: show a bar, or lines, on stderr. Without it, a warning in the log says what was left out.
        trust: who may write to the store that `source` names, as for `Store.open`.
        options: options of the format, such as `fps=30` for LeRobot; docs/importers.md lists them.

    Returns:
        What was written and what was left out.

    Raises:
        ArgumentError: the format, an option or a cast is unknown.
        SourceError: there is no row, or a field that the format cannot hold.
        DatasetExistsError: something is there already.
        NoSpaceError: the file system has too little space. Nothing of the attempt is left.
        OSError, StoreIOError: the path cannot be written to. Nothing of the attempt is left.
        MissingDependencyError: the format's package is not installed.
        StoreMissingError, CheckpointError: the source cannot be opened.

    Examples:
        >>> import numpy as np, tempfile, geartrain as gt
        >>> with gt.Store.create({"obs": gt.Field((4,), "float32")}, max_length=10, capacity=3) as store:
        ...     _ = store.insert({"obs": np.zeros((2, 10, 4), "f")})
        ...     report = export_store(store, tempfile.mkdtemp() + "/rows.npz", progress=False)  # an ExportReport
        >>> report.rows, report.steps
        (2, 20)
    """
    target, format = _target(path, format)
    casts = casts_of(cast)
    trust = check_trust(trust)
    for what, value in (
        ("skip_unsupported", skip_unsupported),
        ("metadata", metadata),
        ("overwrite", overwrite),
        ("progress", progress),
    ):
        check_flag(what, value)
    module, kind, _ = EXPORT_FORMATS[format]
    writer_class: type[DatasetWriter] = getattr(importlib.import_module(module), kind)
    options = checked_options(f"the {format} exporter", writer_class, options, ("fields", "about"))
    if metadata and not writer_class.TAKES_METADATA:
        raise ArgumentError(f"{format} has no place for the metadata of rows; npz, npy and parquet have")
    _check_target(target, format, overwrite, writer_class)
    started = time.monotonic()
    with contextlib.ExitStack() as ends:
        with _naming_errors(target):
            fresh = ends.enter_context(sibling(target)) / "dataset"
        rows = ends.enter_context(StoredRows(source, trust=trust))
        if rows.count == 0:
            raise SourceError(f"{rows.name} has no row to export")
        chosen, left_out = _chosen(rows, writer_class, fields, casts, skip_unsupported)
        written = {name: _converted(rows.fields[stored], casts) for name, stored in chosen.items()}
        converted = {
            name: each.dtype for name, each in written.items() if each.dtype != rows.fields[chosen[name]].dtype
        }
        if metadata:
            taken = sorted(written.keys() & METADATA.keys())
            if taken:
                raise SourceError(f"{rows.name}: has fields that metadata=True would write: {', '.join(taken)}")
            written |= METADATA
        _check_space(target, writer_class.needed_bytes(written, rows.episodes(), rows.steps()[0]))
        done = steps = 0
        with Progress(f"exporting {rows.name}", rows.count, unit="rows", enabled=progress) as bar:
            with (
                _naming_errors(target),
                _ending(writer_class(fresh, fields=written, about=rows.name, **options)) as to,
            ):
                rows.verify()
                for group in rows.groups(chosen, converted, metadata=metadata):
                    bar.advance(to.write(group), group.rows)
                    done += len(group.lengths)
                    steps += int(group.lengths.sum())
                if done == 0:
                    raise SourceError(f"{rows.name}: every row was overwritten before it was read")
                to.finish()
            with _naming_errors(target):
                _flush(fresh)
                _put_in_place(fresh, target, format, overwrite, writer_class)
            report = ExportReport(done, steps, bar.nbytes, rows.overwritten, rows.still_open, left_out)
    report = replace(report, elapsed_s=time.monotonic() - started)
    bar.say(f"{target}: {report}")
    if not progress and (report.overwritten or report.still_open or report.left_out):
        _log.warning("%s: %s", target, report)
    return report


def _chosen(
    rows: StoredRows, writer: type[DatasetWriter], fields: FieldChoice, casts: Mapping[str, str], skip: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The fields to write, {written: stored}, and the fields left out, with the reason."""
    asked = choose(rows.name, fields, dict.fromkeys(rows.fields), list(rows.fields))
    refused = {
        name: why
        for name, stored in asked.items()
        if (why := writer.refused(name, _converted(rows.fields[stored], casts))) is not None
    }
    if refused and not skip:
        reasons = "; ".join(f"{name} ({why})" for name, why in refused.items())
        raise SourceError(
            f"{rows.name}: cannot be written: {reasons}. Leave these out with skip_unsupported=True, or list the "
            f"fields you want in fields="
        )
    chosen = {name: stored for name, stored in asked.items() if name not in refused}
    if not chosen:
        raise SourceError(f"{rows.name}: no field is left to export; it has {', '.join(rows.fields)}")
    unasked = {name: "not asked for" for name in rows.fields if name not in asked.values()}
    split = {EPISODES: "each episode is a trajectory"} if rows.split else {}
    return chosen, {**split, **unasked, **refused}


def _converted(field: Field, casts: Mapping[str, str]) -> Field:
    dtype = casts.get(field.dtype, field.dtype)
    return field if dtype == field.dtype else Field(field.shape, dtype, per_row=field.per_row)


def _target(path: str | os.PathLike[str], format: str) -> tuple[Path, str]:
    """The destination, with symbolic links followed, and the format."""
    name = check_text("the path to write to", str(check_path("the path to write to", path)))
    if not name.strip() or Path(name).name in ("", "."):
        raise ArgumentError(f"a path is needed to write to, found {shown(path)}")
    check_choice("format", format, ("auto", *EXPORT_FORMATS))
    if format == "auto":
        by_ending = {ending: each for each, (_, _, ending) in EXPORT_FORMATS.items() if ending}
        if Path(name).suffix not in by_ending:
            raise ArgumentError(
                f"{name!r} does not end in {' or '.join(by_ending)}: give format=, one of {', '.join(EXPORT_FORMATS)}"
            )
        format = by_ending[Path(name).suffix]
    return Path(os.path.realpath(name)), format


def _check_target(target: Path, format: str, overwrite: bool, writer: type[DatasetWriter]) -> None:
    """Raises where the dataset cannot be put: before any work."""
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{target} cannot be written: its folder does not exist")
    if _is_there(target):
        if not overwrite:
            raise DatasetExistsError(f"{target} exists already; overwrite=True (--overwrite) replaces a dataset")
        if not _replaceable(target, writer):
            raise DatasetExistsError(
                f"{target} has files that are not of a {format} dataset, so it is not replaced: choose another path"
            )


def _is_there(target: Path) -> bool:
    try:
        target.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:  # such as a name that is too long
        raise type(error)(error.errno, f"{target} cannot be written: {error.strerror}") from None
    return True


def _replaceable(target: Path, writer: type[DatasetWriter]) -> bool:
    try:
        return writer.replaces(target)
    except OSError:
        return False


def _check_space(target: Path, needed: int) -> None:
    about = os.statvfs(target.parent)
    free = about.f_bavail * about.f_frsize
    if needed > free:
        raise NoSpaceError(
            f"{target} needs {needed:,} bytes at least, and its file system has {free:,}; nothing was written"
        )


@contextlib.contextmanager
def _ending(writer: DatasetWriter) -> Iterator[DatasetWriter]:
    try:
        yield writer
    except BaseException:
        with contextlib.suppress(Exception):  # such as the full disk, again
            writer.close()
        raise
    writer.close()


def _flush(path: Path) -> None:
    """Writes a file, or a folder and all in it, to its disk."""
    inside = sorted(path.rglob("*")) if path.is_dir() else []
    for each in [*inside, path]:
        descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(fresh: Path, target: Path, format: str, overwrite: bool, writer: type[DatasetWriter]) -> None:
    """Gives the dataset its name in one step, and removes a previous dataset of that name if allowed."""
    if os.path.lexists(target):
        if not overwrite:
            raise DatasetExistsError(f"another process wrote {target} meanwhile; it is left as it is")
        if not _replaceable(target, writer):
            raise DatasetExistsError(
                f"{target} now has files that are not of a {format} dataset, so it is not replaced: choose another path"
            )
        _native.exchange_paths(str(fresh), str(target))
    elif fresh.is_dir():
        fresh.rename(target)  # which fails where a folder that is not empty, or a file, has come between
    else:
        try:
            os.link(fresh, target)  # which fails where a file has come between, as a rename does not
        except FileExistsError:
            raise DatasetExistsError(f"another process wrote {target} meanwhile; it is left as it is") from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            fresh.rename(target)  # a file system without links
    sync_directory(target.parent)


@contextlib.contextmanager
def _naming_errors(target: Path) -> Iterator[None]:
    """Names the target in the system's errors, whichever library tells them; a full disk is a `NoSpaceError`."""
    try:
        yield
    except GeartrainError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        number = getattr(error, "errno", None)
        # Arrow and HDF5 put the number into the text alone.
        told = next((each for each in FULL if number == each or f"rrno {each}]" in str(error)), None)
        told = told or next((each for each in FULL if f"errno = {each}," in str(error)), None)
        if told is None:
            if not isinstance(error, OSError):
                raise
            raise type(error)(number, f"{target} cannot be written: {error.strerror or error}") from error
        raise NoSpaceError(
            f"cannot write {target}: {os.strerror(told)}; {room_in(target)}. The unfinished dataset is removed"
        ) from error


__all__ = ["EXPORT_FORMATS", "ExportReport", "export_store"]
