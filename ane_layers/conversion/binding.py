"""Turns converted functions into one package: weights bound, constants gathered, functions side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ane_layers.checkpoint import to_float16_checked
from ane_layers.conversion.weights import WeightWriter
from ane_layers.program.weights import ALIGNMENT, WeightFile

_FILE_NAME = "@model_path/weights/weight.bin"


@dataclass(frozen=True)
class BoundWeight:
    """Where a late-bound weight is stored."""

    name: str
    offset: int


def bind_weights(
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    writer: WeightWriter,
    *,
    duplicate_tied: bool,
    progress: Callable[[str], None],
) -> list[BoundWeight]:
    """Streams weights into the weight file as fp16, one at a time.

    A weight that is a view into another one (the pieces of a head tied to the embedding) becomes a record over the same bytes, so that
    the table is in the file once.

    Args:
        weights: by path of the parameter.
        names: of their constants, by path.
        writer: of the weight file.
        duplicate_tied: whether views get bytes of their own.
        progress: called with a line of text now and then.

    Raises:
        ValueError: naming the weight, if a value is outside fp16's range.
    """
    bound: list[BoundWeight] = []
    parts = {} if duplicate_tied else _parts(weights)
    inside = {part for views in parts.values() for part, _ in views}
    for count, (path, weight) in enumerate(weights.items()):
        if path in inside:
            continue
        if count % 64 == 63:
            progress(f"writing weights: {count} of {len(weights)}")
        stored = to_float16_checked(path, weight).contiguous()
        views = parts.get(path, [])
        records = [(2 * start, 2 * weights[part].numel()) for part, start in views]
        offsets = writer.add_with_parts("fp16", stored.numpy(), records)
        for owner, offset in zip([path, *(part for part, _ in views)], offsets, strict=True):
            bound.append(BoundWeight(names[owner], offset))
    return bound


def _parts(weights: Mapping[str, Tensor]) -> dict[str, list[tuple[str, int]]]:
    """For each weight that others are parts of, those and the element at which they begin."""
    by_storage: dict[int, list[str]] = {}
    for path, weight in weights.items():
        if weight.is_contiguous():
            by_storage.setdefault(weight.untyped_storage().data_ptr(), []).append(path)
    parts = {}
    for paths in by_storage.values():
        whole = max(paths, key=lambda path: weights[path].numel())
        first = int(weights[whole].storage_offset())
        last = first + weights[whole].numel()
        views = []
        for path in paths:
            start = int(weights[path].storage_offset()) - first
            within = start >= 0 and start + weights[path].numel() <= last - first
            # A record must begin at a multiple of 64 bytes; a piece that does not is stored by itself.
            if path != whole and within and weights[path].dtype == weights[whole].dtype and 2 * start % ALIGNMENT == 0:
                views.append((path, start))
        if views:
            parts[whole] = views
    return parts


def bind_function(function: Any, bound: Sequence[BoundWeight], source: WeightFile | None, writer: WeightWriter) -> None:
    """Completes one function's protobuf message in place.

    Inputs that stand for weights become constants over the weight file; the function's own constants move from the converter's file.
    """
    from coremltools.proto import MIL_pb2

    names = {weight.name: weight for weight in bound}
    types = {}
    for i in reversed(range(len(function.inputs))):
        if function.inputs[i].name in names:
            types[function.inputs[i].name] = function.inputs[i].type
            del function.inputs[i]
    for block in function.block_specializations.values():
        for operation in block.operations:
            _move_constants(operation, source, writer)
        constants = []
        for name in sorted(types, key=lambda name: names[name].offset):
            constants.append(_constant(MIL_pb2, name, types[name], names[name].offset))
        operations = list(block.operations)
        del block.operations[:]
        block.operations.extend([*constants, *operations])


def _constant(mil: Any, name: str, value_type: Any, offset: int) -> Any:
    operation = mil.Operation(type="const")
    operation.outputs.add(name=name, type=value_type)
    text = mil.ValueType(tensorType=mil.TensorType(dataType=mil.STRING))
    label = mil.Value(type=text)
    label.immediateValue.tensor.strings.values.append(name)
    operation.attributes["name"].CopyFrom(label)
    value = mil.Value(type=value_type)
    value.blobFileValue.fileName = _FILE_NAME
    value.blobFileValue.offset = offset
    operation.attributes["val"].CopyFrom(value)
    return operation


def _move_constants(operation: Any, source: WeightFile | None, writer: WeightWriter) -> None:
    for value in operation.attributes.values():
        _move(value, source, writer)
    for argument in operation.inputs.values():
        for binding in argument.arguments:
            if binding.WhichOneof("binding") == "value":
                _move(binding.value, source, writer)
    for block in operation.blocks:
        for inner in block.operations:
            _move_constants(inner, source, writer)


def _move(value: Any, source: WeightFile | None, writer: WeightWriter) -> None:
    if value.WhichOneof("value") != "blobFileValue":
        return
    assert source is not None, "a constant refers to a weight file that the converter did not write"
    record = source.record(value.blobFileValue.offset)
    value.blobFileValue.fileName = _FILE_NAME
    value.blobFileValue.offset = writer.add(record.dtype, source.data(record), padding_bits=record.padding_bits)


def merge_functions(
    specs: Mapping[str, Any], bound: Sequence[BoundWeight], files: Mapping[str, Path], writer: WeightWriter
) -> Any:
    """One model specification out of several with one function each; the first is the default.

    Args:
        specs: converted specification of each function.
        bound: late-bound weights, already stored.
        files: the converter's weight file of each function, where it wrote one.
        writer: of the package's weight file.
    """
    first = next(iter(specs))
    merged = type(specs[first])()
    merged.specificationVersion = max(spec.specificationVersion for spec in specs.values())
    merged.mlProgram.version = specs[first].mlProgram.version
    # Which versions of coremltools and torch wrote the graph.
    merged.description.metadata.userDefined.update(specs[first].description.metadata.userDefined)
    late = {weight.name for weight in bound}
    for name, spec in specs.items():
        source = WeightFile(files[name]) if name in files else None
        function = merged.mlProgram.functions[name]
        function.CopyFrom(spec.mlProgram.functions["main"])
        bind_function(function, bound, source, writer)
        # One function called main is an ordinary package, which coremltools' own tools take; multifunction ones they refuse.
        plain = list(specs) == ["main"]
        description = merged.description if plain else merged.description.functions.add(name=name)
        if not plain:
            merged.description.defaultFunctionName = first
        description.input.extend(feature for feature in spec.description.input if feature.name not in late)
        description.output.extend(spec.description.output)
        description.state.extend(spec.description.state)
    return merged
