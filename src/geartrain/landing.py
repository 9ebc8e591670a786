"""Batches that land in a GPU's memory: gathered by the GPU itself, or staged through pinned host memory.

Two paths, the same batches:

    gather   the segment is pinned where it is (pinning.py) and one Triton kernel reads the chosen rows out of it
             (kernels/gather_rows.py). The CPU touches no row.
    staged   native threads gather into a pinned buffer (fetch.py), and one asynchronous copy takes it to the device.
             Works for any segment, pinned or not.

Either runs on a stream of its own, into one buffer of device memory a batch (an *arena*), with an event at its end. The
consumer's stream waits for the event; its host does not wait. The arena comes from torch's allocator and is lent to the
consumer's stream, so that its memory is used again once the batch was dropped and what the consumer had given its
stream by then is done.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from geartrain.batch import Batch
from geartrain.device import Device
from geartrain.errors import PinError, SchemaError
from geartrain.fetch import Plan, Raw
from geartrain.keys import Keys
from geartrain.pinning import Pin, pins
from geartrain.schema import DTYPES, torch_dtype

if TYPE_CHECKING:
    import torch

    from geartrain.kernels.gather_rows import Arena, GatherRows

Path = Literal["auto", "gather", "staged"]

# The chooser's crossover: rows of more bytes than this are staged. Not measured yet on any GPU. `geartrain bench fetch
# --device cuda` measures both paths and prints the value for the machine. Until then it follows from what is published
# and what was measured on CPUs: reads of mapped memory in aligned requests of 128 bytes come within a few per cent of
# cudaMemcpy's rate (Min et al., EMOGI, VLDB 2021; Min et al., PyTorch-Direct, 2021), and GEAR's kernel moved 17 GB/s
# where a CPU that drove the copies moved 2 (GEAR, section 3.4). So the GPU's own gather loses nothing on small rows and
# saves the CPU's copy on large ones; only beyond 4 MB a row, where a few threads of a host stream as fast as a link
# carries, is there nothing left to save but its occupancy of multiprocessors.
CROSSOVER_BYTES = 4 << 20

_log = logging.getLogger("geartrain.landing")


@dataclass(frozen=True)
class Convert:
    """What becomes of a field on its way: float32(x) * scale + shift, rounded to `dtype`.

    Args:
        dtype: "bfloat16", "float16" or "float32".
        scale, shift: float32 numbers.

    Example:
        >>> Convert("bfloat16", scale=1 / 255)
        Convert(dtype='bfloat16', scale=0.00392156862745098, shift=0.0)
    """

    dtype: str
    scale: float = 1.0
    shift: float = 0.0

    def apply(self, values: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """The same as the kernel does, by torch; where a step is not `real` the result is 0."""
        import torch

        made = (values.to(torch.float32) * self.scale + self.shift).to(getattr(torch, self.dtype))
        if real is not None:
            made.masked_fill_(~real.view(*real.shape, *([1] * (made.ndim - real.ndim))), 0)
        return made


@dataclass(frozen=True)
class OnDevice:
    """How batches come to a GPU; `Replay(device="cuda")` is short for `Replay(device=OnDevice("cuda"))`.

    Args:
        device: "cuda", "cuda:1", a torch.device, or a `geartrain.device.Device`.
        path: "gather", "staged", or "auto": gather where the segment can be pinned and rows are not larger than the
            crossover, staged otherwise. "gather" raises where "auto" would say in the log why it stages.
        select: where rows are chosen. "device" draws with Triton kernels from a copy of the weights in device memory;
            "auto" does so where the strategy allows it and the batch is large enough to pay for keeping that copy.
        convert: fields to convert on the way, by name.
        packed: windows stand one behind the other, without padding, with `batch.cu_seqlens`.
        pin_limit_bytes: most pinned bytes on this host, all processes together; half of its memory by default.
    """

    device: Any = "cuda"
    path: Path = "auto"
    select: Literal["auto", "host", "device"] = "auto"
    convert: Mapping[str, Convert] = field(default_factory=dict)
    packed: bool = False
    pin_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.path not in ("auto", "gather", "staged"):
            raise SchemaError(f"path is 'auto', 'gather' or 'staged', found {self.path!r}")
        if self.select not in ("auto", "host", "device"):
            raise SchemaError(f"select is 'auto', 'host' or 'device', found {self.select!r}")


def gather_rows_of(plan: Plan, convert: Mapping[str, Convert], packed: bool) -> GatherRows:
    """A plan as the kernel takes it. Raises `SchemaError` for a conversion that there is not."""
    from geartrain.kernels.gather_rows import GatherField, GatherRows, Segment

    store = plan.store
    unknown = set(convert) - set(plan.names)
    if unknown:
        raise SchemaError(f"`convert` names {sorted(unknown)}, the batch has {plan.names}")
    layout = store.native.layout()
    fields = []
    for name, number in zip(plan.names, plan.numbers, strict=True):
        spec = store.fields[name]
        offset, stride = layout["columns"][number]
        into = convert.get(name)
        step_bytes = spec.step_nbytes if spec.timed else spec.nbytes
        fields.append(
            GatherField(name, spec.dtype, spec.itemsize, offset, stride, spec.nbytes, step_bytes, spec.timed)
            if into is None
            else GatherField(
                name, spec.dtype, spec.itemsize, offset, stride, spec.nbytes, step_bytes, spec.timed,
                into.dtype, into.scale, into.shift,
            )
        )  # fmt: skip
    segment = Segment(layout["words"], layout["status"], layout["status_stride"], store.capacity, store.max_length)
    return GatherRows(segment, fields, plan.window, plan.pad_left, packed)


class Landing:
    """Where the batches of one plan land.

    Args:
        device, stream: on which.
        plan: what is fetched.
        options: as `Replay` was given them.

    Raises:
        PinError: path="gather" was asked for, and the segment cannot be pinned.
        SchemaError: a conversion that there is not.
    """

    def __init__(self, device: Device, stream: Any, plan: Plan, options: OnDevice) -> None:
        self.device = device
        self.stream = stream
        self.plan = plan
        self.options = options
        self.gather = gather_rows_of(plan, options.convert, options.packed)
        self.row_bytes = sum(plan.row_bytes(name) for name in plan.names)
        self.bounce = Bounce(device)
        self._pin: Pin | None = None
        self.segment: torch.Tensor | None = None
        self.path, self.why = self._choose()

    def _choose(self) -> tuple[str, str]:
        asked, store = self.options.path, self.plan.store
        if asked == "staged":
            return "staged", "it was asked for"
        if asked == "auto" and self.row_bytes > CROSSOVER_BYTES:
            return "staged", f"rows of {self.row_bytes} bytes are larger than the crossover of {CROSSOVER_BYTES}"
        try:
            self._pin = pins().hold(store, self.device, self.options.pin_limit_bytes)
        except PinError as error:
            if asked == "gather":
                raise
            _log.warning("batches of %r are staged through the CPU: %s", store.name, error)
            return "staged", str(error)
        self.segment = self.device.host_view(self._pin.memory)
        if asked == "gather":
            return "gather", "it was asked for"
        return "gather", f"the segment is pinned and rows have {self.row_bytes} bytes, at most {CROSSOVER_BYTES}"

    def close(self) -> None:
        """Waits for the stream and lets go of the segment."""
        if self._pin is not None:
            with self.device.on(self.stream):
                self.device.sync(self.device.record())
            self.segment = None
            self._pin.release()
            self._pin = None

        # --- a batch -----------------------------------------------------------------------------------------------

    def begin(self, n: int) -> Flight:
        """An arena for a batch of n rows; its memory belongs to the stream."""
        return Flight(self, self.gather.arena(n))

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Small host arrays, on the device by one copy."""
        import torch

        sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
        total = sum(sizes)
        if total == 0:
            return []
        with self.device.on(self.stream):
            target = self.device.empty((total,), torch.uint8)
            buffer = self.bounce.take(total)
            at, views = 0, []
            for array, size in zip(arrays, sizes, strict=True):
                flat = np.ascontiguousarray(array).reshape(-1)
                buffer.numpy()[at : at + flat.nbytes] = flat.view(np.uint8)
                views.append(target[at : at + flat.nbytes].view(getattr(torch, flat.dtype.name)).view(array.shape))
                at += size
            self.device.copy(target, buffer[:total])
            self.bounce.give(buffer)
        return views

    def describe(self) -> dict[str, Any]:
        """The path in use and why, for people."""
        return {
            "device": self.device.name,
            "path": self.path,
            "why": self.why,
            "row_bytes": self.row_bytes,
            "pinned_bytes": 0 if self._pin is None else self._pin.memory.nbytes,
            "bounce_bytes": self.bounce.nbytes,
        }


