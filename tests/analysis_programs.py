"""Packages of many small functions, for tests of the analysis: one conversion in place of dozens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Function as MILFunction
from coremltools.converters.mil.mil import Program
from mil_programs import BUILTIN, Build, Inputs, mb, quiet

from ane_layers.program import Function, Package

TARGET = ct.target.iOS18


def save_functions(
    path: Path, inputs: Inputs, builds: Mapping[str, Build], states: Inputs | None = None
) -> dict[str, Function]:
    """The functions of a saved package by the names of `builds`, each with those inputs and states that it uses.

    A function's own name in the package is a number, for names of tests are no identifiers.
    """
    program = Program()
    for number, build in enumerate(builds.values()):
        used = _used(inputs, build, states or {})
        with MILFunction(used, opset_version=TARGET) as function:
            function.set_outputs([mb.identity(x=value) for value in build(function.inputs)])
        program.add_function(f"f{number}", function)
    program.default_function_name = "f0"
    program.export_as_multifunction = True
    with quiet():
        model = ct.convert(
            program,
            source="milinternal",
            convert_to="mlprogram",
            minimum_deployment_target=TARGET,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        model.save(str(path))
    functions = Package.open(path).functions
    return {name: functions[f"f{number}"] for number, name in enumerate(builds)}


class _Noting(dict[str, Any]):
    """Values by name that remember which were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


def _placeholders(inputs: Inputs, states: Inputs) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: mb.placeholder(shape=shape, dtype=BUILTIN[dtype]) for name, (shape, dtype) in inputs.items()
    }
    for name, (shape, dtype) in states.items():
        values[name] = mb.state_tensor_placeholder(shape, dtype=BUILTIN[dtype])
    return values


def _used(inputs: Inputs, build: Build, states: Inputs) -> dict[str, Any]:
    # An unused input is kept alive by an identity, which the format refuses for a state.
    with MILFunction(_placeholders(inputs, states), opset_version=TARGET) as trial:
        noting = _Noting(trial.inputs)
        build(noting)
    names = noting.asked or set(list(inputs)[:1])
    return {name: value for name, value in _placeholders(inputs, states).items() if name in names}
