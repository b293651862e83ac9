"""Holds an operation of the interpreter, in a saved program, against what coremltools or somebody else makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters import mil
from coremltools.converters.mil.mil import Function, types
from mil_programs import save_program

from ane_layers.interpreter import MLProgram

mb = mil.Builder

Make = Callable[..., Any]


def as_output(value: Any) -> Any:
    """An output cannot be boolean or narrow."""
    return value if value.dtype in (types.fp16, types.fp32, types.int32) else mb.cast(x=value, dtype="int32")


def evaluate(make: Make, *arrays: np.ndarray) -> list[np.ndarray]:
    """What coremltools' builder folds the operation to when its inputs are constants."""
    with Function({"unused": mb.placeholder(shape=(1,), dtype=types.fp32)}, opset_version=ct.target.iOS18):
        results = make(*(mb.const(val=array) for array in arrays))
        results = results if isinstance(results, (list, tuple)) else [results]
        assert all(result.val is not None for result in results), "coremltools does not evaluate this operation"
        return [np.asarray(result.val) for result in results]


def run(
    tmp_path: Path, make: Make, *arrays: np.ndarray, mode: Any = "fp32", target: Any = ct.target.iOS18
) -> list[np.ndarray]:
    """What the interpreter makes of the operation in a saved program with these inputs."""
    names = [f"x{number}" for number in range(len(arrays))]
    inputs = {name: (array.shape, array.dtype.type) for name, array in zip(names, arrays, strict=True)}

    def build(values: Any) -> list[Any]:
        results = make(*(values[name] for name in names))
        return [as_output(result) for result in (results if isinstance(results, (list, tuple)) else [results])]

    program = MLProgram(save_program(tmp_path / "p.mlpackage", inputs, build, target=target), mode=mode)
    return list(program.predict(dict(zip(names, arrays, strict=True))).values())


def check(
    tmp_path: Path,
    make: Make,
    *arrays: np.ndarray,
    reference: Any = None,
    rtol: float = 2e-5,
    target: Any = ct.target.iOS18,
) -> None:
    expected = evaluate(make, *arrays) if reference is None else reference
    expected = expected if isinstance(expected, list) else [expected]
    own = run(tmp_path, make, *arrays, target=target)
    assert len(own) == len(expected)
    for one, other in zip(own, expected, strict=True):
        other = other.numpy() if isinstance(other, torch.Tensor) else np.asarray(other)
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other.astype(one.dtype), rtol=rtol, atol=1e-6)
