"""Damages a package in many ways and runs each: `python fuzzing.py PACKAGE FOLDER COUNT`, a JSON line a case, COUNT of each kind.

A process of its own, with its memory limited: a crash or an endless allocation then shows as what it is.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2, Model_pb2

from ane_layers.interpreter import MLProgram
from ane_layers.program.constants import NUMPY_TYPES

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
MEMORY = 6 << 30
HUGE = 10**12


def flip_bits(content: bytes, rng: random.Random, end: int | None = None) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        damaged[rng.randrange(end or len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def flip_records(content: bytes, rng: random.Random) -> bytes:
    """Bits of the header or of a record, its data offset and what is reserved left out."""
    damaged = bytearray(content)
    records = [0, *(o for o in range(64, len(content), 64) if content[o : o + 4] == b"\xef\xbe\xad\xde")]
    offset = rng.choice(records)
    place = rng.choice([4, 5, 6, 7] if offset == 0 else [*range(16), *range(24, 32)])
    damaged[offset + place] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def operations(model: Any) -> list[Any]:
    found = []
    blocks = [block for f in model.mlProgram.functions.values() for block in f.block_specializations.values()]
    while blocks:
        block = blocks.pop()
        found.extend(block.operations)
        blocks.extend(inner for operation in block.operations for inner in operation.blocks)
    return found


def bindings(model: Any) -> list[Any]:
    return [
        b
        for o in operations(model)
        for a in o.inputs.values()
        for b in a.arguments
        if b.WhichOneof("binding") == "name"
    ]


def tensor_types(model: Any) -> list[Any]:
    function = next(iter(model.mlProgram.functions.values()))
    values = [*function.inputs, *(value for o in operations(model) for value in o.outputs)]
    types = [v.type.stateType.wrappedType if v.type.WhichOneof("type") == "stateType" else v.type for v in values]
    types += [attribute.type for o in operations(model) for attribute in o.attributes.values()]
    return [type_.tensorType for type_ in types if type_.WhichOneof("type") == "tensorType"]


def unknown_operation(model: Any, rng: random.Random) -> None:
    rng.choice(operations(model)).type = rng.choice(
        ["", "magic", "const", "add", "read_state", "constexpr_nothing", "cond"]
    )


def rename_use(model: Any, rng: random.Random) -> None:
    """Uses of other values at random: cycles, values of another type, names of nothing."""
    names = [value.name for o in operations(model) for value in o.outputs]
    for binding in rng.sample(bindings(model), rng.choice([1, 2, 5])):
        binding.name = rng.choice([*names, "nothing", ""])


def rename_result(model: Any, rng: random.Random) -> None:
    results = [value for o in operations(model) for value in o.outputs]
    one, other = rng.sample(results, 2)
    one.name = other.name


def huge_shape(model: Any, rng: random.Random) -> None:
    type_ = rng.choice([type_ for type_ in tensor_types(model) if type_.dimensions])
    rng.choice(type_.dimensions).constant.size = rng.choice([HUGE, 2**63, 2**64 - 1, 2**31, 0])


def huge_number(model: Any, rng: random.Random) -> None:
    """Integer constants become huge: shapes to fill, repetitions, pads, strides."""
    constants = [
        a.immediateValue.tensor
        for o in operations(model)
        for a in o.attributes.values()
        if a.HasField("immediateValue")
    ]
    numbers = [t.ints.values for t in constants if t.WhichOneof("value") == "ints" and t.ints.values]
    chosen = rng.choice(numbers)
    chosen[rng.randrange(len(chosen))] = rng.choice([10**6, 2**31 - 1, -(2**31), -1, 0])


def wrong_offset(model: Any, rng: random.Random) -> None:
    blobs = [
        a.blobFileValue
        for o in operations(model)
        for a in o.attributes.values()
        if a.WhichOneof("value") == "blobFileValue"
    ]
    rng.choice(blobs).offset = rng.choice([rng.randrange(2**64), rng.randrange(4096), 64 * rng.randrange(64) + 32])


def shuffle(model: Any, rng: random.Random) -> None:
    function = next(iter(model.mlProgram.functions.values()))
    block = function.block_specializations[function.opset]
    chosen = list(block.operations)
    if rng.random() < 0.5:
        del chosen[rng.randrange(len(chosen))]
    else:
        one, other = rng.sample(range(len(chosen)), 2)
        chosen[one], chosen[other] = chosen[other], chosen[one]
    kept = [type(o).FromString(o.SerializeToString()) for o in chosen]
    del block.operations[:]
    block.operations.extend(kept)


def nest(model: Any, rng: random.Random) -> None:
    """Blocks in blocks, far beyond what anybody writes."""
    function = next(iter(model.mlProgram.functions.values()))
    block = function.block_specializations[function.opset]
    for _ in range(rng.choice([1, 5, 20])):
        inner = type(block).FromString(block.SerializeToString())
        del block.operations[:]
        block.operations.add(type="cond").blocks.append(inner)


def weights(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, random.Random], None]:
    return lambda path, rng: damage(path / WEIGHTS, change, rng)


def program(change: Callable[[Any, random.Random], None]) -> Callable[[Path, random.Random], None]:
    def apply(path: Path, rng: random.Random) -> None:
        model = Model_pb2.Model.FromString((path / MODEL).read_bytes())
        change(model, rng)
        (path / MODEL).write_bytes(model.SerializeToString())

    return apply


def damage(file: Path, change: Callable[[bytes, random.Random], bytes], rng: random.Random) -> None:
    file.write_bytes(change(file.read_bytes(), rng))


def deep_bytes(path: Path, rng: random.Random) -> None:
    """A function more, with an input whose type is a list of lists of lists: written as bytes, no library would."""
    fields = {name: MIL_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name for name in TYPES_OF_DEPTH}
    content = b""
    for _ in range(rng.choice([60, 200, 3000])):
        content = field(fields["ValueType"]["listType"], field(fields["ListType"]["type"], content))
    content = field(fields["NamedValueType"]["name"], b"x") + field(fields["NamedValueType"]["type"], content)
    entry = field(1, b"deep") + field(2, field(fields["Function"]["inputs"], content))
    content = field(fields["Program"]["functions"], entry)
    content = field(Model_pb2.Model.DESCRIPTOR.fields_by_name["mlProgram"], content)
    (path / MODEL).write_bytes((path / MODEL).read_bytes() + content)


TYPES_OF_DEPTH = ("ValueType", "ListType", "NamedValueType", "Function", "Program")


def field(number: Any, content: bytes) -> bytes:
    """A length-delimited field of a message."""
    return varint(getattr(number, "number", number) << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def deep_manifest(path: Path, rng: random.Random) -> None:
    (path / "Manifest.json").write_text("[" * rng.choice([100, 200_000]))


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bits": lambda path, rng: damage(path / MODEL, flip_bits, rng),
    "truncated model": lambda path, rng: damage(path / MODEL, truncate, rng),
    "truncated weights": weights(truncate),
    "flipped records": weights(flip_records),
    "unknown operation": program(unknown_operation),
    "renamed use": program(rename_use),
    "renamed result": program(rename_result),
    "huge shape": program(huge_shape),
    "huge number": program(huge_number),
    "wrong offset": program(wrong_offset),
    "shuffled": program(shuffle),
    "nested": program(nest),
    "deep bytes": deep_bytes,
    "deep manifest": deep_manifest,
}


def outcome(path: Path) -> dict[str, Any]:
    """What comes of loading and running: the outputs' sum, or the error."""
    program = MLProgram(path)
    data = {}
    for value in program.function.inputs:
        type_ = value.tensor_type
        shape = [size if size is not None and size < 100 else 1 for size in type_.shape]
        data[value.name] = np.full(shape, 0.5).astype(NUMPY_TYPES[type_.dtype])
    state = program.make_state() if program.function.states else None
    outputs = program.predict(data, state)
    for value in program.function.outputs:
        assert all(
            declared in (None, own)
            for declared, own in zip(value.tensor_type.shape, outputs[value.name].shape, strict=True)
        )
    return {"result": [str(np.asarray(output).tolist()) for output in outputs.values()]}


def main() -> None:
    package, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    copy = folder / "case.mlpackage"
    for kind, change in KINDS.items():
        for seed in range(count):
            shutil.copytree(package, copy)
            change(copy, random.Random(seed))
            # Told in advance: after a crash, the last line says of what.
            print(json.dumps({"kind": kind, "seed": seed}), flush=True)
            started = time.monotonic()
            try:
                line = outcome(copy)
            except Exception as error:
                line = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps({"kind": kind, "seed": seed, "seconds": time.monotonic() - started, **line}), flush=True)
            shutil.rmtree(copy)


if __name__ == "__main__":
    main()
