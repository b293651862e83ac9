"""Minimal programs for the lint, and how a rule is tried on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.proto import Model_pb2
from mil_programs import BUILTIN, Build, Inputs, save_program

from ane_layers.analysis.lint import Finding, lint
from ane_layers.program import Package

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
VERSION = "com.github.apple.coremltools.version"

Make = Callable[[Path], Package]
TYPES = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32}


@dataclass(frozen=True)
class Fires:
    """A program in which a rule finds `count` cases, whose message has `words` in it; `expected` is part of the reason, if there is one."""

    make: Make
    count: int
    words: Sequence[str] = ()
    expected: str | None = None


def program(
    build: Build,
    states: Mapping[str, tuple[int, ...]] | None = None,
    change: Callable[[Any], None] | None = None,
    target: Any = ct.target.iOS18,
    **inputs: tuple[int, ...] | tuple[str, tuple[int, ...]],
) -> Make:
    """What saves a program of fp16 inputs (or `name=(dtype, shape)`) and states; `change` edits the model's message afterwards."""
    given: Inputs = {name: _input(entry) for name, entry in inputs.items()}
    kept: Inputs = {name: (shape, np.float16) for name, shape in (states or {}).items()}

    def make(folder: Path) -> Package:
        path = save_program(folder / "model.mlpackage", given, build, kept, target)
        if change is not None:
            model = Model_pb2.Model()
            model.ParseFromString((path / MODEL).read_bytes())
            change(model)
            (path / MODEL).write_bytes(model.SerializeToString())
        return Package.open(path)

    return make


def _input(entry: Any) -> tuple[tuple[int, ...], type]:
    dtype, shape = entry if isinstance(entry[0], str) else ("fp16", entry)
    assert TYPES[dtype] in BUILTIN
    return tuple(shape), TYPES[dtype]


def operations(model: Any) -> Any:
    """The operations of the only function of a model's message."""
    (function,) = model.mlProgram.functions.values()
    return function.block_specializations[function.opset].operations


def finding(package: Package, rule: str) -> Finding | None:
    """What a rule says about the default function."""
    found = [result for result in lint(package, package.function()) if result.rule == rule]
    assert len(found) <= 1
    return found[0] if found else None


def check_fires(folder: Path, rule: str, case: Fires) -> None:
    result = finding(case.make(folder), rule)
    assert result is not None, f"{rule} does not fire"
    assert result.count == case.count, result.message
    assert result.message.startswith("main: ")
    for word in case.words:
        assert word in result.message, f"{word!r} is not in {result.message!r}"
    if case.expected is None:
        assert result.expected is None
    else:
        assert result.expected is not None
        assert case.expected in result.expected
    assert not result.suppressed


def check_silent(folder: Path, rule: str, make: Make) -> None:
    result = finding(make(folder), rule)
    assert result is None, result


def flat(cases: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The cases of a table, each with its rule, as pytest takes them."""
    return [(rule, case) for rule, several in cases.items() for case in several]
