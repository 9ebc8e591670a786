"""State of a replay buffer for JAX: a pytree with one number, which refers to a store."""

from __future__ import annotations

import copy
from typing import Any

import jax

from geartrain._native import forks
from geartrain.core.arguments import check_type
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, StoreClosedError
from geartrain.integrations.jax.streams import Streams
from geartrain.store.store import Store


class BufferContents:
    """Contents of a state: the store, its writer and sampler, and the structure of a timestep."""

    def __init__(self, store: Store, streams: Streams, tree: Any, fields: list[Field], shared: bool) -> None:
        self.store, self.streams, self.tree, self.fields, self.shared = store, streams, tree, fields, shared
        self.forks = forks()

    def check(self) -> None:
        """Raises ArgumentError in a forked child, StoreClosedError once it was closed."""
        if self.forks != forks():
            raise ArgumentError(
                "this buffer belongs to the process that this one was forked from, and JAX does not work "
                "after a fork: start a new process, and join the store by its name (store=...)"
            )
        if self.store.closed:
            raise StoreClosedError("this buffer was closed")

    def close(self) -> None:
        """Closes the store. In the process that made it, also closes the writer and the sampler."""
        if self.forks == forks():
            self.streams.close()
        self.store.close()


@jax.tree_util.register_pytree_node_class
class BufferState:
    """State of a buffer: a pytree of one number, and the store that it stands for.

    The contents are in shared memory and change in place. A state that you keep does not keep earlier contents.

    Args:
        contents: set by `TrajectoryBuffer.init`, which makes the object.

    Attributes:
        added: int32, timesteps that this process has added.
    """

    __slots__ = ("_contents", "added")

    def __init__(self, added: Any, contents: BufferContents) -> None:
        self.added = added
        self._contents = contents

    @property
    def current_index(self) -> Any:
        """Position of the next timestep in `experience`, int32, as in flashbax."""
        streams = self._contents.streams
        return (self.added // streams.n) % streams.timesteps

    @property
    def is_full(self) -> Any:
        """Whether `max_length` timesteps were added. From then on the oldest are removed."""
        streams = self._contents.streams
        return self.added // streams.n >= streams.timesteps

    @property
    def experience(self) -> Any:
        """A copy of the timesteps that this process had added by this state, if the store still has them.

        Outside of jit only. A pytree of NumPy arrays (streams, timesteps of each, ...), in flashbax's order: the next
        timestep overwrites the one at `current_index`. Timesteps that were not added yet, or are gone, are zeros.

        Raises:
            ArgumentError: called inside jit.
            StoreClosedError: the buffer was closed.
        """
        contents = self._contents
        contents.check()
        if isinstance(self.added, jax.core.Tracer):
            raise ArgumentError("experience copies shared memory, which is not a traced value: read it outside of jit")
        return contents.tree.unflatten(contents.streams.written(int(self.added) // contents.streams.n))

    def __deepcopy__(self, _: dict[int, Any]) -> BufferState:
        """Returns a state of the same store. The contents are not copied."""
        return BufferState(copy.copy(self.added), self._contents)

    @property
    def store(self) -> Store:
        """The store, for other processes (`name`), `geartrain inspect`, checkpoints and exports."""
        return self._contents.store

    def tree_flatten(self) -> tuple[tuple[Any], BufferContents]:
        """Internal: for JAX."""
        return (self.added,), self._contents

    @classmethod
    def tree_unflatten(cls, contents: BufferContents, children: tuple[Any]) -> BufferState:
        """Internal: for JAX."""
        return cls(children[0], contents)

    def __repr__(self) -> str:
        return f"BufferState(added={self.added}, store={self._contents.store.name!r})"


def contents_of(state: Any) -> BufferContents:
    """The contents that a state refers to.

    Raises:
        ArgumentError: no state, or one of the process that this one was forked from. StoreClosedError: it was closed.
    """
    contents = check_type("a buffer's state is what init returned", state, BufferState)._contents
    contents.check()
    return contents


__all__ = ["BufferContents", "BufferState", "contents_of"]
