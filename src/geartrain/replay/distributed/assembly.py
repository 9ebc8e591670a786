"""Where a rank's part of a batch over many ranks is put together, and how rows of other ranks get there.

A *dock* makes the boxes that rows are read into (serving.py): the one of this rank's own batch, and one for every rank
it reads for. When all are read it moves the boxes to their ranks, takes in those of others, and makes the batch:

| dock | this rank's own rows | rows of other ranks |
|---|---|---|
| `HostDock` | copied by the CPU into the batch | messages, copied into the batch |
| `StagedDock` | copied by the CPU into pinned memory | messages, copied there too; then all to the device |
| `GatherDock` | gathered by the GPU into the batch | messages into pinned memory, then to their places there |
| `NcclDock` | the same | gathered by their rank's GPU; from GPU to GPU as the batch is taken; to their places |

The first three speak with each other: what a rank sends does not depend on where it wants its own batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.core.schema import round_up
from geartrain.device.device import Device, open_device
from geartrain.errors import ArgumentError, StoreClosedError
from geartrain.replay.batch import Batch
from geartrain.replay.builder import nothing
from geartrain.replay.device import (
    DeviceOptions,
    Flight,
    Handover,
    Landed,
    Landing,
    Stage,
    arranging,
    gather_rows_of,
    scatter_lines,
)
from geartrain.replay.device.layout import convert_rows
from geartrain.replay.distributed.messages import BOOK, Box, Seen, message_layout, message_of
from geartrain.replay.distributed.rank_group import Bytes, Message, Ranks
from geartrain.replay.fetch import Plan, Raw

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherRows
    from geartrain.device.kernels.gather_layout import Arena
    from geartrain.device.nccl import DeviceGroup

CLOSE_S = 60.0  # longest wait for the thread to finish what it is at
ALIGN = 64  # of messages, one behind the other

_log = logging.getLogger("geartrain.replay.distributed.assembly")

# Rows that another rank reads for this one, and their places in its batch.
Incoming = tuple[int, NDArray[np.int64]]


class HostDock:
    """Batches in host memory."""

    def begin(self, plan: Plan, n: int) -> Box:
        """A box for this rank's own rows."""
        return Box(plan, n, plan.empty(n))

    def parcels(self, wanted: Sequence[tuple[int, Plan, int]]) -> dict[int, Box]:
        """A box for each (rank, plan, rows) that this rank reads for."""
        return {rank: Box(plan, n) for rank, plan, n in wanted}

    def move(
        self, ranks: Ranks, parcels: Mapping[int, Box], mine: Box | None, incoming: Sequence[Incoming], idle: bool
    ) -> int:
        """Sends the parcels and takes in what others have read; returns the bytes of fields that came.

        `idle` says that no row moves between any two ranks, which all of them know.
        """
        sends: list[Message] = []
        for peer, box in sorted(parcels.items()):
            assert box.message is not None
            sends.append((peer, box.message))
        if mine is None or not incoming:
            ranks.exchange(sends, [])
            return 0
        letters = self._letters(mine.plan, [len(places) for _, places in incoming])
        opened = [message_of(mine.plan, len(places), m) for m, (_, places) in zip(letters, incoming, strict=True)]
        ranks.exchange(sends, [(peer, message) for (peer, _), message in zip(incoming, letters, strict=True)])
        for (_, _, books), (_, places) in zip(opened, incoming, strict=True):
            mine.books[places] = books
        self._take_in(mine, [(arrays, places) for (_, arrays, _), (_, places) in zip(opened, incoming, strict=True)])
        return sum(array.nbytes for _, arrays, _ in opened for array in arrays)

    def _letters(self, plan: Plan, counts: Sequence[int]) -> list[Bytes]:
        return [message_of(plan, n)[0] for n in counts]

    def _take_in(self, mine: Box, letters: Sequence[tuple[list[Any], NDArray[np.int64]]]) -> None:
        for arrays, places in letters:
            for into, array in zip(mine.arrays, arrays, strict=True):
                into[places] = array

    def batch(
        self, box: Box, keys: Keys, importance_weights: NDArray[np.float64] | None, step: int, its: NDArray[np.int64]
    ) -> tuple[Batch, Callable[[], None]]:
        """The batch whose rows are in the box, and what the consumer's thread does as it takes it."""
        plan = box.plan
        raw = raw_of(box)
        batch = plan.batch(raw, keys, np.ascontiguousarray(box.books["probability"]), importance_weights, step)
        return dataclasses.replace(batch, draw=plan.book(its)), nothing

    def no_batch(self, plan: Plan, step: int) -> tuple[Batch, Callable[[], None]]:
        """What a rank gets that reads nothing."""
        empty = plan.of_fields(())
        none = np.empty(0, np.int32)
        raw = Raw([], np.empty(0, np.uint8), empty.mask(none, none), none, none, np.empty(0, np.int64), 0)
        batch = empty.batch(raw, Keys.empty(), np.empty(0), None, step)
        return dataclasses.replace(batch, draw=empty.book(np.empty(0, np.int64))), nothing

    def enter(self) -> None:
        """Called first on the thread that makes batches."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around the making of a batch, against being closed in the middle of it."""
        yield

    def describe(self) -> list[dict[str, Any]]:
        """For each store, how rows come to a device."""
        return []

    def close(self) -> None:
        """Lets go of devices and segments."""


