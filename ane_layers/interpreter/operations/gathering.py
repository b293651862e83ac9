"""Picking elements by index. An index outside its axis is refused, whether the program asks for a check or not.

An index below 0 counts from the end in the opsets up to iOS16, and is outside from iOS17 on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import Context, operation


@operation("gather", exact=True, stored=True)
def gather(
    x: Tensor,
    indices: Tensor,
    context: Context,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> Tensor:
    """Shape: x[:axis] + indices[batch_dims:] + x[axis + 1:]."""
    del validate_indices
    axis %= x.ndim
    indices = places(indices, x.shape[axis], context)
    if batch_dims == 0:
        picked = torch.index_select(x, axis, indices.reshape(-1))
        return picked.reshape(
            (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        )  # to () too, which is no argument at all
    batch, own = x.shape[:batch_dims], indices.shape[batch_dims:]
    # One row of indices for each batch element, and one flat axis for what follows the picked one.
    flat = x.reshape(batch.numel(), x.shape[batch_dims:axis].numel(), x.shape[axis], -1)
    rows = indices.reshape(batch.numel(), -1)
    picked = torch.stack([torch.index_select(part, 1, row) for part, row in zip(flat, rows, strict=True)])
    return picked.reshape(*batch, *x.shape[batch_dims:axis], *own, *x.shape[axis + 1 :])


@operation("gather_along_axis", exact=True)
def gather_along_axis(
    x: Tensor, indices: Tensor, context: Context, axis: int = 0, validate_indices: bool = False
) -> Tensor:
    del validate_indices
    return torch.gather(x, axis, places(indices, x.shape[axis], context))


@operation("gather_nd", exact=True)
def gather_nd(
    x: Tensor, indices: Tensor, context: Context, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    """Shape: indices[:-1] + x[batch_dims + indices[-1]:]."""
    del validate_indices
    depth = indices.shape[-1]
    axes = x.shape[batch_dims : batch_dims + depth]
    parts = [places(part, size, context) for part, size in zip(indices.unbind(-1), axes, strict=True)]
    # The batch axes are picked by their own running number, shaped to meet the indices.
    own = [
        torch.arange(x.shape[axis]).reshape([-1 if axis == other else 1 for other in range(indices.ndim - 1)])
        for axis in range(batch_dims)
    ]
    return x[tuple(own + parts)] if own or parts else x.clone()


@operation("one_hot")
def one_hot(
    indices: Tensor,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: Tensor | None = None,
    off_value: Tensor | None = None,
) -> Tensor:
    axis = axis % (indices.ndim + 1)
    shape = [one_hot_vector_size if place == axis else 1 for place in range(indices.ndim + 1)]
    on = torch.tensor(1) if on_value is None else on_value
    off = torch.tensor(0) if off_value is None else off_value
    return torch.where(torch.arange(one_hot_vector_size).reshape(shape) == indices.unsqueeze(axis), on, off)


@operation("non_zero")
def non_zero(x: Tensor) -> Tensor:
    """Shape: (elements other than 0, axes of x)."""
    return torch.nonzero(x)


def places(indices: Tensor, size: int, context: Context) -> Tensor:
    """Indices into an axis of `size`, none below 0.

    Raises:
        ValueError: one of them is outside the axis.
    """
    indices = indices.long()
    if context.negative_indices:
        indices = torch.where(indices < 0, indices + size, indices)
    outside = (indices < 0) | (indices >= size)
    if bool(outside.any()):
        raise ValueError(f"index {indices[outside][0].item()} is outside an axis of {size}")
    return indices
