"""Checks on a finished package, read back from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ane_layers.conversion.errors import ConversionError
from ane_layers.program import Function, Operation, Package, Reference, TensorType

WEIGHT_LIMIT = 2_000_000_000
"""Bytes of weights from which a warning is given; programs near 2 GB fail on devices (coremltools issue 1807)."""


@dataclass(frozen=True, kw_only=True)
class Expectations:
    """What a package must be, beyond being readable.

    Args:
        state_writes: how often each function writes each state, by its name. A state that is not in it: at least once.
        tile: whether operations that only repeat data are accepted.
        highest_rank: of any value.
    """

    state_writes: Mapping[str, int] = field(default_factory=dict)
    tile: bool = True
    highest_rank: int = 5


Feature: TypeAlias = tuple[str, tuple[int, ...]]
"""dtype and shape."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a function was asked to take and give, by name: inputs, outputs in order, and the shapes of its states."""

    inputs: Mapping[str, Feature]
    outputs: Mapping[str, Feature]
    states: Mapping[str, tuple[int, ...]]


def check_package(package: Package, wanted: Mapping[str, Interface], expectations: Expectations) -> None:
    """Holds a package, as read from disk, against what was asked for.

    Raises:
        ConversionError: naming the function and what is wrong.
    """
    if set(package.functions) != set(wanted):
        raise ConversionError(f"the package has functions {sorted(package.functions)}, expected {sorted(wanted)}")
    for name, function in package.functions.items():
        _check_features(function, wanted[name])
        _check_states(function, wanted[name].states, expectations)
        _check_graph(function, expectations)


def _check_features(function: Function, wanted: Interface) -> None:
    inputs = wanted.inputs
    found = {value.name: (value.tensor_type.dtype, value.tensor_type.shape) for value in function.inputs}
    # A function that does not use an input loses it.
    wrong = {name: found.get(name) for name, wanted in inputs.items() if found.get(name) != wanted}
    if wrong:
        name, actual = next(iter(wrong.items()))
        raise ConversionError(f"function {function.name}: input {name} is {actual}, expected {inputs[name]}")
    if extra := sorted(set(found) - set(inputs)):
        raise ConversionError(f"function {function.name}: unexpected input {extra[0]}")
    used = _effective(function)
    if idle := [name for name in inputs if name not in used]:
        raise ConversionError(
            f"function {function.name}: input {idle[0]} has no effect; a value that is read from a tensor by int() or .item() while "
            "tracing becomes a constant"
        )
    outputs = {value.name: (value.tensor_type.dtype, value.tensor_type.shape) for value in function.outputs}
    if list(outputs) != list(wanted.outputs):
        raise ConversionError(f"function {function.name}: outputs are {list(outputs)}, expected {list(wanted.outputs)}")
    for name, feature in wanted.outputs.items():
        # A scalar comes out as an array of one element.
        if outputs[name] != feature and (feature[1] or outputs[name] != (feature[0], (1,))):
            raise ConversionError(f"function {function.name}: output {name} is {outputs[name]}, expected {feature}")
    kept = {value.name: value.tensor_type for value in function.states}
    for name, shape in wanted.states.items():
        if name not in kept:
            raise ConversionError(
                f"function {function.name}: state {name} was lost; is it read and written in forward?"
            )
        if kept[name] != TensorType("fp16", shape):
            raise ConversionError(f"function {function.name}: state {name} is {kept[name]}, expected fp16{list(shape)}")


def _check_states(function: Function, states: Mapping[str, tuple[int, ...]], expectations: Expectations) -> None:
    outputs = {value.name for value in function.outputs}
    producers = {value.name: operation for operation in function.block.walk() for value in operation.outputs}
    writes: Counter[str] = Counter()
    for operation in function.block.walk():
        if operation.type != "write_state":
            continue
        state = _reference(operation, "input")
        writes[state] += 1
        written = {_reference(operation, "data")}
        update = producers.get(next(iter(written)))
        if update is not None and update.type == "slice_update":
            written.add(_reference(update, "update"))
        if both := written & outputs:
            raise ConversionError(
                f"function {function.name}: {both.pop()} is an output and is written to state {state}, which crashes Core ML "
                "(coremltools issue 2713); return a value of its own"
            )
    for operation in function.block.walk():
        written_state = operation.type == "read_state" and writes[_reference(operation, "input")] > 0
        if written_state and (both := {value.name for value in operation.outputs} & outputs):
            raise ConversionError(
                f"function {function.name}: output {both.pop()} is the written state {_reference(operation, 'input')} itself, "
                "which crashes Core ML (coremltools issue 2713); read the state from the host"
            )
    for name in states:
        wanted = expectations.state_writes.get(name)
        if writes[name] == 0 or (wanted is not None and writes[name] != wanted):
            expected = "at least once" if wanted is None else f"{wanted} times"
            raise ConversionError(
                f"function {function.name}: state {name} is written {writes[name]} times, expected {expected}; an assignment "
                "with an index in place of a slice is lost by the converter: write cache[..., i : i + n, :] = x"
            )


def _check_graph(function: Function, expectations: Expectations) -> None:
    for operation in function.block.walk():
        if operation.type == "tile" and not expectations.tile:
            raise ConversionError(f"function {function.name}: {operation.name} is a tile operation, which repeats data")
        for value in operation.outputs:
            if isinstance(value.type, TensorType) and value.type.rank > expectations.highest_rank:
                raise ConversionError(
                    f"function {function.name}: {operation.type} {operation.name} has rank {value.type.rank} "
                    f"({value.type}), above {expectations.highest_rank}"
                )


def _effective(function: Function) -> set[str]:
    """Names of all values that an output or a state depends on."""
    live = {value.name for value in function.outputs}
    for operation in reversed(function.block.operations):
        if operation.type == "write_state" or operation.blocks or live & {value.name for value in operation.outputs}:
            parts = [operation, *(inner for block in operation.blocks for inner in block.walk())]
            arguments = [argument for part in parts for values in part.inputs.values() for argument in values]
            live |= {argument.name for argument in arguments if isinstance(argument, Reference)}
    return live


def _reference(operation: Operation, name: str) -> str:
    argument = operation.inputs[name][0]
    return argument.name if isinstance(argument, Reference) else ""
