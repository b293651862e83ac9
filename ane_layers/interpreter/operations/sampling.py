"""Images read at given places: one by one, under a transform, or on the grid of a box."""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.operations.resizing import grid, interpolate
from ane_layers.interpreter.registry import operation


@operation("resample")
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """Shape: x (B, C, H, W), coordinates (B, H', W', 2) of (x, y) → (B, C, H', W')."""
    height, width = x.shape[-2:]
    across, down = coordinates.to(torch.float32).unbind(-1)
    across = _in_elements(across, width, coordinates_mode, align_corners)
    down = _in_elements(down, height, coordinates_mode, align_corners)
    if sampling_mode == "nearest":
        return _pick(x, down.round(), across.round(), padding_mode, padding_value)
    if sampling_mode != "bilinear":
        raise ValueError(f"sampling_mode is {sampling_mode!r}, expected bilinear or nearest")
    top, left = down.floor(), across.floor()
    low, right = (down - top).unsqueeze(1), (across - left).unsqueeze(1)  # (B, 1, H', W')
    upper = torch.lerp(
        _pick(x, top, left, padding_mode, padding_value), _pick(x, top, left + 1, padding_mode, padding_value), right
    )
    lower = torch.lerp(
        _pick(x, top + 1, left, padding_mode, padding_value),
        _pick(x, top + 1, left + 1, padding_mode, padding_value),
        right,
    )
    return torch.lerp(upper, lower, low)


