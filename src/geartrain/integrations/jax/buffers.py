"""Replay buffers with flashbax's interface over a store: `init`, `add`, `sample`, `can_sample`, in and outside jit."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from geartrain.core.arguments import check_real, check_whole
from geartrain.core.keys import Keys
from geartrain.core.lifetime import Closing, on_error
from geartrain.core.schema import MAX_NAME_BYTES, Field
from geartrain.errors import ArgumentError
from geartrain.integrations.jax.buffer_state import BufferContents, BufferState, contents_of
from geartrain.integrations.jax.leaves import as_array, dtype_of, is_traced, key_data, key_number, name_of
from geartrain.integrations.jax.streams import Streams, rows_for, steps_of_row
from geartrain.store.store import Store

_MOST_ADDED = 2**31 - 1


class ExperiencePair(NamedTuple):
    """Two consecutive timesteps, `first` and `second`, each a pytree of arrays (batch, ...)."""

    first: Any
    second: Any


class Sample(NamedTuple):
    """A batch of sequences. `TrajectoryBuffer.sample` returns it.

    Attributes:
        experience: an `ExperiencePair`, or with `make_trajectory_buffer` a pytree of arrays (batch, time, ...).
        indices: (batch, 3) uint32, for `set_priorities` of prioritised buffers. They name a sequence, and never the one
            that replaces it.
        probabilities: (batch,) float32, only from prioritised buffers.
    """

    experience: Any
    indices: Any = None
    probabilities: Any = None


class TrajectoryBuffer(Closing, elsewhere="share it by the name of its store"):
    """A buffer of streams of timesteps. `make_flat_buffer` and its siblings make one.

    Methods take and return a `BufferState`. They work outside `jax.jit`, and inside `jax.jit`, `lax.scan`, `lax.cond`
    and the like. Inside, they are ordered `io_callback`s: each runs once, in the order of the program. JAX refuses them
    under `vmap` and `pmap`. Outside, sequences are returned without a copy, and pairs by one compiled copy.

    As a context manager, leaving it closes the stores that its `init` made. So does dropping it.

    Args:
        options: set by the functions that make the object.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._open: list[weakref.ref[BufferContents]] = []

    def init(self, timestep: Any) -> BufferState:
        """Makes or joins the store, and returns the state of an empty buffer.

        Args:
            timestep: an example: a pytree of arrays without batch and time axes. Its values are not stored.

        Raises:
            ArgumentError: called inside jit, or the example has no arrays.
            SchemaError: a dtype that stores do not support.
            NoSpaceError: /dev/shm is too small.
            IncompatibleStoreError: the store of that name has other fields.
        """
        options = self._options
        paths, tree = jax.tree_util.tree_flatten_with_path(timestep)
        if any(isinstance(leaf, jax.core.Tracer) for _, leaf in paths):
            raise ArgumentError(
                "init creates shared memory, which is not a traced value: call it outside of jit, vmap and scan"
            )
        if not paths:
            raise ArgumentError(f"a timestep is a pytree of arrays, found {timestep!r}")
        fields: dict[str, Field] = {}
        for number, (path, leaf) in enumerate(paths):
            name = name_of(path)
            if name in fields or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
                name = f"leaf.{number}"
            fields[name] = Field(np.shape(leaf), dtype_of(name, leaf))
        streams, sequence, exponent = options["streams"], options["sequence"], options["exponent"]
        timesteps = options["timesteps"]
        limits: dict[str, Any] = {
            "max_length": steps_of_row(timesteps, sequence),
            "capacity": rows_for(timesteps, streams, sequence, options["writers"]),
            "priority_per": "row" if exponent is None else "step",
            "new_priority": "one" if exponent is None else "max",
            "reserve": options["reserve"],
        }
        name = options["store"]
        made_here = name is None
        store = Store.create(fields, **limits) if made_here else Store.open(name, fields, create="missing", **limits)
        with on_error(store.close):
            if store.per_step != (exponent is not None):
                raise ArgumentError(
                    f"the store {name!r} is of a buffer {'with' if store.per_step else 'without'} priorities"
                )
            made = Streams(store, fields, streams, timesteps, sequence, options["batch_size"], exponent)
        contents = BufferContents(store, made, tree, list(fields.values()), not made_here)
        weakref.finalize(self, contents.close).atexit = False
        self._open = [each for each in self._open if each() is not None] + [weakref.ref(contents)]
        return BufferState(np.int32(0), contents)

    def add(self, state: BufferState, timesteps: Any) -> BufferState:
        """Appends timesteps that continue those of the last call.

        Args:
            state: what `init` or the last `add` returned.
            timesteps: a pytree like the example of `init`, with batch and time axes in front as the buffer was made.

        Raises:
            ArgumentError: another structure, shape or dtype.
            StoreClosedError: the buffer was closed. Inside jit every error is a `jax.errors.JaxRuntimeError` that names
                it.
        """
        contents = contents_of(state)
        leaves, steps = self._leaves(contents, timesteps)
        axes = self._missing_axes()

        def append(*values: Any) -> NDArray[np.int32]:
            contents.check()
            contents.streams.add([np.expand_dims(np.asarray(value), axes) for value in values[:-1]])
            return _advanced(values[-1], steps)

        if is_traced(state.added, *leaves):
            added = io_callback(append, jax.ShapeDtypeStruct((), np.int32), *leaves, state.added, ordered=True)
        else:
            added = append(*leaves, state.added)
        return BufferState(added, contents)

    def sample(self, state: BufferState, key: Any) -> Sample:
        """Draws a batch of sequences, uniformly or in proportion to their priorities.

        The draw follows from the key and the store's contents. From a store that several processes write to, all their
        timesteps are drawn.

        Args:
            state: state of the buffer.
            key: a JAX random key.

        Raises:
            EmptyStoreError: there is no whole sequence yet; see `can_sample`.
            ArgumentError: `key` is not a random key.
            StoreClosedError: the buffer was closed. Inside jit every error is a `jax.errors.JaxRuntimeError` that names
                it.
        """
        contents = contents_of(state)
        data = key_data(key)
        batch, sequence = self._options["batch_size"], self._options["sequence"]
        prioritised = self._options["exponent"] is not None

        def draw(data: Any, added: Any) -> tuple[Any, ...]:
            contents.check()
            values, keys, probability = contents.streams.draw(key_number(np.asarray(data)))
            if not prioritised:
                return tuple(values)
            assert keys.step is not None
            indices = np.stack([keys.row, keys.generation, keys.step], 1)
            return (*values, indices, probability.astype(np.float32))

        if is_traced(data, state.added):
            kinds = [
                jax.ShapeDtypeStruct((batch, sequence, *field.shape), field.numpy_dtype) for field in contents.fields
            ]
            if prioritised:
                kinds += [jax.ShapeDtypeStruct((batch, 3), np.uint32), jax.ShapeDtypeStruct((batch,), np.float32)]
            found = list(io_callback(draw, tuple(kinds), data, state.added, ordered=True))
        else:
            found = list(draw(data, state.added))
        values, others = found[: len(contents.fields)], found[len(contents.fields) :]
        if self._options["flat"]:
            first, second, others = _compiled_pairs(values, others)
            tree = contents.tree
            experience: Any = ExperiencePair(tree.unflatten(first), tree.unflatten(second))
        else:
            experience = contents.tree.unflatten([as_array(each) for each in values])
        return Sample(experience, *others)

    def can_sample(self, state: BufferState) -> Any:
        """Whether there is as much as `min_length` says: a bool, or inside jit a traced one.

        A buffer with its own store counts what was added, one with a shared store the sequences of all processes.

        Args:
            state: state of the buffer.
        """
        contents, least = contents_of(state), self._options["least"]
        if not contents.shared:
            return state.added >= least

        def enough(added: Any) -> NDArray[np.bool_]:
            contents.check()
            return np.asarray(contents.streams.sequences() >= max(1, least - 1))

        if is_traced(state.added):
            return io_callback(enough, jax.ShapeDtypeStruct((), np.bool_), state.added, ordered=True)
        return enough(state.added)

    def set_priorities(self, state: BufferState, indices: Any, priorities: Any) -> BufferState:
        """Sets the priorities of sampled sequences to |priority| ** priority_exponent.

        Sequences that are gone are skipped, and counted as `stale_keys` by the store.

        Args:
            state: state of a prioritised buffer.
            indices: (n, 3), from a sample.
            priorities: (n,) finite.

        Raises:
            ArgumentError: a priority is not finite, shapes differ, or the buffer has no priorities.
        """
        contents = contents_of(state)
        if self._options["exponent"] is None:
            raise ArgumentError("this buffer has no priorities: make_prioritised_flat_buffer has")
        if np.shape(indices)[1:] != (3,) or np.shape(priorities) != np.shape(indices)[:1]:
            raise ArgumentError(
                f"indices are those of a sample, (n, 3), and priorities (n,); found {np.shape(indices)} and "
                f"{np.shape(priorities)}"
            )

        def update(indices: Any, priorities: Any, added: Any) -> NDArray[np.int32]:
            contents.check()
            row, generation, step = (np.ascontiguousarray(each) for each in np.asarray(indices, np.uint32).T)
            keys = Keys.of_rows(row, generation, contents.store.id, step=step)
            contents.streams.update(keys, np.asarray(priorities, np.float64))
            return np.asarray(added)

        if is_traced(indices, priorities, state.added):
            kind = jax.ShapeDtypeStruct((), np.int32)
            added = io_callback(update, kind, indices, priorities, state.added, ordered=True)
        else:
            added = update(indices, priorities, state.added)
        return BufferState(added, contents)

    def close(self) -> None:
        """Closes the stores of all states of this buffer. A store that other processes have open stays."""
        if any(contents() is not None for contents in self._open):
            jax.effects_barrier()  # what was called inside jit is done
        for reference in self._open:
            contents = reference()
            if contents is not None and not contents.store.closed:
                contents.close()

    def _missing_axes(self) -> tuple[int, ...]:
        """Places of the axes (streams, steps) that timesteps are given without."""
        return tuple(
            axis for axis, given in enumerate((self._options["batched"], self._options["sequences"])) if not given
        )

    def _leaves(self, contents: BufferContents, timesteps: Any) -> tuple[list[Any], int]:
        """The arrays of some timesteps, checked, and how many timesteps they are, of all streams."""
        leaves, tree = jax.tree_util.tree_flatten(timesteps)
        if tree != contents.tree:
            raise ArgumentError(f"timesteps are {contents.tree} as in init, found {tree}")
        batched, sequences, streams = (self._options[name] for name in ("batched", "sequences", "streams"))
        steps: int | None = None
        for place, (leaf, field) in enumerate(zip(leaves, contents.fields, strict=True)):
            shape = np.shape(leaf)
            front = int(batched) + int(sequences)
            wanted = (*((streams,) if batched else ()), *(("time",) if sequences else ()), *field.shape)
            time = shape[front - 1] if sequences and len(shape) >= front else 1
            if (
                shape != tuple(time if each == "time" else each for each in wanted)
                or (steps or time) != time
                or time < 1
            ):
                raise ArgumentError(f"timesteps have arrays of shape {wanted} and one time, found {shape}")
            steps = time
            found = dtype_of("timesteps", leaf)
            if found != field.numpy_dtype:
                raise ArgumentError(f"an array of timesteps is {field.dtype} as in init, found {found}")
            if not isinstance(leaf, jax.Array):
                leaves[place] = np.asarray(leaf, found)
        assert steps is not None
        return leaves, steps * streams


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    *,
    store: str | None = None,
    writers: int = 1,
    reserve: bool = True,
) -> TrajectoryBuffer:
    """A buffer whose samples are pairs of consecutive timesteps, as flashbax's function of this name.

    Args:
        max_length: fewest timesteps that are kept, over all streams.
        min_length: pairs from which `can_sample` is true, rounded down to whole timesteps of all streams.
        sample_batch_size: pairs of a sample.
        add_sequences: `add` takes a time axis.
        add_batch_size: `add` takes a batch axis in front, of this size.
        store: name of a store that several processes share; the first of them makes it. By default the buffer has its
            own store.
        writers: number of processes that add to it.
        reserve: allocate the memory when `init` is called; see `Store.create`.

    Raises:
        ArgumentError: a size is out of range.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> buffer = make_flat_buffer(max_length=100, min_length=2, sample_batch_size=4)  # a TrajectoryBuffer
        >>> state = buffer.init({"obs": jnp.zeros(3)})  # a BufferState
        >>> for t in range(5):
        ...     state = buffer.add(state, {"obs": jnp.full(3, t, jnp.float32)})
        >>> sample = buffer.sample(state, jax.random.key(0))  # a Sample of an ExperiencePair
        >>> bool((sample.experience.second["obs"] - sample.experience.first["obs"] == 1).all())
        True
        >>> buffer.close()
    """
    return _made(max_length, min_length, sample_batch_size, 2, add_sequences, add_batch_size, store, writers, reserve)


