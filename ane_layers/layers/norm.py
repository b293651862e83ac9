"""Root-mean-square normalisation that keeps its range in fp16."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) · weight`, written so that fp16 neither overflows nor loses `eps`.

    A square leaves fp16's range from |x| = 256 on, and an `eps` of 1e-6 added to a mean of squares is a subnormal number of few bits.
    Here no square is ever an operation's result: with `e = sqrt(C·eps)` appended to the row as one more element,

        sqrt(Σx² + C·eps) = ‖[x, e]‖₂,

    so the Euclidean length of the extended row (one `reduce_l2_norm`) is the whole denominator, and `sqrt(C)` goes into the weight, a
    constant. Four operations: concat, reduce_l2_norm, real_div, mul. That holds for every result in the graph; how wide an engine
    accumulates inside `reduce_l2_norm` is not documented. Rows up to a root mean square of 65504 / sqrt(C) are in range
    (1447 for C = 2048); a zero row stays zero.

    Args:
        size: C, the number of elements that are normalised together.
        eps: added to the mean of squares; exactly as given, never floored.
        dim: the axis of C; 1 for hidden states `[B, C, 1, S]`, -1 for heads `[B, H, S, D]`.
        offset: added to the weight; 1 for checkpoints that store how far the weight is from 1.

    Shape:
        - input: any, with C elements along `dim`
        - output: as the input
        - weight: `[C]`, or a shape that broadcasts against the input (one row per head, say)

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, size: int, *, eps: float, dim: int = -1, offset: float = 0.0) -> None:
        super().__init__()
        if eps < 0:
            raise ValueError(f"RMSNorm: eps must not be negative, got {eps}")
        self.size = size
        self.eps = eps
        self.dim = dim
        self.offset = offset
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        shape = list(x.shape)
        shape[dim] = 1
        extended = torch.cat([x, x.new_full(shape, (self.size * self.eps) ** 0.5)], dim=dim)
        length = torch.linalg.vector_norm(extended, dim=dim, keepdim=True)
        return x / length * (self.spread_weight(x) * self.size**0.5)

    def spread_weight(self, x: Tensor) -> Tensor:
        """The weight in a shape that broadcasts against x."""
        weight = self.gain()
        if weight.ndim == 1:
            weight = weight.view(self.size, *[1] * (x.ndim - 1 - self.dim % x.ndim))  # [C, 1, …]: C stands at `dim`
        return weight

    def gain(self) -> Tensor:
        """What the normalised values are multiplied by: the weight with its offset, a constant by the time that a program is written."""
        return self.weight + self.offset if self.offset else self.weight

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"{self.size}, eps={self.eps}, dim={self.dim}{offset}"
