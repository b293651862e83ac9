"""Counts what a saved program does, function by function, from the file alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ane_layers.program import Blob, Function, Operation, Package, StateType, TensorType, Value, ValueType


def inspect(package: Package) -> dict[str, Any]:
    """Operations, repetition, rank and weights of every function of a package, ready to be written as JSON.

    Returns:
        `{"functions": {name: {...}}}`, each with
        `operations`: `total`, `compute` (all but `const` and `constexpr_*`) and `by_type`, nested blocks included;
        `tile`: `count` and `bytes`, the sum of the outputs in bytes (None if one has an open dimension);
        `highest_rank` over all values; `weight_bytes` as stored, a blob that is referred to twice counted once;
        `state_writes`, the number of `write_state`; `inputs`, `outputs` and `states`, name → `dtype` and `shape`, where
        an open dimension is None.
    """
    return {"functions": {name: function_counts(function) for name, function in package.functions.items()}}


def function_counts(function: Function) -> dict[str, Any]:
    """The counts of one function; see `inspect`."""
    operations = list(function.block.walk())
    by_type = Counter(operation.type for operation in operations)
    tiles = [operation for operation in operations if operation.type == "tile"]
    return {
        "operations": {
            "total": len(operations),
            "compute": sum(count for type_, count in by_type.items() if is_compute(type_)),
            "by_type": dict(sorted(by_type.items())),
        },
        "tile": {"count": len(tiles), "bytes": _output_bytes(tiles)},
        "highest_rank": highest_rank(function),
        "weight_bytes": weight_bytes(function),
        "state_writes": by_type["write_state"],
        "inputs": _interface(function.inputs),
        "outputs": _interface(function.outputs),
        "states": _interface(function.states),
    }


def is_compute(operation_type: str) -> bool:
    """Whether an operation does something when the function is called, rather than hold a constant."""
    return operation_type != "const" and not operation_type.startswith("constexpr_")


def highest_rank(function: Function) -> int:
    """The highest rank of any tensor in the function: inputs, states and every operation's outputs."""
    values = [*function.inputs, *function.states]
    for operation in function.block.walk():
        values.extend(operation.outputs)
        for block in operation.blocks:
            values.extend(block.inputs)
    types = [value.type.tensor if isinstance(value.type, StateType) else value.type for value in values]
    return max((type_.rank for type_ in types if isinstance(type_, TensorType)), default=0)


def weight_bytes(function: Function) -> int:
    """Bytes in weight files that the function refers to, as stored. Bytes that several constants share count once: a head tied to an
    embedding may be records over the embedding's own table."""
    ranges = sorted(
        (str(blob.file.path), blob.record.data_offset, blob.record.data_offset + blob.stored_bytes)
        for blob in blobs(function.block.walk())
    )
    total, previous, end = 0, "", 0
    for file, first, last in ranges:
        if file != previous:
            previous, end = file, 0
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def blobs(operations: Iterable[Operation]) -> Iterator[Blob]:
    """Every constant that lies in a weight file, as often as the operations refer to it."""
    for operation in operations:
        for constant in operation.attributes.values():
            if isinstance(constant, Blob):
                yield constant
        for arguments in operation.inputs.values():
            for argument in arguments:
                if isinstance(argument, Blob):
                    yield argument


def _output_bytes(operations: Iterable[Operation]) -> int | None:
    types = [value.tensor_type for operation in operations for value in operation.outputs]
    if not all(type_.is_static for type_ in types):
        return None
    return sum(type_.byte_count for type_ in types)


def _interface(values: Iterable[Value]) -> dict[str, dict[str, Any]]:
    return {value.name: _feature(value.type) for value in values}


def _feature(type_: ValueType) -> dict[str, Any]:
    if isinstance(type_, StateType):
        type_ = type_.tensor
    if isinstance(type_, TensorType):
        return {"dtype": type_.dtype, "shape": list(type_.shape)}
    # A classifier gives a dictionary from labels to probabilities, which has no shape.
    return {"dtype": type(type_).__name__.removesuffix("Type").lower(), "shape": []}
