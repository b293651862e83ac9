"""Writing elements by index. An index outside its axis is refused, whether the program asks for a check or not.

Several updates of one element act one after the other; of `"update"` the last one stays. Sums and products of them are
formed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.operations.gathering import places
from ane_layers.interpreter.registry import Context, operation


@operation("scatter")
def scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    context: Context,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """Shape: data D, indices K, updates D[:axis] + K + D[axis + 1:] → D."""
    del validate_indices
    axis %= data.ndim
    rows = places(indices, data.shape[axis], context).reshape(-1)
    targets = _numbers(data).index_select(axis, rows).reshape(updates.shape)
    return _apply(data, targets, updates, mode)


@operation("scatter_along_axis")
def scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    context: Context,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    del validate_indices
    targets = torch.gather(_numbers(data), axis, places(indices, data.shape[axis], context))
    return _apply(data, targets, updates, mode)


@operation("scatter_nd")
def scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    context: Context,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """Shape: data D, indices K, updates K[:-1] + D[K[-1]:] → D."""
    del validate_indices
    axes = data.shape[: indices.shape[-1]]
    parts = [places(part, size, context) for part, size in zip(indices.unbind(-1), axes, strict=True)]
    targets = _numbers(data)[tuple(parts)] if parts else _numbers(data).expand(updates.shape)
    return _apply(data, targets, updates, mode)


def _numbers(data: Tensor) -> Tensor:
    """Every element's number. Picked as a gather picks elements, they tell where a scatter goes."""
    return torch.arange(data.numel()).reshape(data.shape)


def _apply(data: Tensor, targets: Tensor, updates: Tensor, mode: str) -> Tensor:
    if targets.shape != updates.shape:
        raise ValueError(f"updates has shape {list(updates.shape)}, expected {list(targets.shape)}")
    flat, slots, values = data.reshape(-1).clone(), targets.reshape(-1), updates.reshape(-1)
    if mode in ("add", "sub"):
        flat.index_add_(0, slots, values, alpha=1 if mode == "add" else -1)
    elif mode in ("mul", "max", "min"):
        flat.scatter_reduce_(0, slots, values, {"mul": "prod", "max": "amax", "min": "amin"}[mode])
    elif mode == "update":
        last = _last(slots, flat.numel())
        flat[slots[last]] = values[last]
    elif mode == "div":
        _divide(flat, slots, values)
    else:
        raise ValueError(f"mode is {mode!r}, expected add, sub, mul, div, max, min or update")
    return flat.reshape(data.shape)


def _last(targets: Tensor, count: int) -> Tensor:
    """Which updates no later one of the same element follows."""
    order = torch.arange(targets.numel())
    latest = torch.full((count,), -1).scatter_reduce_(0, targets, order, "amax")
    return latest[targets] == order


def _divide(flat: Tensor, targets: Tensor, values: Tensor) -> None:
    if not flat.is_floating_point():
        raise ValueError("mode is 'div' for integers, and how Core ML rounds them is not documented")
    # One division at a time for each element: the product of divisors may overflow where the quotient does not.
    while targets.numel():
        last = _last(targets, flat.numel())
        flat[targets[last]] /= values[last]
        targets, values = targets[~last], values[~last]
