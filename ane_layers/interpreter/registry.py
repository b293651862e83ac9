"""The table of operations: a small typed function for each, entered by the decorator `operation`.

A parameter of such a function is an input of the operation, under the same name. Its annotation says how the input
reaches the function:

- `Tensor`: as it is; `tuple[Tensor, ...]`: an input that takes several values;
- `int`, `float`, `bool`, `str`, `tuple[int, ...]`, `tuple[bool, ...]`: as a plain Python value, converted once when it
  is a constant, on every call when it is not;
- `StateCell`: the state that the input names;
- `Context`: no input: what the program says about the operation itself.

`None` in an annotation and a default value mark an input that may be missing.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from torch import Tensor

from ane_layers.program import TensorType


@dataclass(frozen=True)
class Context:
    """What the program says about one operation.

    `outputs` are the types it declares; `runtime` names the inputs whose values are known only when it runs.
    """

    outputs: tuple[TensorType, ...]
    runtime: frozenset[str]

    @property
    def output(self) -> TensorType:
        return self.outputs[0]


class StateCell:
    """One tensor that lives on between calls, and a way back for a call that fails."""

    def __init__(self, name: str, type_: TensorType, tensor: Tensor) -> None:
        self.name = name
        self.type = type_
        self.tensor = tensor
        self._undo: list[Callable[[], object]] = []

    def replace(self, tensor: Tensor) -> None:
        """Holds `tensor` from now on. It becomes the cell's own: nobody else may change it."""
        before = self.tensor
        self._undo.append(lambda: setattr(self, "tensor", before))
        self.tensor = tensor

    def overwrite(self, part: Tensor, values: Tensor) -> None:
        """Writes `values` into `part`, a view of the cell's tensor."""
        before = part.clone()
        self._undo.append(lambda: part.copy_(before))
        part.copy_(values)

    def commit(self) -> None:
        self._undo.clear()

    def roll_back(self) -> None:
        while self._undo:
            self._undo.pop()()


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
    """

    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    exact: bool
    view: bool


Function = TypeVar("Function", bound=Callable[..., Any])
_TABLE: dict[str, Implementation] = {}


def operation(*names: str, exact: bool = False, view: bool = False) -> Callable[[Function], Function]:
    """Enters a function into the table under the names of the operations it carries out."""

    def enter(function: Function) -> Function:
        implementation = Implementation(function, _parameters(function), exact or view, view)
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
