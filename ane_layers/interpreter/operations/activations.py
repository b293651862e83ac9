"""Activation functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.registry import operation


@operation("relu")
def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


@operation("relu6")
def relu6(x: Tensor) -> Tensor:
    return torch.clamp(x, 0, 6)


@operation("sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


@operation("silu")
def silu(x: Tensor) -> Tensor:
    return F.silu(x)


@operation("softplus")
def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))


@operation("softsign")
def softsign(x: Tensor) -> Tensor:
    return F.softsign(x)


@operation("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    if mode == "EXACT":
        return F.gelu(x)
    if mode == "TANH_APPROXIMATION":
        return F.gelu(x, approximate="tanh")
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    raise ValueError(f"mode is {mode!r}, which is no kind of gelu")


@operation("clamped_relu")
def clamped_relu(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.clamp(F.leaky_relu(x, alpha), max=beta)


@operation("elu")
def elu(x: Tensor, alpha: float) -> Tensor:
    return F.elu(x, alpha)


@operation("leaky_relu")
def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    return F.leaky_relu(x, alpha)


@operation("linear_activation")
def linear_activation(x: Tensor, alpha: float, beta: float) -> Tensor:
    return x * alpha + beta


@operation("prelu")
def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x > 0, x, per_channel(alpha, x) * x)


@operation("scaled_tanh")
def scaled_tanh(x: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * torch.tanh(beta * x)


@operation("sigmoid_hard")
def sigmoid_hard(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


@operation("softplus_parametric")
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return per_channel(alpha, x) * softplus(per_channel(beta, x) * x)


@operation("thresholded_relu")
def thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x >= alpha, x, torch.zeros((), dtype=x.dtype))


@operation("softmax")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """One value a channel, shaped to meet `x` (B, C, ...)."""
    return values.reshape(1, -1, *[1] * (x.ndim - 2))
