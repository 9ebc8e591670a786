"""Choice of episodes by number and by metadata: `episodes=` and `where=` of imports, for every format."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from geartrain.core.arguments import check_texts, check_whole, did_you_mean, shown, some_of
from geartrain.core.progress import Progress
from geartrain.errors import ArgumentError, FieldError, SourceError
from geartrain.integrations.datasets.episode import Episode, Extent, Metadata, Source, plain

EpisodeChoice = int | Sequence[int] | slice | str | None
Where = Callable[[Mapping[str, Any]], bool] | Sequence[str] | str | None

_SLICE = re.compile(r"\s*(-?[0-9]{1,18})?\s*:\s*(-?[0-9]{1,18})?\s*(?::\s*(-?[0-9]{1,18})?\s*)?")
_CONDITION = re.compile(r"\s*([^=<>!]*[^=<>!\s])\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda found, wanted: bool(found == wanted),
    "!=": lambda found, wanted: bool(found != wanted),
    "<": lambda found, wanted: bool(found < wanted),
    ">": lambda found, wanted: bool(found > wanted),
    "<=": lambda found, wanted: bool(found <= wanted),
    ">=": lambda found, wanted: bool(found >= wanted),
}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
#: Different values that an error shows.
_SHOWN = 6


def chosen_episodes(source: Source, episodes: EpisodeChoice, where: Where, *, progress: bool = False) -> Source:
    """The source, with only those episodes that have one of the numbers and for which `where` holds.

    Args:
        source: all episodes.
        episodes, where: as of `import_dataset`; None chooses all.
        progress: shows a bar while metadata is read.

    Raises:
        ArgumentError: `episodes` or `where` is of another form.
        FieldError: `where` asks for metadata that there is not.
        SourceError: there is no such episode, or none is left.
    """
    if episodes is None and where is None:
        return source
    parts = None if episodes is None else _parts(episodes)
    conditions = where if where is None or callable(where) else _conditions(where)
    numbers = None
    if parts is not None:
        count = source.episodes
        numbers = _numbers(source.name, parts, source.extent(progress=progress).episodes if count is None else count)
    if conditions is not None:
        return _Chosen(source, *_matching(source, numbers, conditions, progress))
    assert numbers is not None
    return _Chosen(source, numbers)


class _Chosen(Source):
    """Some episodes of another source, by their numbers, in its order; and the longest of them, if it is known."""

    def __init__(self, source: Source, numbers: list[int], longest: int | None = None) -> None:
        self.name, self.threads, self.episodes = source.name, source.threads, len(numbers)
        self._source, self._chosen, self._longest = source, numbers, longest

    def __iter__(self) -> Iterator[Episode]:
        return self._source.read(self._chosen)

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        return self._source.read(self._chosen if numbers is None else [self._chosen[number] for number in numbers])

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        wanted = iter(self._chosen)
        number = next(wanted, None)
        for at, about in enumerate(self._source.metadata()):
            if at == number:
                yield about
                number = next(wanted, None)
                if number is None:
                    return

    def extent(self, *, progress: bool = False) -> Extent:
        if self._longest is None:
            self._longest = super().extent(progress=progress).longest
        return Extent(len(self._chosen), self._longest)

    def release(self) -> None:
        self._source.release()


@dataclass
class _Condition:
    """A condition of the form name, operator, value; and what the episodes have under the name."""

    text: str
    name: str
    operator: str
    value: str
    seen: dict[Any, None] = field(default_factory=dict)

    def holds(self, about: Mapping[str, Any]) -> bool:
        """Whether it holds for an episode; where its metadata lacks the name, the value is missing."""
        found = plain(about.get(self.name))
        several = isinstance(found, list)
        for each in found if several else [found]:
            if len(self.seen) <= _SHOWN:
                self.seen[each] = None
        if several:
            if self.operator not in ("=", "!="):
                raise ArgumentError(f"where={self.text!r}: {self.name} is a list, which {self.operator} does not order")
            any_is = any(self._is(each, "=") for each in found)
            return any_is if self.operator == "=" else not any_is
        return self._is(found, self.operator)

    def _is(self, found: Any, operator: str) -> bool:
        if found is None:  # a missing value
            return operator == "!="
        wanted: Any = self.value
        if isinstance(found, bool):
            if wanted.lower() not in _FLAGS or operator not in ("=", "!="):
                raise ArgumentError(f"where={self.text!r}: {self.name} is true or false, and takes = or !=")
            wanted = _FLAGS[wanted.lower()]
        elif isinstance(found, int | float):
            wanted = self._number(found)
        elif operator not in ("=", "!="):
            raise ArgumentError(f"where={self.text!r}: {self.name} is text, such as {shown(found)}; it takes = or !=")
        else:
            found = str(found)
        return _ORDER[operator](found, wanted)

    def _number(self, found: float) -> float:
        try:
            return int(self.value)
        except ValueError:
            with contextlib.suppress(ValueError):
                return float(self.value)
        raise ArgumentError(
            f"where={self.text!r}: {self.name} is a number, such as {found}; {self.value!r} is none"
        ) from None

    def told(self) -> str:
        """What the episodes have, for an error."""
        values = [value for value in self.seen if value is not None]
        if not values:
            return f"{self.name} is missing in all of them"
        if len(values) > _SHOWN:
            return f"{self.name} is {', '.join(shown(value) for value in values[:_SHOWN])} or another"
        return f"{self.name} is {' or '.join(shown(value) for value in values)}"


def _parts(episodes: object) -> Iterable[int | slice]:
    """Numbers and slices of an `episodes=`."""
    if isinstance(episodes, str):
        parts: list[int | slice] = []
        for text in episodes.split(","):
            cut = _SLICE.fullmatch(text)
            if cut is not None:
                parts.append(_ahead(slice(*(int(part) if part else None for part in cut.groups())), text))
            elif re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
                parts.append(_number(int(text)))
            else:
                raise ArgumentError(
                    f"episodes='0:100' is the first hundred, '7' one, '3,5,8:10' several; found {shown(episodes)}"
                )
        return parts
    if isinstance(episodes, slice):
        bounds = (episodes.start, episodes.stop, episodes.step)
        what, most = "a bound of the slice", 2**62
        whole = [each if each is None else check_whole(what, each, -most, most) for each in bounds]
        return [_ahead(slice(*whole), episodes)]
    if isinstance(episodes, np.ndarray):
        episodes = list(episodes) if episodes.ndim == 1 else episodes[()]
    if isinstance(episodes, Collection) and not isinstance(episodes, bytes | bytearray | Mapping):
        return map(_number, episodes)  # one by one: a range may be longer than any data set
    return [_number(episodes)]


def _number(value: object) -> int:
    number = check_whole("each of episodes", value)
    if number < 0:
        raise ArgumentError(f"episodes are numbered from 0, found {shown(number)}; episodes='-10:' is the last ten")
    return number


def _ahead(part: slice, given: object) -> slice:
    if part.step is not None and part.step < 1:
        raise ArgumentError(
            f"episodes are imported in the dataset's own order: a slice has a step of at least 1, found {shown(given)}"
        )
    return part


def _numbers(where: str, parts: Iterable[int | slice], count: int) -> list[int]:
    """The numbers that are chosen, rising."""
    has = f"it has {count:,}, numbered 0 to {count - 1}" if count else "it has none"
    found: list[int] = []
    for part in parts:
        if isinstance(part, slice):
            found.extend(range(count)[part])
        elif part >= count:
            raise SourceError(f"{where}: there is no episode {shown(part)}; {has}")
        else:
            found.append(part)
    if not found:
        raise SourceError(f"{where}: episodes= chooses no episode; {has}")
    found.sort()
    twice = next((one for one, other in itertools.pairwise(found) if one == other), None)
    if twice is not None:
        raise SourceError(f"{where}: episodes= names episode {twice} twice; each can be imported once")
    return found


def _conditions(where: object) -> list[_Condition]:
    texts = [where] if isinstance(where, str) else where
    if isinstance(texts, str | bytes) or not isinstance(texts, Collection) or isinstance(texts, Mapping):
        raise ArgumentError(
            f"where is a function of an episode's metadata, or conditions such as 'task=pick' and 'length>100'; found "
            f"{shown(where)}"
        )
    conditions = []
    for text in check_texts("where", texts):
        parts = _CONDITION.fullmatch(text)
        if parts is None or not parts[3] or parts[3].startswith("="):
            raise ArgumentError(
                f"where={shown(text)} is no condition: write a name, one of = != < > <= >=, and a value, such as "
                f"'task=pick' or 'length>100'. In a shell put quotes around it, since < and > name files there"
            )
        conditions.append(_Condition(text, parts[1], parts[2], parts[3]))
    if not conditions:
        raise ArgumentError("where is empty: leave it out to import all episodes")
    return conditions


def _matching(
    source: Source,
    numbers: list[int] | None,
    where: Callable[[Mapping[str, Any]], Any] | list[_Condition],
    progress: bool,
) -> tuple[list[int], int]:
    """Those of the numbers whose metadata matches, and the greatest of their lengths, from one pass over the metadata.

    Raises:
        FieldError: a name that there is not.
        SourceError: none does.
    """
    conditions = where if isinstance(where, list) else []
    wanted = None if numbers is None else set(numbers)
    matching, longest, looked_at = [], 0, 0
    names: dict[str, None] = {}
    total = source.episodes if numbers is None else len(numbers)
    with Progress(f"{source.name}: metadata", total, enabled=progress, delay_s=1) as bar:
        for number, found in enumerate(source.metadata()):
            if numbers is not None and number > numbers[-1]:
                break
            if wanted is not None and number not in wanted:
                continue
            about = found if isinstance(found, Metadata) else Metadata(number, found)
            answer = where(about) if callable(where) else all([each.holds(about) for each in conditions])  # noqa: C419
            if not isinstance(answer, bool | np.bool_):
                raise ArgumentError(f"where= returns True or False; for episode {number} it returned {shown(answer)}")
            if answer:
                matching.append(number)
                longest = max(longest, about["length"])
            if conditions:
                names.update(dict.fromkeys(about))
            looked_at += 1
            bar.advance(0)
    for condition in conditions:
        if looked_at and condition.name not in names:
            raise FieldError(
                f"{source.name}: episodes have no metadata {condition.name!r}; they have {some_of(names, 40)}"
                f"{did_you_mean(condition.name, list(names))}"
            )
    if not matching:
        what = " and ".join(f"where={condition.text!r}" for condition in conditions) or "where="
        told = "".join({condition.name: f". {condition.told()}" for condition in conditions}.values())
        were = "episode was" if looked_at == 1 else "episodes were"
        raise SourceError(f"{source.name}: no episode matches {what}; {looked_at:,} {were} looked at{told}")
    return matching, longest


__all__ = ["EpisodeChoice", "Where", "chosen_episodes"]
