"""Refuses programs that no machine of this size can run, before anything is allocated."""

from __future__ import annotations

import math
import os
from functools import cache

from ane_layers.program import Function, StateType, TensorType, Value


@cache
def memory_bytes() -> int:
    """The memory of this machine; 2⁴⁶ bytes where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 46


def check_sizes(function: Function) -> None:
    """Looks at what the states and the results of a function are declared to be.

    A system that gives out more memory than it has would otherwise end the process when the value is filled.

    Raises:
        ValueError: one of them alone does not fit the machine's memory.
    """
    for state in function.states:
        _check(state, f"state {state.name!r}")
    for operation in function.block.walk():
        for value in operation.outputs:
            _check(value, f"operation {operation.name!r} ({operation.type})")


def _check(value: Value, what: str) -> None:
    type_ = value.type.tensor if isinstance(value.type, StateType) else value.type
    if not isinstance(type_, TensorType) or not type_.is_static:
        return
    count = math.prod(size for size in type_.shape if size is not None)
    # Four bytes an element, as it is held while the program runs.
    if 4 * count > memory_bytes():
        raise ValueError(f"{what}: a value of type {type_} takes {4 * count} bytes, more than this machine's memory")
