"""Decodes PNG and JPEG images with Pillow, and defines how images and video frames are stored.

RLDS and LeRobot both keep compressed images inside their tables. PNG decodes to exactly the original bytes. JPEG
decoders differ slightly, so a pixel can differ by one from what TensorFlow decodes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geartrain.core.arguments import check_choice, check_whole, shown
from geartrain.core.extras import require
from geartrain.errors import ArgumentError
from geartrain.integrations.datasets.episode import Array

_MOST_EDGE = 1 << 14


@dataclass(frozen=True)
class ImageForm:
    """How images are stored.

    Attributes:
        size: (height, width) that they are resized to, or None.
        channels_first: True for (channels, height, width).
    """

    size: tuple[int, int] | None = None
    channels_first: bool = False

    @classmethod
    def of(cls, size: int | str | Sequence[int] | None, layout: str) -> ImageForm:
        """The form that options ask for.

        Args:
            size: (height, width), the text "height x width" such as "240x320", or one number for both.
            layout: "hwc" or "chw".

        Raises:
            ArgumentError: something else.
        """
        check_choice("the option image_layout", layout, ("hwc", "chw"))
        edges: Any = size
        if isinstance(size, str):
            edges = [int(edge) for edge in size.split("x")] if re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})?", size) else []
            edges *= 3 - len(edges) if edges else 1
        elif isinstance(size, int | np.integer) and not isinstance(size, bool):
            edges = (size, size)
        if edges is None:
            return cls(None, layout == "chw")
        try:
            if not isinstance(edges, list | tuple | np.ndarray):
                raise TypeError
            height, width = (check_whole("an edge", edge) for edge in edges)
            if not (1 <= height <= _MOST_EDGE and 1 <= width <= _MOST_EDGE):
                raise ValueError
        except (TypeError, ValueError):
            raise ArgumentError(
                f"the option image_size is height and width, such as (240, 320) or '240x320', each from 1 to "
                f"{_MOST_EDGE:,}, or one number for both; found {shown(size)}"
            ) from None
        return cls((height, width), layout == "chw")

    def shape(self, picture: tuple[int, int, int]) -> tuple[int, int, int]:
        """Shape of what is stored of a picture of shape (height, width, channels)."""
        height, width = self.size or picture[:2]
        return (picture[2], height, width) if self.channels_first else (height, width, picture[2])

    def put(self, pixels: Array, out: Array) -> None:
        """Copies pixels (height, width, channels), which have the size already, to where they are stored."""
        np.copyto(out, pixels.transpose(2, 0, 1) if self.channels_first else pixels, casting="unsafe")


def decode_image(
    data: bytes, channels: int | None, dtype: str, extra: str, size: tuple[int, int] | None = None
) -> Array:
    """One image as (height, width, channels), or (height, width) where `channels` is None.

    Args:
        data: the encoded file.
        channels: 1, 3, 4 or None; the image is converted to it.
        dtype: uint8, uint16 (one channel), or float32, which TFDS writes as the four bytes of an RGBA
            pixel.
        extra: the optional dependency that brings Pillow, for the message when it is missing.
        size: (height, width) that an image of uint8 is resized to.

    Raises:
        ValueError: the bytes are not an image, or not one of that kind.
        MissingDependencyError: Pillow is not installed.
    """
    image_module = require("PIL.Image", f"geartrain[{extra}]", "Decoding images")
    if not data:
        raise ValueError("the image is empty")
    try:
        image = image_module.open(io.BytesIO(data))
        lossy = _what_is_lost(image, data)
        image.load()
    except Exception as error:  # Pillow's decoders raise OSError, RuntimeError, SyntaxError and others
        raise ValueError(f"the image cannot be decoded: {error}") from error
    if lossy and not (dtype == "uint16" and lossy == _MORE_BITS and image.mode.startswith("I")):
        raise ValueError(f"a {image.format} image of mode {image.mode} has {lossy}")
    if dtype == "float32":
        pixels: Array = np.ascontiguousarray(np.asarray(image.convert("RGBA")))
        return pixels.view("<f4").reshape(*pixels.shape[:2], 1)
    if dtype == "uint16":
        if channels not in (1, None) or not image.mode.startswith("I"):
            raise ValueError(f"a 16-bit image of mode {image.mode} is not read, only grey ones are")
        grey: Array = np.asarray(image).astype(np.uint16)
        return grey if channels is None else grey[..., None]
    mode = {None: "L", 1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
    if dtype != "uint8" or mode is None:
        raise ValueError(f"an image of {channels} channels of {dtype} is not read")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"an image of mode {image.mode} has more than 8 bits a value")
    image = image if image.mode == mode else image.convert(mode)
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], image_module.Resampling.BILINEAR)
    decoded: Array = np.asarray(image)
    return decoded[..., None] if channels == 1 else decoded


_MORE_BITS = "more than the 8 bits a value that are read"


def _what_is_lost(image: Any, data: bytes) -> str:
    """How Pillow would change an image's values, known before it is decoded; "" for no change.

    Pillow gives images in colours, or with alpha, cut to 8 bits a value, and those of a largest value of their own
    scaled.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[24:25] == b"\x10":
        return _MORE_BITS
    for decoder, _, _, found in image.tile:
        options = found if isinstance(found, tuple) else (found,)
        if decoder in ("ppm", "ppm_plain") and options[-1] not in (255, "1;I", "1"):
            return _MORE_BITS if options[-1] == 65535 else f"values up to {options[-1]}, which would be scaled"
        if decoder == "SGI16" or any(isinstance(option, str) and ";16" in option for option in options):
            return _MORE_BITS
    if image.format == "JPEG2000" and (at := data.find(b"\xff\x4f\xff\x51")) >= 0:  # its component's precision
        return _MORE_BITS if data[at + 42 : at + 43] > b"\x07" and data[at + 42] & 0x7F > 7 else ""
    if image.format == "AVIF" and (at := data.find(b"pixi")) >= 0:  # bits of its first channel
        return _MORE_BITS if data[at + 9 : at + 10] > b"\x08" else ""
    return ""
