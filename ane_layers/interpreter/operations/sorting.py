"""Orders. Equal elements keep the order of their indices, as in numpy's stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import operation


@operation("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    return torch.argsort(x, stable=True, dim=axis, descending=not ascending)


@operation("topk", exact=True)
def topk(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Tensor, ...] | Tensor:
    del sort, output_indices_dtype  # sorted either way; the declared type of the indices says the same
    count = x.shape[axis] if k == -1 else k
    if not 0 <= count <= x.shape[axis]:
        raise ValueError(f"k is {k} on an axis of size {x.shape[axis]}")
    values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    values, indices = values.narrow(axis, 0, count), indices.narrow(axis, 0, count)
    return (values.contiguous(), indices) if return_indices else values.contiguous()
