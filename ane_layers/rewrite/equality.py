"""Runs two packages of the same interface side by side in the interpreter, on random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ane_layers.interpreter import MLProgram, Mode
from ane_layers.program import Function, Package, TensorType

INTEGERS = 8
"""Random integers, token ids for instance, are below this: whatever they are looked up in has as many rows."""


@dataclass(frozen=True)
class Equality:
    """How far two packages agree, over all calls.

    Attributes:
        snr_db: signal-to-noise ratio of each function's outputs and states, the first package being the signal; infinite if they are the
            same.
        calls: of each function.
        mode: arithmetic of the interpreter.
    """

    snr_db: Mapping[str, float]
    calls: int
    mode: str

    @property
    def least(self) -> float:
        return min(self.snr_db.values(), default=math.inf)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def equality(
    first: str | Path | Package,
    second: str | Path | Package,
    *,
    calls: int = 3,
    mode: Mode = "fp32",
    seed: int = 0,
    inputs: Callable[[Function, int], Mapping[str, np.ndarray]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Equality:
    """Calls every function of both packages with the same numbers, one call after the other on the same states.

    States begin with random numbers, and masks and the like are random too: whatever the numbers mean, equal programs make the same of
    them. Integers along one axis or none are taken for positions, which count the calls; other integers are below 8.

    Args:
        first: a package.
        second: one with the same functions, inputs, outputs and states.
        calls: of each function.
        mode: see `MLProgram`.
        seed: of the numbers.
        inputs: makes the inputs of a function's call number n, for packages that refuse random ones.
        progress: called with a line of text at each call.

    Raises:
        ValueError: the functions differ, the interpreter cannot carry a call out, or a result is not finite.
    """
    packages = [package if isinstance(package, Package) else Package.open(package) for package in (first, second)]
    if list(packages[0].functions) != list(packages[1].functions):
        raise ValueError(f"{packages[1].path}: has other functions than {packages[0].path}")
    say = progress or (lambda line: None)
    levels = {}
    for name in packages[0].functions:
        programs = [MLProgram(package, name, mode, compact=True) for package in packages]
        function = programs[0].function
        generator = np.random.default_rng(seed)
        states = [program.make_state() for program in programs]
        for state in function.states:
            content = _random(state.tensor_type, generator)
            for each in states:
                each.write_state(state.name, content)
        signal = noise = 0.0
        for call in range(calls):
            say(f"comparing {name}: call {call + 1} of {calls}")
            data = dict(inputs(function, call) if inputs is not None else _inputs(function, call, generator))
            try:
                wanted = programs[0].predict(data, states[0])
            except ValueError:
                # Perhaps a block that fills the whole cache, and fits at position 0 alone.
                if inputs is not None or not call:
                    raise
                data |= {
                    value.name: data[value.name] - call for value in function.inputs if _is_position(value.tensor_type)
                }
                wanted = programs[0].predict(data, states[0])
            results = [wanted, programs[1].predict(data, states[1])]
            held = [{entry.name: state.read_state(entry.name) for entry in function.states} for state in states]
            for key, value in (results[0] | held[0]).items():
                strength, error = _difference(f"{name}: {key}", value, (results[1] | held[1])[key])
                signal, noise = signal + strength, noise + error
        levels[name] = decibels(signal, noise)
    return Equality(levels, calls, mode)


def decibels(signal: float, noise: float) -> float:
    """Infinite where there is no noise, and −infinite where there is nothing but noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _difference(where: str, wanted: Any, actual: Any) -> tuple[float, float]:
    if not isinstance(wanted, np.ndarray) or wanted.dtype.kind not in "fiub":
        return (1.0, 0.0) if wanted == actual else (0.0, 1.0)
    first, second = wanted.astype(np.float64), actual.astype(np.float64)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError(f"{where} is not finite for random inputs, so that nothing can be told from it")
    return float(np.square(first).sum()), float(np.square(first - second).sum())


def _inputs(function: Function, call: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    data = {}
    for value in function.inputs:
        type_ = value.tensor_type
        if value.name in function.flexible_inputs or not type_.is_static:
            raise ValueError(f"input {value.name} of function {function.name} has no fixed shape")
        if "int" in type_.dtype:
            shape = tuple(size for size in type_.shape if size is not None)
            positions = call + np.arange(type_.element_count)
            numbers = positions.reshape(shape) if _is_position(type_) else generator.integers(0, INTEGERS, shape)
            data[value.name] = numbers.astype(np.int32)
        else:
            data[value.name] = _random(type_, generator)
    return data


def _is_position(type_: TensorType) -> bool:
    return "int" in type_.dtype and type_.rank < 2


def _random(type_: TensorType, generator: np.random.Generator) -> np.ndarray:
    numbers = generator.standard_normal(tuple(size for size in type_.shape if size is not None), np.float32)
    return numbers.astype(np.float16 if type_.dtype == "fp16" else np.float32)
