"""Fused norms, softmax and reductions as an engine without a wide accumulator would carry them out.

Each function here stands for the operation of its name in the mode `"fp16_pessimistic"`: every step inside is rounded to
fp16, squares included, and sums are taken one element after the other in the order of their indices, each partial sum
rounded. That is the worst order in use: real engines add in several lanes. Products of matrices and convolutions
are left as they are, with sums in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ane_layers.interpreter.executor import Step
from ane_layers.interpreter.registry import implementations
from ane_layers.interpreter.values import round_to_fp16 as rounded
from ane_layers.program import TensorType

Axes = tuple[int, ...] | None


def narrow(step: Step) -> Step:
    """The step with its call replaced, if it is one of these operations and its result is fp16."""
    compute = NARROW.get(step.operation.type)
    type_ = step.operation.outputs[0].type if step.operation.outputs else None
    if compute is None or not isinstance(type_, TensorType) or type_.dtype != "fp16":
        return step
    names = [parameter.name for parameter in implementations()[step.operation.type].parameters]
    return replace(step, call=_by_name(compute, names))


def _by_name(compute: Callable[..., Tensor], names: list[str]) -> Callable[..., Tensor]:
    accepted = set(compute.__code__.co_varnames[: compute.__code__.co_argcount])
    places = [(place, name) for place, name in enumerate(names) if name in accepted]

    def call(*arguments: Any) -> Tensor:
        return compute(**{name: arguments[place] for place, name in places})

    return call


def running(ufunc: np.ufunc, x: Tensor, axes: Axes, keep_dims: bool) -> Tensor:
    """`ufunc` over the axes (all if None), element after element, each partial result rounded to fp16."""
    chosen = sorted({axis % x.ndim for axis in (range(x.ndim) if axes is None else axes)})
    kept = [axis for axis in range(x.ndim) if axis not in chosen]
    shape = (
        [1 if axis in chosen else size for axis, size in enumerate(x.shape)]
        if keep_dims
        else [x.shape[a] for a in kept]
    )
    rows = x.permute(*kept, *chosen).reshape(math.prod(x.shape[axis] for axis in kept), -1).half().numpy()
    if rows.shape[1] == 0:
        return torch.full(shape, float(ufunc.identity))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # numpy's own reduction may add in blocks, or in fp32; only its running sums are defined to round each.
        last = ufunc.accumulate(rows, axis=1, dtype=np.float16)[:, -1]
    return torch.from_numpy(last.astype(np.float32)).reshape(shape)


def total(x: Tensor, axes: Axes, keep_dims: bool = True) -> Tensor:
    return running(np.add, x, axes, keep_dims)


def mean_of(x: Tensor, axes: Axes, keep_dims: bool = True) -> Tensor:
    count = math.prod(x.shape[axis] for axis in (range(x.ndim) if axes is None else axes))
    return rounded(total(x, axes, keep_dims) / count)


def square(x: Tensor) -> Tensor:
    return rounded(torch.square(x))


def reduce_sum(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return total(x, axes, keep_dims)


def reduce_mean(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return mean_of(x, axes, keep_dims)


def reduce_prod(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return running(np.multiply, x, axes, keep_dims)


def reduce_l1_norm(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return total(x.abs(), axes, keep_dims)


def reduce_l2_norm(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return torch.sqrt(total(square(x), axes, keep_dims))


def reduce_sum_square(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return total(square(x), axes, keep_dims)


def reduce_log_sum(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    return torch.log(total(x, axes, keep_dims))


def reduce_log_sum_exp(x: Tensor, axes: Axes = None, keep_dims: bool = False) -> Tensor:
    chosen = list(range(x.ndim)) if axes is None else list(axes)
    powers, highest = _powers(x, chosen)
    highest = highest.reshape(total(powers, axes, keep_dims).shape)
    return rounded(torch.log(total(powers, axes, keep_dims))) + highest


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    powers, _ = _powers(x, [axis])
    return powers / total(powers, (axis,))


def _powers(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """exp of what is left when the largest along the axes is taken away, and that largest."""
    highest = torch.amax(x, axes, keepdim=True)
    return rounded(torch.exp(rounded(x - highest))), highest


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    scores = rounded(torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        keeps = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if keeps else rounded(scores + attn_mask)
    return torch.matmul(rounded(softmax(scores)), value)


def layer_norm(
    x: Tensor, axes: Axes = None, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    normalized = tuple(axis % x.ndim for axis in (range(x.ndim) if axes is None else axes))
    shape = [size if axis in normalized else 1 for axis, size in enumerate(x.shape)]
    return _normalize(x, normalized, epsilon, gamma, beta, shape)


def instance_norm(x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    shape = [1, x.shape[1], *[1] * (x.ndim - 2)]
    return _normalize(x, tuple(range(2, x.ndim)), epsilon, gamma, beta, shape)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    shape = [1, -1, *[1] * (x.ndim - 2)]
    centred = rounded(x - mean.reshape(shape))
    return _scale(centred, variance.reshape(shape), epsilon, gamma, beta, shape)


def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    return x * rounded(torch.rsqrt(_plus(total(square(x), (-3, -2, -1)), epsilon)))


def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    squares = torch.nn.functional.pad(square(x).movedim(1, -1), (size // 2, (size - 1) // 2))
    sums = total(squares.unfold(-1, size, 1), (-1,), keep_dims=False).movedim(-1, 1)
    return x / rounded(torch.pow(rounded(k + rounded(alpha / size * sums)), beta))


def _normalize(
    x: Tensor, axes: tuple[int, ...], epsilon: float, gamma: Tensor | None, beta: Tensor | None, shape: list[int]
) -> Tensor:
    centred = rounded(x - mean_of(x, axes))
    return _scale(centred, mean_of(square(centred), axes), epsilon, gamma, beta, shape)


def _scale(
    centred: Tensor, variance: Tensor, epsilon: float, gamma: Tensor | None, beta: Tensor | None, shape: list[int]
) -> Tensor:
    x = rounded(centred * rounded(torch.rsqrt(_plus(variance, epsilon))))
    if gamma is not None:
        x = rounded(x * gamma.reshape(shape))
    return x if beta is None else x + beta.reshape(shape)


def _plus(x: Tensor, epsilon: float) -> Tensor:
    return rounded(x + float(np.float16(epsilon)))


NARROW: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        batch_norm,
        instance_norm,
        l2_norm,
        layer_norm,
        local_response_norm,
        reduce_l1_norm,
        reduce_l2_norm,
        reduce_log_sum,
        reduce_log_sum_exp,
        reduce_mean,
        reduce_prod,
        reduce_sum,
        reduce_sum_square,
        scaled_dot_product_attention,
        softmax,
    )
}
