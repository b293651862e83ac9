"""What passes between a caller and a program: the checks on the way in, the types on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from ane_layers.interpreter.values import from_numpy
from ane_layers.program import Function, TensorType
from ane_layers.program.constants import NUMPY_TYPES

Mode: TypeAlias = Literal["fp32", "fp16", "fp16_pessimistic"]
MODES: tuple[str, ...] = get_args(Mode)


def check_array(kind: str, name: str, value: object, type_: TensorType, mode: str) -> None:
    """Checks a value that a caller gives for the input or state `name`.

    Raises:
        TypeError: it is no numpy array, or of another type than the program says. Where fp16 is declared, the mode
            `"fp32"` takes fp32 too: that is what it gives out.
        ValueError: it has another shape.
    """
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{kind} {name!r} is a {type(value).__name__}, expected a numpy array of {type_}")
    wide = mode == "fp32" and type_.dtype == "fp16" and value.dtype == np.float32
    if value.dtype != NUMPY_TYPES[type_.dtype] and not wide:
        raise TypeError(f"{kind} {name!r} has dtype {value.dtype}, expected {NUMPY_TYPES[type_.dtype]}")
    fits = len(value.shape) == type_.rank and all(
        declared in (None, size) for size, declared in zip(value.shape, type_.shape, strict=True)
    )
    if not fits:
        declared_shape = ["?" if size is None else size for size in type_.shape]
        raise ValueError(f"{kind} {name!r} has shape {list(value.shape)}, expected {declared_shape}")


def to_tensors(function: Function, data: Mapping[str, np.ndarray], mode: str) -> dict[str, Tensor]:
    """The checked inputs of one call, in their carriers; optional ones that are left out are filled.

    Raises:
        ValueError: an input is missing, unknown or of another shape.
        TypeError: an input is no array of its type.
    """
    expected = {value.name: value.tensor_type for value in function.inputs}
    for name in data:
        if name not in expected:
            raise ValueError(f"input {name!r} is unknown; the inputs are {', '.join(expected) or 'none'}")
    tensors = {}
    for name, type_ in expected.items():
        if name not in data:
            tensors[name] = _filled(name, type_, function)
            continue
        check_array("input", name, data[name], type_, mode)
        flexible = function.flexible_inputs.get(name)
        if flexible is not None and not flexible.allows(data[name].shape):
            raise ValueError(f"input {name!r} has shape {list(data[name].shape)}, expected {flexible}")
        tensors[name] = from_numpy(data[name], type_.dtype)
    return tensors


def _filled(name: str, type_: TensorType, function: Function) -> Tensor:
    if name not in function.optional_inputs:
        raise ValueError(f"input {name!r} is missing, a {type_}")
    shape: tuple[int | None, ...] = type_.shape
    if name in function.flexible_inputs:
        shape = function.flexible_inputs[name].default
    if None in shape:
        raise ValueError(f"input {name!r} is missing, and its shape {type_} is open")
    array = np.full(shape, function.optional_inputs[name], NUMPY_TYPES[type_.dtype])  # type: ignore[type-var]
    return from_numpy(array, type_.dtype)


def to_numpy(tensor: Tensor, dtype: str, mode: str) -> np.ndarray:
    """A tensor as an array of its declared type; fp16 stays fp32 in the mode `"fp32"`, which rounds nothing."""
    if dtype == "fp16":
        return (tensor if mode == "fp32" else tensor.half()).numpy()
    if tensor.dtype == torch.bool:
        return tensor.numpy()
    return tensor.numpy().astype(NUMPY_TYPES[dtype], copy=False)
