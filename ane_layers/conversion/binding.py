"""Turns converted functions into one package: weights bound, constants gathered, functions side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from ane_layers.checkpoint import to_float16_checked
from ane_layers.compression import CompressedWeight, Compression, LookupTables
from ane_layers.conversion.weights import WeightWriter
from ane_layers.program.weights import ALIGNMENT, WeightFile

_FILE_NAME = "@model_path/weights/weight.bin"

_MIL_TYPES = {"fp16": "FLOAT16", "int4": "INT4", "int8": "INT8"}
_MIL_TYPES |= {f"uint{bits}": f"UINT{bits}" for bits in (1, 2, 3, 4, 6, 8)}


@dataclass(frozen=True)
class BoundWeight:
    """A late-bound weight in the weight file.

    Attributes:
        name: of its constant.
        operation: MIL's type of the operation that gives it: `const`, `constexpr_lut_to_dense` or `constexpr_blockwise_shift_scale`.
        parts: what the operation takes from the weight file, by argument.
    """

    name: str
    operation: str
    parts: Mapping[str, StoredPart]

    @property
    def first_offset(self) -> int:
        return min(part.offset for part in self.parts.values())


@dataclass(frozen=True)
class StoredPart:
    """A tensor in the weight file: its type, its shape, and the offset of its record."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def bind_weights(
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    writer: WeightWriter,
    *,
    compression: Compression | None,
    duplicate_tied: bool,
    progress: Callable[[str], None],
    load: Callable[[str], Tensor] | None = None,
) -> list[BoundWeight]:
    """Streams weights into the weight file, as fp16 or compressed, one at a time.

    A weight that is a view into another one (the pieces of a head tied to the embedding) becomes records over the same bytes, so that
    the table is in the file once; unless a recipe gives them settings of their own.

    Args:
        weights: by path of the parameter.
        names: of their constants, by path.
        writer: of the weight file.
        compression: of the weights; None for fp16.
        duplicate_tied: whether views get bytes of their own.
        progress: called with a line of text now and then.
        load: gives a weight that has no values, on the meta device, by its path.

    Raises:
        ValueError: naming the weight, if a value is outside fp16's range, or its compression does not fit it.
    """
    bound: list[BoundWeight] = []
    views = {} if duplicate_tied else _views(weights, compression)
    inside = {part for parts in views.values() for part, _ in parts}
    for count, (path, weight) in enumerate(weights.items()):
        if path in inside:
            continue
        if compression is not None or count % 64 == 63:
            progress(f"writing weights: {count + 1} of {len(weights)}")
        parts = views.get(path, [])
        if load is not None and weight.is_meta:
            weight = load(path)
        compressed = compression.weight(path, weight) if compression is not None else None
        if compressed is not None:
            stored = _store_compressed(compressed, [(start, weights[part].shape) for part, start in parts], writer)
        else:
            dense = to_float16_checked(path, weight).contiguous().numpy()
            offsets = writer.add_with_parts(
                "fp16", dense, [(2 * start, 2 * weights[part].numel()) for part, start in parts]
            )
            shapes = [dense.shape, *(tuple(weights[part].shape) for part, _ in parts)]
            stored = [
                ("const", {"val": StoredPart("fp16", shape, offset)})
                for shape, offset in zip(shapes, offsets, strict=True)
            ]
        for owner, (operation, records) in zip([path, *(part for part, _ in parts)], stored, strict=True):
            bound.append(BoundWeight(names[owner], operation, records))
            if compression is not None and owner != path:
                compression.share(owner, path, weights[owner])
    return bound


Stored: TypeAlias = tuple[str, dict[str, StoredPart]]


