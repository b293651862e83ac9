"""Products of matrices, and attention as one operation."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.registry import operation


@operation("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    # A vector has nothing to transpose.
    x = x.transpose(-1, -2) if transpose_x and x.ndim > 1 else x
    y = y.transpose(-1, -2) if transpose_y and y.ndim > 1 else y
    return torch.matmul(x, y)


@operation("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@operation("einsum")
def einsum(values: tuple[Tensor, ...], equation: str) -> Tensor:
    return torch.einsum(equation, *values)


@operation("scaled_dot_product_attention")
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """softmax(query keyᵀ / √D + mask) value; in a boolean mask True keeps a slot."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        keeps = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if keeps else scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)