def raw_of(box: Box) -> Raw:
    """The rows of a box with their books, as they are fetched from a store."""
    books = box.books
    return Raw(
        box.arrays,
        np.zeros(box.n, np.uint8),
        box.plan.mask(books["start"], books["steps"]),
        np.ascontiguousarray(books["start"]),
        np.ascontiguousarray(books["length"]),
        np.ascontiguousarray(books["version"]),
        0,
    )


# --- on a device -------------------------------------------------------------------------------------------------


class DeviceDock(HostDock):
    """What docks on a device have in common.

    Args:
        device, stream: on which.
        landings: of this rank's own fields, one for each store; none where it reads nothing.
        options: as `Replay` was given them.
        why: this path was taken.
    """

    path = ""

    def __init__(self, device: Device, stream: Any, landings: list[Landing], options: DeviceOptions, why: str) -> None:
        self.device = device
        self.stream = stream
        self.landings = landings
        self.options = options
        self.why = why
        self._handover = Handover(device)
        self._lock = threading.Lock()
        self._closed = False

    def enter(self) -> None:
        """See `HostDock`."""
        self.device.enter()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """See `HostDock`."""
        with self._lock:
            if self._closed:
                raise StoreClosedError("this replay was closed")
            self._handover.hold_back()
            yield

    def _landed(self, landed: Landed) -> tuple[Batch, Callable[[], None]]:
        return landed.batch, self._handover.of(landed)

    def no_batch(self, plan: Plan, step: int) -> tuple[Batch, Callable[[], None]]:
        """See `HostDock`."""
        (batch, deliver), none = super().no_batch(plan, step), self.device.empty
        books: dict[str, Any] = {
            name: none(tuple(book.shape), book.dtype)
            for name in ("mask", "start", "length", "version", "probability", "draw")
            for book in [getattr(batch, name)]
        }
        return dataclasses.replace(batch, **books), deliver

    def describe(self) -> list[dict[str, Any]]:
        """See `HostDock`."""
        told = {"path": self.path, "why": self.why, "select": "host: over several ranks", "exchange": "host"}
        return [{"store": one.plan.store.name, **one.describe(), **told} for one in self.landings]

    def close(self) -> None:
        """Waits for the stream, and unpins."""
        self._closed = True
        if not self._lock.acquire(timeout=CLOSE_S):
            _log.warning("the replay's thread does not come back; what is pinned stays pinned")
            return
        try:
            self._handover.clear()
            for landing in self.landings:
                landing.close()
        finally:
            self._lock.release()


class _StagedBox(Box):
    """Pinned memory in the place of recycled memory."""

    def __init__(self, plan: Plan, stage: Stage, n: int) -> None:
        super().__init__(plan, n, stage.arrays)
        self.stage = stage


