"""Operations that hand on the elements of one value, and what they do to where each element stands."""

from __future__ import annotations

import numpy as np

from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.movement import repeats
from ane_layers.rewrite.draft import shape_of

_VIEWS = frozenset({"expand_dims", "identity", "reshape", "squeeze"})
_JOINS = frozenset({"concat", "stack"})
_ARITHMETIC = frozenset({"add", "mul", "real_div", "sub"})


def passes(step: Step) -> bool:
    """Whether the operation hands on the elements of one value: moved, repeated, or changed one by one in the same way."""
    return step.depth == 0 and (_moves(step) or is_pointwise(step))


def is_pointwise(step: Step) -> bool:
    """A cast, or arithmetic with one constant number."""
    if step.type == "cast":
        return True
    if step.type not in _ARITHMETIC or repeats(step):
        return False
    x, y = step.one("x"), step.one("y")
    numbers = [datum for datum in (x, y) if datum is not None and datum.constant is not None and datum.elements == 1]
    return len(numbers) == 1 and len(shape_of(numbers[0])) <= 1


def data_input(step: Step) -> Datum | None:
    """The value that a step which `passes` hands on; for a concat or stack, what all its values are views of."""
    if step.type in _JOINS:
        values = {_seen_through(datum) for datum in step.inputs.get("values", ())}
        return values.pop() if len(values) == 1 else None
    if step.type in _ARITHMETIC:
        x, y = step.one("x"), step.one("y")
        data = [datum for datum in (x, y) if datum is not None and datum.constant is None]
        return data[0] if len(data) == 1 else None
    return step.one("x")


def carry_out(step: Step, numbers: np.ndarray, result: Datum) -> np.ndarray:
    """What a step that `passes` makes of numbers in place of the elements it is given."""
    shape = shape_of(result)
    if step.type in _VIEWS or is_pointwise(step):
        return numbers.reshape(shape)
    if step.type in _ARITHMETIC:
        return np.broadcast_to(numbers, shape)
    if step.type == "transpose":
        return numbers.transpose(_integers(step, "perm"))
    if step.type == "tile":
        return np.tile(numbers, _integers(step, "reps"))
    if step.type == "gather":
        return np.take(numbers, _integers(step, "indices"), axis=_integers(step, "axis")[0])
    values = [numbers.reshape(shape_of(value)) for value in step.inputs["values"]]
    axis = _integers(step, "axis")[0]
    return np.stack(values, axis) if step.type == "stack" else np.concatenate(values, axis)


def _moves(step: Step) -> bool:
    if step.type in _VIEWS:
        return True
    if step.type == "transpose":
        return _known(step, "perm")
    if step.type == "tile":
        return _known(step, "reps")
    if step.type == "gather":
        indices, batch = step.one("indices"), step.one("batch_dims")
        plain = batch is None or batch.numbers == (0,)
        return plain and _known(step, "axis") and _known(step, "indices") and len(shape_of(indices)) == 1  # type: ignore[arg-type]
    if step.type in _JOINS:
        interleave = step.one("interleave")
        plain = interleave is None or (interleave.constant is not None and not interleave.constant.array().any())
        return plain and _known(step, "axis") and data_input(step) is not None
    return step.type in _ARITHMETIC and repeats(step) and data_input(step) is not None


def _known(step: Step, parameter: str) -> bool:
    datum = step.one(parameter)
    return datum is not None and datum.numbers is not None


def _integers(step: Step, parameter: str) -> tuple[int, ...]:
    datum = step.one(parameter)
    assert datum is not None
    assert datum.numbers is not None
    return datum.numbers


def _seen_through(datum: Datum) -> Datum:
    while datum.step is not None and datum.step.depth == 0 and datum.step.type in _VIEWS:
        data = datum.step.one("x")
        if data is None:
            break
        datum = data
    return datum


def inner_views(step: Step) -> list[Step]:
    """The views between a concat or stack and the value that it joins with itself."""
    found: list[Step] = []
    if step.type in _JOINS:
        end = data_input(step)
        for datum in step.inputs["values"]:
            while datum is not end and datum.step is not None:
                found.append(datum.step)
                datum = datum.step.one("x") or datum
    return list(dict.fromkeys(found))
