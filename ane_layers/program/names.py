"""Checks that every name in a function is given once, and before it is used."""

from __future__ import annotations

from ane_layers.program.types import Block, Function, Operation, Reference, Value


def check_names(function: Function, where: str) -> None:
    """Refuses names that stand for two values, stand for themselves, or stand for nothing.

    Raises:
        ValueError: such a name; the message starts with `where`.
    """
    outputs = function.block.outputs
    for name in outputs:
        if outputs.count(name) > 1:
            raise ValueError(f"{where}: field outputs names {name!r} twice")
    _check_block(function.block, (*function.inputs, *function.states), frozenset(), where)


def _check_block(block: Block, inputs: tuple[Value, ...], around: frozenset[str], where: str) -> None:
    # A nested block may use a name of its surroundings anew, as loops within loops do that coremltools writes.
    own: set[str] = set()
    _give((*inputs, *block.inputs), own, where)
    for operation in block.operations:
        place = f"{where}: operation {operation.name!r} ({operation.type})"
        for name in _used(operation):
            if name not in own and name not in around:
                raise ValueError(f"{place}: value {name!r} is used before anything gives it")
        for inner in operation.blocks:
            _check_block(inner, (), around | own, place)
        _give(operation.outputs, own, place)
    for name in block.outputs:
        if name not in own and name not in around:
            raise ValueError(f"{where}: field outputs names {name!r}, which no operation gives")


def _used(operation: Operation) -> list[str]:
    return [
        argument.name
        for arguments in operation.inputs.values()
        for argument in arguments
        if isinstance(argument, Reference)
    ]


def _give(values: tuple[Value, ...], known: set[str], where: str) -> None:
    for value in values:
        if value.name in known:
            raise ValueError(f"{where}: value {value.name!r} is given twice")
        known.add(value.name)
