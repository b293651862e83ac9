"""Constants that are kept in fp16 to save memory, and the operations that need them wider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ane_layers.interpreter.executor import Step
from ane_layers.interpreter.registry import implementations


def widening(rounds: bool) -> Callable[[Step], Step]:
    """A change of steps: constants kept in fp16 are widened on every call, unless the operation takes them as they are.

    Args:
        rounds: results of type fp16 are rounded to it, so a product may read fp16.
    """

    def change(step: Step) -> Step:
        implementation = implementations()[step.operation.type]
        if implementation.stored and (implementation.exact or rounds):
            return step
        places = [place for place, value in enumerate(step.template) if _is_fp16(value)]
        return replace(step, call=_widened(step.call, places)) if places else step

    return change


def _widened(call: Callable[..., Any], places: list[int]) -> Callable[..., Any]:
    def widened(*arguments: Any) -> Any:
        values = list(arguments)
        for place in places:
            values[place] = values[place].float()
        return call(*values)

    return widened


def _is_fp16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16
