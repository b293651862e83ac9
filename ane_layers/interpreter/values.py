"""How values of a program are held while it runs.

Every float type is held in fp32, every integer up to 32 bits in int32, wider ones in int64. In the mode `"fp16"` a
value of type fp16 is held in fp32 too, but rounded to fp16: the same numbers, and arithmetic inside one operation
then accumulates in fp32 without a conversion before each.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

_CARRIERS = {
    "bool": torch.bool,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float32,
    "int64": torch.int64,
    "uint32": torch.int64,
    "uint64": torch.int64,
    "int4": torch.int32,
    "int8": torch.int32,
    "int16": torch.int32,
    "int32": torch.int32,
    "uint1": torch.int32,
    "uint2": torch.int32,
    "uint3": torch.int32,
    "uint4": torch.int32,
    "uint6": torch.int32,
    "uint8": torch.int32,
    "uint16": torch.int32,
}

# A number that does not fit wraps around, as it does where the type really has these bits.
_NARROW = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16}


def carrier(dtype: str) -> torch.dtype:
    """The torch type that holds values of MIL's type `dtype`.

    Raises:
        ValueError: values of this type cannot be computed with (strings, 8-bit floats).
    """
    if dtype not in _CARRIERS:
        raise ValueError(f"dtype {dtype!r} cannot be computed with")
    return _CARRIERS[dtype]


def wrap(x: Tensor, dtype: str) -> Tensor:
    """Integers held in a wider type, reduced to the range of `dtype`."""
    if dtype in _NARROW:
        return x.to(_NARROW[dtype]).to(torch.int32)
    if dtype == "uint16":
        return x & 0xFFFF
    return x


def round_to_fp16(x: Tensor) -> Tensor:
    """The nearest fp16 numbers, held in fp32; beyond 65504 they are infinite."""
    return x.half().float()


def fp16_from_numpy(array: np.ndarray) -> Tensor:
    """An fp16 array as it is. Shares the array's memory, a mapped file's too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)


def from_numpy(array: np.ndarray, dtype: str) -> Tensor:
    """An array as a tensor in its carrier. Shares the array's memory where that already has the right form."""
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    with warnings.catch_warnings():
        # Constants are mapped read-only, and nothing here writes to a tensor that is no state.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    return tensor.to(carrier(dtype))
