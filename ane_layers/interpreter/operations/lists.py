"""Lists of tensors, as loops use them. A list is a value: what was read from it before a write stays as it was."""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.registry import Context, Ignored, TensorList, operation


@operation("make_list", view=True)
def make_list(
    elem_shape: Ignored, dtype: Ignored | None = None, init_length: int = 1, dynamic_length: bool = True
) -> TensorList:
    del elem_shape, dtype
    if init_length < 0:
        raise ValueError(f"init_length is {init_length}")
    return TensorList((None,) * init_length, dynamic_length)


@operation("list_length")
def list_length(ls: TensorList) -> Tensor:
    return torch.tensor(len(ls.elements), dtype=torch.int32)


@operation("list_read", view=True)
def list_read(ls: TensorList, index: int) -> Tensor:
    return _element(ls, index)


@operation("list_write", view=True)
def list_write(ls: TensorList, index: int, value: Tensor) -> TensorList:
    return _written(ls, [index], [value])


@operation("list_gather", exact=True)
def list_gather(ls: TensorList, indices: tuple[int, ...], context: Context) -> Tensor:
    """Shape: (indices,) + an element's."""
    if not indices:
        return torch.zeros([0, *(size or 0 for size in context.output.shape[1:])])
    return torch.stack([_element(ls, index) for index in indices])


@operation("list_scatter", view=True)
def list_scatter(ls: TensorList, indices: tuple[int, ...], value: Tensor) -> TensorList:
    return _written(ls, list(indices), list(value.unbind(0)))


def _element(ls: TensorList, index: int) -> Tensor:
    if not 0 <= index < len(ls.elements):
        raise ValueError(f"index is {index} in a list of {len(ls.elements)}")
    element = ls.elements[index]
    if element is None:
        raise ValueError(f"element {index} is read before anything is written to it")
    return element


def _written(ls: TensorList, indices: list[int], values: list[Tensor]) -> TensorList:
    elements = list(ls.elements)
    last = max(indices, default=0)
    if min(indices, default=0) < 0 or (last >= len(elements) and not ls.grows):
        raise ValueError(f"index is {last if last >= len(elements) else min(indices)} in a list of {len(elements)}")
    elements.extend([None] * (last + 1 - len(elements)))
    for index, value in zip(indices, values, strict=True):
        elements[index] = value
    return TensorList(tuple(elements), ls.grows)
