"""States. Reading gives the state's own tensor; what may change it in place is settled when a program is loaded."""

from __future__ import annotations

from torch import Tensor

from ane_layers.interpreter.operations.slicing import place_of_update
from ane_layers.interpreter.registry import StateCell, operation


@operation("read_state", view=True)
def read_state(input: StateCell) -> Tensor:
    return input.tensor


@operation("write_state", exact=True)
def write_state(input: StateCell, data: Tensor) -> None:
    # The result of an update in place is the state's own tensor already.
    if data is not input.tensor:
        input.replace(data.clone())


def hand_over(input: StateCell, data: Tensor) -> None:
    """`write_state` of a value that nothing else holds: no copy."""
    input.replace(data)


def slice_update_in_place(
    x: StateCell,
    update: Tensor,
    begin: tuple[int, ...],
    end: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    begin_mask: tuple[bool, ...] | None = None,
    end_mask: tuple[bool, ...] | None = None,
    squeeze_mask: tuple[bool, ...] | None = None,
) -> Tensor:
    """`slice_update` of a state's own tensor, for a program that writes the result back to that state."""
    part, values = place_of_update(x.tensor, update, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    x.overwrite(part, values)
    return x.tensor
