"""Dataset import: `import_dataset` into a new store, `ingest` into an existing one.

Each episode is first checked against the store's schema and then copied once, into a row of shared memory. If an
episode does not fit, the error names the episode, the field, its value and what would fit. One episode is in memory at
a time. Video frames are decoded straight into the rows, for several episodes at once.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from geartrain.core.arguments import check_choice, check_flag, check_path, check_whole, optional
from geartrain.core.dtypes import as_dtype
from geartrain.core.progress import Progress
from geartrain.core.schema import Field
from geartrain.errors import SourceError, StoreError, StoreExistsError, StoreFullError, StoreMissingError
from geartrain.integrations.datasets.arguments import casts_of, checked_options
from geartrain.integrations.datasets.episode import Array, DeferredSteps, Episode, FieldChoice, Source, reading
from geartrain.integrations.datasets.episode_choice import EpisodeChoice, Where, chosen_episodes
from geartrain.integrations.datasets.row_filling import RowFiller
from geartrain.store.segment import check_name, path_hint
from geartrain.store.store import Store

_log = logging.getLogger(__name__)
TooLong = Literal["error", "truncate", "skip"]

# Format -> module and class. A module is imported on use; each of them has `recognise(path)`, which checks
# the content, and `LOOKS_FOR`, which says what it checks.
FORMATS = {
    "minari": ("geartrain.integrations.datasets.minari", "MinariSource"),
    "rlds": ("geartrain.integrations.datasets.rlds", "RldsSource"),
    "lerobot": ("geartrain.integrations.datasets.lerobot", "LeRobotSource"),
    "d4rl": ("geartrain.integrations.datasets.d4rl", "D4rlSource"),
    "parquet": ("geartrain.integrations.datasets.parquet", "ParquetSource"),
    "arrays": ("geartrain.integrations.datasets.arrays", "ArraySource"),
    "torch": ("geartrain.integrations.datasets.torch_dataset", "TorchSource"),
}


@dataclass(frozen=True)
class ImportReport:
    """Result of an import. `ingest` returns it.

    Attributes:
        episodes: rows written.
        steps: steps of all rows.
        nbytes: bytes written, without the padding of rows.
        too_long: episodes left out (`on_too_long="skip"`) or cut ("truncate").
        empty: episodes without steps, which are always left out.
        elapsed_s: duration, in seconds.
        frames: video frames decoded into rows.
    """

    episodes: int
    steps: int
    nbytes: int
    too_long: int
    empty: int
    elapsed_s: float
    frames: int = 0

    def __str__(self) -> str:
        rate = self.nbytes / 1e6 / max(self.elapsed_s, 1e-9)
        text = (
            f"{self.episodes:,} episodes, {self.steps:,} steps, {self.nbytes / 1e6:,.1f} MB "
            f"in {self.elapsed_s:.1f} s ({rate:,.0f} MB/s)"
        )
        if self.frames:
            text += f"; {self.frames:,} frames of videos ({self.frames / max(self.elapsed_s, 1e-9):,.0f}/s)"
        if self.too_long:
            text += f"; {self.too_long:,} were too long"
        if self.empty:
            text += f"; {self.empty:,} without a step left out"
        return text


def import_dataset(
    source: object,
    into: str | Path,
    *,
    format: str = "auto",
    fields: FieldChoice = None,
    episodes: EpisodeChoice = None,
    where: Where = None,
    capacity: int | None = None,
    max_length: int | None = None,
    on_too_long: TooLong = "error",
    cast: Mapping[str, str] | Sequence[str] | str = (),
    skip_unsupported: bool = False,
    persist: bool | None = None,
    progress: bool = True,
    **options: Any,
) -> Store:
    """Creates a store with the episodes of a dataset, one per row.

    About one episode is in memory at a time, so a dataset larger than memory can be imported into a file.

    The store is complete or absent: if anything fails, what this call created is removed. A complete store is sealed:
    flushed to its disk and marked as whole. From then on any process can open it, whichever process is killed.

    The returned handle is read-only, like `Store.open(..., mode="r")`, so a killed training leaves no trace in the data
    set. `Store.open(into)` opens it for writing, to add rows or to update priorities.

    Args:
        source: a path, a dict of NumPy arrays, a torch `Dataset`, or a `Source`.
        into: name of the store to create; a name with a slash is a file.
        format: one of `FORMATS`; "auto" detects it from the content.
        fields: fields to import: names, `"stored=found"` assignments, or {stored: found}. A name includes everything
            below it. None imports the format's usual fields.
        episodes: numbers of the episodes to import, from 0 in the dataset's order: `7`, `range(100)`, `[3, 5]`,
            `slice(-10, None)`, or text such as "0:100" or "3,5,8:10". None imports all.
        where: chooses episodes by their metadata: a function such as `lambda m: m["task"] == "pick"`, which gets a
            mapping with `episode`, `length` and the names that the format has (docs/importers.md), or conditions such
            as "task=pick" or ["length>100", "success=true"], all of which must hold. With `episodes` it looks at these
            only. Images and videos of other episodes are not read.
        capacity: rows of the store; by default the number of episodes that are imported.
        max_length: steps of the longest row; by default from the metadata, or from one pass over the data. If you give
            it with `capacity`, the dataset is read only once.
        on_too_long: what to do with an episode longer than `max_length`: "error", "truncate" (keep its first steps) or
            "skip".
        cast: dtypes to convert, such as {"float64": "float32"} or "float64=float32".
        skip_unsupported: leave out fields that no store can hold (text, depth maps), instead of raising.
        persist: keep the store after the last process closed it. True by default for files only.
        progress: show a bar, or lines, on stderr. Without it, a warning in the log counts episodes that were left out
            or cut.
        options: options of the format, such as `split=` for RLDS or `episode_steps=` for D4RL. None is the format's
            default.

    Returns:
        The store.

    Raises:
        ArgumentError: the format, an option, a cast, `capacity` or `max_length` is invalid.
        SourceError: the dataset, or an episode of it, cannot be stored; or no episode is chosen.
        FieldError: `where` asks for metadata that the episodes do not have; the message lists what they have.
        MissingDependencyError: the format's package is not installed.
        StoreExistsError: `into` exists.
        NoSpaceError: the file system has too little space for the store.

    Examples:
        >>> import numpy as np
        >>> data = {"obs": np.zeros((3, 10, 4), "float32")}
        >>> with import_dataset(data, "import-example", progress=False) as store:
        ...     len(store), store.max_length
        (3, 10)
        >>> with import_dataset(data, "import-example", episodes="0:2", where="length>5", progress=False) as store:
        ...     len(store)
        2
    """
    casts, name = casts_of(cast), check_name(into)
    _check_too_long(on_too_long)
    check_flag("progress", progress)
    if persist is not None:
        check_flag("persist", persist)
    for what, value in (("capacity", capacity), ("max_length", max_length)):
        optional(check_whole, what, value, 1, 2**62)
    _check_absent(name)  # before a long pass over the data
    opened = open_source(
        source,
        format=format,
        fields=fields,
        episodes=episodes,
        where=where,
        skip_unsupported=skip_unsupported,
        progress=progress,
        **options,
    )
    if capacity is None:
        capacity = opened.episodes
    if capacity is None or max_length is None:
        extent = opened.extent(progress=progress)
        capacity = extent.episodes if capacity is None else capacity
        max_length = extent.longest if max_length is None else max_length
    if capacity < 1 or max_length < 1:
        raise SourceError(f"{opened.name} has no episode with at least one step")
    schema = {
        name: Field(found.shape, casts.get(found.dtype, found.dtype), per_row=found.per_row)
        for name, found in opened.fields().items()
    }
    store, began_ns = None, time.time_ns()
    try:
        store = Store.create(name, schema, max_length=max_length, capacity=capacity, persist=persist)
        ingest(opened, store, on_too_long=on_too_long, cast=casts, progress=progress)
        _seal(store)
    except BaseException:
        if store is None:
            _remove_begun(name, began_ns)
        else:
            store.unlink()
            store.close()
        raise
    return store


def _seal(store: Store) -> None:
    """Flushes the store, marks it as whole, and makes the handle read-only; not where another process writes to it."""
    try:
        store.native.seal_segment()
    except StoreFullError as error:
        _log.warning("the data set is complete, but not sealed: %s", error)


def _remove_begun(name: str, began_ns: int) -> None:
    """Removes the store that this process has created since, and that an interrupt has kept `Store.create` from
    returning: it would look like a whole import without rows."""
    with contextlib.suppress(StoreError, OSError), Store.open(name, mode="r", adopt=True) as found:
        about = found.native.describe()
        mine = {each["pid"] for each in found.native.clients()} <= {os.getpid()}
        if mine and about["created_ns"] >= began_ns and len(found) == 0:
            found.unlink()


def ingest(
    source: Source,
    store: Store,
    *,
    on_too_long: TooLong = "error",
    cast: Mapping[str, str] | Sequence[str] | str = (),
    progress: bool = True,
) -> ImportReport:
    """Writes all episodes of a source into a store, one row each, in the source's order.

    A dtype is converted if no value can change (float32 into a float64 field), or if `cast` names the conversion; other
    conversions raise.

    Args:
        source: the episodes; `open_source` makes one.
        store: the store to fill.
        on_too_long, cast, progress: as for `import_dataset`.

    Returns:
        What was written and what was left out.

    Raises:
        SourceError: an episode does not fit, or cannot be read. The message names it. The rows of earlier episodes
            stay.

    Examples:
        >>> import numpy as np, geartrain as gt
        >>> source = open_source({"obs": np.zeros((3, 10, 4), "float32")})
        >>> with gt.Store.create(source.fields(), max_length=10, capacity=8) as store:
        ...     report = ingest(source, store, progress=False)  # an ImportReport
        >>> report.episodes, report.steps
        (3, 30)
    """
    casts = casts_of(cast)
    _check_too_long(on_too_long)
    check_flag("progress", progress)
    schema = dict(store.fields)
    limit = store.options["max_rows"] or store.capacity
    room = limit - len(store)
    steps = too_long = empty = 0
    started = time.monotonic()
    with (
        Progress(source.name, source.episodes, enabled=progress) as bar,
        contextlib.ExitStack() as opened,
    ):
        opened.callback(source.release)
        rows = opened.enter_context(RowFiller(store, source.threads, bar.advance))
        try:
            for episode in source:
                if episode.length == 0:
                    empty += 1
                    continue
                fitting = episode
                if episode.length > store.max_length:
                    too_long += 1
                    if on_too_long == "skip":
                        continue
                    if on_too_long == "truncate":
                        fitting = episode.cut(store.max_length)
                if rows.rows == room:
                    raise SourceError(
                        f"{source.name}: {episode.name}: the store is full ({limit:,} rows): use a larger one, or "
                        "fewer episodes"
                    )
                _check(source.name, fitting, schema, store.max_length, casts)
                rows.add(fitting)
                steps += fitting.length
                del episode, fitting  # before the source reads the next one
        except SourceError:
            rows.finish()  # or the error of an episode before that one
            raise
        rows.finish()
        elapsed_s = time.monotonic() - started
        report = ImportReport(bar.done, steps, bar.nbytes, too_long, empty, elapsed_s, rows.deferred)
    bar.say(f"{source.name}: {report}")
    if not progress and (report.too_long or report.empty):  # nothing is left out without a word
        _log.warning("%s: %s", source.name, report)
    return report


def open_source(
    source: object,
    *,
    format: str = "auto",
    fields: FieldChoice = None,
    episodes: EpisodeChoice = None,
    where: Where = None,
    skip_unsupported: bool = False,
    progress: bool = False,
    **options: Any,
) -> Source:
    """Opens a dataset as a `Source` of episodes, without a store.

    `Source.metadata()` shows what `where` can look at.

    Args:
        source, format, fields, episodes, where, skip_unsupported, options: as for `import_dataset`.
        progress: show a bar on stderr while `where` looks at the metadata.

    Raises:
        ArgumentError: the format is unknown, or has no such option. The message lists the valid ones.
        SourceError: the path is in no known format, or damaged; or no episode is chosen.
        FieldError: `where` asks for metadata that the episodes do not have; the message lists what they have.

    Examples:
        >>> import numpy as np
        >>> data = {"obs": np.zeros((3, 10, 4), "float32"), "task": np.array([0, 1, 1])}
        >>> source = open_source(data, where=lambda m: m["task"] == 1)
        >>> [dict(about) for about in source.metadata()]
        [{'episode': 1, 'task': 1, 'length': 10}, {'episode': 2, 'task': 1, 'length': 10}]
    """
    check_flag("progress", progress)
    opened = _opened(source, format, fields, check_flag("skip_unsupported", skip_unsupported), options)
    return chosen_episodes(opened, episodes, where, progress=progress)


def _opened(
    source: object, format: str, fields: FieldChoice, skip_unsupported: bool, options: dict[str, Any]
) -> Source:
    """All episodes of a dataset."""
    if isinstance(source, Source):
        if fields is not None or options:
            raise SourceError(f"{source.name} is open already: give fields and options when you open it")
        return source
    check_choice("format", format, ("auto", *FORMATS))
    if isinstance(source, str | Path):
        check_path("the source of an import", source)
    if format == "auto":
        format = _recognise(source)
    module, kind = FORMATS[format]
    opener = getattr(importlib.import_module(module), kind)
    options = checked_options(f"the {format} importer", opener, options, ("fields", "skip_unsupported"))
    if format != "torch":
        with reading(str(source) if isinstance(source, str | Path) else "the arrays", f"the format {format}"):
            opened = opener(source, fields=fields, skip_unsupported=skip_unsupported, **options)
    else:  # errors of the user's own dataset are theirs
        opened = opener(source, fields=fields, skip_unsupported=skip_unsupported, **options)
    assert isinstance(opened, Source)  # FORMATS names only classes of this package
    return opened


def _recognise(source: object) -> str:
    if isinstance(source, Mapping):
        return "arrays"
    if not isinstance(source, str | Path):
        return "torch"
    path = Path(source)
    if not os.path.lexists(path):
        raise SourceError(f"{path} does not exist")
    looked_for = []
    for name, (module_name, _) in FORMATS.items():
        module = importlib.import_module(module_name)
        with reading(str(path), "a dataset"):
            if module.recognise(path):
                return name
        if module.LOOKS_FOR:
            looked_for.append(f"{module.LOOKS_FOR} ({name})")
    raise SourceError(f"{path} has no known format; looked for {'; '.join(looked_for)}")


def _check(where: str, episode: Episode, schema: Mapping[str, Field], limit: int, casts: Mapping[str, str]) -> None:
    """Raises `SourceError` unless the episode fits a row, field by field."""
    here = f"{where}: {episode.name}"
    if episode.length > limit:
        raise SourceError(
            f"{here}: has {episode.length:,} steps, a row of the store holds {limit:,}. Import with "
            f"max_length={episode.length}, or with on_too_long='truncate' or 'skip'"
        )
    found: dict[str, Array | DeferredSteps] = {**episode.timed, **episode.untimed}
    if found.keys() != schema.keys():
        raise SourceError(
            f"{here}: has the fields {', '.join(sorted(found))}; the store has {', '.join(sorted(schema))}"
        )
    for name, array in found.items():
        field = schema[name]
        timed = name in episode.timed
        if timed == field.per_row:
            kinds = {True: "a value per step", False: "one value per episode"}
            raise SourceError(f"{here}: field {name!r} is {kinds[timed]}, the store keeps {kinds[not field.per_row]}")
        if timed and len(array) != episode.length:
            lengths = {key: len(value) for key, value in episode.timed.items()}
            raise SourceError(f"{here}: its fields disagree about its length: {lengths}")
        shape = array.shape[1:] if timed else array.shape
        if shape != field.shape:
            what = "steps of shape" if timed else "shape"
            raise SourceError(f"{here}: field {name!r} has {what} {shape}, the store holds {field.shape}")
        _check_dtype(here, name, array, field, casts)


def _check_dtype(here: str, name: str, array: Array | DeferredSteps, field: Field, casts: Mapping[str, str]) -> None:
    found = array.dtype.name
    if field.dtype in (found, casts.get(found)):
        return
    numpy_name = as_dtype(field.dtype).numpy_name
    if numpy_name is not None and np.can_cast(array.dtype, numpy_name, "safe"):
        return
    raise SourceError(
        f"{here}: field {name!r} has dtype {found}, the store holds {field.dtype}, which "
        f"cannot take every value of it; convert on purpose with "
        f"cast='{found}={field.dtype}'"
    )


def _check_absent(name: str) -> None:
    if "/" in name and not Path(name).parent.is_dir():
        raise StoreMissingError(f"{name} cannot be created: {Path(name).parent} is no directory")
    try:
        found = Store.open(name, mode="r", adopt=True)
    except StoreMissingError:
        return
    rows, path = len(found), found.path
    killed = found.native.live_clients() == 0 and not found.native.closed_in_order()
    found.close()
    of_killed = " of processes that were killed: an import that was not finished, for example" if killed else ""
    read = "" if killed else f"Store.open({name!r}, mode='r') reads it. "
    raise StoreExistsError(
        f"a store named {name!r} exists already ({path}, {rows:,} rows{of_killed}). {read}Import under another name, "
        f"or delete its rows first: geartrain remove {shlex.quote(name)}{path_hint(name)}"
    )


def _check_too_long(on_too_long: str) -> None:
    check_choice("on_too_long", on_too_long, ("error", "truncate", "skip"))