def _store_compressed(
    compressed: CompressedWeight, parts: Sequence[tuple[int, Sequence[int]]], writer: WeightWriter
) -> list[Stored]:
    """Writes a compressed weight, and records for parts of it: element at which each begins, and its shape."""
    whole = compressed.shape
    per_row = math.prod(whole[1:])
    pieces = [(0, whole), *((start // per_row, tuple(shape)) for start, shape in parts)]
    bits = compressed.bits
    ranges = [(row * per_row * bits // 8, math.prod(shape) * bits // 8) for row, shape in pieces[1:]]
    lookup = isinstance(compressed, LookupTables)
    dtype = f"uint{bits}" if lookup else f"int{bits}"
    data = writer.add_with_parts(dtype, compressed.packed, ranges, padding_bits=compressed.padding_bits)
    side = compressed.table if isinstance(compressed, LookupTables) else compressed.scale
    rows = whole[0] // len(side)  # output channels that one row of tables or scales serves
    width = side[0].nbytes
    # One table for the whole weight serves every part of it.
    spans = [
        (row // rows * width, shape[0] // rows * width) if len(side) > 1 else (0, width) for row, shape in pieces[1:]
    ]
    offsets = writer.add_with_parts("fp16", side, spans)
    stored: list[Stored] = []
    for (_, shape), indices, offset in zip(pieces, data, offsets, strict=True):
        groups = shape[0] // rows if len(side) > 1 else 1
        if lookup:
            table = (groups, *[1] * (len(shape) - 1), side.shape[1], 1)
            parts_of = {"indices": StoredPart(dtype, shape, indices), "lut": StoredPart("fp16", table, offset)}
            stored.append(("constexpr_lut_to_dense", parts_of))
        else:
            scale = (groups, side.shape[1], *[1] * (len(shape) - 2))
            parts_of = {"data": StoredPart(dtype, shape, indices), "scale": StoredPart("fp16", scale, offset)}
            stored.append(("constexpr_blockwise_shift_scale", parts_of))
    return stored


def _views(weights: Mapping[str, Tensor], compression: Compression | None) -> dict[str, list[tuple[str, int]]]:
    """For each weight that others are parts of, those and the element at which they begin."""
    by_storage: dict[tuple[int, str], list[str]] = {}
    for path, weight in weights.items():
        if weight.is_contiguous():
            key = compression.plan.key(path) if compression is not None else ""
            by_storage.setdefault((weight.untyped_storage()._cdata, key), []).append(path)
    shared = compression.plan.shared if compression is not None else frozenset()
    parts = {}
    for paths in by_storage.values():
        whole = max(paths, key=lambda path: weights[path].numel())
        first = int(weights[whole].storage_offset())
        last = first + weights[whole].numel()
        views = []
        for path in paths:
            start = int(weights[path].storage_offset()) - first
            within = start >= 0 and start + weights[path].numel() <= last - first
            # A record must begin at a multiple of 64 bytes; a piece that does not is stored by itself. For compressed weights the plan
            # has looked after that.
            aligned = path in shared or 2 * start % ALIGNMENT == 0
            if path != whole and within and weights[path].dtype == weights[whole].dtype and aligned:
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
        for name in sorted(types, key=lambda name: names[name].first_offset):
            constants.append(_constant(MIL_pb2, names[name], types[name]))
        operations = list(block.operations)
        del block.operations[:]
        block.operations.extend([*constants, *operations])


def _constant(mil: Any, weight: BoundWeight, value_type: Any) -> Any:
    operation = mil.Operation(type=weight.operation)
    operation.outputs.add(name=weight.name, type=value_type)
    text = mil.ValueType(tensorType=mil.TensorType(dataType=mil.STRING))
    label = mil.Value(type=text)
    label.immediateValue.tensor.strings.values.append(weight.name)
    operation.attributes["name"].CopyFrom(label)
    for argument, part in weight.parts.items():
        tensor = mil.TensorType(dataType=mil.DataType.Value(_MIL_TYPES[part.dtype]), rank=len(part.shape))
        for size in part.shape:
            tensor.dimensions.add().constant.size = size
        value = mil.Value(type=mil.ValueType(tensorType=tensor))
        value.blobFileValue.fileName = _FILE_NAME
        value.blobFileValue.offset = part.offset
        if weight.operation == "const":
            operation.attributes[argument].CopyFrom(value)
        else:
            operation.inputs[argument].arguments.add().value.CopyFrom(value)
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
