"""Rotary position embedding: fp32 tables, and the rotation of heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position as constants, computed in fp32 and only then rounded.

    Half-split rotation (Hugging Face's `rotate_half`) is `x·cos + [-x₂, x₁]·sin`; the sign is moved into the table, so that swapping
    the halves is all that is done to `x`: see `rotate`. Where only the first R elements of a head are rotated, the others have the
    cosine 1 and the sine 0, which costs no operation of its own.

    Args:
        frequencies: from `rotary_frequencies`, `[R / 2]`.
        max_positions: number of rows, normally the context length T.
        head_dim: D; R if not given.
        factor: on cosines and sines of what is rotated; see `rotary_factor`.

    Shape:
        - position: int32 `[1]`, the first of S consecutive positions
        - output: cos and signed sin, each `[1, 1, S, D]`

    Raises:
        ValueError: if a head has fewer elements than are rotated.
    """

    table: Tensor

    def __init__(
        self, frequencies: Tensor, *, max_positions: int, head_dim: int | None = None, factor: float = 1.0
    ) -> None:
        super().__init__()
        rotated = 2 * len(frequencies)
        size = rotated if head_dim is None else head_dim
        if size < rotated:
            raise ValueError(f"RotaryEmbedding: {rotated} elements of a head are to be rotated, but head_dim is {size}")
        # Position 4095 times a frequency has more bits than fp16 or a converter's fp16 graph keeps.
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies.float())
        cos, sin = angles.cos() * factor, angles.sin() * factor
        still = angles.new_ones(max_positions, size - rotated)
        table = torch.cat([cos, cos, still, -sin, sin, 0 * still], dim=-1)  # [T, 2·D]
        self.register_buffer("table", table, persistent=False)

    def forward(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        positions = position
        if length > 1:
            positions = position + torch.arange(length, dtype=position.dtype, device=position.device)
        # A lookup, not a slice from `position` on: the slice would have no static size, and neither would all that follows.
        rows = F.embedding(positions, self.table)[None, None]  # [1, 1, S, 2·D]
        cos, sin = rows.chunk(2, dim=-1)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, dim: int = -1, rotated: int | None = None) -> Tensor:
    """Rotates heads by their positions.

    Args:
        x: query or key heads.
        cos: from `RotaryEmbedding`.
        sin: from `RotaryEmbedding`, the first half negative.
        dim: the axis of D.
        rotated: R, how many of a head's elements are rotated, the first ones; all by default.

    Shape:
        - x: `[B, H, S, D]`, or another order of axes with D at `dim`
        - cos, sin: `[1, 1, S, D]`, or what broadcasts against x
        - output: as x
    """
    size = x.shape[dim]
    half = (size if rotated is None else rotated) // 2
    first, second, *still = x.split([half, half, size - 2 * half] if size > 2 * half else half, dim=dim)
    return x * cos + torch.cat([second, first, *still], dim=dim) * sin
