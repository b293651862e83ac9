"""Runs a saved ML Program on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ane_layers.interpreter.interface import MODES, to_numpy, to_tensors
from ane_layers.interpreter.plan import Step, build
from ane_layers.interpreter.registry import StateCell
from ane_layers.interpreter.state import MLState
from ane_layers.interpreter.values import round_to_fp16
from ane_layers.program import Package


class MLProgram:
    """One function of a package, ready to run; the interface is that of coremltools' `MLModel`.

    It shows what the program computes. It shows nothing of where Core ML would run it or how fast.

    Args:
        path: the `.mlpackage`, or one that is already open.
        function_name: the function to run; the package's default one if None.
        mode: `"fp32"` computes in fp32 throughout: what the program means, free of rounding. Constants are as stored;
            values, states and outputs of type fp16 are fp32 numbers, not rounded. `"fp16"` rounds the result of every
            operation to the type it declares; inside one operation (a product, a convolution, a sum, softmax) it
            accumulates in fp32. The engine accumulates in its own ways: expect agreement within fp16, not bits.

    Raises:
        ValueError: the package is unsound, the function or mode unknown, or operations are not supported: all their
            types are named.

    Example:
        >>> decode = MLProgram("model.mlpackage", "decode", mode="fp16")
        >>> state = decode.make_state()
        >>> decode.predict({"inputIds": ids, "position": position, "causalMask": mask}, state)["logits"]
    """

    def __init__(
        self, path: str | Path | Package, function_name: str | None = None, mode: Literal["fp32", "fp16"] = "fp32"
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected {' or '.join(MODES)}")
        self.package = path if isinstance(path, Package) else Package.open(path)
        self.function = self.package.function(function_name)
        self.mode = mode
        with torch.inference_mode():
            self._plan = build(self.function, rounds=mode == "fp16")
        self._output_types = {value.name: value.tensor_type.dtype for value in self.function.outputs}

    def make_state(self) -> MLState:
        """Fresh states, all zero."""
        return MLState(self.function.states, self.mode)

    def predict(self, data: Mapping[str, np.ndarray], state: MLState | None = None) -> dict[str, np.ndarray]:
        """Runs the function once. If that fails, the state is what it was before.

        Args:
            data: an array for each input, of its declared type and shape.
            state: from `make_state` of this or another function with the same states; it is updated.

        Returns:
            Each output by name, in its declared type (fp32 for fp16 in the mode `"fp32"`).

        Raises:
            ValueError: an input is missing, unknown or of another shape; the state is missing or does not fit; or an
                operation cannot be carried out, a slice out of range for instance. The message names it.
            TypeError: an input is no array of its type.
        """
        plan = self._plan
        with torch.inference_mode():
            slots = plan.slots.copy()
            for name, tensor in to_tensors(self.function, data, self.mode).items():
                slots[plan.inputs[name]] = tensor
            cells = self._cells(state)
            for cell in cells:
                slots[plan.states[cell.name]] = cell
            try:
                self._run(slots)
                outputs = {name: self._output(name, slots[slot]) for name, slot in plan.outputs.items()}
            except BaseException:
                # An interrupt in the middle must not leave half of a step in the cache either.
                for cell in cells:
                    cell.roll_back()
                raise
            for cell in cells:
                cell.commit()
        return outputs

    def _cells(self, state: MLState | None) -> list[StateCell]:
        states = self.function.states
        if not states:
            return []
        if state is None:
            raise ValueError(f"state is missing; function {self.function.name!r} has {_names(states)}")
        if state.mode != self.mode:
            raise ValueError(f"state is of mode {state.mode!r}, the program of mode {self.mode!r}")
        cells = [state.cell(value.name) for value in states]
        for value, cell in zip(states, cells, strict=True):
            if cell.type != value.tensor_type:
                raise ValueError(
                    f"state {value.name!r} is {cell.type}, function {self.function.name!r} has {value.tensor_type}"
                )
        return cells

    def _run(self, slots: list[Any]) -> None:
        for step in self._plan.steps:
            try:
                arguments = step.template.copy()
                for place, slot, convert in step.gaps:
                    arguments[place] = slots[slot] if convert is None else convert(slots[slot])
                for place, group in step.groups:
                    arguments[place] = tuple(slots[slot] for slot in group)
                result = step.call(*arguments)
                if len(step.outputs) == 1:
                    _store(step, 0, result if isinstance(result, Tensor) else result[0], slots)
                else:
                    for number in range(len(step.outputs)):
                        _store(step, number, result[number], slots)
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise ValueError(f"operation {step.operation.name!r} ({step.operation.type}): {reason}") from error
            for slot in step.release:
                slots[slot] = None

    def _output(self, name: str, value: Tensor) -> np.ndarray:
        # What shares memory with a state or a constant would change, or change it, behind the caller's back.
        if name in self._plan.kept:
            value = value.clone()
        return to_numpy(value, self._output_types[name], self.mode)


def _store(step: Step, number: int, value: Tensor, slots: list[Any]) -> None:
    slot, carrier, rounded, shape = step.outputs[number]
    if value.dtype is not carrier:
        value = value.to(carrier)
    if rounded:
        value = round_to_fp16(value)
    if shape is not None and value.shape != shape:
        raise ValueError(f"result has shape {list(value.shape)}, the program says {list(shape)}")
    slots[slot] = value


def _names(values: Any) -> str:
    return ", ".join(value.name for value in values)
