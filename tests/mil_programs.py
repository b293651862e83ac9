"""Small programs for tests, written with coremltools' builder and saved as it saves them."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters import mil
from coremltools.converters.mil.mil import Function, Program, types

mb = mil.Builder

BUILTIN = {np.float32: types.fp32, np.float16: types.fp16, np.int32: types.int32}

Inputs = Mapping[str, tuple[tuple[int, ...], type]]
Build = Callable[[Mapping[str, Any]], Sequence[Any]]


def save_program(
    path: Path,
    inputs: Inputs,
    build: Build,
    states: Inputs | None = None,
    target: Any = ct.target.iOS18,
    passes: Any = ct.PassPipeline.EMPTY,
) -> Path:
    """Saves a program whose `build` gets the inputs and states by name and gives its outputs. By default no pass runs on it."""
    function_inputs: dict[str, Any] = {
        name: mb.placeholder(shape=shape, dtype=BUILTIN[dtype]) for name, (shape, dtype) in inputs.items()
    }
    for name, (shape, dtype) in (states or {}).items():
        function_inputs[name] = mb.state_tensor_placeholder(shape, dtype=BUILTIN[dtype])
    program = Program()
    with Function(function_inputs, opset_version=target) as function:
        function.set_outputs([mb.identity(x=value) for value in build(function.inputs)])
    program.add_function("main", function)
    with quiet():
        model = ct.convert(
            program,
            source="milinternal",
            convert_to="mlprogram",
            minimum_deployment_target=target,
            pass_pipeline=passes,
            skip_model_load=True,
        )
        model.save(str(path))
    return path


def output_names(path: Path) -> list[str]:
    return [output.name for output in ct.models.MLModel(str(path), skip_model_load=True).get_spec().description.output]


@contextlib.contextmanager
def quiet() -> Any:
    """coremltools' progress bars and warnings are no part of a test's outcome."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
