"""Reads a saved ML Program from its own files, without the converter that wrote it."""

from ane_layers.program.constants import Blob, Constant, Immediate
from ane_layers.program.flexible import FlexibleShape
from ane_layers.program.package import Package
from ane_layers.program.types import (
    Argument,
    Block,
    DictionaryType,
    Function,
    ListType,
    Operation,
    Reference,
    StateType,
    TensorType,
    TupleType,
    Value,
    ValueType,
)

__all__ = [
    "Argument",
    "Blob",
    "Block",
    "Constant",
    "DictionaryType",
    "FlexibleShape",
    "Function",
    "Immediate",
    "ListType",
    "Operation",
    "Package",
    "Reference",
    "StateType",
    "TensorType",
    "TupleType",
    "Value",
    "ValueType",
]
