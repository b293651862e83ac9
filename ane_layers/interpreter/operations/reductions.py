"""Reductions over axes; without axes, over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import operation


@operation("reduce_sum")
def reduce_sum(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sum(x, _axes(x, axes), keep_dims)


@operation("reduce_mean")
def reduce_mean(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    if not x.is_floating_point():
        # Integers are divided as integers are.
        count = torch.tensor([x.shape[axis] for axis in _axes(x, axes)]).prod()
        return torch.div(torch.sum(x, _axes(x, axes), keep_dims), count, rounding_mode="trunc")
    return torch.mean(x, _axes(x, axes), keep_dims)


@operation("reduce_max")
def reduce_max(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.amax(x, _axes(x, axes), keep_dims)


@operation("reduce_min")
def reduce_min(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.amin(x, _axes(x, axes), keep_dims)


@operation("reduce_prod")
def reduce_prod(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    # torch multiplies along one axis at a time; the last axis first, so that the others keep their numbers.
    for axis in sorted((axis % x.ndim for axis in _axes(x, axes)), reverse=True):
        x = torch.prod(x, axis, keep_dims)
    return x


@operation("reduce_l1_norm")
def reduce_l1_norm(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sum(torch.abs(x), _axes(x, axes), keep_dims)


@operation("reduce_l2_norm")
def reduce_l2_norm(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sqrt(reduce_sum_square(x, axes, keep_dims))


@operation("reduce_sum_square")
def reduce_sum_square(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sum(torch.square(x), _axes(x, axes), keep_dims)


@operation("reduce_log_sum")
def reduce_log_sum(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.log(torch.sum(x, _axes(x, axes), keep_dims))


@operation("reduce_log_sum_exp")
def reduce_log_sum_exp(x: Tensor, axes: tuple[int, ...] | None = None, keep_dims: bool = False) -> Tensor:
    return torch.logsumexp(x, _axes(x, axes), keep_dims)


@operation("reduce_argmax")
def reduce_argmax(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
    del output_dtype  # the declared type of the result says the same
    return torch.argmax(x, axis, keep_dims)


@operation("reduce_argmin")
def reduce_argmin(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
    del output_dtype
    return torch.argmin(x, axis, keep_dims)


def _axes(x: Tensor, axes: tuple[int, ...] | None) -> list[int]:
    return list(range(x.ndim)) if axes is None else list(axes)
