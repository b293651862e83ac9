"""Constants of a program: written in the program itself, or as a blob in a weight file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ane_layers.program.types import BITS, TensorType, ValueType
from ane_layers.program.weights import BlobRecord, WeightFile

# What numpy holds an element in. Types below a byte are unpacked into one byte; bf16 has no numpy type and is widened.
NUMPY_TYPES = {
    "bool": np.dtype(np.bool_),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.float32),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "int4": np.dtype(np.int8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint1": np.dtype(np.uint8),
    "uint2": np.dtype(np.uint8),
    "uint3": np.dtype(np.uint8),
    "uint4": np.dtype(np.uint8),
    "uint6": np.dtype(np.uint8),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
    "string": np.dtype(np.str_),
}


@dataclass(frozen=True, eq=False)
class Immediate:
    """A constant written in the program. `value` is an array, or a tuple or dict of such for lists and dictionaries."""

    type: ValueType
    value: Any

    def array(self) -> np.ndarray:
        """The value as an array of `type`'s shape.

        Raises:
            ValueError: the constant is a list or a dictionary.
        """
        if not isinstance(self.value, np.ndarray):
            raise ValueError(f"constant is a {type(self.type).__name__}, not a tensor")
        return self.value


@dataclass(frozen=True, eq=False)
class Blob:
    """A constant in a weight file. Its record is checked when the package is opened; the data is read by `array`."""

    type: TensorType
    file: WeightFile
    offset: int
    record: BlobRecord

    @property
    def stored_bytes(self) -> int:
        return self.record.byte_count

    @property
    def key(self) -> tuple[object, ...]:
        """The same for every constant that shares this blob."""
        return (*self.file.identity, self.offset)

    def array(self) -> np.ndarray:
        """The value as an array of `type`'s shape; mapped from the file where its layout allows, else unpacked."""
        return decode(self.file.data(self.record), self.type)


Constant: TypeAlias = Immediate | Blob


def blob(type_: TensorType, file: WeightFile, offset: int, name: str) -> Blob:
    """The constant `name` of type `type_` that lies at `offset` of `file`.

    Raises:
        ValueError: no sound record is there, or it holds another type or size than the program says.
    """
    record = file.record(offset)
    where = f"{file.path}: blob at offset {offset} of constant {name!r}"
    if not _fits(record.dtype, type_.dtype):
        raise ValueError(f"{where}: field dtype is {record.dtype}, the program says {type_.dtype}")
    if record.byte_count != type_.byte_count:
        raise ValueError(f"{where}: field size is {record.byte_count}, the program's {type_} needs {type_.byte_count}")
    padding = 8 * record.byte_count - BITS[type_.dtype] * type_.element_count
    if record.padding_bits != padding:
        raise ValueError(
            f"{where}: field padding is {record.padding_bits} bits, the program's {type_} leaves {padding}"
        )
    return Blob(type_, file, offset, record)


def _fits(stored: str, declared: str) -> bool:
    # A bool is stored as bytes, and a program may view integers as signed or unsigned: there only the width must agree.
    if declared not in BITS or BITS[stored] != BITS[declared]:
        return False
    return stored == declared or not {stored, declared} & {"fp16", "bf16", "fp32", "fp64", "fp8e4m3fn", "fp8e5m2"}


def decode(data: np.ndarray, type_: TensorType) -> np.ndarray:
    """Stored bytes (uint8, one axis) as an array of `type_`.

    Raises:
        ValueError: a type that has no numpy counterpart here (8-bit floats), or too few bytes for the shape.
    """
    if type_.dtype not in NUMPY_TYPES or type_.dtype == "string":
        raise ValueError(f"dtype {type_.dtype!r} of a constant cannot be decoded")
    if data.size != type_.byte_count:
        raise ValueError(f"constant of type {type_} has {data.size} bytes, expected {type_.byte_count}")
    shape, bits, target = type_.shape, BITS[type_.dtype], NUMPY_TYPES[type_.dtype]
    if bits < 8:
        return unpack(data, bits, type_.element_count, signed=type_.dtype.startswith("int")).reshape(shape)  # type: ignore[arg-type]
    if type_.dtype == "bf16":
        # A bf16 is the upper half of the fp32 of the same value.
        widened = data.view(np.uint16).astype(np.uint32) << 16
        return widened.view(np.float32).reshape(shape)  # type: ignore[arg-type]
    return data.view(target).reshape(shape)  # type: ignore[arg-type]


def unpack(data: np.ndarray, bits: int, count: int, signed: bool = False) -> np.ndarray:
    """`count` elements of `bits` each, packed from the lowest bit up, as uint8 (int8 when `signed`).

    Raises:
        ValueError: the bytes hold fewer elements.
    """
    if data.size * 8 < count * bits:
        raise ValueError(f"{data.size} bytes hold fewer than {count} elements of {bits} bits")
    if 8 % bits == 0:
        per_byte = 8 // bits
        used = data[: math.ceil(count / per_byte)]
        shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
        elements = ((used[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count]
    else:
        # 3 and 6 bits cross byte borders, but three bytes hold whole elements: they are read as one number.
        padded = np.zeros((math.ceil(data.size / 3), 3), np.uint32)
        padded.reshape(-1)[: data.size] = data
        groups = padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16
        shifts32 = np.arange(24 // bits, dtype=np.uint32) * np.uint32(bits)
        elements = ((groups[:, None] >> shifts32) & np.uint32((1 << bits) - 1)).astype(np.uint8).reshape(-1)[:count]
    if not signed:
        return elements
    sign = np.uint8(1 << (bits - 1))
    return ((elements ^ sign).astype(np.int16) - int(sign)).astype(np.int8)
