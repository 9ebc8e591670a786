"""Runs torch's reduce-scatter, all-gather, all-to-all, gather, scatter and broadcast as exchanges of a `Group`.

torch has several forms of arguments: a list of tensors, one tensor of all parts, or several of either. Each form
becomes a list of parts by rank. A contiguous part is sent from, or received into, the tensor's own memory. Other parts
are copied. Collectives that only move data accept any dtype.

Gather and scatter run as all-to-alls in which most parts are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from geartrain.collectives.exchange import Exchange

Tensors = Sequence[torch.Tensor]
# Starts an exchange of memory that the last argument owns; returns a `geartrain.collectives.Work`.
Start = Callable[[Exchange, Any], Any]


class Parts:
    """Tensors as contiguous memory, one part for each rank.

    Args:
        tensors: one a rank, or one alone.
        receives: whether results are written into them.
    """

    def __init__(self, tensors: Tensors, *, receives: bool) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        plain = [tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj() for tensor in self._tensors]
        self.memory = [
            tensor if own else torch.empty(tensor.shape, dtype=tensor.dtype) if receives else _plain(tensor)
            for tensor, own in zip(self._tensors, plain, strict=True)
        ]
        self._copies = [i for i, own in enumerate(plain) if receives and not own]

    @property
    def has_copies(self) -> bool:
        """Whether `copy_back` does anything."""
        return bool(self._copies)

    def copy_back(self) -> None:
        """Copies results into the tensors that are not contiguous."""
        for i in self._copies:
            self._tensors[i].copy_(self.memory[i])

    def segments(self, item_size: int) -> list[tuple[int, int]]:
        """Address and elements of each."""
        return [(tensor.data_ptr(), tensor.nbytes // item_size) for tensor in self.memory]

    def detach_from(self, results: Parts, rank: int) -> None:
        """Copies inputs that results would be written over; this rank's own part may be in place."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in results.memory}
        for i, tensor in enumerate(self.memory):
            if tensor.untyped_storage().data_ptr() not in storages:
                continue
            for j, result in enumerate(results.memory):
                own = (i == rank or len(self.memory) == 1) and (j == rank or len(results.memory) == 1)
                if not (_apart(tensor, result) or (own and tensor.data_ptr() == result.data_ptr())):
                    self.memory[i] = tensor.clone()
                    break


class TensorExchange(NamedTuple):
    """One exchange of tensors, with inputs and outputs by rank as in `Exchange`. `op` is torch's operation.

    `results` are the caller's output tensors, if they differ from the outputs of the exchange.
    """

    collective: str
    inputs: Tensors
    outputs: Tensors
    op: Any = None
    root: int = 0
    results: Tensors | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [*self.inputs, *self.outputs]

    def alone(self) -> None:
        """Does it in a group of one rank. Raises `ValueError` for results of another size."""
        for given, result in zip(self.inputs, self.outputs, strict=True):
            if given.numel() != result.numel():
                raise ValueError(f"{given.numel()} elements do not go into a result of {result.numel()}")
            if given is not result and self.collective != "broadcast":
                result.detach().view(-1).copy_(given.detach().reshape(-1)) if result.is_contiguous() else (
                    result.detach().copy_(given.detach().view(result.shape))
                )


def begin(
    start: Start, call: TensorExchange, rank: int, dtype: str, op: str
) -> tuple[Callable[[float | None], None], Callable[[], bool], bool]:
    """Begins one exchange; `wait` and `done` of it, as `TorchWork` takes them, and whether `wait` copies results.

    Args:
        start: see `Start`.
        call: of tensors on the CPU that have one dtype.
        rank: this one.
        dtype: the name of their dtype; "uint8" for what is moved as bytes.
        op: the name of the operation.
    """
    receives = Parts(call.outputs, receives=True)
    if call.collective == "broadcast":
        (tensor,) = receives.memory
        if tensor.data_ptr() != call.outputs[0].data_ptr() and rank == call.root:
            tensor.copy_(call.outputs[0].detach())
        sends = receives
    else:
        sends = Parts(call.inputs, receives=False)
        sends.detach_from(receives, rank)
    item_size = 1 if dtype == "uint8" else call.outputs[0].element_size()
    exchange = Exchange(call.collective, sends.segments(item_size), receives.segments(item_size), dtype, op, call.root)
    work = start(exchange, (sends, receives))

    def wait(limit_s: float | None) -> None:
        work.wait(limit_s)
        receives.copy_back()

    return wait, work.done, receives.has_copies


# --- torch's forms ----------------------------------------------------------------------------------------------------
# Each takes the rank, the number of ranks and the arguments of a method of torch's groups, and returns the calls.


