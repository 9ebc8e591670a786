"""Shows rows of a store to people: values as text, images on the terminal or as PNG files."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from geartrain.core.schema import Field
from geartrain.core.shared_files import writing
from geartrain.replay.fetch import fetch
from geartrain.store.row import ROW_STATES
from geartrain.store.store import Store
from geartrain.tools.cli.app import escape

#: Smallest edge of an array shown as a picture, and the widest picture on a terminal, in cells.
_LEAST, _WIDEST = 8, 64
#: Gray frames of a stack that are shown beside each other; more are no stack.
_STACKED = 8
_EDGE_ITEMS = 3
#: From dark to bright, where there are no colours.
_SHADES = " .:-=+*#%@"


def newest_rows(store: Store, n: int) -> Iterator[dict[str, Any]]:
    """The newest rows, oldest of them first: key, metadata, and `values` by field, (length, *shape) or (*shape).

    A row that is overwritten meanwhile is left out. A copy of each row is made.
    """
    keys = store.keys()
    for at in range(max(0, len(keys) - n), len(keys)):
        key = keys[at : at + 1]
        about = store.status(key)
        batch = fetch(store, key, pad="right", output="numpy", on_stale="drop", threads=1)
        if len(batch) == 0:
            continue
        length = int(about["length"][0])
        yield {
            "row": int(key.row[0]),
            "generation": int(key.generation[0]),
            "length": length,
            "state": ROW_STATES[int(about["state"][0])],
            "priority": float(about["priority"][0]),
            "version": int(about["version"][0]),
            "times_sampled": int(about["times_sampled"][0]),
            "age_s": max(0.0, (time.time_ns() - int(about["inserted_at_ns"][0])) / 1e9),
            "values": {
                name: np.asarray(batch[name])[0] if field.per_row else np.asarray(batch[name])[0][:length]
                for name, field in store.fields.items()
            },
        }


def picture_of(value: NDArray[Any], field: Field) -> NDArray[np.uint8] | None:
    """One step's value as a picture (height, width, 3); None where it is none.

    Pictures are uint8: (H, W), (H, W, 3), (3, H, W), or a stack of up to 8 gray frames, (n, H, W) or (H, W, n), which
    are put beside each other; H and W are 8 at least.
    """
    if value.dtype != np.uint8 or value.ndim not in (2, 3):
        return None
    if value.ndim == 2:
        value = value[..., None]
    if min(value.shape[:2]) < _LEAST and min(value.shape[1:]) >= _LEAST:
        value = np.moveaxis(value, 0, -1)
    height, width, channels = value.shape
    if min(height, width) < _LEAST or channels > _STACKED:
        return None
    if channels == 3:
        return np.ascontiguousarray(value)
    beside = np.concatenate([value[..., at] for at in range(channels)], axis=1)
    return np.repeat(beside[..., None], 3, axis=-1)


def half_blocks(picture: NDArray[np.uint8], width: int) -> Segments:
    """A picture in half blocks, two pixels a cell, at most `width` cells wide and scaled down by whole steps."""
    step = max(1, -(-picture.shape[1] // max(1, width)))
    small = picture[::step, ::step]
    if len(small) % 2:
        small = np.concatenate([small, small[-1:]])
    segments = []
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            style = Style(color=Color.from_rgb(*map(int, above)), bgcolor=Color.from_rgb(*map(int, below)))
            segments.append(Segment("▀", style))
        segments.append(Segment.line())
    return Segments(segments)


def shades(picture: NDArray[np.uint8], width: int) -> str:
    """The same picture without colours, for a file or a pipe: a character for two pixels, the brighter the denser."""
    step = max(1, -(-picture.shape[1] // max(1, width)))
    gray = picture[::step, ::step].mean(-1)
    if len(gray) % 2:
        gray = np.concatenate([gray, gray[-1:]])
    levels = ((gray[::2] + gray[1::2]) / 2 * len(_SHADES) / 256).astype(int)
    return "".join("".join(_SHADES[level] for level in line).rstrip() + "\n" for line in levels)


def png(picture: NDArray[np.uint8]) -> bytes:
    """The picture as a PNG file."""
    height, width, _ = picture.shape
    lines = b"".join(b"\0" + picture[y].tobytes() for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def print_rows(store: Store, n: int, out: Console, folder: Path | None) -> None:
    """Prints the newest rows; writes the pictures of all their steps into `folder`, if there is one."""
    shown = 0
    for row in newest_rows(store, n):
        shown += 1
        out.print(
            f"[bold]row {row['row']:,}[/], generation {row['generation']:,}: {row['length']:,} steps, {row['state']}, "
            f"priority {row['priority']:.6g}, version {row['version']:,}, sampled {row['times_sampled']:,} times, "
            f"{row['age_s']:,.1f} s old",
            soft_wrap=True,
        )
        for name, values in row["values"].items():
            field = store.fields[name]
            steps = values[None] if field.per_row else values
            first = picture_of(steps[0], field) if len(steps) else None
            if first is None:
                text = np.array2string(values, threshold=24, edgeitems=_EDGE_ITEMS, precision=4, suppress_small=True)
                out.print(f"{escape(name)} {escape(text, lines=True)}", soft_wrap=True, highlight=False)
                continue
            last = picture_of(steps[-1], field)
            assert last is not None
            ends = [first] if len(steps) == 1 else [first, last]
            what = "" if field.per_row else f", steps 0 and {len(steps) - 1}" if len(ends) == 2 else ", step 0"
            low, high = int(values.min()), int(values.max())
            out.print(f"{escape(name)} {field.shape} pixels{what}, {low} to {high}", soft_wrap=True, highlight=False)
            for picture in ends:
                if out.color_system is None:
                    out.print(shades(picture, min(_WIDEST, out.width)), end="", markup=False, highlight=False)
                else:
                    out.print(half_blocks(picture, min(_WIDEST, out.width)), end="")
            if folder is not None:
                for step, value in enumerate(steps):
                    made = picture_of(value, field)
                    assert made is not None
                    file = f"row{row['row']}-{name}.png" if field.per_row else f"row{row['row']}-{name}-{step}.png"
                    path = folder / file.replace("/", "_")
                    with writing(path):
                        path.write_bytes(png(made))
    if shown < n:
        out.print(f"{shown:,} rows are selectable" if shown else "no row is selectable")


def rows_as_json(store: Store, n: int) -> list[dict[str, Any]]:
    """The newest rows as plain data: arrays as lists; NaN, infinities and other types as text."""
    rows = []
    for row in newest_rows(store, n):
        values = {name: _plain(value) for name, value in row.pop("values").items()}
        rows.append({**row, "values": values})
    return rows


def _plain(value: NDArray[Any]) -> Any:
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        return np.where(np.isfinite(value), value.astype(object), np.char.mod("%s", value)).tolist()
    if value.dtype.kind in "biuf":
        return value.tolist()
    if value.dtype.kind == "c":
        return [_plain(value.real), _plain(value.imag)]
    return value.astype(str).tolist()


__all__ = ["half_blocks", "newest_rows", "picture_of", "png", "print_rows", "rows_as_json", "shades"]
