"""Exchanges: the collectives that move parts between ranks (reduce-scatter, all-gather, all-to-all, broadcast)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from geartrain.collectives.buffers import HostBuffer, buffer_of, check_reduction
from geartrain.core.arguments import check_choice, check_whole
from geartrain.errors import ArgumentError

#: Their numbers in the native layer (native/collectives/protocol.h: Collective).
COLLECTIVES = {"reduce_scatter": 1, "all_gather": 2, "all_to_all": 3, "broadcast": 4}

#: Address and number of elements.
Memory = tuple[int, int]


class Exchange(NamedTuple):
    """The arguments of one exchange on one rank.

    Attributes:
        collective: a name of `COLLECTIVES`.
        sends, receives: memory by rank; one of `sends` for an all-gather, one of `receives` for a reduce-scatter, and
            one and the same for a broadcast.
        dtype: a name of `REDUCED_DTYPES`.
        op: a name of `OPS`, of a reduce-scatter.
        root: the rank whose array is broadcast.
    """

    collective: str
    sends: Sequence[Memory]
    receives: Sequence[Memory]
    dtype: str
    op: str = "sum"
    root: int = 0

    def checked(self, world_size: int) -> Exchange:
        """Itself. Raises `ArgumentError` for names that do not exist and a wrong number of parts."""
        check_choice("collective", self.collective, COLLECTIVES)
        check_reduction(self.op, self.dtype)
        check_whole("root", self.root, 0, world_size - 1)
        many_out = self.collective in ("reduce_scatter", "all_to_all")
        many_in = self.collective in ("all_gather", "all_to_all")
        for name, parts, many in (("inputs", self.sends, many_out), ("outputs", self.receives, many_in)):
            if many and len(parts) != world_size:
                raise ArgumentError(
                    f"{self.collective} has one of {name} for each of {world_size} ranks, found {len(parts)}"
                )
        return self


def exchange_of(collective: str, inputs: Sequence[Any], outputs: Sequence[Any], op: str, root: int) -> Exchange:
    """The exchange of arrays. Raises `ArgumentError` where their dtypes differ, or as `buffer_of`."""
    for name, arrays in (("inputs", inputs), ("outputs", outputs)):
        if isinstance(arrays, str | bytes) or not isinstance(arrays, Sequence):
            raise ArgumentError(f"{name} is a sequence of arrays, one a rank, found a {type(arrays).__name__}")
    sends, receives = [buffer_of(one) for one in inputs], [buffer_of(one) for one in outputs]
    dtypes = sorted({buffer.dtype for buffer in (*sends, *receives)})
    if len(dtypes) != 1:
        raise ArgumentError(f"the arrays of an operation have one dtype, found {', '.join(dtypes) or 'no array'}")
    return Exchange(collective, _memory(sends), _memory(receives), dtypes[0], op, root)


def _memory(buffers: Sequence[HostBuffer]) -> list[Memory]:
    return [(buffer.address, buffer.elements) for buffer in buffers]
