"""Images made larger, smaller or cut out. Every axis is sampled by itself.

Where each mode takes its samples is what coremltools documents. A nearest neighbour is the element at or before the
sample in the mode `"DEFAULT"`, as in TensorFlow and torch, and the nearest one, halves upwards, in the others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ane_layers.interpreter.registry import Context, operation


@operation("upsample_nearest_neighbor", exact=True)
def upsample_nearest_neighbor(
    x: Tensor, context: Context, scale_factor_height: float = 1.0, scale_factor_width: float = 1.0
) -> Tensor:
    return _resize(x, _scaled(x, context, scale_factor_height, scale_factor_width), "DEFAULT", nearest=True)


@operation("resize_nearest_neighbor", exact=True)
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    return _resize(x, (target_size_height, target_size_width), "DEFAULT", nearest=True)


@operation("upsample_bilinear")
def upsample_bilinear(
    x: Tensor,
    context: Context,
    scale_factor_height: float = 1.0,
    scale_factor_width: float = 1.0,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """The spacing follows from the sizes, not from the factors, which may not divide them."""
    half_pixel_centers = not align_corners if half_pixel_centers is None else half_pixel_centers
    if align_corners and half_pixel_centers:
        raise ValueError("align_corners and half_pixel_centers are both true")
    mode = "STRICT_ALIGN_CORNERS" if align_corners else "UNALIGN_CORNERS" if half_pixel_centers else "DEFAULT"
    return _resize(x, _scaled(x, context, scale_factor_height, scale_factor_width), mode, nearest=False)


@operation("resize_bilinear")
def resize_bilinear(
    x: Tensor, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Tensor:
    return _resize(x, (target_size_height, target_size_width), sampling_mode, nearest=False)


@operation("resize")
def resize(
    x: Tensor,
    shape: tuple[int, ...],
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """The last `resized_dims` axes become those of `shape`; a 0 keeps an axis as it is."""
    if not 0 <= resized_dims <= min(x.ndim, len(shape)):
        raise ValueError(f"resized_dims is {resized_dims} for {x.ndim} axes and {len(shape)} sizes")
    if interpolation_mode not in ("LINEAR", "NEAREST_NEIGHBOR"):
        raise ValueError(f"interpolation_mode is {interpolation_mode!r}, expected LINEAR or NEAREST_NEIGHBOR")
    nearest = interpolation_mode == "NEAREST_NEIGHBOR"
    if not nearest and not x.is_floating_point():
        raise ValueError("interpolation_mode is 'LINEAR' for integers, and how Core ML rounds them is not documented")
    axes = range(x.ndim - resized_dims, x.ndim)
    sizes = [wanted or x.shape[axis] for axis, wanted in zip(axes, shape[len(shape) - resized_dims :], strict=True)]
    return _resize(x, tuple(sizes), sampling_mode, nearest)


@operation("crop", view=True)
def crop(x: Tensor, crop_height: tuple[int, ...], crop_width: tuple[int, ...]) -> Tensor:
    height, width = x.shape[-2:]
    return x[..., crop_height[0] : height - crop_height[1], crop_width[0] : width - crop_width[1]]


def grid(size: float, count: int, mode: str) -> Tensor:
    """Where `count` samples of an axis of `size` elements are taken, in elements, fp64.

    Raises:
        ValueError: the mode is unknown.
    """
    places = torch.arange(count, dtype=torch.float64)
    if mode == "ALIGN_CORNERS" and count == 1:
        places = places + (size - 1) / 2
    elif mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        places = places * ((size - 1) / max(count - 1, 1))
    elif mode == "DEFAULT":
        places = places * (size / count)
    elif mode == "OFFSET_CORNERS":
        places = (places + 0.5) * (max(1, size - 1) / count)
    elif mode == "UNALIGN_CORNERS":
        places = (places + 0.5) * (size / count) - 0.5
    else:
        raise ValueError(f"sampling_mode is {mode!r}, which is no way to sample an axis")
    return places.clamp(0, size - 1)


def interpolate(x: Tensor, axis: int, samples: Tensor) -> Tensor:
    """x at `samples` of one axis, linearly between its elements; samples beyond them take the nearest one."""
    samples = samples.clamp(0, x.shape[axis] - 1)
    below = samples.floor().long()
    above = (below + 1).clamp(max=x.shape[axis] - 1)
    weight = (samples - below).to(x.dtype).reshape([-1, *[1] * (x.ndim - 1 - axis % x.ndim)])
    return torch.lerp(torch.index_select(x, axis, below), torch.index_select(x, axis, above), weight)


def _resize(x: Tensor, sizes: tuple[int, ...], mode: str, nearest: bool) -> Tensor:
    for axis, count in enumerate(sizes, x.ndim - len(sizes)):
        if count < 1:
            raise ValueError(f"axis {axis} would have {count} elements")
        samples = grid(x.shape[axis], count, mode)
        if not nearest:
            x = interpolate(x, axis, samples)
            continue
        # A quotient like 3 · (1 / 3) may come out just below the whole number it is.
        samples = samples + (1e-9 if mode == "DEFAULT" else 0.5)
        x = torch.index_select(x, axis, samples.floor().long().clamp(max=x.shape[axis] - 1))
    return x


def _scaled(x: Tensor, context: Context, height: float, width: float) -> tuple[int, int]:
    declared = context.output.shape[-2:]
    rows, columns = (
        math.floor(size * factor) if wanted is None else wanted
        for size, factor, wanted in zip(x.shape[-2:], (height, width), declared, strict=True)
    )
    return rows, columns
