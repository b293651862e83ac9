"""Changes the calls of a plan after it is made: what a mode or a diagnosis does otherwise costs nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ane_layers.interpreter.executor import Plan, Step, SubPlan

Change = Callable[[Step], Step]


def map_steps(plan: Plan, change: Change) -> Plan:
    """The plan with every step changed, those of nested blocks included."""
    return replace(plan, steps=_changed(plan.steps, change))


def _changed(steps: tuple[Step, ...], change: Change) -> tuple[Step, ...]:
    return tuple(change(_with_blocks_changed(step, change)) for step in steps)


def _with_blocks_changed(step: Step, change: Change) -> Step:
    if step.nested is None:
        return step
    place, plans = step.nested
    inner: tuple[SubPlan, ...] = tuple(replace(plan, steps=_changed(plan.steps, change)) for plan in plans)
    return replace(step, nested=(place, inner))