def make_prioritised_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float = 0.6,
    *,
    store: str | None = None,
    writers: int = 1,
    reserve: bool = True,
) -> TrajectoryBuffer:
    """A flat buffer that draws pairs in proportion to their priorities. New pairs have the highest priority so far.

    Args:
        max_length, min_length, sample_batch_size, add_sequences, add_batch_size, store, writers, reserve: as for
            `make_flat_buffer`.
        priority_exponent: exponent applied to priorities, 0 to 1.

    Raises:
        ArgumentError: a size or the exponent is out of range.
    """
    check_real("priority_exponent", priority_exponent, 0, 1)
    sizes = (max_length, min_length, sample_batch_size, 2, add_sequences, add_batch_size)
    return _made(*sizes, store, writers, reserve, exponent=float(priority_exponent))


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    min_length_time_axis: int,
    max_length_time_axis: int,
    *,
    period: int = 1,
    store: str | None = None,
    writers: int = 1,
    reserve: bool = True,
) -> TrajectoryBuffer:
    """A buffer whose samples are sequences of consecutive timesteps, which begin anywhere (flashbax's with `period=1`).

    `add` takes arrays (add_batch_size, time, ...). Samples have (sample_batch_size, sample_sequence_length, ...).

    Args:
        add_batch_size: streams.
        sample_batch_size: sequences of a sample.
        sample_sequence_length: timesteps of a sequence.
        min_length_time_axis: timesteps of each stream from which `can_sample` is true.
        max_length_time_axis: fewest timesteps of each stream that are kept.
        period: must be 1: sequences begin at any timestep.
        store, writers, reserve: as for `make_flat_buffer`.

    Raises:
        ArgumentError: a size or `period` is out of range.
    """
    check_whole("period, as sequences begin at any timestep,", period, 1, 1)
    for what, value in (
        ("add_batch_size", add_batch_size),
        ("max_length_time_axis", max_length_time_axis),
        ("min_length_time_axis", min_length_time_axis),
    ):
        check_whole(what, value, 1)
    kept, least = max_length_time_axis * add_batch_size, min_length_time_axis * add_batch_size
    sizes = (kept, least, sample_batch_size, sample_sequence_length, True, add_batch_size)
    return _made(*sizes, store, writers, reserve, flat=False)