@operation("affine")
def affine(
    x: Tensor,
    transform_matrix: Tensor,
    output_height: int,
    output_width: int,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """Shape: x (B, C, H, W), transform_matrix (B or 1, 6) → (B, C, H', W')."""
    # coremltools writes this one combination only; the others have no definition to follow.
    if (coordinates_mode, align_corners) != ("normalized_minus_one_to_one", True):
        raise ValueError(f"coordinates_mode is {coordinates_mode!r} with align_corners {align_corners}")
    down = torch.linspace(-1, 1, output_height).reshape(1, -1, 1)
    across = torch.linspace(-1, 1, output_width).reshape(1, 1, -1)
    a0, a1, a2, b0, b1, b2 = transform_matrix.reshape(-1, 6, 1, 1).unbind(1)
    coordinates = torch.stack([a0 * across + a1 * down + a2, b0 * across + b1 * down + b2], -1)  # (B, H', W', 2)
    coordinates = coordinates.expand(x.shape[0], -1, -1, -1)
    return resample(
        x, coordinates, sampling_mode.lower(), padding_mode.lower(), padding_value, coordinates_mode, align_corners
    )


@operation("crop_resize")
def crop_resize(
    x: Tensor,
    roi: Tensor | None = None,
    boxes: Tensor | None = None,
    box_indices: tuple[int, ...] | None = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Tensor:
    """Shape: x (B, C, H, W); boxes (N, 4) → (N, C, H', W'); up to iOS16 roi (N, 1, 4 or 5, 1, 1) → (N, B or 1, C, H', W')."""
    if boxes is None:
        if roi is None:
            raise ValueError("roi and boxes are both missing")
        numbered = roi.shape[2] == 5
        boxes = roi.reshape(roi.shape[0], -1)
        images = [[int(row[0])] for row in boxes] if numbered else [list(range(x.shape[0]))] * len(boxes)
        boxes = boxes[:, -4:]
    else:
        images = [[number] for number in (range(len(boxes)) if box_indices is None else box_indices)]
    outside = [number for row in images for number in row if not 0 <= number < x.shape[0]]
    if outside:
        raise ValueError(f"box names image {outside[0]} of {x.shape[0]}")
    first, second = boxes.to(torch.float64).mul(spatial_scale).unflatten(1, (2, 2)).unbind(1)
    if box_coordinate_mode.startswith("CENTER_SIZE"):
        first, second = first - second / 2, first + second / 2
    elif not box_coordinate_mode.startswith("CORNERS"):
        raise ValueError(f"box_coordinate_mode is {box_coordinate_mode!r}, expected CORNERS_… or CENTER_SIZE_…")
    if box_coordinate_mode.endswith("WIDTH_FIRST"):
        first, second = first.flip(1), second.flip(1)
    crops = []
    for begin, end, numbers in zip(first.tolist(), second.tolist(), images, strict=True):
        part = x[numbers]
        for axis, count in ((-2, target_height), (-1, target_width)):
            scale = x.shape[axis] - 1 if normalized_coordinates else 1
            samples = _in_box(begin[axis] * scale, end[axis] * scale, count, sampling_mode)
            inside = (samples >= 0) & (samples <= x.shape[axis] - 1)
            shape = [-1, *[1] * (-1 - axis)]
            part = interpolate(part, axis % x.ndim, samples)
            part = torch.where(inside.reshape(shape), part, torch.tensor(pad_value, dtype=x.dtype))
        crops.append(part)
    stacked = torch.stack(crops) if crops else x.new_zeros(0, 1, x.shape[1], target_height, target_width)
    return stacked if roi is not None else stacked.squeeze(1)


def _in_box(begin: float, end: float, count: int, mode: str) -> Tensor:
    """Samples of the interval from `begin` to `end`: those of an axis of as many elements, moved to where it begins."""
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if mode == "ALIGN_CORNERS" and count == 1:
            return torch.tensor([(begin + end) / 2], dtype=torch.float64)
        return begin + torch.arange(count, dtype=torch.float64) * ((end - begin) / max(count - 1, 1))
    if mode not in ("DEFAULT", "OFFSET_CORNERS"):
        raise ValueError(f"sampling_mode is {mode!r}, which coremltools does not define for boxes")
    if end < begin:
        raise ValueError(f"box runs from {begin:g} to {end:g}, which sampling_mode {mode!r} is not defined for")
    return begin + grid(end - begin + 1, count, mode)


def _in_elements(places: Tensor, size: int, mode: str, align_corners: bool) -> Tensor:
    if mode == "unnormalized":
        return places
    if mode not in ("normalized_minus_one_to_one", "normalized_zero_to_one"):
        raise ValueError(f"coordinates_mode is {mode!r}, expected unnormalized or normalized_…")
    share = (places + 1) / 2 if mode == "normalized_minus_one_to_one" else places
    # The ends of the range are the centres of the outer elements, or their outer edges.
    return share * (size - 1) if align_corners else share * size - 0.5


def _pick(x: Tensor, down: Tensor, across: Tensor, mode: str, value: float) -> Tensor:
    """Elements of x (B, C, H, W) at whole places (B, H', W') → (B, C, H', W')."""
    height, width = x.shape[-2:]
    rows, columns = _wrap(down, height, mode), _wrap(across, width, mode)
    numbers = (rows * width + columns).flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
    picked = torch.gather(x.flatten(2), 2, numbers).unflatten(2, down.shape[1:])
    if mode != "constant":
        return picked
    inside = (down >= 0) & (down < height) & (across >= 0) & (across < width)
    return torch.where(inside.unsqueeze(1), picked, torch.tensor(value, dtype=x.dtype))


def _wrap(places: Tensor, size: int, mode: str) -> Tensor:
    """Places beyond the axis, brought back onto it as the padding mode says."""
    if mode in ("constant", "border"):
        return places.clamp(0, size - 1).long()
    # Beyond 2^31 elements from the axis, fp32 tells no places apart anyway.
    number = places.clamp(-(2.0**31), 2.0**31).long()
    if mode == "symmetric":
        number = number % (2 * size)
        return torch.minimum(number, 2 * size - 1 - number)
    if mode == "reflection":
        period = max(2 * (size - 1), 1)
        number = number % period
        return torch.minimum(number, period - number) if size > 1 else number * 0
    raise ValueError(f"padding_mode is {mode!r}, expected constant, border, reflection or symmetric")
