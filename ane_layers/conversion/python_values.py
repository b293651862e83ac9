"""Values of tensors that Python reads while tracing: what they were then would be fixed in the package."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import einops
import torch
from torch import Tensor
from torch.jit import TracerWarning  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

import ane_layers
from ane_layers.conversion.errors import ConversionError

Place = tuple[str, int]
"""File and line."""

# Where a tensor's size is looked at while tracing, which is as fixed in the program as in the trace.
_HARMLESS = tuple(Path(inspect.getfile(package)).parent for package in (ane_layers, einops, torch))

# Methods of tensors that are written in Python: who called them reads.
_METHODS = {inspect.getfile(module) for module in (sys.modules["torch._tensor"], torch.overrides)}

_READS = {
    getattr(Tensor, name)
    for name in (
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "__contains__"),
        *("item", "tolist", "numpy"),
    )
}

# Of sizes and constants these make what is fixed as well. No views and nothing in place: a later write could change what was read.
_ARITHMETIC = {
    *("prim::NumToTensor", "aten::Int", "aten::ScalarImplicit", "aten::neg", "aten::abs", "aten::sqrt", "aten::ceil"),
    *(
        "aten::floor",
        "aten::add",
        "aten::sub",
        "aten::rsub",
        "aten::mul",
        "aten::div",
        "aten::floor_divide",
        "aten::pow",
    ),
    *("aten::remainder", "aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::minimum"),
    *("aten::maximum", "aten::logical_and", "aten::logical_or", "aten::logical_not", "aten::any", "aten::all"),
    *("aten::__and__", "aten::__or__", "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_not"),
}

# Their results' sizes are values.
_SIZED_BY_VALUES = {
    *(
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::argwhere",
        "aten::masked_select",
        "aten::_unique2",
        "aten::bincount",
    ),
    *("aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"),
}


def refuse_read_values(
    caught: Sequence[warnings.WarningMessage], states: Collection[str], trace: Callable[[], object]
) -> None:
    """Refuses a module whose own code reads the value of a tensor, in a branch or by `int()`, unless it follows from shapes and constants.

    Args:
        caught: warnings of a trace. Where the tracer says that nothing was read, there is nothing to do.
        states: names under which the outermost module has its states.
        trace: traces once more: the tracer's warnings do not tell a size from a value.

    Raises:
        ConversionError: naming file and line.
    """
    warned = {
        (warning.filename, warning.lineno)
        for warning in caught
        if issubclass(warning.category, TracerWarning) and "Converting a tensor to" in str(warning.message)
    }
    if not any(_is_own(place) or place[0] in _METHODS for place in warned):
        return
    with warnings.catch_warnings(), _Reads(states) as reads:
        warnings.simplefilter("ignore")
        trace()
    unseen = {place for place in warned if _is_own(place)} - reads.fixed
    for file, line in [*reads.values, *sorted(unseen)]:
        raise ConversionError(
            f"{Path(file).name}:{line}: Python reads the value of a tensor (a branch, int() or item()); what it was while tracing would be "
            "fixed in the package; compute with tensors instead, as with torch.where"
        )


def _is_own(place: Place) -> bool:
    """Whether it is in the user's code."""
    return not any(Path(place[0]).is_relative_to(folder) for folder in _HARMLESS)


class _Reads(TorchFunctionMode):
    """Notes where the user's code reads a traced tensor into Python.

    Attributes:
        fixed: places where what was read follows from shapes and constants, every time.
        values: the others, in the order in which they were reached.
    """

    def __init__(self, states: Collection[str]) -> None:
        super().__init__()
        self._states = set(states)
        self.fixed: set[Place] = set()
        self.values: dict[Place, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and torch._C._is_tracing():
            frame = sys._getframe(1)
            while frame.f_code.co_filename in _METHODS and frame.f_back is not None:
                frame = frame.f_back
            place = frame.f_code.co_filename, frame.f_lineno
            if _is_own(place):
                self._note(place, args)
        return func(*args, **(kwargs or {}))

    def _note(self, place: Place, args: Sequence[Any]) -> None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if place not in self.values and all(_is_fixed(_traced(value), self._states) for value in tensors):
            self.fixed.add(place)
        else:
            self.fixed.discard(place)
            self.values[place] = None


def _traced(tensor: Tensor) -> Any:
    """The value of the trace that a tensor is now."""
    return torch._C._get_value_trace(tensor)  # type: ignore[attr-defined]


def _is_fixed(value: Any, states: set[str]) -> bool:
    """Whether a traced value is made of sizes and constants by arithmetic alone."""
    for node in _nodes(value, through=_ARITHMETIC):
        kind = node.kind()
        if kind == "prim::TracedAttr":  # a parameter or buffer: a constant, unless it is a state
            fixed = node.s("scope").rpartition(".")[2] not in states
        elif kind == "aten::size":
            fixed = not any(_is_sized_by_values(each) for each in _nodes(next(node.inputs())))
        else:
            fixed = kind == "prim::Constant" or kind in _ARITHMETIC
        if not fixed:
            return False
    return True


def _is_sized_by_values(node: Any) -> bool:
    if node.kind() != "aten::index":
        return node.kind() in _SIZED_BY_VALUES
    indices = list(node.inputs())[1].node().inputs()
    return any(str(index.type().scalarType()) in ("Bool", "Byte") for index in indices if index.isCompleteTensor())


def _nodes(value: Any, *, through: Collection[str] | None = None) -> Iterator[Any]:
    """What made a traced value, and from there back to the inputs; or as far as operations `through` which to go."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if value.debugName() in seen:
            continue
        seen.add(value.debugName())
        node = value.node()
        yield node
        if through is None or node.kind() in through:
            waiting.extend(node.inputs())
