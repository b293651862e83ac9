"""Runs a saved ML Program on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ane_layers.interpreter.axes import check_axes
from ane_layers.interpreter.compactness import widening
from ane_layers.interpreter.diagnosis import Diagnosis, Finding
from ane_layers.interpreter.executor import run
from ane_layers.interpreter.interface import MODES, Mode, to_numpy, to_tensors
from ane_layers.interpreter.limits import check_sizes
from ane_layers.interpreter.pessimism import narrow
from ane_layers.interpreter.plan import build
from ane_layers.interpreter.registry import StateCell
from ane_layers.interpreter.rewriting import map_steps
from ane_layers.interpreter.state import MLState
from ane_layers.program import Package, TensorType


class MLProgram:
    """One function of a package, ready to run; the interface is that of coremltools' `MLModel`.

    It shows what the program computes. It shows nothing of where Core ML would run it or how fast.

    Args:
        path: the `.mlpackage`, or one that is already open.
        function_name: the function to run; the package's default one if None.
        mode: `"fp32"` computes in fp32 throughout: what the program means, free of rounding. Constants are as stored;
            values, states and outputs of type fp16 are fp32 numbers, not rounded. `"fp16"` rounds the result of every
            operation to the type it declares; inside one operation (a product, a convolution, a sum, softmax) it
            accumulates in fp32. `"fp16_pessimistic"` is the same, but softmax, norms and reductions whose result is fp16
            round every step inside as well and sum one element after the other in fp16 (`pessimism.py`). The engine
            accumulates in its own ways: expect agreement within fp16, not bits.
        compact: keep large fp16 constants in fp16, mapped from the file, rather than decoded to fp32 once: half the memory. In the
            mode `"fp32"` each is widened whenever an operation needs it, which takes longer; in the fp16 modes a product with one
            token reads it as it is.
        diagnose: collect `findings`. A call then takes longer; without it, nothing is looked at.

    Raises:
        ValueError: the package is unsound, the function or mode unknown, or operations are not supported: all their
            types are named.

    Example:
        >>> decode = MLProgram("model.mlpackage", "decode", mode="fp16")
        >>> state = decode.make_state()
        >>> decode.predict({"inputIds": ids, "position": position, "causalMask": mask}, state)["logits"]
    """

    def __init__(
        self,
        path: str | Path | Package,
        function_name: str | None = None,
        mode: Mode = "fp32",
        *,
        diagnose: bool = False,
        compact: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected {' or '.join(MODES)}")
        self.package = path if isinstance(path, Package) else Package.open(path)
        self.function = self.package.function(function_name)
        self.mode = mode
        check_sizes(self.function)
        check_axes(self.function)
        try:
            with torch.inference_mode():
                self._plan = build(self.function, rounds=mode != "fp32", compact=compact)
        except ValueError:
            raise
        except Exception as error:  # whatever damaged programs make numpy and torch raise
            raise ValueError(f"function {self.function.name!r} is unsound: {type(error).__name__}: {error}") from error
        if compact:
            self._plan = map_steps(self._plan, widening(rounds=mode != "fp32"))
        if mode == "fp16_pessimistic":
            self._plan = map_steps(self._plan, narrow)
        self._diagnosis = Diagnosis(self.function) if diagnose else None
        if self._diagnosis is not None:
            self._plan = map_steps(self._plan, self._diagnosis.observe)
        self._output_types = {
            value.name: value.type.dtype for value in self.function.outputs if isinstance(value.type, TensorType)
        }

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Where numbers left fp16 so far, in the order of the program's operations; empty without `diagnose`."""
        return () if self._diagnosis is None else self._diagnosis.findings

    def make_state(self) -> MLState:
        """Fresh states, all zero."""
        return MLState(self.function.states, self.mode)

    def predict(self, data: Mapping[str, np.ndarray], state: MLState | None = None) -> dict[str, Any]:
        """Runs the function once. If that fails, the state is what it was before.

        Args:
            data: an array for each input, of its declared type and shape.
            state: from `make_state` of this or another function with the same states; it is updated.

        Returns:
            Each output by name: an array of its declared type (fp32 for fp16 in the mode `"fp32"`); of a classifier
            the label, a string or an integer, and a dictionary of probabilities by label.

        Raises:
            ValueError: an input is missing, unknown or of another shape; the state is missing or does not fit; or an
                operation cannot be carried out, a slice out of range for instance. The message names it.
            TypeError: an input is no array of its type.
        """
        plan = self._plan
        if self._diagnosis is not None:
            self._diagnosis.begin()
        with torch.inference_mode():
            slots = plan.slots.copy()
            for name, tensor in to_tensors(self.function, data, self.mode).items():
                slots[plan.inputs[name]] = tensor
            cells = self._cells(state)
            for cell in cells:
                slots[plan.states[cell.name]] = cell
            try:
                run(plan.steps, slots)
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

    def _output(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # What shares memory with a state or a constant would change, or change it, behind the caller's back.
        if name in self._plan.kept:
            value = value.clone()
        return to_numpy(value, self._output_types[name], self.mode)


def _names(values: Any) -> str:
    return ", ".join(value.name for value in values)
