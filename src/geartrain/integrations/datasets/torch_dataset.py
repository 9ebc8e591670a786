"""Importer of a torch `Dataset`, map-style or iterable, whose items are episodes.

Each item becomes a row. An item is a dict, a tuple or a named tuple of tensors, NumPy arrays and numbers, which may be
nested. Values with at least one axis are timed, with time first, unless `untimed` names them. Numbers are values that
the row has once. If the items are single samples without time (an image and its label), pass `untimed=True`.

torch is not imported: any object with `detach()` counts as a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import check_texts
from geartrain.core.extras import require
from geartrain.errors import SourceError
from geartrain.integrations.datasets.episode import Array, Episode, FieldChoice, Source, choose, flatten

LOOKS_FOR = ""  # a dataset object, never a path


def recognise(path: Path) -> bool:
    """Never: a torch dataset is an object."""
    return False


class TorchSource(Source):
    """Episodes of a torch `Dataset`, one item in memory at a time.

    A `Dataset` does not tell the lengths of its items, so finding the longest takes a pass over the data. Give
    `max_length` (and `capacity`, for an iterable dataset) to `import_dataset` to read it only once.

    Args:
        dataset: anything with `__len__` and `__getitem__`, or anything iterable.
        names: names for the parts of tuple items, in their order; "0", "1", ... by default.
        untimed: fields without a time axis, or True for all of them.
        length: name of the item's field with the number of real steps. The field is not stored.

    Raises:
        SourceError: items that are no dicts or tuples of arrays, or that differ in their fields.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        fields: FieldChoice = None,
        skip_unsupported: bool = False,
        names: Sequence[str] | None = None,
        untimed: bool | Collection[str] = (),
        length: str | None = None,
    ) -> None:
        self.name = type(dataset).__name__
        if isinstance(dataset, Mapping) or (isinstance(dataset, np.ndarray) and dataset.ndim == 0):
            raise SourceError(f"{self.name} is no dataset of items; a dict of arrays is of the format 'arrays'")
        if names is not None:
            names = check_texts("names", names)
        if not isinstance(untimed, bool):
            untimed = check_texts("untimed", [untimed] if isinstance(untimed, str) else untimed)
        self._dataset = dataset
        self._mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not self._mapped and not hasattr(dataset, "__iter__"):
            raise SourceError(
                f"{self.name} is neither a path, a dict of arrays nor a dataset that can be indexed or iterated"
            )
        self.episodes = len(dataset) if self._mapped else None
        self._names = names
        self._untimed = untimed
        self._length = length
        # An iterable that is its own iterator can be read only once: the item that is looked at here is
        # handed out again when the iteration begins.
        self._held: list[Any] = []
        self._started = False
        self._once = not self._mapped and iter(dataset) is dataset
        for found in self._items():
            self._held.append(found)
            break
        else:
            raise SourceError(f"{self.name}: holds no item")
        item = self._flat(0, self._held[0])
        self._first = item
        available = {name: _why_not(value) for name, value in item.items()}
        if length is not None and length not in item:
            raise SourceError(f"{self.name}: item 0 has no field {length!r} to take lengths from")
        default = [name for name in item if name != length]
        self._chosen = choose(self.name, fields, available, default, skip_unsupported)

    def __iter__(self) -> Iterator[Episode]:
        """Every item as an episode."""
        return self.read()

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The items as episodes; of a dataset with `__getitem__`, no others are asked for."""
        if numbers is not None and not self._mapped:
            yield from super().read(numbers)
            return
        items = self._items(numbers)
        for index in count() if numbers is None else numbers:
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception as error:
                raise SourceError(
                    f"{self.name}: item {index}: the dataset raised {type(error).__name__}: {error}"
                ) from error
            yield self._episode(index, self._flat(index, item))

    def first(self) -> Episode:
        """The first item, which was read when the dataset was opened."""
        return self._episode(0, self._first)

    def _items(self, numbers: Sequence[int] | None = None) -> Iterator[Any]:
        if self._mapped:
            return (self._dataset[index] for index in (range(len(self._dataset)) if numbers is None else numbers))
        if not self._once:
            return iter(self._dataset)
        if self._started and not self._held:
            raise SourceError(
                f"{self.name}: can be read only once, and was; give max_length and capacity, so that no "
                f"pass over it is needed to find them, and leave out episodes= and where="
            )
        self._started = True
        return chain([self._held.pop()] if self._held else [], self._dataset)

    def _flat(self, index: int, item: Any) -> dict[str, Any]:
        if not isinstance(item, Mapping | tuple | list):
            item = (item,)
        flat = flatten(tuple(item) if isinstance(item, list) else item)
        if self._names is None or isinstance(item, Mapping):
            return flat
        if len(self._names) != len(item):
            raise SourceError(f"{self.name}: item {index} has {len(item)} parts, names= has {len(self._names)}")
        return flatten(dict(zip(self._names, item, strict=True)))

    def _episode(self, index: int, item: dict[str, Any]) -> Episode:
        timed: dict[str, Array] = {}
        once: dict[str, Array] = {}
        length = None
        if self._length is not None and self._length in item:
            length = int(item[self._length])
        for stored, name in self._chosen.items():
            if name not in item:
                raise SourceError(
                    f"{self.name}: item {index}: has no field {name!r}, which item 0 has; it has {', '.join(item)}"
                )
            array = self._array(index, name, item[name])
            if array.ndim == 0 or self._untimed is True or self._is_untimed(name):
                once[stored] = array
            else:
                timed[stored] = array if length is None else array[:length]
        return Episode(f"item {index}", timed, once)

    def _is_untimed(self, name: str) -> bool:
        return not isinstance(self._untimed, bool) and name in self._untimed

    def _array(self, index: int, name: str, value: Any) -> Array:
        if not hasattr(value, "detach"):
            return np.asarray(value)
        tensor = value.detach().cpu()
        try:
            return np.asarray(tensor.numpy())
        except TypeError:  # bfloat16 and the float8 types, which NumPy lacks
            return self._as_ml_dtypes(index, name, tensor)

    def _as_ml_dtypes(self, index: int, name: str, tensor: Any) -> Array:
        kind = str(tensor.dtype).removeprefix("torch.")
        what = f"{self.name}: item {index}: field {name!r} is {kind}, which NumPy lacks: it"
        ml_dtypes = require("ml_dtypes", "ml_dtypes", what)
        import torch

        same_size = {1: torch.uint8, 2: torch.uint16}[tensor.element_size()]
        raw: Array = tensor.contiguous().view(same_size).numpy()
        return raw.view(getattr(ml_dtypes, kind))


def _why_not(value: Any) -> str | None:
    if hasattr(value, "detach"):
        return None
    kind = np.asarray(value).dtype.kind
    return f"a {type(value).__name__}" if kind in "OSUV" else None
