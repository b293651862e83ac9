"""What a program keeps between calls."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ane_layers.interpreter.interface import check_array, to_numpy
from ane_layers.interpreter.registry import StateCell
from ane_layers.interpreter.values import carrier, from_numpy
from ane_layers.program import Value


class MLState:
    """The states of a program, zero at first; made by `MLProgram.make_state`.

    Every program of the same mode whose states have these names and types accepts it: prefill and decode share one.
    In the modes `"fp16"` and `"fp16_pessimistic"` a state of type fp16 holds fp16 numbers. In the mode `"fp32"` it keeps
    what was written, not rounded.
    """

    def __init__(self, states: Iterable[Value], mode: str) -> None:
        self.mode = mode
        with torch.inference_mode():
            self._cells = {
                state.name: StateCell(
                    state.name,
                    state.tensor_type,
                    torch.zeros(state.tensor_type.shape, dtype=carrier(state.tensor_type.dtype)),  # type: ignore[arg-type]
                )
                for state in states
            }

    def read_state(self, name: str) -> np.ndarray:
        """A copy of the state `name`: in its declared type, or fp32 for fp16 in the mode `"fp32"`.

        Raises:
            ValueError: there is no such state.
        """
        cell = self.cell(name)
        return to_numpy(cell.tensor.clone(), cell.type.dtype, self.mode)

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Sets the state `name` to a copy of `value`.

        Raises:
            ValueError: there is no such state, or the shape differs.
            TypeError: the value is no array of the state's type.
        """
        cell = self.cell(name)
        check_array("state", name, value, cell.type, self.mode)
        with torch.inference_mode():
            cell.tensor = from_numpy(value, cell.type.dtype).clone()

    def cell(self, name: str) -> StateCell:
        """The storage of the state `name`, for the interpreter.

        Raises:
            ValueError: there is no such state.
        """
        if name not in self._cells:
            raise ValueError(f"no state {name!r}; there is {', '.join(sorted(self._cells)) or 'none'}")
        return self._cells[name]
