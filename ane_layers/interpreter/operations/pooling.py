"""Pooling over one to three spatial axes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.operations.convolution import padding, torch_order
from ane_layers.interpreter.registry import operation

_MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}

Sizes = tuple[int, ...]


@operation("max_pool", exact=True)
def max_pool(
    x: Tensor,
    kernel_sizes: tuple[int, ...],
    pad_type: str,
    strides: tuple[int, ...] | None = None,
    pad: tuple[int, ...] | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """Shape: x (B, C, ...) → (B, C, ...)."""
    strides = strides or (1,) * len(kernel_sizes)
    before, after, beyond = _borders(x, kernel_sizes, pad_type, strides, pad, ceil_mode)
    x = F.pad(x, torch_order(before, _sum(after, beyond)), value=-math.inf)
    return _MAXIMUM[len(kernel_sizes)](x, kernel_sizes, strides)


@operation("avg_pool")
def avg_pool(
    x: Tensor,
    kernel_sizes: tuple[int, ...],
    pad_type: str,
    strides: tuple[int, ...] | None = None,
    pad: tuple[int, ...] | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """What `ceil_mode` adds behind the padding counts as no element, as in torch."""
    strides = strides or (1,) * len(kernel_sizes)
    before, after, beyond = _borders(x, kernel_sizes, pad_type, strides, pad, ceil_mode)
    average = _AVERAGE[len(kernel_sizes)]
    means = average(F.pad(x, torch_order(before, _sum(after, beyond))), kernel_sizes, strides)
    counted = torch.ones(1, 1, *x.shape[2:])
    if exclude_padding_from_average:
        counted = F.pad(counted, torch_order(before, after))
    elif any(beyond):
        counted = F.pad(counted, torch_order(before, after), value=1)
    else:
        return means
    # The share of each window that counts.
    return means / average(F.pad(counted, torch_order((0,) * len(before), beyond)), kernel_sizes, strides)


@operation("l2_pool")
def l2_pool(
    x: Tensor,
    kernel_sizes: tuple[int, ...],
    pad_type: str,
    strides: tuple[int, ...] | None = None,
    pad: tuple[int, ...] | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """The Euclidean length of each window."""
    strides = strides or (1,) * len(kernel_sizes)
    before, after, beyond = _borders(x, kernel_sizes, pad_type, strides, pad, ceil_mode)
    squares = F.pad(torch.square(x), torch_order(before, _sum(after, beyond)))
    return torch.sqrt(_AVERAGE[len(kernel_sizes)](squares, kernel_sizes, strides) * math.prod(kernel_sizes))


def _borders(
    x: Tensor, kernel: Sizes, pad_type: str, strides: Sizes, pad: Sizes | None, ceil_mode: bool
) -> tuple[Sizes, Sizes, Sizes]:
    """Padding before and after each axis, and what `ceil_mode` needs beyond it to fill the last window."""
    sizes = tuple(x.shape[2:])
    if x.ndim != len(kernel) + 2 or len(kernel) not in _AVERAGE:
        raise ValueError(f"kernel_sizes has {len(kernel)} entries for a tensor of {x.ndim} axes")
    before, after = padding(pad_type.lower(), pad, sizes, kernel, strides, (1,) * len(kernel))
    if not ceil_mode:
        return before, after, (0,) * len(kernel)
    beyond = []
    for axis, size in enumerate(sizes):
        length = size + before[axis] + after[axis]
        windows = -(-(length - kernel[axis]) // strides[axis]) + 1
        if (windows - 1) * strides[axis] >= size + before[axis] and before[axis] + after[axis] > 0:
            windows -= 1  # a window may not begin behind the elements
        beyond.append(max(0, (windows - 1) * strides[axis] + kernel[axis] - length))
        if (windows - 1) * strides[axis] >= size + before[axis]:
            raise ValueError(f"the last window on axis {axis + 2} holds no element")
    return before, after, tuple(beyond)


def _sum(one: Sizes, other: Sizes) -> Sizes:
    return tuple(a + b for a, b in zip(one, other, strict=True))
