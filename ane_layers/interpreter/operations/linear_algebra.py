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


@operation("linear", stored=True)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.numel() == x.shape[-1]:
        return vector_product(weight, x, bias)
    return F.linear(x, weight.to(x.dtype), bias)


def vector_product(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """One vector times a matrix that may be kept in fp16.

    Then x holds fp16 numbers as well and the result is going to be rounded to fp16, so torch may multiply in fp16; it adds up in
    fp32. With a bias the sum would be rounded twice, so the matrix is widened.

    Shape: weight (C', C), x (..., C) with one vector in all → (..., C').
    """
    if weight.dtype != torch.float16 or bias is not None:
        return F.linear(x, weight.to(x.dtype), bias)
    return F.linear(x.half(), weight).float()


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
