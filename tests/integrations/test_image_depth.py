"""Images of datasets: every value as the file has it, or an error; none is cut to 8 bits, or scaled."""

from __future__ import annotations

import contextlib
import io
import struct
from typing import Any

import numpy as np
import pytest

from geartrain.integrations.datasets.images import decode_image

image_module = pytest.importorskip("PIL.Image")

COLOURS = np.array([[[0x1234, 0x5678, 0x9ABC], [1, 2, 65535]]], np.uint16)
GREY = COLOURS[..., 0]


def tiff(pixels: np.ndarray, photometric: int, alpha: bool = False) -> bytes:
    """An uncompressed TIFF file of one strip."""
    height, width, samples = pixels.shape
    bits = struct.pack(f"<{samples}H", *[pixels.itemsize * 8] * samples)
    data = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    entries = [(256, 4, 1, width), (257, 4, 1, height), (259, 3, 1, 1), (262, 3, 1, photometric), (277, 3, 1, samples)]
    entries += [(278, 4, 1, height), (279, 4, 1, len(data)), *([(338, 3, 1, 2)] if alpha else [])]
    at = 8 + 2 + 12 * (len(entries) + 2) + 4
    where = struct.unpack("<I", bits.ljust(4, b"\0"))[0] if len(bits) <= 4 else at
    entries += [(258, 3, samples, where), (273, 4, 1, at + len(bits))]
    listed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + listed + b"\0" * 4 + bits + data


def sgi(pixels: np.ndarray) -> bytes:
    height, width, planes = pixels.shape
    head = struct.pack(">hBBHHHHll", 474, 0, pixels.itemsize, 3, width, height, planes, 0, 65535).ljust(512, b"\0")
    return head + pixels.transpose(2, 0, 1)[:, ::-1].astype(">u2").tobytes()


def netpbm(kind: bytes, largest: int, values: np.ndarray) -> bytes:
    head = kind + b"\n%d %d\n%d\n" % (values.shape[1], values.shape[0], largest)
    if kind in (b"P2", b"P3"):
        return head + b" ".join(b"%d" % value for value in values.ravel().tolist()) + b"\n"
    return head + values.astype(">u2" if largest > 255 else "u1").tobytes()


def saved(mode: str, format: str, **options: Any) -> bytes:
    made = io.BytesIO()
    image_module.new(mode, (3, 2), 5 if mode == "L" else (5, 6, 7)).save(made, format, **options)
    return made.getvalue()


@pytest.mark.parametrize(
    ("data", "channels"),
    [
        (netpbm(b"P6", 65535, COLOURS), 3),
        (netpbm(b"P3", 65535, COLOURS), 3),
        (netpbm(b"P6", 1023, COLOURS // 64), 3),
        (netpbm(b"P6", 100, COLOURS // 656), 3),
        (netpbm(b"P5", 65535, GREY), 1),
        (netpbm(b"P5", 1023, GREY // 64), 1),
        (netpbm(b"P2", 7, GREY // 9000), 1),
        (tiff(COLOURS, 2), 3),
        (tiff(np.concatenate([COLOURS, COLOURS[..., :1]], 2), 2, alpha=True), 4),
        (tiff(GREY[..., None], 1), 1),
        (sgi(COLOURS), 3),
    ],
    ids=[
        "P6",
        "P3",
        "P6 of 10 bits",
        "P6 to 100",
        "P5",
        "P5 of 10 bits",
        "P2 to 7",
        "TIFF",
        "TIFF alpha",
        "TIFF grey",
        "SGI",
    ],
)
def test_more_than_8_bits_are_refused_where_8_are_stored(data: bytes, channels: int) -> None:
    with pytest.raises(ValueError, match=r"8 bits a value|values up to"):
        decode_image(data, channels, "uint8", "rlds")


@pytest.mark.parametrize("data", [netpbm(b"P5", 65535, GREY), tiff(GREY[..., None], 1)], ids=["P5", "TIFF"])
def test_grey_values_of_16_bits_are_exact(data: bytes) -> None:
    assert (decode_image(data, 1, "uint16", "rlds")[..., 0] == GREY).all()


def test_grey_values_that_would_be_scaled_are_refused_as_16_bits_too() -> None:
    with pytest.raises(ValueError, match="values up to 1023"):
        decode_image(netpbm(b"P5", 1023, GREY // 64), 1, "uint16", "rlds")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "SGI", "JPEG2000"])
@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_images_of_8_bits_are_read(form: str, mode: str, channels: int) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    found = decode_image(saved(mode, form, **options), channels, "uint8", "rlds")
    assert found.shape == (2, 3, channels) and np.abs(found[0, 0].astype(int) - [5, 6, 7][:channels]).max() <= 2


@pytest.mark.parametrize("kind", [b"P5", b"P6"])
def test_netpbm_of_8_bits_is_exact(kind: bytes) -> None:
    values = (COLOURS if kind == b"P6" else GREY) & 255
    found = decode_image(netpbm(kind, 255, values), 3 if kind == b"P6" else 1, "uint8", "rlds")
    assert (found.ravel() == values.ravel()).all()


@pytest.mark.parametrize("data", [b"P1\n3 1\n1 0 1\n", b"P4\n3 1\n\xa0"])
def test_bitmaps_are_read_as_black_and_white(data: bytes) -> None:
    assert decode_image(data, None, "uint8", "rlds").tolist() == [[0, 255, 0]]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["AVIF", "PNG", "TIFF", "GIF", "WEBP", "JPEG2000", "PPM", "BMP", "SGI"])
def test_a_damaged_image_is_one_kind_of_error(form: str) -> None:
    whole = saved("RGB", form)
    rng = np.random.default_rng(0)
    for at in rng.integers(4, len(whole), 40).tolist():
        data = bytearray(whole)
        data[at] ^= 0xFF
        with contextlib.suppress(ValueError):
            decode_image(bytes(data), 3, "uint8", "rlds")
        with contextlib.suppress(ValueError):
            decode_image(whole[:at], 3, "uint8", "rlds")


def test_colours_of_more_than_8_bits_in_jpeg_2000_are_refused() -> None:
    data = bytearray(saved("RGB", "JPEG2000"))
    at = data.index(b"\xff\x4f\xff\x51") + 42
    data[at] = data[at + 3] = data[at + 6] = 11  # 12 bits each
    with pytest.raises(ValueError, match=r"8 bits a value|cannot be decoded"):
        decode_image(bytes(data), 3, "uint8", "rlds")
