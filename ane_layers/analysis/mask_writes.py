"""Caches that are changed element by element: `cache · (1 − m) + new · m`, `select(m, new, cache)` and the like.

Such a write needs no computed position, so that converters use it where a cache is an input and an output. What comes out is the cache
with new rows in it, as after an update; that it reads and writes the whole cache shows in what is materialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.movement import JOINS, REARRANGEMENTS, SELECTIONS, VIEWS, data_of, repeats, root

_ELEMENTWISE = frozenset({"add", "cast", "identity", "mul", "select", "sub"})
_MOVING = VIEWS | REARRANGEMENTS | SELECTIONS | JOINS


@dataclass(frozen=True, eq=False)
class MaskWrite:
    """An elementwise expression that gives a value with parts of it replaced.

    Attributes:
        cache: the value, of the result's shape.
        new: what takes the place of a part; smaller than the cache where it is spread over slots by the mask.
        steps: the operations of the expression.
    """

    cache: Datum
    new: tuple[Datum, ...]
    steps: frozenset[Step]

    @property
    def new_elements(self) -> int | None:
        """Elements of the new rows; None if a dimension is open."""
        sizes = [datum.elements for datum in self.new]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def mask_writes(flow: Flow) -> dict[Step, list[MaskWrite]]:
    """Every operation that ends such an expression, with one entry for each value that may be the cache: whether it is one shows elsewhere.

    An expression consists of sums, products and selections of one shape. Nothing in it but the cache itself may come from the cache, or
    the cache from it, by moving elements about: a rotary embedding is a product and a sum too.
    """
    found: dict[Step, list[MaskWrite]] = {}
    for step in flow.steps:
        if step.type in ("add", "select", "sub") and len(step.outputs) == 1:
            writes = list(_writes(step))
            if writes:
                found[step] = writes
    return found


def _writes(step: Step) -> Iterator[MaskWrite]:
    whole = step.outputs[0]
    if whole.tensor is None or not whole.tensor.is_static or "bool" in whole.tensor.dtype:
        return
    leaves, steps = _expression(whole)
    for cache in leaves:
        if _shape(cache) != _shape(whole) or root(cache).constant is not None:
            continue
        others = [leaf for leaf in leaves if leaf is not cache and leaf.constant is None]
        masks = _masks(cache, steps)
        # The rows are spread by the same mask, or by another one of its shape.
        shapes = {_shape(mask) for mask in masks}
        new = tuple(leaf for leaf in others if leaf not in masks and _shape(leaf) not in shapes)
        varies = any((mask.elements or 0) > 1 for mask in masks)
        if varies and new and not any(_related(leaf, cache) for leaf in others):
            yield MaskWrite(cache, tuple(map(_unrepeated, new)), frozenset(steps))


def _expression(whole: Datum) -> tuple[list[Datum], set[Step]]:
    """The values that a value is worked out from element by element, and the operations of its shape that do it."""
    leaves: dict[Datum, None] = {}
    steps: dict[Step, None] = {}
    left = [whole]
    while left:
        datum = left.pop()
        step = datum.step
        if step is None or step.type not in _ELEMENTWISE or _shape(datum) != _shape(whole):
            leaves[datum] = None
        elif step not in steps:
            steps[step] = None
            left += [given for _, given in step.given()]
    return list(leaves), set(steps)


def _masks(cache: Datum, steps: set[Step]) -> set[Datum]:
    """What the cache, or a sum with it, is multiplied with or chosen by; of a mask of its own shape, what that is worked out from."""
    holding: set[Datum] = {cache}
    while grown := {step.outputs[0] for step in steps if any(given in holding for _, given in step.given())} - holding:
        holding |= grown
    masks: set[Datum] = set()
    for step in steps:
        if step.outputs[0] in holding:
            for parameter, given in step.given():
                if (step.type == "mul" or parameter == "cond") and given not in holding and given.constant is None:
                    masks.update(_expression(given)[0] if given.step in steps else [given])
    return masks


def _related(one: Datum, other: Datum) -> bool:
    return _is_moved_from(one, other) or _is_moved_from(other, one)


def _is_moved_from(datum: Datum, cache: Datum) -> bool:
    """Whether a value comes from the cache by moves and elementwise arithmetic."""
    left, seen = [datum], set[Datum]()
    while left:
        current = left.pop()
        if current is cache:
            return True
        if current in seen or current.step is None:
            continue
        seen.add(current)
        if current.step.type in _ELEMENTWISE or current.step.type in _MOVING:
            left += [given for _, given in current.step.given() if given.constant is None]
    return False


def _unrepeated(datum: Datum) -> Datum:
    """What a value is a repetition of, seen through views."""
    while datum.step is not None and (datum.step.type in VIEWS or repeats(datum.step)):
        data = data_of(datum.step) or next(iter(datum.step.inputs.get("values", ())), None)
        if data is None or datum.step.type == "read_state":
            break
        datum = data
    return datum


def _shape(datum: Datum) -> tuple[int | None, ...]:
    return () if datum.tensor is None else datum.tensor.shape
