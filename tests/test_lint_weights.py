"""The lint's rules about weights, their size and their compression: what each finds, and the nearest neighbour that it leaves alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters import mil
from coremltools.converters.mil.mil import types
from coremltools.proto import Model_pb2
from lint_checks import MODEL, VERSION, WEIGHTS, Fires, Make, check_fires, check_silent, flat, operations, program
from mil_programs import save_program

from ane_layers.program import Package

mb = mil.Builder

UINT4, UINT6, INT4 = types.np_uint4_dtype, types.np_uint6_dtype, types.np_int4_dtype
HALF = np.float16


def sized(size: int, *, whole_file: bool = False, ids: bool = True, compressed: bool = False) -> Make:
    """A program whose weights (or weight file) have `size` bytes, none of which are on the disk: the file has a hole.

    A saved convolution is turned into one over more channels: in the type that the program gives its weight, and in the weight
    file's record of it.
    """

    def build(values: Any) -> list[Any]:
        weight = np.ones((64, 64, 1, 1), HALF)
        if compressed:
            weight = mb.constexpr_blockwise_shift_scale(data=weight.astype(np.int8), scale=np.ones((1, 1, 1, 1), HALF))
        first = mb.conv(x=values["x"], weight=weight)
        return [mb.mul(x=first, y=mb.cast(x=values["ids"], dtype="fp16"))] if ids else [first]

    def make(folder: Path) -> Package:
        inputs = {"x": ((1, 64, 1, 2), HALF)} | ({"ids": ((1, 1), np.int32)} if ids else {})
        path = save_program(folder / "model.mlpackage", inputs, build)
        model = Model_pb2.Model()
        model.ParseFromString((path / MODEL).read_bytes())
        blobs = [(operation, v) for operation in operations(model) for v in constants(operation) if is_blob(v)]
        (constant, value) = blobs[0]
        assert len(blobs) == 1
        offset = value.blobFileValue.offset
        record = (path / WEIGHTS).read_bytes()[offset : offset + 32]
        sentinel, code, _, data, padding = struct.unpack("<IIQQQ", record)
        count = size - data if whole_file else size
        width = 1 if compressed else 2
        assert count % width == 0
        for type_ in (constant.outputs[0].type, value.type):
            del type_.tensorType.dimensions[:]
            type_.tensorType.rank = 1
            type_.tensorType.dimensions.add().constant.size = count // width
        (path / MODEL).write_bytes(model.SerializeToString())
        with (path / WEIGHTS).open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack("<IIQQQ", sentinel, code, count, data, padding))
            file.truncate(data + count)
        return Package.open(path)

    return make


def constants(operation: Any) -> list[Any]:
    """Constants that an operation holds: a const as an attribute, others as inputs written in place."""
    bindings = [binding for name in operation.inputs for binding in operation.inputs[name].arguments]
    written = [binding.value for binding in bindings if binding.WhichOneof("binding") == "value"]
    return [operation.attributes[name] for name in operation.attributes] + written


def is_blob(value: Any) -> bool:
    return value.WhichOneof("value") == "blobFileValue"


def multiplied(*weights: Any, states: bool = False, quantized: bool = False) -> Any:
    """Convolutions over the channels of `x`, each with a weight that a function makes."""

    def build(values: Any) -> list[Any]:
        x = values["x"]
        if quantized:
            x = mb.quantize(input=x, scale=HALF(0.1), output_dtype="int8")
            x = mb.dequantize(input=x, scale=HALF(0.1))
        if states:
            x = mb.add(x=x, y=mb.reduce_sum(x=mb.read_state(input=values["cache"])))
        return [mb.conv(x=x, weight=weight()) for weight in weights]

    return build


def table(
    tables: Sequence[int],
    entries: int = 16,
    shape: Sequence[int] = (64, 64, 1, 1),
    dtype: Any = HALF,
    bits: Any = UINT4,
) -> Any:
    """A weight of `shape` from lookup tables, so many on each axis."""

    def make() -> Any:
        lut = np.arange(entries, dtype=np.int8).astype(dtype).reshape(1, 1, 1, 1, entries, 1)
        return mb.constexpr_lut_to_dense(indices=np.zeros(shape, bits), lut=np.tile(lut, (*tables, 1, 1)))

    return make


def scaled(data: Any, *scales: int) -> Any:
    """A weight from integers or a table, with so many scales on each axis."""
    return lambda: mb.constexpr_blockwise_shift_scale(
        data=data() if callable(data) else data, scale=np.ones(scales, HALF)
    )


def quantized_table() -> Any:
    entries = np.zeros((1, 1, 1, 1, 16, 1), np.int8)
    lut = mb.constexpr_blockwise_shift_scale(data=entries, scale=np.ones((1,) * 6, HALF))
    return mb.constexpr_lut_to_dense(indices=np.zeros((64, 64, 1, 1), UINT4), lut=lut)


def linear_per_block(values: Any) -> list[Any]:
    weight = mb.constexpr_blockwise_shift_scale(data=np.zeros((64, 64), INT4), scale=np.ones((64, 2), HALF))
    return [mb.linear(x=values["x"], weight=weight)]


def first_generation(values: Any) -> list[Any]:
    """A table as iOS 16 has them."""
    weight = mb.constexpr_lut_to_dense(
        indices=np.zeros(64 * 64 // 2, np.uint8), lut=np.zeros(16, HALF), shape=np.array([64, 64, 1, 1], np.uint32)
    )
    return [mb.conv(x=values["x"], weight=weight)]


def version(number: str) -> Any:
    def change(model: Any) -> None:
        model.description.metadata.userDefined[VERSION] = number

    return change


X = (1, 64, 1, 8)
INTEGERS_4, INTEGERS_8 = np.zeros((64, 64, 1, 1), INT4), np.zeros((64, 64, 1, 1), np.int8)
STATE = {"cache": (3, 2, 64, 32)}

FIRES = {
    "weights-above-1-gb": [
        Fires(
            sized(1_000_000_002),
            1,
            ["1.00 GB of weights"],
            expected="an fp16 build in one chunk: it starts at token ids (ids)",
        ),
        Fires(sized(1_500_000_000, ids=False), 1, ["1.50 GB of weights"]),
        Fires(sized(1_000_000_001, compressed=True), 1),
    ],
    "weight-file-near-2-gb": [
        Fires(sized(2_000_000_000, whole_file=True), 1, ["weight.bin has 2,000,000,000 bytes", "2,147,483,648"]),
        Fires(sized((1 << 31) - 2, whole_file=True), 1),
    ],
    "weight-file-above-2-gib": [Fires(sized(1 << 31, whole_file=True), 1, ["weight.bin has 2,147,483,648 bytes"])],
    "int4-per-block-in-conv": [
        Fires(program(multiplied(scaled(INTEGERS_4, 64, 2, 1, 1)), x=X), 1, ["[64, 64, 1, 1], scales [64, 2, 1, 1]"]),
    ],
    "lut-group-size": [
        Fires(program(multiplied(table((16, 1, 1, 1))), x=X), 1, ["16 tables, groups of 4 on axis 0"]),
        Fires(program(multiplied(table((1, 2, 1, 1))), x=X), 1, ["2 tables, groups of 32 on axis 1"]),
        Fires(program(multiplied(table((8, 2, 1, 1))), x=X), 1, ["8 x 2 tables"]),
    ],
    "lut-of-8-bit-entries": [
        Fires(program(multiplied(quantized_table), x=X), 1, ["activations not quantized"]),
        Fires(program(multiplied(scaled(table((1, 1, 1, 1), dtype=np.int8), 1, 1, 1, 1)), x=X), 1),
        Fires(program(multiplied(quantized_table, quantized=True), x=X), 1, ["activations of 8 bits too"]),
    ],
    "lut-with-channel-scale": [
        Fires(program(multiplied(scaled(table((1, 1, 1, 1)), 64, 1, 1, 1)), x=X), 1, ["fp16[64, 64, 1, 1]"]),
    ],
    "palettized-stateful-coremltools-9": [
        Fires(program(multiplied(table((8, 1, 1, 1)), states=True), STATE, version("9.0"), x=X), 1),
        Fires(
            program(multiplied(table((1, 1, 1, 1)), table((1, 1, 1, 1)), states=True), STATE, version("9.0.1"), x=X), 2
        ),
    ],
    "compression-folded-on-old-chips": [
        Fires(program(multiplied(scaled(INTEGERS_8, 64, 1, 1, 1)), x=X), 1, ["int8[64, 64, 1, 1], not per block"]),
        Fires(program(multiplied(scaled(INTEGERS_4, 64, 2, 1, 1)), x=X), 1, ["int4[64, 64, 1, 1], per block"]),
    ],
}

SILENT = {
    "weights-above-1-gb": [sized(1_000_000_000)],
    "weight-file-near-2-gb": [sized(1_999_999_998, whole_file=True), sized(1 << 31, whole_file=True)],
    "weight-file-above-2-gib": [sized((1 << 31) - 2, whole_file=True)],
    "int4-per-block-in-conv": [
        program(multiplied(scaled(INTEGERS_4, 64, 1, 1, 1)), x=X),
        program(multiplied(scaled(INTEGERS_8, 64, 2, 1, 1)), x=X),
        program(linear_per_block, x=(1, 64)),
    ],
    "lut-group-size": [
        program(multiplied(table((1, 1, 1, 1)), table((8, 1, 1, 1)), table((1, 4, 1, 1))), x=X),
        program(first_generation, target=ct.target.iOS16, x=X),
    ],
    "lut-of-8-bit-entries": [
        program(multiplied(table((1, 1, 1, 1))), x=X),
        # 256 entries, but of fp16.
        program(multiplied(table((1, 1, 1, 1), 256, bits=np.uint8)), x=X),
    ],
    "lut-with-channel-scale": [
        program(multiplied(scaled(table((1, 1, 1, 1), dtype=np.int8), 1, 1, 1, 1)), x=X),
        program(multiplied(quantized_table), x=X),
        program(multiplied(scaled(INTEGERS_8, 64, 1, 1, 1)), x=X),
    ],
    "palettized-stateful-coremltools-9": [
        program(multiplied(table((8, 1, 1, 1)), states=True), STATE, version("8.3.0"), x=X),
        program(multiplied(table((8, 1, 1, 1))), change=version("9.0"), x=X),
        program(multiplied(table((8, 1, 1, 1), 64, bits=UINT6), states=True), STATE, version("9.0"), x=X),
        program(multiplied(scaled(INTEGERS_4, 64, 1, 1, 1), states=True), STATE, version("9.0"), x=X),
    ],
    "compression-folded-on-old-chips": [
        program(multiplied(table((8, 1, 1, 1))), x=X),
        program(multiplied(scaled(table((1, 1, 1, 1)), 64, 1, 1, 1)), x=X),
        program(multiplied(quantized_table), x=X),
    ],
}


@pytest.mark.parametrize(("rule", "case"), flat(FIRES))
def test_fires_with_the_right_count(tmp_path: Path, rule: str, case: Fires) -> None:
    check_fires(tmp_path, rule, case)


@pytest.mark.parametrize(("rule", "make"), flat(SILENT))
def test_near_miss_is_left_alone(tmp_path: Path, rule: str, make: Make) -> None:
    check_silent(tmp_path, rule, make)
