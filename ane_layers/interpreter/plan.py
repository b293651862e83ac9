"""Turns a function of a program into a list of calls, with everything settled that can be before the first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

import ane_layers.interpreter.operations  # noqa: F401 - fills the table
from ane_layers.interpreter.executor import Output, Plan, Step, SubPlan
from ane_layers.interpreter.operations.states import hand_over, slice_update_in_place
from ane_layers.interpreter.ownership import Ownership, decide, names
from ane_layers.interpreter.plain import RUNTIME, Convert, static
from ane_layers.interpreter.registry import (
    Context,
    Ignored,
    Implementation,
    NestedBlock,
    Parameter,
    RandomSource,
    StateCell,
    TensorList,
    implementations,
)
from ane_layers.interpreter.values import carrier
from ane_layers.interpreter.weights import constants, is_constant, tensor
from ane_layers.program import Argument, Block, Function, Operation, Reference, StateType, TensorType, Value
from ane_layers.program.constexpr import Constant

# Values that are passed on as they are.
_WHOLE = (Tensor, TensorList, StateCell)

# In a nested block every value is a copy: what runs there, and how often, is known only when it runs.
_NOTHING = Ownership({}, frozenset(), frozenset())


def build(function: Function, rounds: bool, compact: bool = False) -> Plan:
    """The plan of a function.

    Args:
        function: of a package.
        rounds: results of type fp16 are rounded to it.
        compact: large constants of type fp16 are kept in it, and widened for an operation that cannot take them so.

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
    return _Builder(function, rounds, compact).build()


