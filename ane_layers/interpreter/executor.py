"""Carries out the steps of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ane_layers.interpreter.plain import Convert
from ane_layers.interpreter.values import round_to_fp16
from ane_layers.program import Operation


@dataclass(frozen=True, eq=False)
class Output:
    """Where a result goes and what is held against it. `carrier` is None for what is no tensor: lists, labels."""

    slot: int
    carrier: torch.dtype | None = None
    rounded: bool = False
    shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """One call. `template` are its arguments, with gaps that `gaps`, `groups` and `nested` fill.

    `gaps` and `groups` name slots; `nested` is the place of the argument that takes the operation's own blocks.
    """

    operation: Operation
    call: Any
    template: list[Any]
    gaps: tuple[tuple[int, int, Convert | None], ...]
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    nested: tuple[int, tuple[SubPlan, ...]] | None
    outputs: tuple[Output, ...]
    release: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SubPlan:
    """The steps of a nested block. Its values have slots of their own among those of the function, whose values it sees."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps of a function and where its values stand: `slots` holds the constants, None elsewhere."""

    steps: tuple[Step, ...]
    slots: list[Any]
    inputs: Mapping[str, int]
    states: Mapping[str, int]
    outputs: Mapping[str, int]
    kept: frozenset[str]


class BoundBlock:
    """A nested block within one run of its function, as the operation that holds it calls it."""

    def __init__(self, plan: SubPlan, slots: list[Any]) -> None:
        self._plan = plan
        self._slots = slots

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Runs the block once; what it does to states stays done.

        Raises:
            ValueError: the block takes another number of inputs.
        """
        plan, slots = self._plan, self._slots
        if len(inputs) != len(plan.inputs):
            raise ValueError(f"block takes {len(plan.inputs)} values, {len(inputs)} are given")
        for slot, value in zip(plan.inputs, inputs, strict=True):
            slots[slot] = value
        run(plan.steps, slots)
        return tuple(slots[slot] for slot in plan.outputs)


def run(steps: tuple[Step, ...], slots: list[Any]) -> None:
    """Carries out `steps` on `slots`.

    Raises:
        ValueError: a step cannot be carried out; the message names its operation, and those that hold it.
    """
    for step in steps:
        try:
            arguments = step.template.copy()
            for place, slot, convert in step.gaps:
                arguments[place] = slots[slot] if convert is None else convert(slots[slot])
            for place, group in step.groups:
                arguments[place] = tuple(slots[slot] for slot in group)
            if step.nested is not None:
                place, plans = step.nested
                arguments[place] = tuple(BoundBlock(plan, slots) for plan in plans)
            result = step.call(*arguments)
            if len(step.outputs) == 1:
                _store(step.outputs[0], result[0] if isinstance(result, tuple) else result, slots)
            else:
                for number, output in enumerate(step.outputs):
                    _store(output, result[number], slots)
        except Exception as error:  # whatever damaged programs make torch raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(f"operation {step.operation.name!r} ({step.operation.type}): {reason}") from error
        for slot in step.release:
            slots[slot] = None


def _store(output: Output, value: Any, slots: list[Any]) -> None:
    if output.carrier is not None:
        value = _checked(output, value)
    slots[output.slot] = value


def _checked(output: Output, value: Tensor) -> Tensor:
    if value.dtype is not output.carrier:
        value = value.to(output.carrier)
    if output.rounded:
        value = round_to_fp16(value)
    if output.shape is not None and value.shape != output.shape:
        raise ValueError(f"result has shape {list(value.shape)}, the program says {list(output.shape)}")
    return value
