"""Refuses operations whose axes their inputs do not have: counted modulo the rank, a damaged axis would be another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ane_layers.program import Argument, Block, Function, Immediate, Operation, Reference, TensorType, Value, ValueType

# Where an axis is one of the result: how many axes that has beyond the input's.
_ADDED = {"one_hot": 1, "stack": 1}
# In this order: a scatter has indices too, which for one_hot are all there is.
_DATA = ("x", "values", "data", "input", "indices")


def check_axes(function: Function) -> None:
    """Holds every constant `axis` and `axes` against the rank of the operation's data, as far as it is declared.

    Raises:
        ValueError: an axis is outside of -rank … rank - 1.
    """
    types = {value.name: value.type for value in (*function.inputs, *_values(function.block))}
    constants = {
        operation.outputs[0].name: operation.attributes["val"]
        for operation in function.block.walk()
        if operation.type == "const" and operation.outputs and isinstance(operation.attributes.get("val"), Immediate)
    }
    for operation in function.block.walk():
        rank = _rank(operation, types)
        for name in ("axis", "axes"):
            if rank is not None and name in operation.inputs and operation.inputs[name]:
                _check(operation, name, _numbers(operation.inputs[name][0], constants), rank)


def _check(operation: Operation, name: str, numbers: np.ndarray, rank: int) -> None:
    rank += numbers.size if operation.type == "expand_dims" else _ADDED.get(operation.type, 0)
    for number in numbers.reshape(-1).tolist():
        # A scalar has no axis, and yet 0 and -1 are in use for it.
        if not -max(rank, 1) <= number < max(rank, 1):
            raise ValueError(
                f"operation {operation.name!r} ({operation.type}): {name} is {number}, its data has {rank} axes"
            )


def _rank(operation: Operation, types: Mapping[str, ValueType]) -> int | None:
    for name in _DATA:
        arguments = operation.inputs.get(name)
        if arguments:
            type_ = types.get(arguments[0].name) if isinstance(arguments[0], Reference) else arguments[0].type
            return type_.rank if isinstance(type_, TensorType) else None
    return None


def _numbers(argument: Argument, constants: Mapping[str, object]) -> np.ndarray:
    constant = constants.get(argument.name) if isinstance(argument, Reference) else argument
    if not isinstance(constant, Immediate) or not isinstance(constant.value, np.ndarray):
        return np.zeros(0, np.int64)
    return constant.value if constant.value.dtype.kind in "iu" else np.zeros(0, np.int64)


def _values(block: Block) -> Iterator[Value]:
    for operation in block.walk():
        yield from operation.outputs
        for inner in operation.blocks:
            yield from inner.inputs