def _made(
    max_length: int,
    min_length: int,
    batch_size: int,
    sequence: int,
    sequences: bool,
    add_batch_size: int | None,
    store: str | None,
    writers: int,
    reserve: bool,
    *,
    exponent: float | None = None,
    flat: bool = True,
) -> TrajectoryBuffer:
    streams = 1 if add_batch_size is None else add_batch_size
    for what, value in (
        ("max_length", max_length),
        ("min_length", min_length),
        ("sample_batch_size", batch_size),
        ("sample_sequence_length", sequence),
        ("add_batch_size", streams),
        ("writers", writers),
    ):
        check_whole(what, value, 1)
    timesteps = max_length // streams
    if timesteps < sequence:
        raise ArgumentError(
            f"max_length={max_length} holds {timesteps} timesteps of each of {streams} streams, and a sample needs "
            f"{sequence}"
        )
    if flat:  # one timestep of each stream more: as many pairs as timesteps are asked for
        min_length = (min_length // streams + 1) * streams
    least = max(min_length, (sequence - 1) * streams + 1)
    if least > min(max_length, _MOST_ADDED):
        raise ArgumentError(f"min_length needs {least} timesteps, and max_length={max_length} holds fewer")
    return TrajectoryBuffer(
        {
            "timesteps": timesteps,
            "least": least,
            "batch_size": batch_size,
            "sequence": sequence,
            "sequences": bool(sequences),
            "batched": add_batch_size is not None,
            "streams": streams,
            "store": store,
            "writers": writers,
            "reserve": reserve,
            "exponent": exponent,
            "flat": flat,
        }
    )


def _advanced(added: Any, steps: int) -> NDArray[np.int32]:
    return np.asarray(min(int(added) + steps, _MOST_ADDED), np.int32)


def _pairs(values: Any, others: Any) -> Any:
    """Both timesteps of sequences of two, and the rest as arrays of JAX."""
    return [each[:, 0] for each in values], [each[:, 1] for each in values], others


# One program for all of them: JAX takes longer to begin a slice than to make it.
_compiled_pairs: Any = jax.jit(_pairs)


__all__ = [
    "BufferState",
    "ExperiencePair",
    "Sample",
    "TrajectoryBuffer",
    "make_flat_buffer",
    "make_prioritised_flat_buffer",
    "make_trajectory_buffer",
]