class _Builder:
    def __init__(self, function: Function, rounds: bool, compact: bool) -> None:
        self._function = function
        self._rounds = rounds
        self._compact = compact
        self._slots: list[Any] = []
        self._slot_of: dict[str, int] = {}
        self._constants: dict[str, Constant] = {}
        self._constant_slots: dict[str, int] = {}
        self._states = {state.name for state in function.states}

    def build(self) -> Plan:
        function = self._function
        for value in (*function.inputs, *function.states):
            self._slot_of[value.name] = self._new_slot()
        running = self._running(function.block)
        ownership = decide(function, running, implementations())
        steps = self._steps(running, function.inputs, function.block.outputs, ownership)
        return Plan(
            steps=steps,
            slots=self._slots,
            inputs={value.name: self._slot_of[value.name] for value in function.inputs},
            states={value.name: self._slot_of[value.name] for value in function.states},
            outputs={name: self._any_slot(name) for name in function.block.outputs},
            kept=ownership.kept,
        )

    def _running(self, block: Block) -> list[Operation]:
        """The operations that are left when the constants are noted."""
        running: list[Operation] = []
        for operation in block.operations:
            if is_constant(operation):
                for name, constant in constants(operation, self._constants).items():
                    self._hide(name)
                    self._constants[name] = constant
            else:
                running.append(operation)
        return running

    def _steps(
        self, running: Sequence[Operation], inputs: Sequence[Value], results: Sequence[str], ownership: Ownership
    ) -> tuple[Step, ...]:
        last_use = {name: index for index, operation in enumerate(running) for name in names(operation)}
        own = {value.name for value in inputs}
        steps = []
        for index, operation in enumerate(running):
            step = self._step(index, operation, ownership)
            own.update(value.name for value in operation.outputs)
            # A value ends with its last use, but for results; values from around the block are not this block's to end.
            finished = {*names(operation), *(value.name for value in operation.outputs)} & own - set(results)
            release = tuple(sorted(self._slot_of[name] for name in finished if last_use.get(name, index) == index))
            steps.append(replace(step, release=release))
        return tuple(steps)

    def _sub_plan(self, block: Block) -> SubPlan:
        """A nested block, which sees what is around it but for names of its own, which end with it."""
        around = self._slot_of, self._constants, self._constant_slots
        self._slot_of, self._constants, self._constant_slots = (dict(table) for table in around)  # type: ignore[assignment]
        for value in block.inputs:
            self._hide(value.name)
            self._slot_of[value.name] = self._new_slot()
        running = self._running(block)
        steps = self._steps(running, block.inputs, block.outputs, _NOTHING)
        plan = SubPlan(
            steps=steps,
            inputs=tuple(self._slot_of[value.name] for value in block.inputs),
            outputs=tuple(self._any_slot(name) for name in block.outputs),
        )
        self._slot_of, self._constants, self._constant_slots = around
        return plan

    def _hide(self, name: str) -> None:
        """Takes a constant out of sight where a value of the same name begins: loops in loops name their inputs alike."""
        self._constants.pop(name, None)
        self._constant_slots.pop(name, None)

    def _new_slot(self, value: Any = None) -> int:
        self._slots.append(value)
        return len(self._slots) - 1

    def _any_slot(self, name: str) -> int:
        if name in self._constants:
            if name not in self._constant_slots:
                self._constant_slots[name] = self._new_slot(tensor(self._constants[name]))
            return self._constant_slots[name]
        if name not in self._slot_of:
            raise ValueError(f"block gives {name!r}, which no operation makes")
        return self._slot_of[name]

    def _step(self, index: int, operation: Operation, ownership: Ownership) -> Step:
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
        nested = None
        for place, parameter in enumerate(implementation.parameters):
            if parameter.kind == tuple[NestedBlock, ...]:
                template.append(None)
                nested = place, tuple(self._sub_plan(block) for block in operation.blocks)
            else:
                self._bind(parameter, arguments.get(parameter.name), operation, arguments, template, gaps, groups)
        if operation.blocks and nested is None:
            raise ValueError(f"{_label(operation)}: blocks of its own are not supported")
        outputs = []
        for value in operation.outputs:
            self._hide(value.name)
            self._slot_of[value.name] = self._new_slot()
            outputs.append(self._output(value, implementation))
        return Step(operation, call, template, tuple(gaps), tuple(groups), nested, tuple(outputs), ())

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
        if parameter.kind in (Context, RandomSource):
            template[place] = self._context(operation, arguments) if parameter.kind is Context else RandomSource()
            return
        if given is None and parameter.required:
            raise ValueError(f"{_label(operation)}: input {parameter.name!r} is missing")
        if given is None or parameter.kind is Ignored:
            return
        if parameter.kind == tuple[Tensor, ...]:
            groups.append((place, tuple(self._tensor_slot(argument, operation) for argument in given)))
            return
        constant = self._constant(given[0], operation)
        if constant is None:
            if parameter.kind not in _WHOLE and parameter.kind not in RUNTIME:
                raise ValueError(f"{_label(operation)}: input {parameter.name!r} has to be a constant")
            convert = None if parameter.kind in _WHOLE else RUNTIME[parameter.kind]
            gaps.append((place, self._tensor_slot(given[0], operation), convert))
        else:
            whole = parameter.kind in _WHOLE
            template[place] = tensor(constant, compact=self._compact) if whole else static(parameter.kind, constant)

    def _context(self, operation: Operation, arguments: Mapping[str, tuple[Argument, ...]]) -> Context:
        return Context(
            outputs=tuple(value.type for value in operation.outputs),
            runtime=frozenset(
                name
                for name, values in arguments.items()
                if any(self._constant(value, operation) is None for value in values)
            ),
            opset=self._function.opset,
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

    def _output(self, value: Value, implementation: Implementation) -> Output:
        slot = self._slot_of[value.name]
        type_ = value.type.tensor if isinstance(value.type, StateType) else value.type
        if implementation.plain or not isinstance(type_, TensorType):
            return Output(slot)
        rounded = self._rounds and type_.dtype == "fp16" and not implementation.exact
        return Output(slot, carrier(type_.dtype), rounded, type_.shape if type_.is_static else None)


def _label(operation: Operation) -> str:
    return f"operation {operation.name!r} ({operation.type})"
