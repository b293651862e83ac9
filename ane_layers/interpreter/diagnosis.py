"""Where numbers leave fp16: which operation first made an infinity or a NaN, or numbers too small for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ane_layers.interpreter.executor import Step
from ane_layers.interpreter.registry import implementations
from ane_layers.interpreter.values import round_to_fp16
from ane_layers.interpreter.weights import is_constant
from ane_layers.program import Argument, Block, Function, Reference, TensorType

Kind: TypeAlias = Literal["overflow", "nan", "subnormal"]
_KINDS: tuple[Kind, ...] = get_args(Kind)

# The smallest normal fp16 number. Below it digits are lost, and engines are free to make it zero.
SMALLEST_NORMAL = 2.0**-14


@dataclass(frozen=True)
class Finding:
    """What one operation did to numbers.

    Attributes:
        function: that it belongs to.
        operation: its name.
        type: its type.
        kind: `"overflow"`: an infinite result of finite inputs, and for results of type fp16 one beyond its 65504 (which
            the mode `"fp32"` goes on with). `"nan"`: a NaN that no input had. `"subnormal"`: a result that is not zero
            in fp32, and zero or subnormal in its type fp16.
        count: such elements, over all calls.
        call: number of the first call in which it happened, from 0.
        index: place of the first such element in the result.
        near: the weight that this operation or one before it last used, such as `model_layers_3_mlp_down_proj_weight`: converters keep
            weights' names, and seldom those of layers. Empty if there is none.
    """

    function: str
    operation: str
    type: str
    kind: Kind
    count: int
    call: int
    index: tuple[int, ...]
    near: str = ""

    def __str__(self) -> str:
        what = {"overflow": "infinite in fp16", "nan": "NaN", "subnormal": "subnormal or flushed to zero in fp16"}
        return (
            f"function {self.function!r}, operation {self.operation!r} ({self.type}): {self.count} elements {what[self.kind]}, "
            f"first at {list(self.index)} in call {self.call}{f', near {self.near}' if self.near else ''}"
        )


class Diagnosis:
    """Collects findings of one program. Operations that only pass elements on are not looked at."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._dtypes = dict(_dtypes(function))
        self._near = dict(_nearest_weights(function.block))
        names = [output.name for operation in function.block.walk() for output in operation.outputs]
        self._places = {name: place for place, name in enumerate(names)}
        self._found: dict[tuple[str, Kind], Finding] = {}
        self._call = -1

    @property
    def findings(self) -> tuple[Finding, ...]:
        """In the order of the operations in the program, whichever call they happened in; of one, overflow, NaN, subnormal."""
        return tuple(
            self._found[key]
            for key in sorted(self._found, key=lambda key: (self._places[key[0]], _KINDS.index(key[1])))
        )

    def begin(self) -> None:
        """Notes that a further call begins."""
        self._call += 1

    def observe(self, step: Step) -> Step:
        """The step with a call that also looks at its results."""
        implementation = implementations()[step.operation.type]
        if implementation.exact or step.nested is not None:
            return step
        module = implementation.function.__module__.rpartition(".")[2]
        by_element = module in ("elementwise", "activations") and step.operation.type != "softmax"
        names = [parameter.name for parameter in implementation.parameters]
        arguments = {name: step.operation.inputs.get(name, ()) for name in names}
        narrow = [[self._is_fp16(argument) for argument in arguments[name]] for name in names]
        call: Callable[..., Any] = step.call

        def observed(*given: Any) -> Any:
            result = call(*given)
            results = result if isinstance(result, tuple) else (result,)
            for output, value in zip(step.operation.outputs, results, strict=False):
                if isinstance(value, Tensor) and value.is_floating_point() and isinstance(output.type, TensorType):
                    self._examine(step, value, output.type.dtype == "fp16", _flat(given, narrow), by_element)
            return result

        return replace(step, call=observed)

    def _is_fp16(self, argument: Argument) -> bool:
        if isinstance(argument, Reference):
            return self._dtypes.get(argument.name) == "fp16"
        return isinstance(argument.type, TensorType) and argument.type.dtype == "fp16"

    def _examine(
        self, step: Step, value: Tensor, narrow: bool, inputs: Iterator[tuple[Any, bool]], by_element: bool
    ) -> None:
        held = round_to_fp16(value) if narrow else value
        if not bool(held.isfinite().all()):
            known_nan, known_infinite = _known(inputs, held.shape if by_element else None)
            self._note(step, "nan", held.isnan() & ~known_nan)
            self._note(step, "overflow", held.isinf() & ~known_infinite)
        if narrow:
            self._note(step, "subnormal", (value != 0) & (value.abs() < SMALLEST_NORMAL))

    def _note(self, step: Step, kind: Kind, places: Tensor) -> None:
        count = int(places.count_nonzero())
        if count == 0:
            return
        operation = step.operation
        key: tuple[str, Kind] = operation.outputs[0].name, kind
        before = self._found.get(key)
        if before is None:
            index = tuple(places.nonzero()[0].tolist())
            before = Finding(
                self._function.name,
                operation.name,
                operation.type,
                kind,
                0,
                self._call,
                index,
                self._near[operation.name],
            )
        self._found[key] = replace(before, count=before.count + count)


def _flat(given: tuple[Any, ...], narrow: list[list[bool]]) -> Iterator[tuple[Any, bool]]:
    for value, flags in zip(given, narrow, strict=True):
        parts = value if isinstance(value, tuple) else (value,)
        for number, part in enumerate(parts):
            yield part, number < len(flags) and flags[number]


def _known(inputs: Iterator[tuple[Any, bool]], shape: torch.Size | None) -> tuple[Tensor, Tensor]:
    """Where inputs are NaN, and where they are not finite, in places of `shape`; over all their elements if that is None."""
    nan = infinite = torch.zeros((), dtype=torch.bool)
    for value, narrow in inputs:
        if isinstance(value, float):
            nan, infinite = nan | math.isnan(value), infinite | (not math.isfinite(value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        held = round_to_fp16(value) if narrow else value
        own_nan, own_infinite = held.isnan(), ~held.isfinite()
        if shape is None or not _broadcasts(held.shape, shape):
            own_nan, own_infinite = own_nan.any(), own_infinite.any()
        nan, infinite = nan | own_nan, infinite | own_infinite
    return nan, infinite


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _dtypes(function: Function) -> Iterator[tuple[str, str]]:
    values = [*function.inputs, *_made(function.block)]
    return ((value.name, value.type.dtype) for value in values if isinstance(value.type, TensorType))


def _made(block: Block) -> Iterator[Any]:
    for operation in block.walk():
        yield from operation.outputs
        for inner in operation.blocks:
            yield from inner.inputs


def _nearest_weights(block: Block) -> Iterator[tuple[str, str]]:
    """For each operation, the name of the weight that was used last up to it."""
    constants = {output.name for operation in block.walk() if is_constant(operation) for output in operation.outputs}
    near = ""
    for operation in block.walk():
        for argument in operation.inputs.get("weight", ()):
            if isinstance(argument, Reference) and argument.name in constants:
                near = argument.name
        yield operation.name, near
