"""The message classes of the file format: the only place that imports coremltools, and only `coremltools.proto`."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from ane_layers.program.types import (
    DictionaryType,
    ListType,
    StateType,
    TensorType,
    TupleType,
    ValueType,
)

# Number of the enum DataType in the format, and MIL's name of the type.
DATA_TYPES = {
    1: "bool",
    2: "string",
    10: "fp16",
    11: "fp32",
    12: "fp64",
    13: "bf16",
    21: "int8",
    22: "int16",
    23: "int32",
    24: "int64",
    25: "int4",
    31: "uint8",
    32: "uint16",
    33: "uint32",
    34: "uint64",
    35: "uint4",
    36: "uint2",
    37: "uint1",
    38: "uint6",
    39: "uint3",
    40: "fp8e4m3fn",
    41: "fp8e5m2",
}


@cache
def model_class() -> Any:
    """The message class of a whole model, imported when the first package is opened: that takes seconds."""
    # Anywhere but on macOS the import warns that Core ML's own runtime is missing. Reading a file needs none of it.
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from coremltools.proto import Model_pb2
    finally:
        logger.setLevel(level)
    return Model_pb2.Model


def value_type(message: Any, where: str) -> ValueType:
    """A ValueType message as a type record; `where` names its place in errors.

    Raises:
        ValueError: the type is missing or of an unknown kind or element type.
    """
    kind = message.WhichOneof("type")
    if kind == "tensorType":
        return _tensor_type(message.tensorType, where)
    if kind == "stateType":
        wrapped = value_type(message.stateType.wrappedType, where)
        if not isinstance(wrapped, TensorType):
            raise ValueError(f"{where}: field stateType holds a {type(wrapped).__name__}, expected a tensor")
        return StateType(wrapped)
    if kind == "listType":
        return ListType(value_type(message.listType.type, where), _size(message.listType.length))
    if kind == "tupleType":
        return TupleType(tuple(value_type(element, where) for element in message.tupleType.types))
    if kind == "dictionaryType":
        return DictionaryType(
            value_type(message.dictionaryType.keyType, where), value_type(message.dictionaryType.valueType, where)
        )
    raise ValueError(f"{where}: field type is {kind!r}, which is no known kind of value")


def _tensor_type(message: Any, where: str) -> TensorType:
    if message.dataType not in DATA_TYPES:
        raise ValueError(f"{where}: field dataType is {message.dataType}, which is no known element type")
    return TensorType(DATA_TYPES[message.dataType], tuple(_size(dimension) for dimension in message.dimensions))


def _size(dimension: Any) -> int | None:
    return int(dimension.constant.size) if dimension.WhichOneof("dimension") == "constant" else None
