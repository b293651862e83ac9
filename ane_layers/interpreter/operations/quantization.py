"""Quantization of values while a program runs. Compressed constants are not here: they are read with the program."""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import operation

_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}


@operation("quantize")
def quantize(
    input: Tensor, scale: Tensor, output_dtype: str, zero_point: Tensor | None = None, axis: int | None = None
) -> Tensor:
    """round(input / scale) + zero_point, halves to even, held to the range of `output_dtype`."""
    if output_dtype not in _RANGES:
        raise ValueError(f"output_dtype is {output_dtype!r}, expected int8 or uint8")
    quantized = torch.round(input / _along(scale, input, axis))
    if zero_point is not None:
        quantized = quantized + _along(zero_point, input, axis)
    return torch.clamp(quantized, *_RANGES[output_dtype]).to(torch.int32)


@operation("dequantize")
def dequantize(input: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int | None = None) -> Tensor:
    """scale · (input - zero_point)."""
    shifted = input if zero_point is None else input - _along(zero_point, input, axis)
    return shifted.to(scale.dtype) * _along(scale, input, axis)


def _along(values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """One value, or one for each place on `axis`, shaped to meet x."""
    if values.ndim == 0:
        return values
    if axis is None:
        raise ValueError("axis is missing for one scale a channel")
    return values.reshape([-1 if place == axis % x.ndim else 1 for place in range(x.ndim)])
