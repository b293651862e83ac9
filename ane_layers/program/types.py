"""What a saved program consists of, as plain immutable records.

Nothing here knows how a package is stored: `package.py` fills these in, the analyser and the interpreter read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ane_layers.program.flexible import FlexibleShape

if TYPE_CHECKING:
    from ane_layers.program.constants import Constant

# Bits of one element as Core ML stores it, by MIL's own name of the type. A bool takes a whole byte.
BITS: Mapping[str, int] = {
    "bool": 8,
    "fp8e4m3fn": 8,
    "fp8e5m2": 8,
    "fp16": 16,
    "bf16": 16,
    "fp32": 32,
    "fp64": 64,
    "int4": 4,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint1": 1,
    "uint2": 2,
    "uint3": 3,
    "uint4": 4,
    "uint6": 6,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
}


@dataclass(frozen=True)
class TensorType:
    """Element type (MIL's name, `"fp16"`) and shape of a tensor. A dimension that the file leaves open is None."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return None not in self.shape

    @property
    def element_count(self) -> int:
        """Number of elements.

        Raises:
            ValueError: a dimension is open.
        """
        if not self.is_static:
            raise ValueError(f"shape {list(self.shape)} has an open dimension: its size is known only when it runs")
        return math.prod(size for size in self.shape if size is not None)

    @property
    def byte_count(self) -> int:
        """Bytes of a dense tensor of this type; elements below a byte are packed.

        Raises:
            ValueError: a dimension is open, or the elements have no fixed size (strings).
        """
        if self.dtype not in BITS:
            raise ValueError(f"dtype {self.dtype!r} has no fixed size in bytes")
        return math.ceil(self.element_count * BITS[self.dtype] / 8)

    def __str__(self) -> str:
        dimensions = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{dimensions}]"


@dataclass(frozen=True)
class StateType:
    """A tensor that lives on between calls."""

    tensor: TensorType


@dataclass(frozen=True)
class ListType:
    """A list of tensors of one type; `length` is None where the file leaves it open."""

    element: ValueType
    length: int | None


@dataclass(frozen=True)
class TupleType:
    elements: tuple[ValueType, ...]


@dataclass(frozen=True)
class DictionaryType:
    key: ValueType
    value: ValueType


ValueType: TypeAlias = TensorType | StateType | ListType | TupleType | DictionaryType


@dataclass(frozen=True)
class Value:
    """A named value: an input, or what an operation gives."""

    name: str
    type: ValueType

    @property
    def tensor_type(self) -> TensorType:
        """The type of a tensor or of the tensor in a state.

        Raises:
            ValueError: the value is neither.
        """
        if isinstance(self.type, StateType):
            return self.type.tensor
        if isinstance(self.type, TensorType):
            return self.type
        raise ValueError(f"value {self.name!r} is a {type(self.type).__name__}, not a tensor")


@dataclass(frozen=True)
class Reference:
    """An argument that names another value."""

    name: str


# An argument is either the name of a value or a constant written in place.
Argument: TypeAlias = "Reference | Constant"


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation as the file has it. `attributes` hold constants (a const's own value is `attributes["val"]`)."""

    type: str
    name: str
    inputs: Mapping[str, tuple[Argument, ...]]
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Constant]
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, eq=False)
class Block:
    """A straight list of operations; `outputs` are names of values."""

    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]

    def walk(self) -> Iterator[Operation]:
        """Every operation in order, those of nested blocks after the operation that holds them."""
        for operation in self.operations:
            yield operation
            for block in operation.blocks:
                yield from block.walk()


@dataclass(frozen=True, eq=False)
class Function:
    """One entry point. `inputs` leaves the states out; they are in `states`.

    `optional_inputs` may be left out by a caller, and have the value that then fills them; `flexible_inputs` allow several shapes.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    states: tuple[Value, ...]
    block: Block
    opset: str
    optional_inputs: Mapping[str, float] = field(default_factory=dict)
    flexible_inputs: Mapping[str, FlexibleShape] = field(default_factory=dict)
