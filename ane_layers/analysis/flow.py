"""What flows where in a function: its operations with their inputs resolved, nested blocks in line."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from ane_layers.program import (
    Argument,
    Block,
    Function,
    ListType,
    Operation,
    Reference,
    StateType,
    TensorType,
    ValueType,
)
from ane_layers.program.constexpr import Constant, compressed
from ane_layers.program.types import BITS


@dataclass(eq=False)
class Datum:
    """A value of a function.

    Attributes:
        name: as in the file; empty for a constant that is written in place.
        type: its type.
        step: the operation that gives it. None for inputs, states, constants, and what a nested block is handed.
        constant: its value if it is a constant, compressed or not.
        users: operations that take it, in order, each as often as it takes it.
    """

    name: str
    type: ValueType
    step: Step | None = None
    constant: Constant | None = None
    users: list[Step] = field(default_factory=list)

    @property
    def tensor(self) -> TensorType | None:
        """The type of a tensor or of the tensor in a state; None for lists, dictionaries and the like."""
        if isinstance(self.type, StateType):
            return self.type.tensor
        return self.type if isinstance(self.type, TensorType) else None

    @property
    def elements(self) -> int | None:
        """Number of elements; None if a dimension is open or the value is no tensor."""
        return self.tensor.element_count if self.tensor is not None and self.tensor.is_static else None

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """Its elements if it is a constant of integers: axes, bounds and the like; None otherwise."""
        if self.constant is None or self.tensor is None or "int" not in self.tensor.dtype:
            return None
        return tuple(self.constant.array().reshape(-1).tolist())

    @property
    def bytes(self) -> int | None:
        """Bytes of the dense tensor; None if a dimension is open, 0 for what is no tensor of numbers."""
        return byte_count(self.type)


@dataclass(eq=False)
class Step:
    """An operation that is carried out when the function is called: anything but `const` and `constexpr_*`.

    `depth` is 0 in the function itself and counts the blocks around it else.
    """

    operation: Operation
    inputs: Mapping[str, tuple[Datum, ...]]
    depth: int
    outputs: tuple[Datum, ...] = ()

    @property
    def type(self) -> str:
        return self.operation.type

    @property
    def name(self) -> str:
        return self.operation.name

    def given(self) -> Iterator[tuple[str, Datum]]:
        """Every input with the name of its parameter."""
        for parameter, data in self.inputs.items():
            for datum in data:
                yield parameter, datum

    def one(self, parameter: str) -> Datum | None:
        """The input of a parameter that takes one value; None where it is left out."""
        data = self.inputs.get(parameter, ())
        return data[0] if data else None


class Flow:
    """The steps of a function in order, those of nested blocks after the operation that holds them.

    Attributes:
        steps: all of them.
        inputs, states: by name.
        outputs: of the function, in order.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.steps: list[Step] = []
        self.inputs = {value.name: Datum(value.name, value.type) for value in function.inputs}
        self.states = {value.name: Datum(value.name, value.type) for value in function.states}
        scope: MutableMapping[str, Datum] = {**self.inputs, **self.states}
        self._read(function.block, scope, 0)
        self.outputs = tuple(scope[name] for name in function.block.outputs if name in scope)

    def _read(self, block: Block, scope: MutableMapping[str, Datum], depth: int) -> None:
        for operation in block.operations:
            if operation.type == "const":
                value = operation.outputs[0]
                scope[value.name] = Datum(value.name, value.type, constant=operation.attributes.get("val"))
            elif operation.type.startswith("constexpr_"):
                constants = compressed(operation, _constants(operation, scope))
                for value in operation.outputs:
                    scope[value.name] = Datum(value.name, value.type, constant=constants[value.name])
            else:
                self._step(operation, scope, depth)

    def _step(self, operation: Operation, scope: MutableMapping[str, Datum], depth: int) -> None:
        inputs = {
            parameter: tuple(_resolve(argument, scope) for argument in arguments)
            for parameter, arguments in operation.inputs.items()
        }
        step = Step(operation, inputs, depth)
        for _, datum in step.given():
            datum.users.append(step)
        self.steps.append(step)
        for inner in operation.blocks:
            # A nested block sees what is around it and may use its names anew.
            own: MutableMapping[str, Datum] = ChainMap({}, scope)
            own.update((value.name, Datum(value.name, value.type)) for value in inner.inputs)
            self._read(inner, own, depth + 1)
        step.outputs = tuple(Datum(value.name, value.type, step) for value in operation.outputs)
        scope.update((datum.name, datum) for datum in step.outputs)


def byte_count(type_: ValueType) -> int | None:
    """Bytes of a dense value; None if a dimension is open, 0 for what has no size in bytes (strings, dictionaries).

    A list counts its length times its element.
    """
    if isinstance(type_, StateType):
        type_ = type_.tensor
    if isinstance(type_, TensorType):
        if type_.dtype not in BITS:
            return 0
        return type_.byte_count if type_.is_static else None
    if isinstance(type_, ListType):
        element = byte_count(type_.element)
        return None if type_.length is None or element is None else type_.length * element
    return 0


def _resolve(argument: Argument, scope: Mapping[str, Datum]) -> Datum:
    if isinstance(argument, Reference):
        return scope[argument.name]
    return Datum("", argument.type, constant=argument)


def _constants(operation: Operation, scope: Mapping[str, Datum]) -> dict[str, Constant]:
    """The constants among what the operation refers to."""
    known = {}
    for arguments in operation.inputs.values():
        for argument in arguments:
            if isinstance(argument, Reference):
                constant = scope[argument.name].constant
                if constant is not None:
                    known[argument.name] = constant
    return known
