"""Episodes and sources: the interface between importers and stores, and the names of fields.

A *source* is an iterable of `Episode`s that can be iterated more than once. It holds one episode (or one slice of a
file) in memory at a time, so a dataset larger than memory can be imported. Each format's file has one `Source`.
`ingest` in importer.py writes its episodes into a store.

Every importer uses the same singular names: `obs`, `action`, `reward`, `terminated`, `truncated` and `next_obs`.
`final_obs` is the observation after the last step, once for each row. Nested observations are flattened with dots
(`obs.state`, `obs.images.front`), as `TensorDict.unflatten_keys()` expects.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from geartrain.core.arguments import check_text, check_texts, did_you_mean, some_of
from geartrain.core.progress import Progress
from geartrain.core.schema import Field
from geartrain.errors import (
    ArgumentError,
    FieldError,
    GeartrainError,
    SchemaError,
    SourceError,
)

Array = np.ndarray[Any, np.dtype[Any]]
FieldChoice = Mapping[str, str] | Sequence[str] | str | None

# Bytes of all fields in one read of a flat file: large enough for the disk and for HDF5's chunks, small
# compared with the store.
SLICE_BYTES = 16 << 20


class DeferredSteps(abc.ABC):
    """Steps of a field that are produced in place, such as video frames that are decoded into a row.

    Attributes:
        shape: (T, ...).
        dtype: dtype of the steps.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abc.abstractmethod
    def read_into(self, out: Array, stopped: Callable[[], bool] = lambda: False) -> None:
        """Makes them in an array of this shape, converted to its dtype. By any thread, several of them at once.

        Args:
            out: where to.
            stopped: whether nobody wants them any more; asked from time to time, and then it may return early.

        Raises:
            SourceError: they cannot be made.
        """

    @abc.abstractmethod
    def first(self, length: int) -> DeferredSteps:
        """The first steps alone."""

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("these steps are in no array yet, so that they cannot be had without a copy")
        made = np.empty(self.shape, self.dtype)
        self.read_into(made)
        return made if dtype is None else made.astype(dtype, copy=False)


