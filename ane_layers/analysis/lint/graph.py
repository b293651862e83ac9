"""A function as the rules look at it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.program import Blob, Function, Immediate, Package, TensorType
from ane_layers.program.constexpr import Compressed


class Graph:
    """The steps of a function and what surrounds them."""

    def __init__(self, package: Package, function: Function) -> None:
        self.package = package
        self.function = function
        self.flow = Flow(function)

    @property
    def steps(self) -> list[Step]:
        return self.flow.steps

    def of_type(self, *types: str) -> Iterator[Step]:
        return (step for step in self.steps if step.type in types)

    @cached_property
    def values(self) -> list[tuple[Datum, str]]:
        """Every input, state and result, each with its name and kind or operation."""
        named = [(datum, f"{name} (input)") for name, datum in self.flow.inputs.items()]
        named += [(datum, f"{name} (state)") for name, datum in self.flow.states.items()]
        return named + [(datum, f"{step.name} ({step.type})") for step in self.steps for datum in step.outputs]

    @cached_property
    def constants(self) -> list[Datum]:
        """Every constant that a step takes, once."""
        found: dict[Datum, None] = {}
        for step in self.steps:
            for _, datum in step.given():
                if datum.constant is not None:
                    found[datum] = None
        return list(found)

    @cached_property
    def integer_inputs(self) -> dict[str, TensorType]:
        """Inputs of integers: token ids and positions."""
        tensors = {name: datum.tensor for name, datum in self.flow.inputs.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and "int" in tensor.dtype}


def name_of(datum: Datum) -> str:
    """The name of the operation that gives a value, or its own."""
    return datum.step.name if datum.step is not None else datum.name


def shown(step: Step, datum: Datum | None = None) -> str:
    """An operation with its type and result (or another value), as messages have it."""
    tensor = datum.tensor if datum is not None else (step.outputs[0].tensor if step.outputs else None)
    return f"{step.name} ({step.type})" + (f" {tensor}" if tensor is not None else "")


def is_float(datum: Datum) -> bool:
    """Whether a value holds floating-point numbers."""
    return datum.tensor is not None and datum.tensor.dtype.startswith(("fp", "bf"))


def shape_of(datum: Datum | None) -> tuple[int | None, ...]:
    """The shape of a value; empty for none and for what is no tensor."""
    return datum.tensor.shape if datum is not None and datum.tensor is not None else ()


def byte_size(datum: Datum) -> int:
    """Bytes of a value, 0 where that is not known."""
    return datum.bytes or 0


def plain(datum: Datum | None) -> np.ndarray | None:
    """The value of an uncompressed constant tensor; None for anything else."""
    if datum is None or not isinstance(datum.constant, Immediate | Blob):
        return None
    if isinstance(datum.constant, Immediate) and not isinstance(datum.constant.value, np.ndarray):
        return None
    return datum.constant.array()


def whole_number(step: Step, parameter: str, default: int) -> int:
    """A constant integer parameter of an operation, or its default where it is left out or computed."""
    array = plain(step.one(parameter))
    return default if array is None or array.size != 1 else int(array.reshape(-1)[0])


def compressed_constants(graph: Graph) -> Iterator[tuple[Datum, Compressed]]:
    """The compressed constants that steps take."""
    for datum in graph.constants:
        if isinstance(datum.constant, Compressed):
            yield datum, datum.constant
