"""Decoding of images (PNG, JPEG), by Pillow.

Both RLDS and LeRobot keep images as compressed bytes inside their tables. PNG decodes to the bytes
that were written. JPEG decoders differ by a grey level here and there, so a pixel can differ by one
from what TensorFlow's decoder gives for the same file.
"""

from __future__ import annotations

import io

import numpy as np

from geartrain.integrations.datasets.episode import Array, require


def decode_image(data: bytes, channels: int | None, dtype: str, extra: str) -> Array:
    """One image as (height, width, channels), or (height, width) where `channels` is None.

    Args:
        data: the encoded file.
        channels: 1, 3, 4 or None; the image is converted to it.
        dtype: uint8, uint16 (one channel), or float32, which TFDS writes as the four bytes of an RGBA
            pixel.
        extra: the optional dependency that brings Pillow, for the message when it is missing.

    Raises:
        ValueError: the bytes are not an image, or not one of that kind.
        MissingDependencyError: Pillow is not installed.
    """
    image_module = require("PIL.Image", extra, "Decoding images")
    if not data:
        raise ValueError("the image is empty")
    try:
        image = image_module.open(io.BytesIO(data))
        image.load()
    except OSError as error:
        raise ValueError(f"the image cannot be decoded: {error}") from error
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
    decoded: Array = np.asarray(image if image.mode == mode else image.convert(mode))
    return decoded[..., None] if channels == 1 else decoded
