"""Turns a function of a program into a list of calls, with everything settled that can be before the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ane_layers.interpreter.operations  # noqa: F401 - fills the table
from ane_layers.interpreter.operations.states import hand_over, slice_update_in_place
from ane_layers.interpreter.ownership import Ownership, decide, names
from ane_layers.interpreter.registry import Context, Implementation, Parameter, StateCell, implementations
from ane_layers.interpreter.values import carrier
from ane_layers.interpreter.weights import constants, is_constant, tensor
from ane_layers.program import Argument, Function, Operation, Reference, TensorType
from ane_layers.program.constexpr import Constant

Convert = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Step:
    """One call. `template` are its arguments, with gaps that `gaps` and `groups` fill from slots."""

    operation: Operation
    call: Callable[..., Any]
    template: list[Any]
    gaps: tuple[tuple[int, int, Convert | None], ...]
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    outputs: tuple[tuple[int, Any, bool, tuple[int | None, ...] | None], ...]  # slot, carrier, rounded, shape
    release: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps of a function and where its values stand: `slots` holds the constants, None elsewhere."""

    steps: tuple[Step, ...]
    slots: list[Any]
    inputs: Mapping[str, int]
    states: Mapping[str, int]
    outputs: Mapping[str, int]
    kept: frozenset[str]


def build(function: Function, rounds: bool) -> Plan:
    """The plan of a function. `rounds`: results of type fp16 are rounded to it.

    Raises:
        ValueError: operations that are not supported (all of them are named), or an operation that is given an input it
            does not have, lacks one it needs, or uses a value that nothing gives.
    """
    missing = sorted(
        {
            operation.type
            for operation in function.block.walk()
            if not is_constant(operation) and operation.type not in implementations()
        }
    )
    if missing:
        raise ValueError(f"function {function.name!r} uses operations that are not supported: {', '.join(missing)}")
    return _Builder(function, rounds).build()