class StagedDock(DeviceDock):
    """Batches that are put together in pinned memory."""

    path = "staged"

    def begin(self, plan: Plan, n: int) -> Box:
        """See `HostDock`."""
        return _StagedBox(plan, Stage(self.landings[0], n), n)

    def batch(
        self, box: Box, keys: Keys, importance_weights: NDArray[np.float64] | None, step: int, its: NDArray[np.int64]
    ) -> tuple[Batch, Callable[[], None]]:
        """See `HostDock`."""
        assert isinstance(box, _StagedBox)
        flight = box.stage.send(raw_of(box))
        return self._landed(flight.land(keys, box.books["probability"], importance_weights, step, its))


class DeviceBox(Box):
    """Rows in device memory, padded, gathered by the device."""

    def __init__(self, plan: Plan, n: int, flight: Flight, landings: list[Landing]) -> None:
        super().__init__(plan, n, [])
        self.flight = flight
        self._landings = landings

    @property
    def nbytes(self) -> int:
        """See `Box`."""
        plan = self.flight.plan
        return sum(self.n * (plan.steps if field.timed else 1) * field.result_bytes for field in plan.fields)

    def read(
        self,
        part: int,
        plan: Plan,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32],
    ) -> Callable[[], Seen]:
        """See `Box`. Launches; the call of what is returned waits."""
        flight, layout = self.flight, self.flight.layout
        flight.gather(rows, generations, None, ends=ends, places=places, landing=self._landings[part])
        flight.ask([flight.arena[at : at + size * self.n] for at, size in _books_at(layout)])
        return functools.partial(self._seen, ends, places)

    def _seen(self, ends: NDArray[np.int32] | None, places: NDArray[np.uint32]) -> Seen:
        torn, starts, lengths, versions = self.flight.answer()
        starts, lengths = starts.view(np.int32)[places], lengths.view(np.int32)[places]
        steps = lengths if ends is None else np.minimum(lengths, np.maximum(ends, 0) + 1) - starts
        return Seen(torn[places], lengths, starts, steps.astype(np.int32), versions.view(np.int64)[places])


def _books_at(layout: Arena) -> list[tuple[int, int]]:
    return [(layout.starts, 4), (layout.lengths, 4), (layout.versions, 8)]


