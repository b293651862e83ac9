"""How many new tokens a call takes, from what flows: ids that are looked up, or hidden states that come in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.layers import embedding
from ane_layers.analysis.movement import JOINS, REARRANGEMENTS, VIEWS, data_of, root

# What hidden states go through on their way to the first projection: a norm, in one operation or many.
_BEFORE_PROJECTIONS = (
    VIEWS
    | REARRANGEMENTS
    | JOINS
    | frozenset(
        {"add", "batch_norm", "inverse", "layer_norm", "mul", "pow", "real_div", "rsqrt", "sqrt", "square", "sub"}
    )
    | frozenset({"reduce_l2_norm", "reduce_mean", "reduce_sum", "reduce_sum_square", "split"})
)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Attributes:
    source: the ids, or the input of hidden states.
    count: new tokens of a call; None if a dimension is open.
    """

    source: Datum
    count: int | None


def tokens(flow: Flow) -> Tokens | None:
    """What a call takes: ids that are looked up in a table called an embedding's, else hidden states, else what is looked up in the
    largest table; None without any of them."""
    return _looked_up(embedding(flow, named=True)) or _hidden_states(flow) or _looked_up(embedding(flow))


def _looked_up(lookup: Step | None) -> Tokens | None:
    indices = lookup.one("indices") if lookup is not None else None
    return None if indices is None else Tokens(indices, indices.elements)


def _hidden_states(flow: Flow) -> Tokens | None:
    """The first input that goes to a projection without being multiplied with another computed value: as many columns or rows as its
    channels leave, which the projection's weight tells. Without one, the input of the contract's name."""
    for datum in flow.inputs.values():
        if datum.tensor is None or not datum.tensor.dtype.startswith(("fp", "bf")):
            continue
        channels = next(_channels(datum), None)
        shape = _shape(datum)
        if channels and channels in shape and len(shape) > 1:
            elements = datum.elements
            return Tokens(datum, None if elements is None else elements // channels)
    named = flow.inputs.get("hiddenStates")
    return None if named is None or not _shape(named) else Tokens(named, _shape(named)[-1])


def _shape(datum: Datum) -> tuple[int | None, ...]:
    return () if datum.tensor is None else datum.tensor.shape


def _channels(datum: Datum) -> Iterator[int | None]:
    """The channels that projections take of a value."""
    left, seen = [datum], {datum}
    while left:
        current = left.pop(0)
        for user in current.users:
            if user.type in _BEFORE_PROJECTIONS:
                fresh = [output for output in user.outputs if output not in seen]
                seen.update(fresh)
                left += fresh
            elif data_of(user) is current or user.type == "matmul":
                yield from _projected(user, current)


def _projected(step: Step, datum: Datum) -> Iterator[int | None]:
    """Channels of a 1×1 convolution, a linear layer or a product with a constant, which has two axes at least."""
    for parameter in ("weight", "x", "y"):
        weight = step.one(parameter)
        if weight is None or root(weight).constant is None or weight.tensor is None or weight is datum:
            continue
        shape = weight.tensor.shape
        if len(shape) < 2:
            continue
        if step.type in ("conv", "linear") and parameter == "weight" and all(size == 1 for size in shape[2:]):
            yield shape[1]
        elif step.type == "matmul":
            transposed = step.one(f"transpose_{parameter}")
            turned = transposed is not None and transposed.constant is not None and bool(transposed.constant.array())
            yield shape[-2 if (parameter == "y") is not turned else -1]