@dataclass(frozen=True)
class Episode:
    """One episode (trajectory), which becomes one row.

    Attributes:
        name: name for error messages, precise enough to find the episode in the files.
        timed: arrays (T, ...) by field, all of the same T, or `DeferredSteps`.
        untimed: values once a row, such as `final_obs`.
        follows: maps an untimed name to a timed name. The untimed value is that field's next step after the episode.
            `cut` replaces it by the step after the cut.

    Examples:
        >>> import numpy as np
        >>> from geartrain.integrations import open_source
        >>> source = open_source({"obs": np.zeros((3, 10, 4), "float32")})  # a Source of three Episodes
        >>> [episode.length for episode in source], source.extent().longest  # of an Extent
        ([10, 10, 10], 10)
    """

    name: str
    timed: Mapping[str, Array | DeferredSteps]
    untimed: Mapping[str, Array] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of steps: the first axis of the timed fields, or 1 without any."""
        return next((len(array) for array in self.timed.values()), 1)

    def cut(self, length: int) -> Episode:
        """The first steps of the episode, as views.

        Args:
            length: number of steps.

        Raises:
            SourceError: a `final_` field cannot be replaced, because the field that it follows is missing.
        """
        untimed = dict(self.untimed)
        for name, timed in self.follows.items():
            if timed not in self.timed:
                raise SourceError(
                    f"{self.name}: truncating it to {length} steps needs {name!r} of the step after "
                    f"them; import {timed!r} too, or leave {name!r} out"
                )
            untimed[name] = np.asarray(self.timed[timed])[length]
        timed_cut = {
            name: steps.first(length) if isinstance(steps, DeferredSteps) else steps[:length]
            for name, steps in self.timed.items()
        }
        return replace(self, timed=timed_cut, untimed=untimed)


@dataclass(frozen=True)
class Extent:
    """Size of a source.

    Attributes:
        episodes: number of episodes.
        longest: steps of the longest.
    """

    episodes: int
    longest: int


class Metadata(Mapping[str, Any]):
    """What is known of one episode without its data: `episode` (its number), `length` and what the format has.

    Args:
        number: of the episode, from 0 in the source's order.
        known: values by name, `length` among them.
        later: functions by name; each makes a value when it is asked for.
    """

    def __init__(
        self, number: int, known: Mapping[str, Any], later: Mapping[str, Callable[[], Any]] | None = None
    ) -> None:
        self._known, self._later = {"episode": number, **known}, later or {}

    def __getitem__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        if name in self._later:
            return self._later[name]()
        raise FieldError(
            f"episodes have no metadata {name!r}; they have {some_of(self, 40)}{did_you_mean(name, list(self))}"
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default where there is none; without the cost of an error's text."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._later

    def __iter__(self) -> Iterator[str]:
        return iter([*self._known, *self._later])

    def __len__(self) -> int:
        return len(self._known) + len(self._later)


class Source(abc.ABC):
    """Episodes of a dataset. They can be iterated more than once, each time from the first."""

    name: str
    episodes: int | None = None  # from the format's metadata, or after `extent()`; None before
    threads: int = 1  # that make deferred steps

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Episode]:
        """Every episode in the source's own order, one at a time."""

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The episodes of these numbers. A format that can skip the others without reading their data overrides this.

        Args:
            numbers: from 0, in the source's order, rising; None for all.

        Raises:
            SourceError: the source has fewer episodes.
        """
        if numbers is None:
            yield from self
            return
        wanted = iter(numbers)
        number = next(wanted, None)
        for at, episode in enumerate(self):
            if number is None:
                return
            if at == number:
                yield episode
                number = next(wanted, None)
        if number is not None:
            raise SourceError(f"{self.name}: there is no episode {number}")

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """What `where=` and `extent` look at: a mapping for each episode, in the source's order.

        `length` is its number of steps. The other names are the format's. By default all episodes are read, and the
        names are those of their untimed numbers. A format that knows more, or knows it without the data, overrides
        this.
        """
        for number, episode in enumerate(self):
            numbers = {name: value.item() for name, value in episode.untimed.items() if np.ndim(value) == 0}
            yield Metadata(number, {"length": episode.length, **numbers})

    def release(self) -> None:  # noqa: B027
        """Closes the files that deferred steps opened. They are opened again when needed."""

    def extent(self, *, progress: bool = False) -> Extent:
        """Number of episodes and longest length, from the metadata.

        Args:
            progress: shows a bar, for formats that read all data for it.
        """
        longest = 0
        with Progress(f"{self.name}: lengths", self.episodes, enabled=progress, delay_s=1) as bar:
            for about in self.metadata():
                longest = max(longest, about["length"])
                bar.advance(0)
        self.episodes = bar.done
        return Extent(bar.done, longest)

    def first(self) -> Episode:
        """First episode that has a step. All others must have its shapes and dtypes.

        Raises:
            SourceError: there is none.
        """
        for episode in self:
            if episode.length:
                return episode
        raise SourceError(f"{self.name}: holds no episode with at least one step")

    def fields(self) -> dict[str, Field]:
        """Fields of a store for this source.

        Raises:
            SourceError: a field that no store can hold.
        """
        episode = self.first()
        found: dict[str, Field] = {}
        for timed, arrays in ((True, episode.timed), (False, episode.untimed)):
            for name, array in arrays.items():
                shape = array.shape[1:] if timed else array.shape
                try:
                    found[name] = Field(shape, array.dtype.newbyteorder("="), per_row=not timed)
                except SchemaError as error:
                    raise SourceError(
                        f"{self.name}: {episode.name}: field {name!r} ({array.dtype}, "
                        f"shape {array.shape}) cannot be stored: {error}"
                    ) from None
        return found


class FormatSource(Source):
    """A source that reads the chosen fields of any episodes, by their numbers."""

    _chosen: dict[str, str]  # stored name -> the format's name

    @abc.abstractmethod
    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]: ...

    def __iter__(self) -> Iterator[Episode]:
        return self.read()

    def numbered(self) -> Iterator[tuple[int, Episode]]:
        """All episodes with their numbers."""
        return enumerate(self.read())

    @functools.cached_property
    def _figures(self) -> dict[str, dict[int, Any]]:
        return {}

    def figure(self, field: str, of_steps: Callable[[Array], Any], number: int) -> Any:
        """A figure of one episode, from its steps of a field, which are read for all episodes when it is first asked
        for."""
        if field not in self._figures:
            alone = copy.copy(self)
            alone._chosen = {field: field}
            with reading(f"{self.name}: {field} of all episodes", "numbers"):
                self._figures[field] = {n: of_steps(np.asarray(each.timed[field])) for n, each in alone.numbered()}
        return self._figures[field][number]


def total(steps: Array) -> float:
    """The sum of an episode's rewards: its return."""
    return float(steps.sum(dtype=np.float64))


def ever(steps: Array) -> bool:
    """Whether a flag is set in any step."""
    return bool(steps.any())


