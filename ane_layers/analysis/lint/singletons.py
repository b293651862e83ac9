"""Which values with a last axis of 1 cannot be otherwise, from what the file shows."""

from __future__ import annotations

from collections.abc import Container

from ane_layers.analysis.caches import Caches
from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.lint.graph import Graph, is_float, shape_of
from ane_layers.analysis.movement import JOINS, SELECTIONS, data_of, root
from ane_layers.analysis.tokens import tokens

_ELEMENTWISE = frozenset(
    {"add", "cast", "exp", "identity", "inverse", "log", "maximum", "minimum", "mul", "pow"}
) | frozenset({"real_div", "rsqrt", "sqrt", "square", "sub"})


def expected_singletons(graph: Graph) -> dict[Datum, str]:
    """Values with a last axis of 1 that something explains, each with what does: the hidden states of a single token and parts of
    them, its score against the one new key, the result of a reduction over the last axis, what is worked out with these element by element,
    and a single position on its way to the outputs."""
    token = _one_token(graph)
    widest = max(
        (datum.elements or 0 for step in graph.steps for datum in step.outputs if _is_vector(datum)), default=0
    )
    cached = Caches(graph.flow).parts
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
            elif token is not None and _scores_one_key(step, cached):
                expected[datum] = f"{token}; a query has one score against the one new key"
            elif _reduces(step):
                expected[datum] = "a reduction over the last axis leaves 1 there"
            elif step.type in _ELEMENTWISE and _follows(step, expected):
                expected[datum] = next(expected[given] for _, given in step.given() if given in expected)
    return expected


def _one_token(graph: Graph) -> str | None:
    """What shows that the function takes one token a call."""
    ids = {name: tensor for name, tensor in graph.integer_inputs.items() if tensor.rank == 2}
    taken = tokens(graph.flow)
    if taken is not None and (taken.count != 1 or is_float(taken.source)):
        shows = f"the function takes one position a call ({taken.source.name} {taken.source.tensor})"
        return shows if taken.count == 1 else None
    if taken is None and any(set(tensor.shape) != {1} for tensor in ids.values()):
        return None
    for name, tensor in graph.integer_inputs.items():
        if set(tensor.shape) == {1} and (name in ids or (taken is not None and not ids)):
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


def _scores_one_key(step: Step, cached: Container[Datum]) -> bool:
    """Whether an operation multiplies two values of this call: what is read of a cache has a key for each slot."""
    operands = [datum for datum in (step.one("x"), step.one("y")) if datum is not None]
    return step.type == "matmul" and not any(root(datum).constant is not None or datum in cached for datum in operands)


def _follows(step: Step, known: Container[Datum]) -> bool:
    """Whether every singleton that the operation takes is known, and one is there."""
    taken = [datum for _, datum in step.given() if datum.constant is None and _is_singleton(datum)]
    return bool(taken) and all(datum in known for datum in taken)