class GatherDock(DeviceDock):
    """Batches whose own rows the device gathers; others come through pinned memory."""

    path = "gather"

    def __init__(self, device: Device, stream: Any, landings: list[Landing], options: DeviceOptions, why: str) -> None:
        super().__init__(device, stream, landings, options, why)
        # As rows come from other ranks.
        self._raw = gather_rows_of(landings[0].plan, {}, False) if landings else None
        self._packed: GatherRows | None = None
        if options.packed and landings:
            self._packed = gather_rows_of(landings[0].plan, landings[0].options.convert, True)

    def begin(self, plan: Plan, n: int) -> Box:
        """See `HostDock`."""
        return DeviceBox(plan, n, Flight(self.landings[0], n), self.landings)

    def _letters(self, plan: Plan, counts: Sequence[int]) -> list[Bytes]:
        """All of them in one pinned buffer, which `_take_in` copies from."""
        sizes = [message_layout(plan, n)[2] for n in counts]
        begins = np.cumsum([0, *(_padded(size) for size in sizes)]).tolist()
        self._buffer, self._begins = self.landings[0].bounce.take(begins[-1]), begins
        memory: Bytes = self._buffer.numpy()
        return [memory[at : at + size] for at, size in zip(begins, sizes, strict=False)]

    def _take_in(self, mine: Box, letters: Sequence[tuple[list[Any], NDArray[np.int64]]]) -> None:
        import torch

        assert isinstance(mine, DeviceBox)
        landing, device, raw = self.landings[0], self.device, self._raw
        buffer, begins = self._buffer, self._begins
        del self._buffer
        assert raw is not None
        with device.on(self.stream):
            came = device.empty((begins[-1],), torch.uint8)
            device.copy(came, buffer[: begins[-1]])
            landing.bounce.give(buffer)
        books = self._books_of(mine, [places for _, places in letters])

        def work() -> None:
            first = 0
            for begin, (_, at) in zip(begins, letters, strict=False):
                k = len(at)
                these = slice(first, first + k)
                for number, offset in enumerate(message_layout(mine.plan, k)[0]):
                    field = raw.fields[number]
                    line = field.result_bytes * (raw.steps if field.timed else 1)
                    values = came[begin + offset :][: k * line].view(k, line)
                    made = convert_rows(
                        mine.flight.plan, number, values, books["mask"][these].view(torch.bool), landing.options.convert
                    )
                    _put_field(mine, number, books["places"][these], made)
                first += k
            for name in ("mask", "starts", "lengths", "versions"):
                lines = books[name].view(torch.uint8).view(len(books["places"]), -1)
                scatter_lines(mine.flight.arena, getattr(mine.flight.layout, name), mine.n, books["places"], lines)

        with device.on(self.stream):
            device.run(work)

    def _books_of(self, mine: Box, places: Sequence[NDArray[np.int64]]) -> dict[str, torch.Tensor]:
        """What is known of the rows that came, on the device."""
        every = np.concatenate(places)
        books = mine.books[every]
        arrays: dict[str, NDArray[Any]] = {
            "places": every,
            "mask": mine.plan.mask(books["start"], books["steps"]).view(np.uint8),
            "starts": books["start"],
            "lengths": books["length"],
            "versions": books["version"],
        }
        return dict(zip(arrays, self.landings[0].upload(list(arrays.values())), strict=True))

    def batch(
        self, box: Box, keys: Keys, importance_weights: NDArray[np.float64] | None, step: int, its: NDArray[np.int64]
    ) -> tuple[Batch, Callable[[], None]]:
        """See `HostDock`."""
        assert isinstance(box, DeviceBox)
        flight, work = self._arranged(box)
        if work is not None:
            with self.device.on(self.stream):
                self.device.run(work)
        return self._landed(flight.land(keys, box.books["probability"], importance_weights, step, its))

    def _arranged(self, box: DeviceBox) -> tuple[Flight, Callable[[], None] | None]:
        """The flight that is handed out, and what fills it when the box is full; None where that is the box's own."""
        padded = box.flight
        if self._packed is None:
            return padded, None
        flight = Flight(self.landings[0], box.n, self._packed)
        mask = box.plan.mask(box.books["start"], box.books["steps"])
        return flight, arranging(flight, padded.arena, padded.plan, padded.layout, mask)


def _put_field(box: DeviceBox, number: int, places: torch.Tensor, lines: torch.Tensor) -> None:
    scatter_lines(box.flight.arena, box.flight.layout.fields[number], box.n, places, lines)


def _scatter(mine: DeviceBox, inbox: torch.Tensor, layouts: Sequence[Arena], places: torch.Tensor) -> None:
    """Rows that came in arenas of their own, one behind the other, to their places in this rank's."""
    to, plan = mine.flight.layout, mine.flight.plan
    sizes = [field.result_bytes * (plan.steps if field.timed else 1) for field in plan.fields]
    first = at = 0
    for layout in layouts:
        k = layout.n
        pieces = [*zip(layout.fields, to.fields, sizes, strict=True)]
        for name, size in (("mask", plan.steps), ("starts", 4), ("lengths", 4), ("versions", 8)):
            pieces.append((getattr(layout, name), getattr(to, name), size))
        for source, target, size in pieces:
            lines = inbox[at + source :][: k * size].view(k, size)
            scatter_lines(mine.flight.arena, target, mine.n, places[first : first + k], lines)
        first += k
        at += layout.nbytes


def _padded(size: int) -> int:
    return round_up(size, ALIGN)