def choose(
    where: str,
    wanted: FieldChoice,
    available: Mapping[str, str | None],
    default: Collection[str],
    skip_unsupported: bool = False,
) -> dict[str, str]:
    """The fields of a source to import, as stored name -> the source's name.

    Args:
        where: the source's name, for messages.
        wanted: None for `default`; else names, or `"stored=found"` assignments, or the mapping
            {stored: found}. A name also stands for everything below it: "obs" takes "obs.state".
        available: every field of the source -> why it cannot be stored, or None where it can.
        default: the names to take when `wanted` is None.
        skip_unsupported: leave out what cannot be stored instead of raising.

    Raises:
        ArgumentError: text that is neither a name nor an assignment.
        SourceError: an unknown name, a name taken twice, or a field that cannot be stored; it lists
            what can.

    Example:
        >>> choose("demo", ["obs", "act=action"], {"obs.x": None, "action": None}, ["obs.x"])
        {'obs.x': 'obs.x', 'act': 'action'}
    """
    if wanted is None:
        pairs = [(name, name) for name in default]
    elif isinstance(wanted, Mapping):
        pairs = [
            (check_text("a field's name", stored), check_text("a field", found)) for stored, found in wanted.items()
        ]
    else:
        names = check_texts("fields", [wanted] if isinstance(wanted, str) else wanted)
        pairs = []
        for text in names:
            stored, equals, found = text.partition("=")
            if not stored or (equals and not found):
                raise ArgumentError(f"a field is a name or stored=found, found {text!r}")
            pairs.append((stored, found or stored))

    chosen: dict[str, str] = {}
    refused: dict[str, str] = {}
    for stored, found in pairs:
        # The default names every field itself, also one that others stand below.
        below = [name for name in available if name == found or (wanted is not None and name.startswith(found + "."))]
        if not below:
            raise SourceError(
                f"{where}: has no field {found!r}; it has {_listed(available)}{did_you_mean(found, available)}"
            )
        for name in below:
            reason = available[name]
            if reason is not None:
                refused[name] = reason
                continue
            target = stored + name.removeprefix(found)
            if target in chosen:
                raise SourceError(f"{where}: two fields would be stored as {target!r}")
            chosen[target] = name
    if refused and not skip_unsupported:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in refused.items())
        storable = _listed([name for name, reason in available.items() if reason is None])
        raise SourceError(
            f"{where}: cannot be stored: {reasons}. Leave these out with skip_unsupported=True, or "
            f"list the fields you want; these can be stored: {storable}"
        )
    if not chosen:
        raise SourceError(f"{where}: no field is left to import; it has {_listed(available)}")
    return chosen


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts, tuples and lists of arrays as one dict with dotted names.

    Example:
        >>> flatten({"obs": {"x": 1, "y": (2, 3)}})
        {'obs.x': 1, 'obs.y.0': 2, 'obs.y.1': 3}
    """
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        children = [(str(key), child) for key, child in enumerate(value)]
    elif isinstance(value, tuple):
        children = list(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in children:
        flat |= flatten(child, f"{prefix}.{key}" if prefix else key)
    return flat


@contextlib.contextmanager
def reading(place: str, expected: str) -> Iterator[None]:
    """Turns a library's errors about damaged or foreign data into a `SourceError` of one line.

    The libraries raise errors of any class on bytes that they did not write; those of geartrain pass.

    Args:
        place: the file, and what of it.
        expected: what should be there.
    """
    try:
        yield
    except GeartrainError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if isinstance(error, MemoryError):
            raise SourceError(
                f"{place}: does not fit into memory, where an import holds one episode at a time: {said}"
            ) from error
        if type(error) is not ValueError:  # those say themselves what is wrong
            said = f"cannot be read: {type(error).__name__}: {said}"
        raise SourceError(f"{place}: {said} (expected {expected})") from error


def count_of(what: str, value: Any) -> int:
    """A count from a dataset's metadata. Raises `ValueError` if it is not a whole number from 0 on."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not 0 <= value < 2**62:
        raise ValueError(f"{what} is a whole number from 0 on, found {value!r}")
    return int(value)


def plain(value: Any) -> Any:
    """A value of an episode's metadata as one of Python's: text, a number, a flag, or a list of them; else None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return list(value) if all(isinstance(each, str | int | float) for each in value) else None
    return value if isinstance(value, str | int | float) else None


def flags(place: str, values: Array, first: int = 0) -> Array:
    """Values that are 0 or 1, of any dtype, as booleans.

    Args:
        place: the file and the field, for the message.
        values: (N,).
        first: the step of the first value, for the message.

    Raises:
        SourceError: another value, such as NaN; names the first such step.
    """
    if values.dtype == bool:
        return values
    if values.dtype.kind not in "iuf":
        raise SourceError(f"{place}: flags are booleans, or numbers 0 and 1; found {values.dtype}")
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        raise SourceError(
            f"{place}: step {first + int(wrong[0])} is {values[wrong[0]]}, and a flag is 0 or 1; "
            f"{len(wrong):,} are neither"
        )
    return values.astype(bool)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) if names else "none"
