"""What a caller may give: flexible shapes, inputs that may be left out, files on the command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from coremltools.proto import Model_pb2
from mil_programs import quiet, save_program

from ane_layers.interpreter import MLProgram
from ane_layers.program import FlexibleShape, Package
from ane_layers.running import parse_inputs, run, write

mb = mil.Builder
MODEL = "Data/com.apple.CoreML/model.mlmodel"


class Mixed(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(2 * x, -1) + y


def convert(path: Path, shape: Any, **options: Any) -> Path:
    with quiet():
        ct.convert(
            torch.jit.trace(Mixed().eval(), (torch.zeros(2, 4), torch.zeros(1))),
            inputs=[ct.TensorType("x", shape), ct.TensorType("y", (1,), **options)],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        ).save(str(path))
    return path


def respecify(path: Path, change: Any) -> None:
    model = Model_pb2.Model.FromString((path / MODEL).read_bytes())
    change(model)
    (path / MODEL).write_bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def enumerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = ct.EnumeratedShapes([(1, 4), (2, 4), (3, 8)], default=(2, 4))
    return convert(tmp_path_factory.mktemp("e") / "e.mlpackage", shapes, default_value=np.array([3], np.float32))


@pytest.fixture(scope="module")
def ranged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = (ct.RangeDim(1, 5, default=2), 4)
    return convert(tmp_path_factory.mktemp("r") / "r.mlpackage", shape)


def reference(x: np.ndarray, y: float) -> np.ndarray:
    return (torch.softmax(2 * torch.from_numpy(x).float(), -1) + y).numpy()


def answer(program: MLProgram, **data: np.ndarray) -> np.ndarray:
    return next(iter(program.predict(data).values()))


def test_enumerated_shapes_are_honoured(enumerated: Path) -> None:
    program = MLProgram(enumerated)
    for shape in ((1, 4), (2, 4), (3, 8)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
        own = answer(program, x=x, y=np.array([1], np.float32))
        np.testing.assert_allclose(own, reference(x, 1), rtol=1e-5)
    for shape in ((3, 4), (1, 8), (4,), (1, 1, 4)):
        message = r"expected (one of \[2, 4\], \[1, 4\], \[3, 8\]|\['\?', '\?'\])"
        with pytest.raises(ValueError, match=message) as error:
            answer(program, x=np.zeros(shape, np.float16))
        assert "\n" not in str(error.value)


def test_ranges_are_honoured(ranged: Path) -> None:
    program = MLProgram(ranged)
    y = np.array([0], np.float32)
    for rows in (1, 3, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float16)
        np.testing.assert_allclose(answer(program, x=x, y=y), reference(x, 0), rtol=1e-5)
    for shape in ((6, 4), (0, 4), (2, 5)):
        with pytest.raises(ValueError, match=r"input 'x' has shape .*, expected "):
            answer(program, x=np.zeros(shape, np.float16), y=y)
    with pytest.raises(ValueError, match=r"input 'x' has shape \[6, 4\], expected \[1 … 5, 4\]"):
        answer(program, x=np.zeros((6, 4), np.float16), y=y)


def test_optional_input_takes_its_default(enumerated: Path, ranged: Path) -> None:
    x = np.zeros((1, 4), np.float16)
    np.testing.assert_allclose(answer(MLProgram(enumerated), x=x), reference(x, 3), rtol=1e-6)
    with pytest.raises(ValueError, match=r"input 'y' is missing, a fp16\[1\]"):
        answer(MLProgram(ranged), x=x)


def test_optional_input_of_flexible_shape_takes_the_default_one(ranged: Path, tmp_path: Path) -> None:
    path = tmp_path / "o.mlpackage"
    shutil.copytree(ranged, path)

    def change(model: Any) -> None:
        model.description.input[0].type.isOptional = True

    respecify(path, change)
    assert answer(MLProgram(path), y=np.array([0], np.float32)).shape == (2, 4)


def test_flexible_shapes_are_read(enumerated: Path, ranged: Path) -> None:
    shapes = Package.open(enumerated).function().flexible_inputs
    assert shapes == {"x": FlexibleShape((2, 4), ((2, 4), (1, 4), (3, 8)))}
    assert Package.open(ranged).function().flexible_inputs == {"x": FlexibleShape((2, 4), (), ((1, 5), (4, 4)))}
    endless = FlexibleShape((1, 1), (), ((1, None), (4, 4)))
    assert str(endless) == "[1 or more, 4]"
    assert endless.allows((10**9, 4))
    assert not endless.allows((0, 4))


def test_reversed_range_is_refused(ranged: Path, tmp_path: Path) -> None:
    path = tmp_path / "o.mlpackage"
    shutil.copytree(ranged, path)

    def change(model: Any) -> None:
        model.description.input[0].type.multiArrayType.shapeRange.sizeRanges[0].lowerBound = 9

    respecify(path, change)
    with pytest.raises(ValueError, match="field shapeRange of input 'x' has the range 9 … 5"):
        Package.open(path)


@pytest.mark.parametrize("axis", [2, -3, 10**6])
def test_axis_that_the_data_lacks_is_refused(tmp_path: Path, axis: int) -> None:
    path = save_program(
        tmp_path / "a.mlpackage", {"x": ((2, 3), np.float16)}, lambda v: [mb.softmax(x=v["x"], axis=-2, name="soft")]
    )

    def change(model: Any) -> None:
        operations = model.mlProgram.functions["main"].block_specializations["CoreML8"].operations
        (constant,) = [o for o in operations if o.outputs and "axis" in o.outputs[0].name]
        constant.attributes["val"].immediateValue.tensor.ints.values[0] = axis

    respecify(path, change)
    with pytest.raises(ValueError, match=rf"operation 'soft' \(softmax\): axis is {axis}, its data has 2 axes"):
        MLProgram(path)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(values: Any) -> list[Any]:
        added = mb.add(x=mb.read_state(input=values["s"]), y=values["x"])
        mb.coreml_update_state(state=values["s"], value=added)
        return [mb.mul(x=added, y=np.float16(300)), mb.cast(x=values["n"], dtype="int32")]

    inputs = {"x": ((2,), np.float16), "n": ((1,), np.int32)}
    return save_program(tmp_path_factory.mktemp("s") / "s.mlpackage", inputs, build, {"s": ((2,), np.float16)})


def arrays(folder: Path, **values: np.ndarray) -> dict[str, Path]:
    for name, value in values.items():
        np.save(folder / f"{name}.npy", value)
    return {name: folder / f"{name}.npy" for name in values}


def test_run_summarizes_and_writes(sums: Path, tmp_path: Path) -> None:
    files = arrays(tmp_path, x=np.array([1, 300], np.float16), n=np.array([-7], np.int32))
    summary, findings = run(sums, files, mode="fp16", output_dir=tmp_path / "a", diagnose=True)
    first, second = summary["outputs"]
    assert (summary["function"], summary["mode"]) == ("main", "fp16")
    assert summary["outputs"][second] == {"dtype": "int32", "shape": [1], "min": -7, "max": -7}
    assert summary["outputs"][first] == {"dtype": "float16", "shape": [2], "min": 300.0, "max": float("inf")}
    assert [(f.type, f.kind) for f in findings] == [("mul", "overflow")]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(f"{name}.npy" for name in (first, second))
    np.testing.assert_array_equal(np.load(tmp_path / f"a/{first}.npy"), np.array([300, np.inf], np.float16))


BAD_FILES: dict[str, tuple[Any, str]] = {
    "type": (np.array([1, 2], np.float64), "input 'x' has dtype float64, expected float16"),
    "shape": (np.zeros((3,), np.float16), r"input 'x' has shape \[3\], expected \[2\]"),
    "objects": (np.array([None, 1], object), "x.npy cannot be read as an .npy array"),
    "no array": (b"what", "x.npy cannot be read as an .npy array"),
    "empty": (b"", "x.npy cannot be read as an .npy array"),
    "missing": (None, "x.npy cannot be read as an .npy array"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_unfit_files_are_refused_and_nothing_is_written(sums: Path, tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    files = arrays(tmp_path, n=np.array([1], np.int32)) | {"x": tmp_path / "x.npy"}
    if isinstance(content, bytes):
        files["x"].write_bytes(content)
    elif content is not None:
        np.save(files["x"], content, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        run(sums, files, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_archives_and_bad_arguments_are_refused(sums: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(2), b=np.zeros(2))
    with pytest.raises(ValueError, match="holds several arrays"):
        run(sums, {"x": tmp_path / "x.npz"})
    assert parse_inputs(["a=b.npy", "c=d=e.npy"]) == {"a": Path("b.npy"), "c": Path("d=e.npy")}
    for text in ("a", "=b", "a="):
        with pytest.raises(ValueError, match=r"--input is '.*', expected NAME=FILE.npy"):
            parse_inputs([text])
    with pytest.raises(ValueError, match="--input 'a' is given twice"):
        parse_inputs(["a=1", "a=2"])


def test_names_of_outputs_do_not_leave_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "..", "", "/x"):
        with pytest.raises(ValueError, match="is no plain name"):
            write({"ok": np.zeros(1), name: np.zeros(1)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"a": np.zeros(1)}, tmp_path)
    monkeypatch.setattr(np, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write({"a": np.ones(1)}, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]
    assert np.load(tmp_path / "a.npy").item() == 0
