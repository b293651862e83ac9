"""Convolutions over one to three spatial axes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.operations.linear_algebra import vector_product
from ane_layers.interpreter.registry import operation

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operation("conv", stored=True)
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: tuple[int, ...] | None = None,
    pad_type: str = "valid",
    pad: tuple[int, ...] | None = None,
    dilations: tuple[int, ...] | None = None,
    groups: int = 1,
) -> Tensor:
    """Shape: x (B, C, ...), weight (C', C / groups, ...) → (B, C', ...)."""
    axes = x.ndim - 2
    strides = strides or (1,) * axes
    dilations = dilations or (1,) * axes
    kernel = tuple(weight.shape[2:])
    before, after = padding(pad_type, pad, tuple(x.shape[2:]), kernel, strides, dilations)
    if groups == 1 and {*kernel, *strides} == {1} and not any((*before, *after)):
        return _pointwise(x, weight, bias)
    weight = weight.to(x.dtype)
    if before != after:
        x = F.pad(x, torch_order(before, after))
        before = (0,) * axes
    return _CONVOLVE[axes](x, weight, bias, strides, before, dilations, groups)


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution that is a product of matrices; torch takes up to three times as long to see it as a convolution."""
    matrix = weight.flatten(1)  # [C', C]
    columns = x.flatten(2)  # [B, C, S]
    if columns.shape[0] == columns.shape[2] == 1:
        result = vector_product(matrix, columns.flatten(1), bias)
    else:
        result = torch.matmul(matrix.to(x.dtype), columns)
        result = result if bias is None else result + bias[:, None]
    return result.reshape(x.shape[0], -1, *x.shape[2:])


@operation("conv_transpose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad: tuple[int, ...] | None = None,
    output_shape: tuple[int, ...] | None = None,
    pad_type: str = "valid",
    strides: tuple[int, ...] | None = None,
    dilations: tuple[int, ...] | None = None,
    groups: int = 1,
) -> Tensor:
    """Shape: x (B, C, ...), weight (C, C' / groups, ...) → (B, C', ...)."""
    axes = x.ndim - 2
    strides = strides or (1,) * axes
    dilations = dilations or (1,) * axes
    full = _TRANSPOSE[axes](x, weight, None, strides, 0, 0, groups, dilations)
    if pad_type == "custom":
        pad = pad or (0,) * 2 * axes
        before, after = pad[0::2], pad[1::2]
    elif pad_type in ("same", "same_lower"):
        excess = [size - old * stride for size, old, stride in zip(full.shape[2:], x.shape[2:], strides, strict=True)]
        smaller, larger = tuple(e // 2 for e in excess), tuple(e - e // 2 for e in excess)
        before, after = (smaller, larger) if pad_type == "same" else (larger, smaller)
    else:
        before = after = (0,) * axes
    if output_shape is not None:
        # Several input sizes give one output size in a convolution; the shape says which is undone.
        after = tuple(
            size - cut - wanted for size, cut, wanted in zip(full.shape[2:], before, output_shape[2:], strict=True)
        )
    # Padding of a convolution is cut off here; a negative cut leaves room that no element of x reaches, but the bias does.
    result = F.pad(full, torch_order(tuple(-cut for cut in before), tuple(-cut for cut in after)))
    return result if bias is None else result + bias.reshape([-1, *[1] * axes])


def padding(
    pad_type: str,
    pad: tuple[int, ...] | None,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements to add before and after each spatial axis.

    Raises:
        ValueError: `pad_type` is unknown.
    """
    axes = len(sizes)
    if pad_type == "valid":
        return (0,) * axes, (0,) * axes
    if pad_type == "custom":
        pad = pad or (0,) * 2 * axes
        return pad[0::2], pad[1::2]
    if pad_type not in ("same", "same_lower"):
        raise ValueError(f"pad_type is {pad_type!r}, expected valid, custom, same or same_lower")
    total = [
        max((-(-size // stride) - 1) * stride + (length - 1) * dilation + 1 - size, 0)
        for size, length, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    smaller, larger = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return (smaller, larger) if pad_type == "same" else (larger, smaller)


def torch_order(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    """Amounts before and after each axis as `F.pad` takes them."""
    # torch names the last axis first.
    return [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair]
