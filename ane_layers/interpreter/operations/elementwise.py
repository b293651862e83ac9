"""Arithmetic, comparison and selection, element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ane_layers.interpreter.registry import Context, operation
from ane_layers.interpreter.values import carrier, wrap

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "floor": torch.floor,
    "logical_not": torch.logical_not,
    "round": torch.round,
    "sign": torch.sign,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
}

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "equal": torch.eq,
    "floor_div": torch.floor_divide,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mod": torch.remainder,
    "mul": torch.mul,
    "not_equal": torch.ne,
    "pow": torch.pow,
    "real_div": torch.true_divide,
    "sub": torch.sub,
}


def _enter_unary(name: str, compute: Callable[[Tensor], Tensor]) -> None:
    @operation(name)
    def unary(x: Tensor) -> Tensor:
        return compute(x)


def _enter_binary(name: str, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operation(name)
    def binary(x: Tensor, y: Tensor) -> Tensor:
        return compute(x, y)


for _name, _unary in _UNARY.items():
    _enter_unary(_name, _unary)
for _name, _binary in _BINARY.items():
    _enter_binary(_name, _binary)


@operation("inverse")
def inverse(x: Tensor, epsilon: float = 1e-4) -> Tensor:
    return torch.reciprocal(x + epsilon)


@operation("log")
def log(x: Tensor, epsilon: float = 1e-45) -> Tensor:
    return torch.log(x + epsilon)


@operation("rsqrt")
def rsqrt(x: Tensor, epsilon: float = 1e-12) -> Tensor:
    return torch.rsqrt(x + epsilon)


@operation("clip")
def clip(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.clamp(x, alpha, beta)


@operation("threshold")
def threshold(x: Tensor, alpha: float) -> Tensor:
    return torch.clamp(x, min=alpha)


@operation("select", exact=True)
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(cond, a, b)


@operation("cast")
def cast(x: Tensor, dtype: str, context: Context) -> Tensor:
    # The declared type rather than `dtype`: that spells some types otherwise ("fp64", which becomes fp32).
    del dtype
    target = context.output.dtype
    if target == "bool":
        return x != 0
    return wrap(x.to(carrier(target), copy=True), target)