def _allgather(rank: int, size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> list[TensorExchange]:
    if isinstance(inputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    return [TensorExchange("all_gather", [one], parts) for one, parts in zip(inputs, outputs, strict=True)]


def _allgather_single(rank: int, size: int, output: Any, input: Any, *_: Any, **__: Any) -> list[TensorExchange]:
    return [TensorExchange("all_gather", [input], rows_of(output, size), results=[output])]


def _allgather_singles(rank: int, size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> list[TensorExchange]:
    pairs = zip(inputs, outputs, strict=True)
    return [TensorExchange("all_gather", [one], rows_of(all_, size), results=[all_]) for one, all_ in pairs]


def _allgather_lists(rank: int, size: int, output_lists: Any, inputs: Any, *_: Any, **__: Any) -> list[TensorExchange]:
    return [TensorExchange("all_gather", [one], [parts[i] for parts in output_lists]) for i, one in enumerate(inputs)]


def _reduce_scatter(
    rank: int, size: int, outputs: Any, inputs: Any, opts: Any = None, *_: Any, op: Any = None, **__: Any
) -> list[TensorExchange]:
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    asked = _op(opts if op is None else op)
    return [TensorExchange("reduce_scatter", parts, [one], asked) for one, parts in zip(outputs, inputs, strict=True)]


def _reduce_scatter_single(
    rank: int, size: int, output: Any, input: Any, opts: Any = None, *_: Any, **__: Any
) -> list[TensorExchange]:
    return [TensorExchange("reduce_scatter", rows_of(input, size), [output], _op(opts))]


def _reduce_scatter_singles(
    rank: int, size: int, outputs: Any, inputs: Any, opts: Any = None, *_: Any, **__: Any
) -> list[TensorExchange]:
    return [
        TensorExchange("reduce_scatter", rows_of(all_, size), [one], _op(opts))
        for one, all_ in zip(outputs, inputs, strict=True)
    ]


def _broadcast(
    rank: int, size: int, tensors: Any, opts: Any = None, *_: Any, root: int | None = None, **__: Any
) -> list[TensorExchange]:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    source = _root(opts if root is None else root)
    return [TensorExchange("broadcast", [one], [one], None, source) for one in given]


def _alltoall(rank: int, size: int, outputs: Any, inputs: Any, *_: Any, **__: Any) -> list[TensorExchange]:
    return [TensorExchange("all_to_all", inputs, outputs)]


def _alltoall_single(
    rank: int, size: int, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), *_: Any, **__: Any
) -> list[TensorExchange]:
    inputs, outputs = splits_of(input, input_splits, size), splits_of(output, output_splits, size)
    return [TensorExchange("all_to_all", inputs, outputs, results=[output])]


def _gather(
    rank: int, size: int, outputs: Any, inputs: Any, opts: Any = None, *_: Any, root: int | None = None, **__: Any
) -> list[TensorExchange]:
    if isinstance(inputs, torch.Tensor):
        outputs, inputs = [outputs] if outputs else [], [inputs]
    target = _root(opts if root is None else root)
    (mine,) = inputs
    nothing = mine.new_empty(0)
    parts = [mine if other == target else nothing for other in range(size)]
    results = list(outputs[0]) if rank == target else []
    return [TensorExchange("all_to_all", parts, results or [nothing] * size, results=results)]


def _scatter(
    rank: int, size: int, outputs: Any, inputs: Any, opts: Any = None, *_: Any, root: int | None = None, **__: Any
) -> list[TensorExchange]:
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs] if inputs else []
    source = _root(opts if root is None else root)
    (mine,) = outputs
    nothing = mine.new_empty(0)
    parts = [mine if other == source else nothing for other in range(size)]
    return [
        TensorExchange("all_to_all", list(inputs[0]) if rank == source else [nothing] * size, parts, results=[mine])
    ]


#: The calls of each method of torch's groups, in all its names.
FORMS: dict[str, Callable[..., list[TensorExchange]]] = {
    "allgather": _allgather,
    "_allgather_base": _allgather_single,
    "all_gather_single": _allgather_single,
    "allgather_into_tensor_coalesced": _allgather_singles,
    "all_gather_single_coalesced": _allgather_singles,
    "allgather_coalesced": _allgather_lists,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_singles,
    "reduce_scatter_single_coalesced": _reduce_scatter_singles,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall_single,
    "all_to_all_single": _alltoall_single,
    "gather": _gather,
    "scatter": _scatter,
}


def timeout_of(arguments: Sequence[Any], names: dict[str, Any]) -> timedelta | None:
    """The deadline that a call has of its own, in whichever form."""
    for given in (*arguments, *names.values()):
        found = given if isinstance(given, timedelta) else getattr(given, "timeout", None)
        if isinstance(found, timedelta) and found.total_seconds() > 0:
            return found
    return None


def _op(given: Any) -> Any:
    return dist.ReduceOp.SUM if given is None else getattr(given, "reduceOp", given)


def _root(given: Any) -> int:
    return int(getattr(given, "rootRank", 0 if given is None else given))


def rows_of(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """One tensor as equal parts by rank: rows of its first dimension, or of its elements where it is contiguous.

    Raises:
        ValueError: it does not divide evenly.
    """
    if tensor.is_contiguous() and tensor.numel() % size == 0:
        return list(tensor.detach().view(-1).chunk(size)) if tensor.numel() else [tensor.detach().view(-1)] * size
    if tensor.dim() == 0 or tensor.shape[0] % size != 0:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is no {size} equal parts")
    return list(tensor.detach().split(tensor.shape[0] // size))  # type: ignore[no-untyped-call]


def splits_of(tensor: torch.Tensor, sizes: Sequence[int], world_size: int) -> list[torch.Tensor]:
    """One tensor as parts by rank, each with a number of rows of the first dimension. Without numbers, parts are equal.

    Raises:
        ValueError: they do not add up.
    """
    if tensor.dim() == 0:
        raise ValueError("a tensor without dimensions cannot be split")
    if not sizes:
        if tensor.shape[0] % world_size != 0:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is no {world_size} equal parts")
        sizes = [tensor.shape[0] // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != tensor.shape[0] or min(sizes) < 0:
        raise ValueError(f"split sizes are {world_size} numbers of sum {tensor.shape[0]}, found {list(sizes)}")
    return list(tensor.detach().split(list(sizes)))  # type: ignore[no-untyped-call]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return not one.numel() or not other.numel() or first + one.nbytes <= second or second + other.nbytes <= first
