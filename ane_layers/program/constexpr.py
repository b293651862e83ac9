"""Decompresses compressed constants: what the operations `constexpr_*` stand for, in both generations of the format.

Lookup tables, quantized numbers with scale and offset, sparse data, and their combinations. The result has the type
that the program declares; an fp16 result is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ane_layers.program.constants import NUMPY_TYPES, Blob, Immediate, unpack
from ane_layers.program.types import Argument, Operation, Reference, TensorType

Arrays: TypeAlias = Mapping[str, np.ndarray]

# Elements to look up at once: numpy widens indices to eight bytes, which for a whole embedding would be gigabytes.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Compressed:
    """A constant that an operation `constexpr_*` makes of its `parts`; `output` says which of its results it is."""

    type: TensorType
    scheme: str
    parts: Mapping[str, Constant]
    output: int = 0

    def array(self) -> np.ndarray:
        """The decompressed value, computed anew at each call.

        Raises:
            ValueError: the parts do not fit each other or the declared shape.
        """
        parts = {name: part.array() for name, part in self.parts.items()}
        try:
            result = _SCHEMES[self.scheme](parts)[self.output]
        except Exception as error:  # whatever damaged parts make numpy raise
            raise ValueError(f"{self.scheme}: parts {', '.join(parts)} do not fit: {error}") from error
        if result.shape != self.type.shape:
            raise ValueError(f"{self.scheme}: shape is {list(result.shape)}, the program says {list(self.type.shape)}")
        return result.astype(NUMPY_TYPES[self.type.dtype], copy=False)


Constant: TypeAlias = Immediate | Blob | Compressed


def is_compressed(operation: Operation) -> bool:
    """Whether the operation is a compressed constant of a kind that is known here."""
    return operation.type in _SCHEMES


def schemes() -> frozenset[str]:
    """The operations `constexpr_*` that are known here."""
    return frozenset(_SCHEMES)


def compressed(operation: Operation, known: Mapping[str, Constant]) -> dict[str, Compressed]:
    """The constants that an operation `constexpr_*` gives, by name; `known` are those before it.

    Raises:
        ValueError: a part is no constant.
    """
    parts: dict[str, Constant] = {name: part for name, part in operation.attributes.items() if name != "name"}
    for name, arguments in operation.inputs.items():
        parts[name] = _resolve(arguments[0], known, operation)
    return {
        value.name: Compressed(value.tensor_type, operation.type, parts, index)
        for index, value in enumerate(operation.outputs)
    }


def _resolve(argument: Argument, known: Mapping[str, Constant], operation: Operation) -> Constant:
    if not isinstance(argument, Reference):
        return argument
    if argument.name not in known:
        raise ValueError(f"operation {operation.name!r} ({operation.type}): {argument.name!r} is no constant")
    return known[argument.name]


def _lut_to_dense(parts: Arrays) -> tuple[np.ndarray, ...]:
    indices, table = parts["indices"], parts["lut"]
    if "shape" in parts:
        # The first generation: one table, and indices packed in bytes.
        shape = tuple(int(size) for size in parts["shape"])
        bits = table.size.bit_length() - 1
        if table.size != 1 << bits:
            raise ValueError(f"lut has {table.size} entries, which is no power of 2")
        return (
            _look_up(unpack(indices, bits, math.prod(shape)).reshape(shape), table.reshape(*[1] * len(shape), -1, 1)),
        )
    axis = int(parts["vector_axis"]) if "vector_axis" in parts else -1
    return (_look_up(indices, table, axis),)


def _look_up(indices: np.ndarray, table: np.ndarray, vector_axis: int = -1) -> np.ndarray:
    """`table` has the axes of `indices`, one entry for each block of the axis, then (entries, vector)."""
    entries, vector = table.shape[-2:]
    blocks = table.shape[:-2]
    if int(indices.max(initial=0)) >= entries:
        # It would be looked up in the next block's table.
        raise ValueError(f"index {int(indices.max())} is beyond the {entries} entries of lut")
    flat = np.ascontiguousarray(table).reshape(-1, vector)
    numbers = np.arange(math.prod(blocks)).reshape(blocks) * entries
    for axis in range(1, indices.ndim):
        numbers = np.repeat(numbers, indices.shape[axis] // blocks[axis], axis)  # first entry of each element's table
    result = np.empty((*indices.shape, vector), table.dtype)
    rows = indices.shape[0] // blocks[0]
    step = max(1, _CHUNK // max(1, math.prod(indices.shape[1:])))
    for block in range(blocks[0]):
        for start in range(block * rows, (block + 1) * rows, step):
            part = slice(start, min(start + step, (block + 1) * rows))
            result[part] = flat[numbers[block] + indices[part]]
    axis = vector_axis % indices.ndim
    shape = [size * vector if place == axis else size for place, size in enumerate(indices.shape)]
    return np.moveaxis(result, -1, axis + 1).reshape(shape)


def _blockwise_shift_scale(parts: Arrays) -> tuple[np.ndarray, ...]:
    data, scale = parts["data"], parts["scale"]
    blocked = [size for whole, count in zip(data.shape, scale.shape, strict=True) for size in (count, whole // count)]
    result = data.reshape(blocked).astype(np.float32)
    spread = [size for count in scale.shape for size in (count, 1)]
    if "offset" in parts:
        result -= parts["offset"].reshape(spread).astype(np.float32)
    result *= scale.reshape(spread).astype(np.float32)
    return (result.reshape(data.shape),)


def _affine_dequantize(parts: Arrays) -> tuple[np.ndarray, ...]:
    data = parts["quantized_data"]
    axis = int(parts["axis"]) % data.ndim
    shape = [-1 if place == axis else 1 for place in range(data.ndim)]

    def spread(values: np.ndarray) -> np.ndarray:
        return (values.reshape(shape) if values.ndim else values).astype(np.float32)

    return ((data.astype(np.float32) - spread(parts["zero_point"])) * spread(parts["scale"]),)


def _cast(parts: Arrays) -> tuple[np.ndarray, ...]:
    return (parts["source_val"],)


def _sparse_to_dense(parts: Arrays) -> tuple[np.ndarray, ...]:
    values, mask = parts["nonzero_data"], parts["mask"]
    if "shape" in parts:
        shape = tuple(int(size) for size in parts["shape"])
        mask = unpack(mask, 1, math.prod(shape)).reshape(shape)
    return (_scatter(values, mask),)


def _scatter(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    if int(np.count_nonzero(mask)) != values.size:
        raise ValueError(f"mask has {np.count_nonzero(mask)} bits set for {values.size} values")
    dense = np.zeros(mask.shape, values.dtype)
    dense[mask != 0] = values
    return dense


def _lut_to_sparse(parts: Arrays) -> tuple[np.ndarray, ...]:
    mask = parts["indices_mask"]
    axis = int(parts["vector_axis"]) if "vector_axis" in parts else -1
    dense = _look_up(_scatter(parts["indices_nonzero_data"], mask), parts["lut"], axis)
    # A vector table fills as many elements as its vectors are long, all of them set.
    mask = np.repeat(mask, parts["lut"].shape[-1], axis)
    return mask, dense[mask != 0]


def _sparse_blockwise_shift_scale(parts: Arrays) -> tuple[np.ndarray, ...]:
    mask = parts["data_mask"]
    dense = {"data": _scatter(parts["nonzero_data"], mask), "scale": parts["scale"]}
    if "offset" in parts:
        dense["offset"] = parts["offset"]
    return mask, _blockwise_shift_scale(dense)[0][mask != 0]


_SCHEMES: Mapping[str, Callable[[Arrays], tuple[np.ndarray, ...]]] = {
    "constexpr_affine_dequantize": _affine_dequantize,
    "constexpr_blockwise_shift_scale": _blockwise_shift_scale,
    "constexpr_cast": _cast,
    "constexpr_lut_to_dense": _lut_to_dense,
    "constexpr_lut_to_sparse": _lut_to_sparse,
    "constexpr_sparse_blockwise_shift_scale": _sparse_blockwise_shift_scale,
    "constexpr_sparse_to_dense": _sparse_to_dense,
}
