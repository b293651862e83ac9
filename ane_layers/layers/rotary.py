"""Rotary position embedding: frequencies, fp32 tables, and the rotation of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_frequencies(head_dim: int, *, rope_theta: float, rope_scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Inverse frequencies in radians per position, fp32.

    Args:
        head_dim: D, even.
        rope_theta: base of the geometric series.
        rope_scaling: Hugging Face's `rope_scaling` (or `rope_parameters`): `rope_type` (older files: `type`) is `default` or `llama3`.

    Shape:
        - output: `[D / 2]`

    Raises:
        ValueError: for an odd `head_dim`, an unknown `rope_type` or a missing or impossible parameter of a known one.

    Source: Su et al., "RoFormer", 2021; the llama3 scaling is Meta's for Llama 3.1.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / rope_theta**exponents
    scaling = dict(rope_scaling or {})
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default":
        _check_keys(scaling, rope_type, ())
        return frequencies
    if rope_type == "llama3":
        _check_keys(scaling, rope_type, _LLAMA3)
        return _llama3(frequencies, scaling)
    raise ValueError(f"rope_type {rope_type!r} is not supported; known: 'default', 'llama3'")


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _check_keys(scaling: Mapping[str, Any], rope_type: str, names: tuple[str, ...]) -> None:
    """Every parameter must be there and be a number; one that is not known may change the frequencies, and is refused."""
    missing = [name for name in names if scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope_type {rope_type!r} lacks {', '.join(missing)}")
    for name in names:
        value = scaling[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"rope_type {rope_type!r}: {name} must be a finite number, got {value!r}")
    # A share of 1 rotates all of a head, which is what happens anyway.
    allowed = {
        *names,
        "rope_type",
        "type",
        *(["partial_rotary_factor"] if scaling.get("partial_rotary_factor") == 1 else []),
    }
    for name in scaling:
        if name not in allowed:
            raise ValueError(f"rope_type {rope_type!r}: {name} = {scaling[name]!r} is not supported")


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly in 1 / wavelength."""
    factor, low, high, context = (float(scaling[name]) for name in _LLAMA3)
    if factor <= 0 or high <= low or context <= 0:
        raise ValueError(
            f"rope_type 'llama3': impossible factor {factor}, low_freq_factor {low}, high_freq_factor {high}, "
            f"original_max_position_embeddings {context}"
        )
    wavelengths = 2 * math.pi / frequencies
    kept = ((context / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: short wavelength, 0: long
    return frequencies * (kept + (1 - kept) / factor)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position as constants, computed in fp32 and only then rounded.

    Half-split rotation (Hugging Face's `rotate_half`) is `x·cos + [-x₂, x₁]·sin`; the sign is moved into the table, so that swapping
    the halves is all that is done to `x`: see `rotate`.

    Args:
        frequencies: from `rotary_frequencies`, `[D / 2]`.
        max_positions: number of rows, normally the context length T.

    Shape:
        - position: int32 `[1]`, the first of S consecutive positions
        - output: cos and signed sin, each `[1, 1, S, D]`
    """

    table: Tensor

    def __init__(self, frequencies: Tensor, *, max_positions: int) -> None:
        super().__init__()
        # Position 4095 times a frequency has more bits than fp16 or a converter's fp16 graph keeps.
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies.float())
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("table", torch.cat([cos, cos, -sin, sin], dim=-1), persistent=False)  # [T, 2·D]

    def forward(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        positions = position
        if length > 1:
            positions = position + torch.arange(length, dtype=position.dtype, device=position.device)
        # A lookup, not a slice from `position` on: the slice would have no static size, and neither would all that follows.
        rows = F.embedding(positions, self.table)[None, None]  # [1, 1, S, 2·D]
        cos, sin = rows.chunk(2, dim=-1)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, dim: int = -1) -> Tensor:
    """Rotates heads by their positions.

    Args:
        x: query or key heads.
        cos: from `RotaryEmbedding`.
        sin: from `RotaryEmbedding`, the first half negative.
        dim: the axis of D.

    Shape:
        - x: `[B, H, S, D]`, or another order of axes with D at `dim`
        - cos, sin: `[1, 1, S, D]`, or what broadcasts against x
        - output: as x
    """
    first, second = x.chunk(2, dim=dim)
    return x * cos + torch.cat([second, first], dim=dim) * sin