class NcclDock(GatherDock):
    """Rows of other ranks come from their GPU.

    They are gathered ahead like this rank's own, and exchanged when the consumer takes the batch, on its thread and
    its stream: in order with the collectives of the model, on all ranks, as NCCL wants it (nccl.py).

    Args:
        group: the ranks, as far as their devices speak with each other.
        others: for each set of fields that some rank reads, landings of them, one for each store.
    """

    def __init__(
        self,
        device: Device,
        stream: Any,
        landings: list[Landing],
        options: DeviceOptions,
        group: DeviceGroup,
        others: dict[tuple[str, ...], list[Landing]],
    ) -> None:
        super().__init__(device, stream, landings, options, "exchange='nccl' sends what the GPU has gathered")
        self._group = group
        self._others = others
        self._outbox: torch.Tensor | None = None
        self._exchange: Callable[[], None] = nothing  # of the batch that is being made

    def parcels(self, wanted: Sequence[tuple[int, Plan, int]]) -> dict[int, Box]:
        """See `HostDock`. One buffer, in the order in which the group sends it."""
        import torch

        ordered = sorted(wanted, key=lambda each: self._group.order[each[0]])
        landings = [self._others[tuple(plan.names)] for _, plan, _ in ordered]
        layouts = [of[0].gather.arena(n) for of, (_, _, n) in zip(landings, ordered, strict=True)]
        with self.device.on(self.stream):
            self._outbox = self.device.empty((sum(layout.nbytes for layout in layouts),), torch.uint8)
        made: dict[int, Box] = {}
        at = 0
        for (rank, plan, n), of, layout in zip(ordered, landings, layouts, strict=True):
            arena = self._outbox[at : at + layout.nbytes]
            made[rank] = DeviceBox(plan, n, Flight(of[0], n, arena=arena), of)
            at += layout.nbytes
        return made

    def move(
        self, ranks: Ranks, parcels: Mapping[int, Box], mine: Box | None, incoming: Sequence[Incoming], idle: bool
    ) -> int:
        """See `HostDock`. Keys and books go from host to host, now; fields when the batch is taken."""
        outbox, self._outbox = self._outbox, None
        assert outbox is not None
        assert mine is None or isinstance(mine, DeviceBox)
        came = {peer: np.empty(len(places), BOOK) for peer, places in incoming}
        ranks.exchange(
            [(peer, box.books.view(np.uint8)) for peer, box in sorted(parcels.items())],
            [(peer, books.view(np.uint8)) for peer, books in came.items()],
        )
        self._exchange = nothing
        if idle:
            return 0
        sends = {peer: box.flight.layout.nbytes for peer, box in parcels.items() if isinstance(box, DeviceBox)}
        places = None
        if incoming:
            assert mine is not None
            for peer, at in incoming:
                mine.books[at] = came[peer]
            incoming = sorted(incoming, key=lambda each: self._group.order[each[0]])
            (places,) = self.landings[0].upload([np.concatenate([at for _, at in incoming])])
        with self.device.on(self.stream):
            gathered = self.device.record()
        counts = [(peer, len(at)) for peer, at in incoming]
        self._exchange = functools.partial(self._all_to_all, gathered, outbox, sends, mine, counts, places)
        return sum(mine.nbytes * len(at) // mine.n for _, at in incoming) if mine is not None else 0

    def _all_to_all(
        self,
        gathered: Any,
        outbox: torch.Tensor,
        sends: Mapping[int, int],
        mine: DeviceBox | None,
        incoming: Sequence[tuple[int, int]],
        places: torch.Tensor | None,
    ) -> None:
        """On the consumer's thread and stream."""
        import torch

        device = self.device
        layouts = {} if mine is None else {peer: mine.flight.plan.arena(k) for peer, k in incoming}
        receives = {peer: layout.nbytes for peer, layout in layouts.items()}
        device.wait(gathered)
        device.record_stream(outbox)
        inbox = device.empty((sum(receives.values()),), torch.uint8)
        self._group.all_to_all(device, inbox, receives, outbox, sends)
        if mine is not None and places is not None:
            device.record_stream(mine.flight.arena)
            device.record_stream(places)
            device.run(functools.partial(_scatter, mine, inbox, [*layouts.values()], places))

    def batch(
        self, box: Box, keys: Keys, importance_weights: NDArray[np.float64] | None, step: int, its: NDArray[np.int64]
    ) -> tuple[Batch, Callable[[], None]]:
        """See `HostDock`."""
        assert isinstance(box, DeviceBox)
        flight, work = self._arranged(box)
        batch, hand_over = self._landed(flight.land(keys, box.books["probability"], importance_weights, step, its))
        exchange, self._exchange = self._exchange, nothing

        def deliver() -> None:
            hand_over()
            exchange()
            if work is not None:
                self.device.record_stream(box.flight.arena)
                self.device.run(work)

        return batch, deliver

    def no_batch(self, plan: Plan, step: int) -> tuple[Batch, Callable[[], None]]:
        """See `HostDock`. Others need this rank for their exchange."""
        exchange, self._exchange = self._exchange, nothing
        return super().no_batch(plan, step)[0], exchange

    def describe(self) -> list[dict[str, Any]]:
        """See `HostDock`."""
        return [{**each, "exchange": self._group.backend} for each in super().describe()]

    def close(self) -> None:
        """See `HostDock`."""
        for landings in self._others.values():
            self.landings = [*self.landings, *(one for one in landings if one not in self.landings)]
        super().close()


# --- which -------------------------------------------------------------------------------------------------------


def check_options(options: DeviceOptions, names: Sequence[str], has_peers: bool) -> None:
    """Raises `ArgumentError` for what there is not over several ranks."""
    unknown = set(options.convert) - set(names)
    if unknown:
        raise ArgumentError(f"`convert` names {sorted(unknown)}, the batch has {list(names)}")
    if options.select == "device":
        raise ArgumentError("select='device' was asked for, but over several ranks rows are chosen on the host")
    if has_peers and (options.path == "gather" or options.exchange == "nccl"):
        asked = "exchange='nccl'" if options.exchange == "nccl" else "path='gather'"
        raise ArgumentError(
            f"{asked} was asked for, but tensor-parallel peers are handed the batch from host memory; use path='staged'"
        )
    if options.exchange == "nccl" and options.path == "staged":
        raise ArgumentError("exchange='nccl' sends what the GPU has gathered; leave path='staged' out")


def open_dock(
    options: DeviceOptions,
    plans: list[dict[tuple[str, ...], Plan]],
    fields: tuple[str, ...],
    has_peers: bool,
    make_group: Callable[[Device], DeviceGroup] | None,
) -> DeviceDock:
    """The dock for batches on a device.

    Args:
        options: as `Replay` was given them, and checked.
        plans: for each store, by the fields that some rank reads.
        fields: that this rank reads.
        has_peers: whether the batch is passed on to tensor-parallel peers.
        make_group: for exchange="nccl", what makes the group; None where there is no torch process group.

    Raises:
        PinError, ArgumentError: what was asked for by name cannot be had.
    """
    device = open_device(options.device)
    device.enter()
    stream = device.new_stream()
    nccl = options.exchange == "nccl"
    opened: list[Landing] = []

    def landings(names: tuple[str, ...], path: Any) -> list[Landing]:
        convert = {name: into for name, into in options.convert.items() if name in names}
        # A batch is packed when it is complete; rows from elsewhere may be longer or shorter.
        here = dataclasses.replace(options, convert=convert, path=path, packed=options.packed and path == "staged")
        made = []
        for of in plans:
            made.append(Landing(device, stream, of[names], here))
            opened.append(made[-1])
        return made

    try:
        if nccl:
            if make_group is None:
                raise ArgumentError("exchange='nccl' needs a process group of torch.distributed, or a mesh over one")
            others = {names: landings(names, "gather") for names in plans[0]}
            return NcclDock(device, stream, others.get(fields, []), options, make_group(device), others)
        if not fields:
            return GatherDock(device, stream, [], options, "this rank reads nothing")
        path, why = ("staged", "tensor-parallel peers are handed the batch") if has_peers else (options.path, "")
        mine = landings(fields, path)
        staged = next((one for one in mine if one.path == "staged"), None)
        if staged is None:
            return GatherDock(device, stream, mine, options, mine[0].why)
        why = why or staged.why
        for one in mine:
            one.close()
        return StagedDock(device, stream, landings(fields, "staged"), options, why)
    except BaseException:
        for one in opened:
            one.close()
        raise


__all__ = ["DeviceDock", "GatherDock", "HostDock", "NcclDock", "StagedDock", "check_options", "open_dock"]