class Flight:
    """One batch on its way: its arena, and what the host has to learn of it."""

    def __init__(self, landing: Landing, layout: Arena) -> None:
        import torch

        self.landing = landing
        self.layout = layout
        with landing.device.on(landing.stream):
            self.arena = landing.device.empty((layout.nbytes,), torch.uint8)
        self.cu_seqlens: torch.Tensor | None = None
        self.steps_packed: int | None = None
        self._news: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._event: Any = None

    def gather(
        self,
        rows: Any,
        generations: Any,
        draw: tuple[int, int, int] | None,
        *,
        ends: NDArray[np.int32] | None = None,
        numbers: NDArray[np.uint32] | None = None,
        places: NDArray[np.uint32] | None = None,
        landing: Landing | None = None,
        clear: bool = True,
    ) -> None:
        """Launches the gather of some rows, or of all of them. Host arrays are uploaded, tensors are there already.

        Args:
            rows, generations: the keys.
            draw: (seed, step, attempt) of the windows.
            ends: the last step of each window, instead.
            numbers: of the draws; 0, 1, 2, ... by default.
            places: of the rows in the batch; 0, 1, 2, ... by default.
            landing: of another store of a mixture.
            clear: forget which rows were torn before.
        """
        at = landing or self.landing
        device, gather, segment, arena, layout = at.device, at.gather, at.segment, self.arena, self.layout
        assert segment is not None
        given = {"rows": rows, "generations": generations, "ends": ends, "numbers": numbers, "places": places}
        on_host = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        given |= dict(zip(on_host, at.upload(list(on_host.values())), strict=True))
        k, rows, generations = len(rows), given["rows"], given["generations"]
        named: dict[str, Any] = {"draw": draw if gather.window else None, "ends": given["ends"]}
        named["numbers"] = given["numbers"]
        with device.on(at.stream):
            if gather.packed:
                self.cu_seqlens = device.empty((k + 1,), _dtype("int32"))
                device.count_steps(gather, self.cu_seqlens, segment, rows, **named)
                named["cu_seqlens"] = self.cu_seqlens
            else:
                named["places"] = given["places"]
            device.gather(gather, segment, arena, layout, rows, generations, clear=clear, **named)

    def ask(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Sends the torn rows and these tensors to the host, behind everything that was launched so far."""
        landing, layout = self.landing, self.layout
        wanted = [self.arena[layout.torn : layout.torn + layout.n], *tensors]
        if self.cu_seqlens is not None:
            wanted.append(self.cu_seqlens)
        with landing.device.on(landing.stream):
            for tensor in wanted:
                flat = tensor.reshape(-1).view(_dtype("uint8"))
                buffer = landing.bounce.take(len(flat))
                landing.device.copy(buffer[: len(flat)], flat)
                self._news.append((buffer, buffer[: len(flat)].view(tensor.dtype)))
            self._event = landing.device.record()

    def answer(self) -> list[NDArray[Any]]:
        """What was asked for, the torn rows first. Here, and only here, a host thread waits for the device."""
        self.landing.device.sync(self._event)
        found = [np.array(view.numpy()) for _, view in self._news]
        for buffer, _ in self._news:
            self.landing.bounce.give_now(buffer, self._event)
        self._news = []
        if self.cu_seqlens is not None:
            self.steps_packed = int(found.pop()[-1])
        return found

    def land(self, keys: Keys, probability: Any, importance: Any, step: int | None) -> Landed:
        """The batch as users get it, and its end as an event."""
        import torch

        landing, plan, layout = self.landing, self.landing.plan, self.layout
        arrays = [array for array in (probability, importance) if array is not None]
        books = landing.upload(arrays)
        n, steps = layout.n, landing.gather.steps
        fields = {}
        for spec, offset in zip(landing.gather.fields, layout.fields, strict=True):
            schema = plan.store.fields[spec.name]
            dtype = torch_dtype(DTYPES[spec.result or schema.dtype])
            shape = plan.shape(spec.name, n)
            if self.steps_packed is not None and schema.timed:
                shape = (self.steps_packed, *schema.step_shape)
            fields[spec.name] = self._view(offset, dtype, *shape)
        batch = Batch(
            fields,
            keys,
            None if landing.gather.packed else self._view(layout.mask, torch.bool, n, steps),
            self._view(layout.starts, torch.int32, n),
            self._view(layout.lengths, torch.int32, n),
            self._view(layout.versions, torch.int64, n),
            books[0] if probability is not None else None,
            books[-1] if importance is not None else None,
            step,
            None,
            self.cu_seqlens,
        )
        with landing.device.on(landing.stream):
            return Landed(batch, landing.device.record(), [self.arena, *books[:1], *self._packed()])

    def _packed(self) -> list[torch.Tensor]:
        return [] if self.cu_seqlens is None else [self.cu_seqlens]

    def _view(self, at: int, dtype: Any, *shape: int) -> torch.Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.arena[at : at + nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class Landed:
    """A batch whose memory is being filled until an event."""

    batch: Batch
    event: Any
    memory: list[torch.Tensor]

    def hand_over(self, device: Device) -> None:
        """Makes the calling thread's stream wait for the batch, and keeps its memory for that stream."""
        device.wait(self.event)
        for tensor in self.memory:
            device.lend(tensor)


# --- staging -----------------------------------------------------------------------------------------------------


class Stage:
    """Pinned memory for a batch of n rows as the CPU makes it: raw and padded, laid out as the kernel would."""

    def __init__(self, landing: Landing, n: int) -> None:
        self.landing = landing
        self.plain = gather_rows_of(landing.plan, {}, False)
        self.layout = self.plain.arena(n)
        self.buffer = landing.bounce.take(self.layout.nbytes)
        plan = landing.plan
        self.arrays = [
            self._array(at, plan.raw_dtype(name), plan.shape(name, n))
            for name, at in zip(plan.names, self.layout.fields, strict=True)
        ]

    def _array(self, at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        made: NDArray[Any] = self.buffer.numpy()[at : at + nbytes].view(dtype).reshape(shape)
        return made

    def send(self, raw: Raw) -> Flight:
        """Copies the batch, whose fields lie in `arrays`, to an arena by one copy, converts and packs there."""
        landing, layout = self.landing, self.layout
        n, steps, device = layout.n, self.plain.steps, landing.device
        self._array(layout.mask, np.bool_, (n, steps))[...] = raw.mask
        self._array(layout.starts, np.int32, (n,))[...] = raw.starts
        self._array(layout.lengths, np.int32, (n,))[...] = raw.lengths
        self._array(layout.versions, np.int64, (n,))[...] = raw.versions
        self._array(layout.torn, np.uint8, (n,))[...] = 0
        flight = landing.begin(n)
        as_it_is = not landing.gather.packed and not landing.options.convert
        with device.on(landing.stream):
            target = flight.arena if as_it_is else device.empty((layout.nbytes,), _dtype("uint8"))
            device.copy(target, self.buffer[: layout.nbytes])
            landing.bounce.give(self.buffer)
        if not as_it_is:
            self._transform(flight, target, raw)
        return flight

    def _transform(self, flight: Flight, raw_arena: torch.Tensor, raw: Raw) -> None:
        """Conversion and packing on the device, where the kernel of the other path does them on the way."""
        landing, n, steps = self.landing, self.layout.n, self.plain.steps
        real = landing.upload([np.flatnonzero(raw.mask)])[0] if landing.gather.packed else None
        if real is not None:
            ends = np.concatenate([np.zeros(1, np.int32), raw.mask.sum(1, dtype=np.int32)]).cumsum(dtype=np.int32)
            (flight.cu_seqlens,) = landing.upload([ends])
            flight.steps_packed = int(ends[-1])
        mask = raw_arena[self.layout.mask : self.layout.mask + n * steps].view(_dtype("bool")).view(n, steps)

        def work() -> None:
            for spec, source_at, at in zip(
                landing.gather.fields, self.layout.fields, flight.layout.fields, strict=True
            ):
                shape = landing.plan.shape(spec.name, n)
                dtype = torch_dtype(DTYPES[spec.dtype])
                nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                values = raw_arena[source_at : source_at + nbytes]
                values = values.view(-1, spec.step_bytes)  # a line a step
                timed = spec.timed
                if real is not None and timed:
                    values = values[real]
                if spec.result is not None:
                    into = landing.options.convert[spec.name]
                    known = mask.reshape(-1) if timed and real is None else None
                    values = into.apply(values.view(dtype), known).view(_dtype("uint8"))
                flight.arena[at : at + values.numel()].view(values.shape).copy_(values)
            for name in ("mask", "starts", "lengths", "versions"):
                if name == "mask" and landing.gather.packed:
                    continue
                source, to = getattr(self.layout, name), getattr(flight.layout, name)
                size = {"mask": n * steps, "starts": 4 * n, "lengths": 4 * n, "versions": 8 * n}[name]
                flight.arena[to : to + size].copy_(raw_arena[source : source + size])

        with landing.device.on(landing.stream):
            landing.device.run(work)


class Bounce:
    """Pinned buffers for copies between host and device, used again once their copy is done."""

    MOST = 16  # that are not in use; more copies than that in flight are waited for

    def __init__(self, device: Device) -> None:
        self._device = device
        self._given: deque[tuple[torch.Tensor, Any]] = deque()
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A pinned buffer of at least so many bytes. Give it back when its last copy was given to the stream."""
        for i, (buffer, event) in enumerate(self._given):
            if nbytes <= len(buffer) <= max(4096, 4 * nbytes) and self._device.done(event):
                del self._given[i]
                return buffer
        while len(self._given) >= self.MOST:
            buffer, event = self._given.popleft()
            self._device.sync(event)
            self.nbytes -= len(buffer)
        size = max(4096, 1 << (max(1, nbytes) - 1).bit_length())
        self.nbytes += size
        return self._device.pinned(size)

    def give(self, buffer: torch.Tensor) -> None:
        """Back, for when everything that the current stream was given so far is done."""
        self._given.append((buffer, self._device.record()))

    def give_now(self, buffer: torch.Tensor, event: Any) -> None:
        """Back; `event` has come, and nothing has used the buffer since."""
        self._given.appendleft((buffer, event))


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


__all__ = ["CROSSOVER_BYTES", "Convert", "Flight", "Landed", "Landing", "OnDevice", "Stage", "gather_rows_of"]
