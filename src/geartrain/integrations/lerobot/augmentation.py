"""Image augmentation of DrQ: random shifts and crops, drawn separately for each image of a batch."""

from __future__ import annotations

import torch
from torch.nn import functional

from geartrain.core.arguments import check_whole
from geartrain.core.global_generators import drawing
from geartrain.errors import ArgumentError


def random_shift(images: torch.Tensor, pad: int = 4) -> torch.Tensor:
    """Shifts each image by up to `pad` pixels in each direction. The border is repeated.

    Args:
        images: (B, C, H, W), floating point.
        pad: pixels, at least 0.

    Returns:
        New images of the same shape and dtype. Shifts are drawn from torch's global generator.
    """
    _check(images)
    pad = check_whole("pad, in pixels,", pad, 0, 2**31)
    padded = functional.pad(images, (pad, pad, pad, pad), mode="replicate")
    return random_crop_vectorized(padded, tuple(images.shape[2:]))


def random_crop_vectorized(images: torch.Tensor, output_size: tuple[int, ...]) -> torch.Tensor:
    """Crops each image at a random place, drawn from torch's global generator.

    Args:
        images: (B, C, H, W).
        output_size: height and width of the crops.

    Returns:
        (B, C, *output_size), a copy.

    Raises:
        ArgumentError: the crops are larger than the images.
    """
    _check(images)
    count, _, height, width = images.shape
    crop_height, crop_width = output_size
    if crop_height > height or crop_width > width:
        raise ArgumentError(
            f"Requested crop size ({crop_height}, {crop_width}) is bigger than the image size ({height}, {width})"
        )
    device = images.device
    with drawing:
        top = torch.randint(0, height - crop_height + 1, (count,), device=device)
        left = torch.randint(0, width - crop_width + 1, (count,), device=device)
    # A view of all parts that there are; one of each image is gathered from it.
    parts = images.unfold(2, crop_height, 1).unfold(3, crop_width, 1)
    return parts[torch.arange(count, device=device), :, top, left]


def _check(images: torch.Tensor) -> None:
    if not isinstance(images, torch.Tensor) or images.ndim != 4:
        found = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
        raise ArgumentError(f"images are a tensor (B, C, H, W), found {found}")


__all__ = ["random_crop_vectorized", "random_shift"]
