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
    values, indices = _first(x, count, axis, descending=not ascending)
    return (values, indices) if return_indices else values


def _first(x: Tensor, count: int, axis: int, descending: bool) -> tuple[Tensor, Tensor]:
    """The first `count` elements of a stable sort, without sorting a whole vocabulary for a few of them."""
    values = torch.topk(x, count, axis, largest=descending).values if 0 < count * 8 <= x.shape[axis] else None
    # NaN compares with nothing; a full sort has a place for it.
    if values is None or bool(values.isnan().any()):
        values, indices = torch.sort(x, dim=axis, descending=descending, stable=True)
        return values.narrow(axis, 0, count).contiguous(), indices.narrow(axis, 0, count)
    # Of equal elements at the border topk takes any, and the first in x are wanted: so many as topk took.
    border = values.narrow(axis, count - 1, 1)
    taken = (values == border).sum(axis, keepdim=True)
    equal = x == border
    better = x > border if descending else x < border
    chosen = (better | (equal & (torch.cumsum(equal, axis, dtype=torch.int32) <= taken))).movedim(axis, -1)
    places = chosen.nonzero()[:, -1].reshape(*chosen.shape[:-1], count).movedim(-1, axis)  # in the order of x
    values, order = torch.sort(torch.gather(x, axis, places), dim=axis, descending=descending, stable=True)
    return values, torch.gather(places, axis, order)
