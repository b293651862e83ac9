"""Which operations do no arithmetic: views, copies, selections, and those that only repeat data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from ane_layers.analysis.flow import Datum, Step

# The same elements in the same order. Taken for views that move nothing, though an engine may lay data out anew. A `read_state`
# is one too: it makes a state's content usable, and what is used of it counts where it is used.
VIEWS = frozenset({"expand_dims", "flatten2d", "read_state", "reshape", "reshape_like", "squeeze"})

# The same elements once more, or in another order or type.
REARRANGEMENTS = frozenset(
    {
        "batch_to_space",
        "cast",
        "depth_to_space",
        "identity",
        "pixel_shuffle",
        "pixel_unshuffle",
        "reverse",
        "reverse_sequence",
        "space_to_batch",
        "space_to_depth",
        "transpose",
    }
)

# A part of the elements of one value.
LOOKUPS = frozenset({"gather", "gather_along_axis", "gather_nd"})
SELECTIONS = LOOKUPS | {"crop", "list_gather", "list_read", "slice_by_index", "slice_by_size", "split"}

# Several values next to each other.
JOINS = frozenset({"concat", "stack"})

# One value with a part of it replaced.
UPDATES = frozenset({"list_scatter", "list_write", "scatter", "scatter_along_axis", "scatter_nd", "slice_update"})

# Elements that appear more than once.
_REPEATING = frozenset({"resize_nearest_neighbor", "sliding_windows", "tile", "upsample_nearest_neighbor"})

# Parameters of which only the shape is looked at.
_SHAPE_ONLY = frozenset({("shape", "x"), ("reshape_like", "ref_tensors"), ("fill_like", "ref_tensor")})

_DATA = ("x", "data", "ls", "input")
_BROADCASTING = frozenset({"add", "mul", "real_div", "sub"})


def data_of(step: Step) -> Datum | None:
    """The value that a view, rearrangement, selection or update is of."""
    for parameter in _DATA:
        datum = step.one(parameter)
        if datum is not None:
            return datum
    return None


def new_data_of(step: Step) -> Datum | None:
    """What an update puts in."""
    for parameter in ("update", "updates", "value"):
        datum = step.one(parameter)
        if datum is not None:
            return datum
    return None


def reads(step: Step, parameter: str) -> bool:
    """Whether the operation looks at the elements of this input, rather than at its shape alone."""
    return (step.type, parameter) not in _SHAPE_ONLY


def is_copy(step: Step) -> bool:
    """Whether the operation moves data and computes nothing; a view is none."""
    return (
        step.type in REARRANGEMENTS
        or step.type in SELECTIONS
        or step.type in JOINS
        or step.type in UPDATES
        or step.type in ("pad", "write_state")
        or repeats(step)
    )


def repeats(step: Step) -> bool:
    """Whether all that the operation does is to give data several times.

    That is `tile` and its like for images; a concat or stack in which every value occurs at least twice, seen through views; a lookup in
    something computed that gives more elements than there are, or whose constant indices each occur at least twice; and an addition
    of zeros or a product with ones of a larger shape.
    """
    if step.type in _REPEATING:
        return _grows(step, data_of(step)) is not False
    if step.type in JOINS:
        return _joins_itself(step)
    if step.type in LOOKUPS:
        data = data_of(step)
        if data is None or data.constant is not None:
            return False
        return _grows(step, data) is True or _looks_up_twice(step)
    return step.type in _BROADCASTING and _broadcasts_only(step)


def root(datum: Datum) -> Datum:
    """The value that this one is a view of, seen through `identity` too. What a state holds at one moment is a value of its own."""
    while datum.step is not None and is_same(datum.step) and datum.step.type != "read_state":
        data = data_of(datum.step)
        if data is None:
            break
        datum = data
    return datum


def is_same(step: Step) -> bool:
    """Whether the result has the same elements in the same order."""
    return step.type in VIEWS or step.type == "identity"


def _grows(step: Step, data: Datum | None) -> bool | None:
    """Whether the result has more elements than the data; None if that is not known."""
    if data is None or not step.outputs or data.elements is None or step.outputs[0].elements is None:
        return None
    return step.outputs[0].elements > data.elements


def _joins_itself(step: Step) -> bool:
    values = step.inputs.get("values", ())
    if all(root(datum).constant is not None for datum in values):
        return False
    # A view that cuts its axes otherwise, put next to the value itself, still repeats every element.
    return all(count > 1 for count in Counter(map(_identity, values)).values())


def _identity(datum: Datum) -> Hashable:
    """The same for values that are the same: one value, or the same part of it, selected twice because no pass joins equal operations."""
    datum = root(datum)
    step = datum.step
    if step is None or step.type not in SELECTIONS or step.type in LOOKUPS:
        return datum
    data = data_of(step)
    arguments = []
    for parameter, given in step.given():
        if given is not data:
            if given.constant is None or given.tensor is None:
                return datum
            arguments.append((parameter, given.constant.array().tobytes()))
    number = next(index for index, output in enumerate(step.outputs) if output is datum)
    return step.type, None if data is None else _identity(data), tuple(sorted(arguments)), number


def _looks_up_twice(step: Step) -> bool:
    indices = step.one("indices")
    if step.type == "gather_along_axis" or indices is None or indices.constant is None:
        return False
    array = indices.constant.array()
    rows = array.reshape(-1, array.shape[-1]) if step.type == "gather_nd" and array.ndim else array.reshape(-1)
    _, counts = np.unique(rows, axis=0, return_counts=True)
    return counts.size > 0 and bool((counts > 1).all())


def _broadcasts_only(step: Step) -> bool:
    x, y = step.one("x"), step.one("y")
    if x is None or y is None:
        return False
    neutral = 0 if step.type in ("add", "sub") else 1
    pairs = [(x, y), (y, x)] if step.type in ("add", "mul") else [(x, y)]
    return any(_grows(step, data) is True and _is_all(other, neutral) for data, other in pairs)


def _is_all(datum: Datum, number: int) -> bool:
    """Whether a value is known to be this number everywhere: a constant, or what `fill` gives."""
    if datum.constant is not None:
        return bool((datum.constant.array() == number).all())
    if datum.step is not None and datum.step.type == "fill":
        value = datum.step.one("value")
        return value is not None and value.constant is not None and bool((value.constant.array() == number).all())
    return False