class _Builder:
    def __init__(self, function: Function, rounds: bool) -> None:
        self._function = function
        self._rounds = rounds
        self._slots: list[Any] = []
        self._slot_of: dict[str, int] = {}
        self._constants: dict[str, Constant] = {}
        self._constant_slots: dict[str, int] = {}
        self._states = {state.name for state in function.states}

    def build(self) -> Plan:
        function = self._function
        for value in (*function.inputs, *function.states):
            self._slot_of[value.name] = self._new_slot()
        running: list[Operation] = []
        for operation in function.block.operations:
            if is_constant(operation):
                self._constants.update(constants(operation, self._constants))
            else:
                running.append(operation)
        ownership = decide(function, running, implementations())
        last_use = {name: index for index, operation in enumerate(running) for name in names(operation)}
        steps = [self._step(index, operation, ownership, last_use) for index, operation in enumerate(running)]
        return Plan(
            steps=tuple(steps),
            slots=self._slots,
            inputs={value.name: self._slot_of[value.name] for value in function.inputs},
            states={value.name: self._slot_of[value.name] for value in function.states},
            outputs={name: self._any_slot(name) for name in function.block.outputs},
            kept=ownership.kept,
        )

    def _new_slot(self, value: Any = None) -> int:
        self._slots.append(value)
        return len(self._slots) - 1

    def _any_slot(self, name: str) -> int:
        if name in self._constants:
            if name not in self._constant_slots:
                self._constant_slots[name] = self._new_slot(tensor(self._constants[name]))
            return self._constant_slots[name]
        return self._slot_of[name]

    def _step(self, index: int, operation: Operation, ownership: Ownership, last_use: Mapping[str, int]) -> Step:
        implementation = implementations()[operation.type]
        call = implementation.function
        arguments = self._arguments(operation, implementation)
        if index in ownership.in_place:
            call = slice_update_in_place
            arguments = {**arguments, "x": (Reference(ownership.in_place[index]),)}
        elif index in ownership.handed_over:
            call = hand_over
        template: list[Any] = []
        gaps: list[tuple[int, int, Convert | None]] = []
        groups: list[tuple[int, tuple[int, ...]]] = []
        for parameter in implementation.parameters:
            self._bind(parameter, arguments.get(parameter.name), operation, arguments, template, gaps, groups)
        outputs = []
        for value in operation.outputs:
            self._slot_of[value.name] = self._new_slot()
            outputs.append(self._output(value.name, value.tensor_type, implementation))
        finished = {*names(operation), *(value.name for value in operation.outputs)}
        release = [
            self._slot_of[name]
            for name in finished
            if name in self._slot_of
            and last_use.get(name, index) == index
            and name not in self._function.block.outputs
            and name not in self._states
        ]
        return Step(operation, call, template, tuple(gaps), tuple(groups), tuple(outputs), tuple(sorted(release)))

    def _arguments(self, operation: Operation, implementation: Implementation) -> dict[str, tuple[Argument, ...]]:
        arguments = {name: values for name, values in operation.inputs.items() if values}
        arguments.update({name: (value,) for name, value in operation.attributes.items() if name != "name"})
        known = {parameter.name for parameter in implementation.parameters}
        for name in arguments:
            if name not in known:
                raise ValueError(f"{_label(operation)}: input {name!r} is not supported")
        return arguments

    def _bind(
        self,
        parameter: Parameter,
        given: tuple[Argument, ...] | None,
        operation: Operation,
        arguments: Mapping[str, tuple[Argument, ...]],
        template: list[Any],
        gaps: list[tuple[int, int, Convert | None]],
        groups: list[tuple[int, tuple[int, ...]]],
    ) -> None:
        place = len(template)
        template.append(parameter.default)
        if parameter.kind is Context:
            template[place] = self._context(operation, arguments)
            return
        if given is None:
            if parameter.required:
                raise ValueError(f"{_label(operation)}: input {parameter.name!r} is missing")
            return
        if parameter.kind == tuple[Tensor, ...]:
            groups.append((place, tuple(self._tensor_slot(argument, operation) for argument in given)))
            return
        constant = self._constant(given[0], operation)
        if parameter.kind is Tensor or parameter.kind is StateCell:
            if constant is None:
                gaps.append((place, self._tensor_slot(given[0], operation), None))
            else:
                template[place] = tensor(constant)
        elif constant is None:
            gaps.append((place, self._tensor_slot(given[0], operation), _RUNTIME[parameter.kind]))
        else:
            template[place] = _STATIC[parameter.kind](constant.array())

    def _context(self, operation: Operation, arguments: Mapping[str, tuple[Argument, ...]]) -> Context:
        return Context(
            outputs=tuple(value.tensor_type for value in operation.outputs),
            runtime=frozenset(
                name
                for name, values in arguments.items()
                if any(self._constant(value, operation) is None for value in values)
            ),
        )

    def _constant(self, argument: Argument, operation: Operation) -> Constant | None:
        if not isinstance(argument, Reference):
            return argument
        if argument.name not in self._constants and argument.name not in self._slot_of:
            raise ValueError(f"{_label(operation)}: value {argument.name!r} is used before anything gives it")
        return self._constants.get(argument.name)

    def _tensor_slot(self, argument: Argument, operation: Operation) -> int:
        constant = self._constant(argument, operation)
        if isinstance(argument, Reference):
            return self._any_slot(argument.name)
        assert constant is not None
        return self._new_slot(tensor(constant))

    def _output(
        self, name: str, type_: TensorType, implementation: Implementation
    ) -> tuple[int, torch.dtype, bool, tuple[int | None, ...] | None]:
        rounded = self._rounds and type_.dtype == "fp16" and not implementation.exact
        return self._slot_of[name], carrier(type_.dtype), rounded, type_.shape if type_.is_static else None


def _label(operation: Operation) -> str:
    return f"operation {operation.name!r} ({operation.type})"


def _integers(array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(number) for number in array.reshape(-1))


# How a plain value is made of a constant, and of a tensor that is known only when the program runs.
_STATIC: dict[Any, Convert] = {
    int: lambda array: int(array.item()),
    float: lambda array: float(array.item()),
    bool: lambda array: bool(array.item()),
    str: lambda array: str(array.item()),
    tuple[int, ...]: _integers,
    tuple[bool, ...]: lambda array: tuple(bool(flag) for flag in array.reshape(-1)),
}
_RUNTIME: dict[Any, Convert] = {
    int: lambda tensor: int(tensor.item()),
    float: lambda tensor: float(tensor.item()),
    bool: lambda tensor: bool(tensor.item()),
    tuple[int, ...]: lambda tensor: tuple(tensor.reshape(-1).tolist()),
    tuple[bool, ...]: lambda tensor: tuple(tensor.reshape(-1).tolist()),
}
