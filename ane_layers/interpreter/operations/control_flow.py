"""Operations that run blocks of their own. A block sees the values around it; what it writes to a state stays written."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ane_layers.interpreter.registry import NestedBlock, operation


@operation("cond", view=True)
def cond(pred: bool, blocks: tuple[NestedBlock, ...]) -> tuple[Any, ...]:
    if_true, if_false = blocks
    return if_true() if pred else if_false()


@operation("while_loop", view=True)
def while_loop(loop_vars: tuple[Tensor, ...], blocks: tuple[NestedBlock, ...]) -> tuple[Any, ...]:
    """Nothing bounds the number of rounds: a program that never ends on a device never ends here."""
    condition, body = blocks
    values: tuple[Any, ...] = loop_vars
    while condition(*values)[0].item():
        values = body(*values)
    return values
