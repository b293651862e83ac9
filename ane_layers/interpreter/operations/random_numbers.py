"""Random numbers of the right distribution, shape and type: never the numbers that Core ML would draw.

Its generators are not documented. Here every operation has a sequence of its own, which goes on from call to call and
begins anew when the program is loaded again: from its seed if it has one, else from anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import RandomSource, operation


@operation("random_uniform")
def random_uniform(
    shape: tuple[int, ...], source: RandomSource, low: float = 0.0, high: float = 1.0, seed: int = -1
) -> Tensor:
    """Numbers of [low, high)."""
    if high < low:
        raise ValueError(f"low is {low:g}, above high {high:g}")
    return torch.rand(shape, generator=source.generator(seed)) * (high - low) + low


@operation("random_normal")
def random_normal(
    shape: tuple[int, ...], source: RandomSource, mean: float = 0.0, stddev: float = 1.0, seed: int = -1
) -> Tensor:
    return torch.randn(shape, generator=source.generator(seed)) * stddev + mean


@operation("random_bernoulli")
def random_bernoulli(shape: tuple[int, ...], source: RandomSource, prob: float = 0.5, seed: int = -1) -> Tensor:
    """1 with the probability `prob`, else 0."""
    return (torch.rand(shape, generator=source.generator(seed)) < prob).to(torch.float32)


@operation("random_categorical")
def random_categorical(x: Tensor, source: RandomSource, mode: str = "logits", size: int = 1, seed: int = -1) -> Tensor:
    """Shape: x (..., classes) → (..., size): numbers of classes, drawn with replacement."""
    if mode not in ("logits", "probs"):
        raise ValueError(f"mode is {mode!r}, expected logits or probs")
    weights = torch.softmax(x, -1) if mode == "logits" else x
    drawn = torch.multinomial(weights.reshape(-1, x.shape[-1]), size, True, generator=source.generator(seed))
    return drawn.reshape(*x.shape[:-1], size)
