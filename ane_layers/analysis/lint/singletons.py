"""Which values with a last axis of 1 cannot be otherwise, from what the file shows."""

from __future__ import annotations

from collections.abc import Container

from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.lint.graph import Graph, is_float, shape_of
from ane_layers.analysis.movement import JOINS, SELECTIONS, data_of

_ELEMENTWISE = frozenset(
    {"add", "cast", "exp", "identity", "inverse", "log", "maximum", "minimum", "mul", "pow"}
) | frozenset({"real_div", "rsqrt", "sqrt", "square", "sub"})


def expected_singletons(graph: Graph) -> dict[Datum, str]:
    """Values with a last axis of 1 that something explains, each with what does: the hidden states of a single token and parts of
    them, the result of a reduction over the last axis and what is worked out with it element by element, and a single position on its way
    to the outputs."""
    token = _one_token(graph)
    widest = max(
        (datum.elements or 0 for step in graph.steps for datum in step.outputs if _is_vector(datum)), default=0
    )
    expected: dict[Datum, str] = {}
    vectors: set[Datum] = set()  # of a single position
    for step in graph.steps:
        for datum in step.outputs:
            if not _is_singleton(datum):
                continue
            if _is_vector(datum) and token is not None:
                expected[datum] = token
            elif _is_vector(datum) and (_selects_one(step) or _follows(step, vectors)):
                expected[datum] = "a single position that is selected for the outputs has the shape [1, C, 1, 1]"
                vectors.add(datum)
            elif token is not None and step.type in SELECTIONS and (datum.elements or 0) <= widest:
                expected[datum] = f"{token}; what is cut from them is no larger than they are, and padded once a layer"
            elif token is not None and step.type in JOINS and _follows(step, expected):
                expected[datum] = f"{token}; parts of them are joined once a call"
            elif _reduces(step) or (step.type in _ELEMENTWISE and _follows(step, expected)):
                expected[datum] = "a reduction over the last axis leaves 1 there"
    return expected


def _one_token(graph: Graph) -> str | None:
    """What shows that the function takes one token a call."""
    ids = {name: tensor for name, tensor in graph.integer_inputs.items() if tensor.rank == 2}
    if ids:
        if any(set(tensor.shape) != {1} for tensor in ids.values()):
            return None
        name, tensor = next(iter(ids.items()))
        return f"the function takes one token a call ({name} {tensor}), whose hidden states are [1, C, 1, 1]"
    for name, datum in graph.flow.inputs.items():
        shape = shape_of(datum)
        if len(shape) == 4 and is_float(datum) and _is_vector(datum) and shape[1] != 1:
            return f"the function takes one position a call ({name} {datum.tensor})"
    return None


def _is_singleton(datum: Datum) -> bool:
    shape = shape_of(datum)
    return len(shape) > 1 and shape[-1] == 1 and is_float(datum)


def _is_vector(datum: Datum) -> bool:
    return sum(size != 1 for size in shape_of(datum)) <= 1


def _selects_one(step: Step) -> bool:
    data = data_of(step)
    return step.type in SELECTIONS and data is not None and shape_of(data)[-1:] != (1,)


def _reduces(step: Step) -> bool:
    data = data_of(step)
    return step.type.startswith("reduce_") and data is not None and shape_of(data)[-1:] != (1,)


def _follows(step: Step, known: Container[Datum]) -> bool:
    """Whether every singleton that the operation takes is known, and one is there."""
    taken = [datum for _, datum in step.given() if datum.constant is None and _is_singleton(datum)]
    return bool(taken) and all(datum in known for datum in taken)
