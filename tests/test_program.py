"""Reading saved packages: structure, constants, compressed constants, counts, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from coremltools.converters.mil.mil import Function, types
from coremltools.libmilstoragepython import _BlobStorageWriter as BlobWriter
from coremltools.proto import Model_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from mil_programs import quiet, save_program

from ane_layers.analysis import inspect
from ane_layers.program import Blob, Package, Reference, StateType, TensorType
from ane_layers.program.constants import blob
from ane_layers.program.constexpr import compressed
from ane_layers.program.weights import WeightFile

mb = mil.Builder

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


class Cached(torch.nn.Module):
    """An embedding, a projection and a cache that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 64)
        self.projection = torch.nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(1, 2, 8, 64))

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        row = self.projection(self.embedding(ids))[None]
        self.cache[:, 0:1, position : position + 1, :] = row
        return torch.matmul(row, self.cache.transpose(-1, -2))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    example = (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    with quiet():
        model = ct.convert(
            torch.jit.trace(Cached().eval(), example),
            inputs=[ct.TensorType("ids", (1, 1), np.int32), ct.TensorType("position", (1,), np.int32)],
            outputs=[ct.TensorType("out", dtype=np.float16)],
            states=[ct.StateType(ct.TensorType(shape=(1, 2, 8, 64), dtype=np.float16), name="cache")],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        model.user_defined_metadata["ane_layers.config"] = "{}"
        path = tmp_path_factory.mktemp("converted") / "model.mlpackage"
        model.save(str(path))
    return path, model


@pytest.fixture(scope="module")
def multifunction(converted: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("multi") / "model.mlpackage"
    descriptor = ct.utils.MultiFunctionDescriptor()
    descriptor.add_function(str(converted[0]), "main", "decode")
    descriptor.add_function(str(converted[0]), "main", "prefill")
    descriptor.default_function_name = "prefill"
    with quiet():
        ct.utils.save_multifunction(descriptor, str(path))
    return path


def test_operations_match_coremltools_program(converted: tuple[Path, Any]) -> None:
    path, model = converted
    own = Counter(operation.type for operation in Package.open(path).functions["main"].block.walk())
    theirs = Counter(operation.op_type for operation in model._mil_program.functions["main"].operations)
    updates = theirs.pop("coreml_update_state")  # in the file: a write, and a read of what was written
    assert own == theirs + Counter(write_state=updates, read_state=updates)


def test_types_and_metadata(converted: tuple[Path, Any]) -> None:
    package = Package.open(converted[0])
    function = package.function()
    assert package.default_function == "main"
    assert package.specification_version == 9
    assert package.metadata["ane_layers.config"] == "{}"
    assert [(value.name, value.type) for value in function.inputs] == [
        ("ids", TensorType("int32", (1, 1))),
        ("position", TensorType("int32", (1,))),
    ]
    assert [(value.name, value.type) for value in function.states] == [
        ("cache", StateType(TensorType("fp16", (1, 2, 8, 64))))
    ]
    assert [(value.name, value.type) for value in function.outputs] == [("out", TensorType("fp16", (1, 2, 1, 8)))]
    gather = next(operation for operation in function.block.walk() if operation.type == "gather")
    assert isinstance(gather.inputs["x"][0], Reference)


def test_every_constant_matches_coremltools_program(converted: tuple[Path, Any]) -> None:
    path, model = converted
    theirs = {
        operation.outputs[0].name: operation.outputs[0].val
        for operation in model._mil_program.functions["main"].operations
        if operation.op_type == "const"
    }
    own = {
        operation.outputs[0].name: operation.attributes["val"].array()
        for operation in Package.open(path).function().block.walk()
        if operation.type == "const"
    }
    assert own.keys() == theirs.keys()
    assert len(own) > 20
    for name, array in own.items():
        np.testing.assert_array_equal(array, theirs[name])
        assert array.shape == np.shape(theirs[name])


def test_inspect_counts(converted: tuple[Path, Any]) -> None:
    counts = inspect(Package.open(converted[0]))["functions"]["main"]
    by_type = counts["operations"]["by_type"]
    assert counts["operations"]["total"] == sum(by_type.values())
    assert counts["operations"]["compute"] == counts["operations"]["total"] - by_type["const"]
    assert counts["state_writes"] == 1
    assert counts["highest_rank"] == 4
    assert counts["tile"] == {"count": 0, "bytes": 0}
    # fp16: embedding, projection, and its bias
    assert counts["weight_bytes"] == 2 * (50 * 64 + 64 * 64 + 64)
    assert counts["outputs"] == {"out": {"dtype": "fp16", "shape": [1, 2, 1, 8]}}
    assert json.loads(json.dumps(counts)) == counts


def test_inspect_multifunction(multifunction: Path, converted: tuple[Path, Any]) -> None:
    package = Package.open(multifunction)
    functions = inspect(package)["functions"]
    assert list(functions) == ["decode", "prefill"]
    assert package.default_function == "prefill"
    assert functions["decode"] == functions["prefill"] == inspect(Package.open(converted[0]))["functions"]["main"]


def test_inspect_tile_rank_and_shared_blob(tmp_path: Path) -> None:
    weight = np.arange(64, dtype=np.float16).reshape(8, 8)

    def build(values: Any) -> list[Any]:
        tiled = mb.tile(x=values["x"], reps=[1, 3])
        deep = mb.expand_dims(x=tiled, axes=[0, 1, 2])
        return [deep, mb.matmul(x=mb.matmul(x=values["x"], y=weight), y=weight)]

    path = save_program(tmp_path / "t.mlpackage", {"x": ((2, 8), np.float16)}, build)
    counts = inspect(Package.open(path))["functions"]["main"]
    assert counts["tile"] == {"count": 1, "bytes": 2 * 24 * 2}
    assert counts["highest_rank"] == 5
    assert counts["weight_bytes"] == 2 * 64 * 2

    def share(model: Any) -> None:
        for operation in _blob_operations(model):
            operation.attributes["val"].blobFileValue.offset = 64

    _respecify(path, share)
    assert inspect(Package.open(path))["functions"]["main"]["weight_bytes"] == 64 * 2


def test_inspect_counts_nested_blocks(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        flag = mb.greater(x=mb.reduce_sum(x=values["x"]), y=0.0)
        return [mb.cond(pred=flag, _true_fn=lambda: mb.sin(x=values["x"]), _false_fn=lambda: mb.cos(x=values["x"]))]

    path = save_program(tmp_path / "c.mlpackage", {"x": ((2, 3), np.float32)}, build)
    by_type = inspect(Package.open(path))["functions"]["main"]["operations"]["by_type"]
    assert (by_type["cond"], by_type["sin"], by_type["cos"]) == (1, 1, 1)


RANGES = {
    "int4": (-8, 7), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
    "uint1": (0, 1), "uint2": (0, 3), "uint3": (0, 7), "uint4": (0, 15), "uint6": (0, 63), "uint8": (0, 255),
    "uint16": (0, 2**16 - 1), "uint32": (0, 2**32 - 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", sorted(RANGES))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_blobs_match_coremltools_writer(dtype: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    low, high = RANGES[dtype]
    numbers = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=40))
    array = np.array(numbers).astype(types.nptype_from_builtin(getattr(types, dtype)))
    path = tmp_path_factory.mktemp("blob") / "weight.bin"
    writer = BlobWriter(str(path))
    offset = getattr(writer, f"write_{dtype}_data")(array)
    del writer  # it writes the header when it goes
    decoded = blob(TensorType(dtype, (len(numbers),)), WeightFile(path), offset, "x").array()
    assert decoded.tolist() == numbers


def materialized(build: Any) -> tuple[Any, Any]:
    """A compressed constant of coremltools and its own decompression of it."""
    with Function({"unused": mb.placeholder(shape=(1,), dtype=types.fp32)}, opset_version=ct.target.iOS18):
        variable = build()
        values = variable if isinstance(variable, tuple) else (variable,)
        reference = values[0].op.materialized_val_inference()
    return values, reference


def test_lookup_tables_match_coremltools(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    cases = []
    for bits, blocks, shape in (
        (4, (3, 1), (6, 8)),
        (2, (1, 2), (6, 8)),
        (6, (1, 1), (5, 7)),
        (8, (2, 4), (6, 8)),
        (3, (1, 1), (6, 8)),
    ):
        indices = rng.integers(0, 2**bits, shape).astype(types.nptype_from_builtin(getattr(types, f"uint{bits}")))
        cases.append((indices, rng.standard_normal((*blocks, 2**bits, 1)).astype(np.float16), None))
    indices = rng.integers(0, 4, (6, 8)).astype(types.nptype_from_builtin(types.uint2))
    cases += [(indices, rng.standard_normal((2, 1, 4, 3)).astype(np.float16), axis) for axis in (0, 1)]
    check_constants(tmp_path, [lambda case=case: mb.constexpr_lut_to_dense(**_lut(case)) for case in cases])


def _lut(case: Any) -> dict[str, Any]:
    indices, table, axis = case
    return {"indices": indices, "lut": table} | ({} if axis is None else {"vector_axis": axis})


def test_blockwise_scales_match_coremltools(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    cases = []
    for dtype, scales, with_offset in (
        ("int4", (6, 2), False),
        ("uint4", (3, 8), True),
        ("int8", (1, 1), True),
        ("uint8", (6, 1), True),
    ):
        low, high = RANGES[dtype]
        kind = types.nptype_from_builtin(getattr(types, dtype))
        case = {
            "data": rng.integers(low, high + 1, (6, 8)).astype(kind),
            "scale": rng.uniform(0.01, 1, scales).astype(np.float16),
        }
        if with_offset:
            case["offset"] = rng.integers(low, high + 1, scales).astype(kind)
        cases.append(case)
    check_constants(tmp_path, [lambda case=case: mb.constexpr_blockwise_shift_scale(**case) for case in cases])


def test_sparse_constants_match_coremltools(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    mask = (rng.random((6, 8)) < 0.4).astype(types.nptype_from_builtin(types.uint1))
    count = int(mask.sum())
    values = rng.standard_normal(count).astype(np.float16)
    codes = rng.integers(0, 4, count).astype(types.nptype_from_builtin(types.uint2))
    table = rng.standard_normal((1, 1, 4, 1)).astype(np.float16)
    quantized = rng.integers(-8, 8, count).astype(types.nptype_from_builtin(types.int4))
    scale = rng.uniform(0.01, 1, (6, 1)).astype(np.float16)

    def looked_up() -> Any:
        found_mask, found = mb.constexpr_lut_to_sparse(indices_mask=mask, indices_nonzero_data=codes, lut=table)
        return mb.constexpr_sparse_to_dense(nonzero_data=found, mask=found_mask)

    def scaled() -> Any:
        found_mask, found = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=mask, nonzero_data=quantized, scale=scale
        )
        return mb.constexpr_sparse_to_dense(nonzero_data=found, mask=found_mask)

    check_constants(tmp_path, [lambda: mb.constexpr_sparse_to_dense(nonzero_data=values, mask=mask), looked_up, scaled])


def check_constants(tmp_path: Path, builds: list[Any]) -> None:
    references = []

    def build(given_values: Any) -> list[Any]:
        results = []
        for make in builds:
            constant = make()
            references.append(constant.op.materialized_val_inference())
            results.append(mb.mul(x=constant, y=given_values["x"]))
        return results

    path = save_program(tmp_path / "c.mlpackage", {"x": ((1,), np.float16)}, build)
    known: dict[str, Any] = {}
    last = {}
    for operation in Package.open(path).function().block.walk():
        if operation.type == "const":
            known[operation.outputs[0].name] = operation.attributes["val"]
        elif operation.type.startswith("constexpr_"):
            known.update(compressed(operation, known))
        elif operation.type == "mul":
            last[operation.outputs[0].name] = known[operation.inputs["x"][0].name].array()
    assert len(last) == len(references) == len(builds)
    for own, reference in zip(last.values(), references, strict=True):
        assert own.dtype == reference.dtype
        np.testing.assert_array_equal(own, reference)


def test_first_generation_constants_match_coremltools(tmp_path: Path) -> None:
    # That generation keeps its parts as attributes, and indices and masks packed in bytes of its own.
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)).eval()
    with quiet():
        model = ct.convert(
            torch.jit.trace(layer, torch.zeros(1, 40)),
            inputs=[ct.TensorType("x", (1, 40))],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
        config = ct.optimize.coreml
        for name, changed in (
            (
                "lut",
                config.palettize_weights(
                    model, _global(config.OpPalettizerConfig(nbits=6, mode="uniform", weight_threshold=10))
                ),
            ),
            (
                "affine",
                config.linear_quantize_weights(
                    model, _global(config.OpLinearQuantizerConfig(mode="linear", weight_threshold=10))
                ),
            ),
            (
                "sparse",
                config.prune_weights(
                    model, _global(config.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=10))
                ),
            ),
        ):
            changed.save(str(tmp_path / f"{name}.mlpackage"))
            theirs = {
                operation.outputs[0].name: operation.materialized_val_inference()
                for operation in changed._mil_program.functions["main"].operations
                if operation.op_type.startswith("constexpr_")
            }
            own = {}
            for operation in Package.open(tmp_path / f"{name}.mlpackage").function().block.walk():
                if operation.type.startswith("constexpr_"):
                    own.update(compressed(operation, {}))
            assert len(own) == 2
            for key, constant in own.items():
                np.testing.assert_array_equal(constant.array(), theirs[key])


def _global(config: Any) -> Any:
    return ct.optimize.coreml.OptimizationConfig(global_config=config)


def _damage(path: Path, file: str, change: Any) -> None:
    (path / file).write_bytes(change((path / file).read_bytes()))


def _respecify(path: Path, change: Any) -> None:
    model = Model_pb2.Model()
    model.ParseFromString((path / MODEL).read_bytes())
    change(model)
    (path / MODEL).write_bytes(model.SerializeToString())


def _blob_operations(model: Any) -> list[Any]:
    operations = model.mlProgram.functions["main"].block_specializations["CoreML8"].operations
    return [
        operation
        for operation in operations
        if operation.type == "const" and operation.attributes["val"].WhichOneof("value") == "blobFileValue"
    ]


def _move_blobs(model: Any) -> None:
    for operation in _blob_operations(model):
        operation.attributes["val"].blobFileValue.offset += 64


def _computed(model: Any) -> list[Any]:
    operations = model.mlProgram.functions["main"].block_specializations["CoreML8"].operations
    return [operation for operation in operations if operation.outputs and "x" in operation.inputs]


def _give_twice(model: Any) -> None:
    first, second = _computed(model)[:2]
    second.outputs[0].name = first.outputs[0].name


def _use_itself(model: Any) -> None:
    operation = _computed(model)[0]
    operation.inputs["x"].arguments[0].name = operation.outputs[0].name


def _rename_file(name: str) -> Any:
    def change(model: Any) -> None:
        for operation in _blob_operations(model):
            operation.attributes["val"].blobFileValue.fileName = name

    return change


def _network(model: Any) -> None:
    model.Clear()
    model.neuralNetwork.SetInParent()


def _replace(old: bytes, new: bytes) -> Any:
    return lambda content: content.replace(old, new, 1)


RECORD = struct.pack("<I", 0xDEADBEEF)
FAULTS = {
    "no folder": (shutil.rmtree, "not a folder"),
    "no manifest": (lambda p: (p / "Manifest.json").unlink(), "Manifest.json: manifest is missing"),
    "manifest no JSON": (lambda p: _damage(p, "Manifest.json", lambda b: b[:50]), "Manifest.json: not valid JSON"),
    "manifest without root": (
        lambda p: _damage(p, "Manifest.json", _replace(b"rootModelIdentifier", b"root")), "field rootModelIdentifier is missing",
    ),
    "manifest leads out": (
        lambda p: _damage(p, "Manifest.json", _replace(b"com.apple.CoreML/model.mlmodel", b"../../model.mlmodel")),
        "leads out of the package",
    ),
    "no model": (lambda p: (p / MODEL).unlink(), "model.mlmodel.*missing"),
    "damaged model": (lambda p: _damage(p, MODEL, lambda b: b[:-200]), "model.mlmodel: model file is damaged"),
    "neural network": (lambda p: _respecify(p, _network), "field Type is 'neuralNetwork', expected 'mlProgram'"),
    "no weights": (lambda p: (p / WEIGHTS).unlink(), "field fileName is '@model_path/weights/weight.bin'.*missing"),
    "weights leave the package": (
        lambda p: _respecify(p, _rename_file("@model_path/../../../../etc/passwd")), "leads out of the package",
    ),
    "empty weights": (lambda p: _damage(p, WEIGHTS, lambda b: b""), "weight.bin: weight file has 0 bytes"),
    "truncated weights": (lambda p: _damage(p, WEIGHTS, lambda b: b[:-40]), r"weight.bin: blob at offset \d+: .*truncated"),
    "weights of version 1": (
        lambda p: _damage(p, WEIGHTS, lambda b: b[:4] + struct.pack("<I", 1) + b[8:]), "field version of the header is 1",
    ),
    "wrong offset": (lambda p: _respecify(p, _move_blobs), "blob at offset 128: field sentinel"),
    "no sentinel": (lambda p: _damage(p, WEIGHTS, _replace(RECORD, b"abcd")), "blob at offset 64: field sentinel"),
    "data elsewhere": (
        lambda p: _damage(p, WEIGHTS, lambda b: b[:80] + struct.pack("<Q", 2**62) + b[88:]), "truncated",
    ),
    "data over a record": (
        lambda p: _damage(p, WEIGHTS, lambda b: b[:80] + struct.pack("<Q", 192) + b[88:]), "data runs over the record at",
    ),
    "wrong padding": (
        lambda p: _damage(p, WEIGHTS, lambda b: b[:88] + struct.pack("<Q", 3) + b[96:]), "field padding is 3 bits, .* leaves 0",
    ),
    "value given twice": (lambda p: _respecify(p, _give_twice), "value '.*' is given twice"),
    "value used before it is given": (lambda p: _respecify(p, _use_itself), "value '.*' is used before anything gives it"),
    "manifest too deep": (lambda p: _damage(p, "Manifest.json", lambda b: b"[" * 100_000), "Manifest.json: not valid JSON"),
    "wrong size": (
        lambda p: _damage(p, WEIGHTS, lambda b: b[:72] + struct.pack("<Q", 10) + b[80:]), "field size is 10",
    ),
    "wrong type": (
        lambda p: _damage(p, WEIGHTS, lambda b: b[:68] + struct.pack("<I", 2) + b[72:]), "field dtype is fp32, the program says fp16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_package_is_refused_in_one_line(fault: str, converted: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.mlpackage"
    shutil.copytree(converted[0], path)
    damage, message = FAULTS[fault]
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        Package.open(path)
    assert "\n" not in str(error.value)


def test_blobs_stay_on_disk(converted: tuple[Path, Any]) -> None:
    blobs = [
        operation.attributes["val"]
        for operation in Package.open(converted[0]).function().block.walk()
        if operation.type == "const" and isinstance(operation.attributes["val"], Blob)
    ]
    assert blobs
    for constant in blobs:
        array = constant.array()
        while array.base is not None and not isinstance(array, np.memmap):
            array = array.base
        assert isinstance(array, np.memmap)
