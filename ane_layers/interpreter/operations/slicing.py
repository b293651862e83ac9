"""Slices, read and written.

A slice whose bounds are constants ends where the axis ends, as in numpy, and the program's types say so. A bound that
is computed must lie on the axis: a Core ML graph cannot raise, and a cache that is written past its last slot would
otherwise go wrong without a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import Context, operation

Bounds = tuple[int, ...]
Mask = tuple[bool, ...]


@operation("slice_by_index", view=True)
def slice_by_index(
    x: Tensor,
    begin: tuple[int, ...],
    end: tuple[int, ...],
    context: Context,
    stride: tuple[int, ...] | None = None,
    begin_mask: tuple[bool, ...] | None = None,
    end_mask: tuple[bool, ...] | None = None,
    squeeze_mask: tuple[bool, ...] | None = None,
) -> Tensor:
    checked = not context.runtime.isdisjoint(("begin", "end"))
    places, backwards = _places(x, begin, end, stride, begin_mask, end_mask, squeeze_mask, checked)
    part = x[places]
    return torch.flip(part, backwards) if backwards else part


@operation("slice_by_size", view=True)
def slice_by_size(x: Tensor, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    places = []
    for axis, (first, length) in enumerate(zip(begin, size, strict=True)):
        extent = x.shape[axis]
        last = extent if length == -1 else first + length
        if not 0 <= first <= last <= extent:
            raise ValueError(f"axis {axis} of size {extent} has no slice from {first} to {last}")
        places.append(slice(first, last))
    return x[tuple(places)]


@operation("slice_update", exact=True)
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: tuple[int, ...],
    end: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    begin_mask: tuple[bool, ...] | None = None,
    end_mask: tuple[bool, ...] | None = None,
    squeeze_mask: tuple[bool, ...] | None = None,
) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    part, values = place_of_update(x, update, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    part.copy_(values)
    return x


def place_of_update(
    x: Tensor,
    update: Tensor,
    begin: Bounds,
    end: Bounds,
    stride: Bounds | None = None,
    begin_mask: Mask | None = None,
    end_mask: Mask | None = None,
    squeeze_mask: Mask | None = None,
) -> tuple[Tensor, Tensor]:
    """The view of `x` that an update goes to, and the values in that view's order.

    Raises:
        ValueError: the slice leaves the axis, or the update has another shape than the slice.
    """
    places, backwards = _places(x, begin, end, stride, begin_mask, end_mask, squeeze_mask, checked=True)
    part = x[places]
    if part.shape != update.shape:
        raise ValueError(f"update has shape {list(update.shape)}, the slice {list(part.shape)}")
    return part, torch.flip(update, backwards) if backwards else update


def _places(
    x: Tensor,
    begin: Bounds,
    end: Bounds,
    stride: Bounds | None,
    begin_mask: Mask | None,
    end_mask: Mask | None,
    squeeze_mask: Mask | None,
    checked: bool,
) -> tuple[tuple[slice | int, ...], list[int]]:
    """What to index x with, and the axes of the result to turn round: torch has no negative steps."""
    rank = x.ndim
    if len(begin) != rank or len(end) != rank:
        raise ValueError(f"begin and end have {len(begin)} and {len(end)} entries for {rank} axes")
    places: list[slice | int] = []
    backwards: list[int] = []
    kept = 0
    for axis in range(rank):
        size, step = x.shape[axis], stride[axis] if stride else 1
        if squeeze_mask and squeeze_mask[axis]:
            first = 0 if begin_mask and begin_mask[axis] else begin[axis]
            if not -size <= first < size:
                raise ValueError(f"begin is {first} on axis {axis} of size {size}")
            places.append(first)
            continue
        first_or_none = None if begin_mask and begin_mask[axis] else begin[axis]
        last_or_none = None if end_mask and end_mask[axis] else end[axis]
        if checked:
            _check("begin", first_or_none, size, axis)
            _check("end", last_or_none, size, axis)
        start, stop, step = slice(first_or_none, last_or_none, step).indices(size)
        if step < 0:
            count = len(range(start, stop, step))
            start, stop, step = start + (count - 1) * step, start + 1, -step
            if count == 0:
                start, stop = 0, 0
            backwards.append(kept)
        places.append(slice(start, max(start, stop), step))
        kept += 1
    return tuple(places), backwards


def _check(name: str, bound: int | None, size: int, axis: int) -> None:
    if bound is not None and not -size <= bound <= size:
        raise ValueError(f"{name} is {bound} on axis {axis} of size {size}")
