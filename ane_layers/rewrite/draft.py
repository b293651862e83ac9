"""A rewriting as plain data: operations to insert, operations to remove. Who carries it out need not know why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.program import TensorType


@dataclass(frozen=True, eq=False)
class NewValue:
    """What a new operation gives."""

    name: str
    type: TensorType


Operand: TypeAlias = "Datum | NewValue"
Argument: TypeAlias = "Operand | np.ndarray | bool | tuple[Operand, ...]"


@dataclass(frozen=True, eq=False)
class NewOperation:
    """An operation to put directly in front of the step `before`."""

    before: Step
    type: str
    inputs: Mapping[str, Argument]
    outputs: tuple[NewValue, ...]


class Draft:
    """Collects new operations and the steps that they make superfluous.

    A new value that stands in for an old one takes its name over, so that users and outputs of the function need no change.

    Attributes:
        operations: in the order in which they are to be inserted.
        removed: steps to remove: nothing uses them any more.
    """

    def __init__(self, flow: Flow) -> None:
        self.operations: list[NewOperation] = []
        self.removed: set[Step] = set()
        self._names = {value.name for value in (*flow.function.inputs, *flow.function.states)}
        for operation in flow.function.block.walk():
            self._names |= {value.name for value in operation.outputs}
            self._names |= {value.name for block in operation.blocks for value in block.inputs}

    def reshape(self, x: Operand, shape: Sequence[int], before: Step, *, instead_of: Datum | None = None) -> Operand:
        """The value itself where it has the shape already, unless it has to stand in for another."""
        if shape_of(x) == tuple(shape) and instead_of is None:
            return x
        return self._add(before, "reshape", {"x": x, "shape": np.array(shape, np.int32)}, x, shape, instead_of)

    def transpose(self, x: Operand, perm: Sequence[int], before: Step, *, instead_of: Datum | None = None) -> Operand:
        shape = [shape_of(x)[axis] for axis in perm]
        return self._add(before, "transpose", {"x": x, "perm": np.array(perm, np.int32)}, x, shape, instead_of)

    def repeat_rows(self, x: Operand, times: int, before: Step) -> Operand:
        """The rows, the last axis but one, so many times over."""
        shape = list(shape_of(x))
        shape[-2] *= times
        inputs: dict[str, Argument] = {
            "values": (x,) * times,
            "axis": np.array(len(shape) - 2, np.int32),
            "interleave": False,
        }
        return self._add(before, "concat", inputs, x, shape, None)

    def matmul(self, x: Operand, y: Operand, transpose_y: bool, before: Step) -> Operand:
        """A product in place of another, `before`, which gives the type."""
        columns = shape_of(y)[-2] if transpose_y else shape_of(y)[-1]
        lead = [max(a, b) for a, b in zip(shape_of(x)[:-2], shape_of(y)[:-2], strict=True)]
        inputs: dict[str, Argument] = {"x": x, "y": y, "transpose_x": False, "transpose_y": transpose_y}
        return self._add(before, "matmul", inputs, before.outputs[0], [*lead, shape_of(x)[-2], columns], None)

    def copy(self, step: Step, inputs: Mapping[str, Argument], shapes: Iterable[Sequence[int]]) -> tuple[Operand, ...]:
        """The operation of a step on other inputs, with results of these shapes."""
        outputs = tuple(
            NewValue(self._unused(f"{old.name}_folded"), TensorType(dtype_of(old), tuple(shape)))
            for old, shape in zip(step.outputs, shapes, strict=True)
        )
        self.operations.append(NewOperation(step, step.type, inputs, outputs))
        return outputs

    def copy_before(self, before: Step, step: Step, inputs: Mapping[str, Argument], shape: Sequence[int]) -> Operand:
        """The operation of a step with one result, elsewhere and on other inputs."""
        return self._add(before, step.type, inputs, step.outputs[0], shape, None)

    def _add(
        self,
        before: Step,
        type_: str,
        inputs: Mapping[str, Argument],
        like: Operand,
        shape: Iterable[int],
        instead_of: Datum | None,
    ) -> NewValue:
        type_of_result = TensorType(dtype_of(like), tuple(int(size) for size in shape))
        name = instead_of.name if instead_of is not None else self._unused(f"{like.name or type_}_folded")
        output = NewValue(name, type_of_result)
        self.operations.append(NewOperation(before, type_, inputs, (output,)))
        return output

    def _unused(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._names:
            count += 1
            name = f"{wanted}_{count}"
        self._names.add(name)
        return name


def shape_of(value: Operand) -> tuple[int, ...]:
    """The shape of a tensor without open dimensions."""
    type_ = value.type if isinstance(value, NewValue) else value.tensor
    assert type_ is not None
    assert type_.is_static
    return tuple(size for size in type_.shape if size is not None)


def dtype_of(value: Operand) -> str:
    type_ = value.type if isinstance(value, NewValue) else value.tensor
    assert type_ is not None
    return type_.dtype


def is_static(datum: Datum) -> bool:
    return datum.tensor is not None and datum.tensor.is_static
