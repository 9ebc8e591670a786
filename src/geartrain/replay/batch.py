"""`Batch`: the fields of sampled rows, and the metadata of each row."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from geartrain.core.arguments import check_flag, check_type, did_you_mean, shown
from geartrain.core.extras import require
from geartrain.core.keys import Keys
from geartrain.core.schema import nested
from geartrain.errors import ArgumentError, FieldError
from geartrain.store.recorder import REPEATS

if TYPE_CHECKING:
    import torch

# Of one kind in a batch: tensors, or with `Replay(output="numpy")` NumPy arrays.
Array: TypeAlias = Union["torch.Tensor", "np.ndarray[Any, Any]"]


class _WeaklyReferable:
    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False, slots=True)
class Batch(_WeaklyReferable):
    """A batch: `batch["obs"]` is a field of the sampled rows, (B, ...); metadata of the rows are attributes.

    Fields with time have shape (B, W, ...) for windows of W steps, (B, max_length, ...) for whole rows, and (B, n, ...)
    for n offsets of `Windows(offsets=...)`. Missing steps are zero, and False in `mask`.

    The arrays share one buffer, which is recycled when the last of them, and the last view into them, is dropped. A
    batch that you keep is never overwritten. All arrays support DLPack.

    Attributes:
        fields: arrays by name. `for name in batch`, `batch.items()` and `batch.values()` work as for a dict;
            `dict(batch.fields)` is one.
        keys: keys of the rows, for `update_priorities`.
        mask: (B, W) bool, True for a real step. `Windows.mask_of` has it for a field with offsets.
        start: (B,) int32, the first step of the row that the batch holds.
        length: (B,) int32, steps of the whole row.
        version: (B,) int64, version of the model that acted.
        probability: (B,) float64, probability of the row in one draw; None for a fetch by key.
        importance_weights: (B,) float64; None unless the strategy has them (`Prioritized(beta=...)`).
        step: number of the batch; None for a fetch by key.
        draw: (B,) int64, number of each row in the global batch; None if one rank has all of it.
        context: (B,) int32, steps at the start of each row or window that repeat the row before (`overlap`); None for
            transitions, if the store's rows repeat no steps, and if `fields=` leaves out "geartrain.repeats".
        cu_seqlens: (B + 1,) int32, where each row's steps begin in packed fields, which are (steps, ...) without a
            mask; None for padded windows.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"obs": gt.Field((3,), "float32")}, max_length=10, capacity=4)
        >>> _ = store.insert({"obs": np.zeros((2, 6, 3), np.float32)})
        >>> with gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=5, window=4) as replay:
        ...     batch = replay.sample()  # a Batch
        >>> tuple(batch["obs"].shape), tuple(batch.mask.shape), batch.step
        ((5, 4, 3), (5, 4), 0)
        >>> store.close()
    """

    fields: dict[str, Array]
    keys: Keys
    mask: Array | None
    start: Array
    length: Array
    version: Array
    probability: Array | None = None
    importance_weights: Array | None = None
    step: int | None = None
    draw: Array | None = None
    cu_seqlens: Array | None = None

    def __getitem__(self, name: str) -> Array:
        try:
            return self.fields[name]
        except (KeyError, TypeError):
            raise unknown_field(name, self.fields) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.fields

    def __len__(self) -> int:
        return len(self.keys)

    def items(self) -> ItemsView[str, Array]:
        """Names and arrays of the fields."""
        return self.fields.items()

    def values(self) -> ValuesView[Array]:
        """Arrays of the fields."""
        return self.fields.values()

    @property
    def context(self) -> Array | None:
        """Steps at each row's beginning that repeat the row before, (B,) int32, as `recorder(overlap=...)` writes them.

        They are burn-in: the loss of these steps belongs to the row before. Of windows, those within the window. None
        where the store does not keep this (`recorded_fields(..., overlap=True)`) or the batch does not have its field.
        """
        name = next((name for name in self.fields if name.startswith(REPEATS)), None)
        if name is None:
            return None
        shared: Any = self.fields[name][:, 0]
        most = None if self.mask is None else self.mask.shape[1]
        repeated: Array = (shared - self.start).clip(0, most)
        return repeated

    @property
    def batch_size(self) -> int:
        """Rows in the batch."""
        return len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        return sum(int(array.nbytes) for array in self.fields.values())

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Batch:
        """Copies the tensors to another device.

        Args:
            device: such as "cuda" or "cuda:1".
            non_blocking: as for `torch.Tensor.to`.

        Returns:
            A batch of the tensors there.

        Raises:
            ArgumentError: the batch has NumPy arrays, or the device is unknown.
        """
        if isinstance(self.start, np.ndarray):
            raise ArgumentError(
                "a batch of NumPy arrays stays in host memory: take tensors (output='torch') to move them"
            )
        import torch

        try:
            device = torch.device(device) if isinstance(device, str) else device
        except RuntimeError:
            device = ascii(device)
        check_type("device is a name such as 'cuda:0', or a torch.device", device, torch.device)
        non_blocking = check_flag("non_blocking", non_blocking)

        def move(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value

        return Batch(
            {name: move(array) for name, array in self.fields.items()},
            self.keys,
            move(self.mask),
            move(self.start),
            move(self.length),
            move(self.version),
            move(self.probability),
            move(self.importance_weights),
            self.step,
            move(self.draw),
            move(self.cu_seqlens),
        )

    def copy_(self, other: Batch) -> Batch:
        """Overwrites this batch's tensors with another's of the same shapes, and returns this batch.

        Use it with a CUDA graph, which reads its input at a fixed address: `clone` one batch, capture with it, and copy
        each new batch into it before a replay. Keys and step stay those of the first batch; take them from `other`.

        Args:
            other: the batch to copy.
        """
        mine: Any
        for name, mine in self.fields.items():
            mine.copy_(other.fields[name])
        for name in METADATA:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.copy_(theirs)
        return self

    def clone(self) -> Batch:
        """A copy of the batch in memory of its own. Needs torch tensors."""

        def copy(value: Any) -> Any:
            return None if value is None else value.clone()

        metadata = {name: copy(getattr(self, name)) for name in METADATA}
        fields = {name: copy(array) for name, array in self.fields.items()}
        return Batch(fields, self.keys, step=self.step, **metadata)

    def as_dict(self) -> dict[str, Array]:
        """Fields and metadata in one dict. For a data loader use `ReplayDataset`, whose items have the keys too.

        Raises:
            ArgumentError: a field has the name of a metadata entry, such as "mask" or "length".
        """
        metadata = {"mask": self.mask} if self.mask is not None else {"cu_seqlens": self.cu_seqlens}
        metadata |= {"start": self.start, "length": self.length, "version": self.version}
        metadata |= {"probability": self.probability, "importance_weights": self.importance_weights}
        check_names(self.fields)
        return {**{name: value for name, value in metadata.items() if value is not None}, **self.fields}

    def to_tensordict(self) -> Any:
        """Fields and metadata as a `tensordict.TensorDict` of batch size (B,), over the same memory.

        A field "next.reward" becomes the entry ("next", "reward"). The keys are not in it: keep the batch for
        `update_priorities`. NumPy arrays become tensors over their memory.

        Raises:
            ArgumentError: the fields are packed; or a field has the name of a metadata entry, or of the entry that
                another field is nested in.
            MissingDependencyError: tensordict is not installed.
        """
        tensordict = require("tensordict", "tensordict", "A TensorDict")
        if self.cu_seqlens is not None:
            raise ArgumentError("packed fields have steps as their first axis, no rows: to_tensordict needs windows")
        import torch

        tensors = {name: torch.as_tensor(array) for name, array in self.as_dict().items()}
        return tensordict.TensorDict(nested(tensors), batch_size=[len(self)])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(array.shape)} {array.dtype}" for name, array in self.fields.items())
        return f"Batch({shapes})"


def check_names(names: Iterable[str]) -> None:
    """Raises `ArgumentError` where a field has the name of a batch's own entry."""
    taken = sorted(set(names) & {*METADATA, "keys", "step"})
    if taken:
        raise ArgumentError(
            f"fields named {', '.join(map(repr, taken))} cannot stand in one dict with a batch's own entries of that "
            f"name; read them as batch[name] and the entries as attributes, or rename the fields"
        )


METADATA = ("mask", "start", "length", "version", "probability", "importance_weights", "draw", "cu_seqlens")


def unknown_field(name: object, fields: Iterable[str]) -> FieldError:
    """The error for a name that is no field of a batch; entries that are attributes are named so."""
    names = list(fields)
    is_attribute = isinstance(name, str) and name in ("keys", *METADATA)
    hint = f"; it is an attribute: batch.{name}" if is_attribute else did_you_mean(name, names)
    return FieldError(f"the batch has no field {shown(name)}; it has {', '.join(names)}{hint}")
