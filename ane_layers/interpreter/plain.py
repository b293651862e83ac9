"""Makes plain Python values of constants, and of tensors that are known only when the program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ane_layers.program.constexpr import Constant

Convert: TypeAlias = Callable[[Any], Any]


def _integers(array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(number) for number in array.reshape(-1))


_STATIC: dict[Any, Convert] = {
    int: lambda array: int(array.item()),
    float: lambda array: float(array.item()),
    bool: lambda array: bool(array.item()),
    str: lambda array: str(array.item()),
    tuple[int, ...]: _integers,
    tuple[bool, ...]: lambda array: tuple(bool(flag) for flag in array.reshape(-1)),
}

RUNTIME: dict[Any, Convert] = {
    int: lambda tensor: int(tensor.item()),
    float: lambda tensor: float(tensor.item()),
    bool: lambda tensor: bool(tensor.item()),
    tuple[int, ...]: lambda tensor: tuple(tensor.reshape(-1).tolist()),
    tuple[bool, ...]: lambda tensor: tuple(tensor.reshape(-1).tolist()),
}

# The elements of a constant list, such as the labels of a classifier.
Labels: TypeAlias = tuple[str | int, ...]


def static(kind: Any, constant: Constant) -> Any:
    """A constant as a value of `kind`.

    Raises:
        ValueError: the constant is no tensor, or no list where one is wanted.
    """
    if kind == Labels:
        values = getattr(constant, "value", None)
        if not isinstance(values, tuple):
            raise ValueError("constant is a tensor, expected a list")
        return tuple(value.array().item() for value in values)
    return _STATIC[kind](constant.array())
