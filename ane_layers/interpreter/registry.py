"""The table of operations: a small typed function for each, entered by the decorator `operation`.

A parameter of such a function is an input of the operation, under the same name. Its annotation says how the input
reaches the function:

- `Tensor`: as it is; `tuple[Tensor, ...]`: an input that takes several values;
- `int`, `float`, `bool`, `str`, `tuple[int, ...]`, `tuple[bool, ...]`: as a plain Python value, converted once when it
  is a constant, on every call when it is not; `Labels`: a constant list;
- `TensorList`: a list of tensors; `StateCell`: the state that the input names;
- `Ignored`: not at all, since the declared type of the result says the same;
- `tuple[NestedBlock, ...]`: no input: the operation's own blocks; `Context`: no input: what the program says about the
  operation itself; `RandomSource`: no input: where this operation's random numbers come from.

`None` in an annotation and a default value mark an input that may be missing.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ane_layers.program import ListType, TensorType, ValueType

# The opsets in which an index below 0 counts from the end; from iOS17 on it is out of range.
_NEGATIVE_INDICES = ("CoreML5", "CoreML6")


@dataclass(frozen=True)
class Context:
    """What the program says about one operation.

    `outputs` are the types it declares; `runtime` names the inputs whose values are known only when it runs; `opset` is
    that of the function ("CoreML8" for iOS18).
    """

    outputs: tuple[ValueType, ...]
    runtime: frozenset[str]
    opset: str

    @property
    def output(self) -> TensorType:
        """The type of the first result, of its elements where that is a list.

        Raises:
            ValueError: it is neither.
        """
        type_ = self.outputs[0]
        type_ = type_.element if isinstance(type_, ListType) else type_
        if not isinstance(type_, TensorType):
            raise ValueError(f"result is a {type(type_).__name__}, expected a tensor")
        return type_

    @property
    def negative_indices(self) -> bool:
        return self.opset in _NEGATIVE_INDICES


class Ignored:
    """Marks an input that is accepted and not looked at."""


class NestedBlock(Protocol):
    """A block of an operation: run with its inputs, it gives its outputs."""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]: ...


@dataclass(frozen=True, eq=False)
class TensorList:
    """A list of tensors, itself a value: writing gives a new list. None stands where nothing was written yet."""

    elements: tuple[Tensor | None, ...]
    grows: bool


class RandomSource:
    """The random numbers of one operation: a sequence of its own, which goes on from call to call."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None

    def generator(self, seed: int) -> torch.Generator:
        """The generator, started with `seed` when it is first used; below 0 it starts anywhere."""
        if self._generator is None:
            self._generator = torch.Generator()
            if seed >= 0:
                self._generator.manual_seed(seed)
            else:
                self._generator.seed()
        return self._generator


class StateCell:
    """One tensor that lives on between calls, and a way back for a call that fails."""

    def __init__(self, name: str, type_: TensorType, tensor: Tensor) -> None:
        self.name = name
        self.type = type_
        self.tensor = tensor
        self._undo: list[Callable[[], object]] = []
        self._replaced = False

    def replace(self, tensor: Tensor) -> None:
        """Holds `tensor` from now on. It becomes the cell's own: nobody else may change it."""
        if not self._replaced:
            before = self.tensor
            self._undo.append(lambda: setattr(self, "tensor", before))
            # Whatever is done to the new tensor is undone with it: a loop of writes keeps one old tensor, not all.
            self._replaced = True
        self.tensor = tensor

    def overwrite(self, part: Tensor, values: Tensor) -> None:
        """Writes `values` into `part`, a view of the cell's tensor."""
        if not self._replaced:
            before = part.clone()
            self._undo.append(lambda: part.copy_(before))
        part.copy_(values)

    def commit(self) -> None:
        self._undo.clear()
        self._replaced = False

    def roll_back(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._replaced = False


@dataclass(frozen=True)
class Parameter:
    """An input of an operation as its function wants it."""

    name: str
    kind: Any
    required: bool
    default: Any


@dataclass(frozen=True)
class Implementation:
    """How an operation is carried out.

    `exact`: the result holds only elements of the inputs, so it needs no rounding.
    `view`: the result may share memory with the inputs.
    `plain`: the results are plain Python values, which a caller gets as they are.
    `stored`: takes constants of type fp16 as they are stored, without a copy in fp32: always if it is `exact`, else where
    results are rounded to fp16 anyway.
    """

    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    exact: bool
    view: bool
    plain: bool
    stored: bool


Function = TypeVar("Function", bound=Callable[..., Any])
_TABLE: dict[str, Implementation] = {}


def operation(
    *names: str, exact: bool = False, view: bool = False, plain: bool = False, stored: bool = False
) -> Callable[[Function], Function]:
    """Enters a function into the table under the names of the operations it carries out."""

    def enter(function: Function) -> Function:
        implementation = Implementation(function, _parameters(function), exact or view, view, plain, stored)
        for name in names:
            if name in _TABLE:
                raise ValueError(f"operation {name!r} is entered twice")
            _TABLE[name] = implementation
        return function

    return enter


def implementations() -> Mapping[str, Implementation]:
    """Every operation that the interpreter carries out, by name."""
    return _TABLE


def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(function)
    return tuple(
        Parameter(name, _without_none(hints[name]), entry.default is inspect.Parameter.empty, entry.default)
        for name, entry in inspect.signature(function).parameters.items()
    )


def _without_none(hint: Any) -> Any:
    options = [option for option in typing.get_args(hint) if option is not NoneType]
    return options[0] if NoneType in typing.get_args(hint) else hint
