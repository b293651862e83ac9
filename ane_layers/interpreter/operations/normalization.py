"""Normalizations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.registry import operation


@operation("layer_norm")
def layer_norm(
    x: Tensor,
    axes: tuple[int, ...] | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    normalized = [axis % x.ndim for axis in (range(x.ndim) if axes is None else axes)]
    variance, mean = torch.var_mean(x, normalized, correction=0, keepdim=True)
    shape = [size if axis in normalized else 1 for axis, size in enumerate(x.shape)]
    return _scale_and_shift((x - mean) * torch.rsqrt(variance + epsilon), gamma, beta, shape)


@operation("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    return F.batch_norm(x, mean, variance, gamma, beta, eps=epsilon)


@operation("instance_norm")
def instance_norm(x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    variance, mean = torch.var_mean(x, list(range(2, x.ndim)), correction=0, keepdim=True)
    shape = [1, x.shape[1], *[1] * (x.ndim - 2)]
    return _scale_and_shift((x - mean) * torch.rsqrt(variance + epsilon), gamma, beta, shape)


@operation("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    # The last three axes are normalized together.
    return x * torch.rsqrt(torch.sum(torch.square(x), (-3, -2, -1), keepdim=True) + epsilon)


@operation("local_response_norm")
def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    # The window holds `size` channels; of an even window the larger half lies before the channel.
    squares = F.pad(torch.square(x).movedim(1, -1), (size // 2, (size - 1) // 2))
    sums = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / torch.pow(k + alpha / size * sums, beta)


def _scale_and_shift(x: Tensor, gamma: Tensor | None, beta: Tensor | None, shape: list[int]) -> Tensor:
    if gamma is not None:
        x = x * gamma.reshape(shape)
    return x if beta is None else x + beta.reshape(shape)
