"""Proves what a repeated value is made of: which element of it is which element of the value that was repeated.

Ports repeat heads by expand and reshape, `repeat_interleave`, a gather or a concat, at rank 3, 4 or 5, before or after a transposition. No
list of such forms is kept. The operations between a value and its use are carried out on the numbers 0, 1, 2, … in place of the
elements, which shows where every element comes from, whatever the operations are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from ane_layers.analysis.flow import Datum, Step
from ane_layers.rewrite.draft import is_static, shape_of
from ane_layers.rewrite.moves import carry_out, data_input, inner_views, is_pointwise, passes


class Refusal(Exception):  # noqa: N818 (it is no error: what is refused stays as it is)
    """Why a repetition is left alone."""


@dataclass(frozen=True, eq=False)
class Repetition:
    """A value `datum`, `[*lead, rows, columns]`, that is `source` with every KV head written `groups` times in a row.

    Attributes:
        datum: the repeated value.
        source: the value it is made of, every element once.
        groups: G.
        shape: of the value with every head once, `[*folded lead, rows, columns]`.
        perm: axes of `source`, viewed as `shape` demands, that give this value; the identity where a view is enough.
        pointwise: operations that change the elements one by one on the way, in order.
        steps: all operations on the way, which become superfluous.
    """

    datum: Datum
    source: Datum
    groups: int
    shape: tuple[int, ...]
    perm: tuple[int, ...]
    pointwise: tuple[Step, ...]
    steps: tuple[Step, ...]

    @property
    def swapped(self) -> bool:
        """Whether only the last two axes change places, which a matrix product does by itself."""
        rank = len(self.perm)
        return self.perm == (*range(rank - 2), rank - 1, rank - 2)


class Arrangement(NamedTuple):
    """At which operation of a path to begin, G, and shape and permutation that give the value with every head once."""

    place: int
    groups: int
    shape: tuple[int, ...]
    perm: tuple[int, ...]


def fold_lead(lead: tuple[int, ...], groups: int) -> tuple[int, tuple[int, ...]] | None:
    """Takes a factor out of the last leading axes: how many axes stay in front, and the axis that the others become, if any is left.

    `[B, H]` keeps one and H becomes K; `[B, K, G]`, of a product at rank 5, keeps two and G is gone. None if the sizes do not allow it.
    """
    for kept in reversed(range(len(lead))):
        size = math.prod(lead[kept:])
        if size % groups == 0:
            gone = size == groups and len(lead) > 2
            return kept, () if gone else (size // groups,)
    return None


def prove(datum: Datum, cache: dict[Hashable, Arrangement | Refusal]) -> Repetition | None:
    """What the operand `datum` of a matrix product repeats; None if it repeats nothing.

    Args:
        datum: `[*lead, rows, columns]`.
        cache: of results for equal operations; every layer of a model has the same.

    Raises:
        Refusal: something is repeated, but not every head, one after the other, as often as the next.
    """
    path = _path(datum)
    repeating = [i for i, (before, _, after) in enumerate(path) if before.elements != after.elements]
    if not repeating:
        return None
    if not all(is_static(value) for before, _, after in path for value in (before, after)):
        raise Refusal("a dimension is open")
    first = repeating[0]
    # A scale in front of the repetition need not be computed again.
    start = max((i + 1 for i in range(first) if is_pointwise(path[i][1])), default=0)
    links = path[start:]
    key = tuple(_signature(before, step, after) for before, step, after in links)
    if key not in cache:
        try:
            cache[key] = _arrangement(links, first - start)
        except Refusal as refusal:
            cache[key] = refusal
    found = cache[key]
    if isinstance(found, Refusal):
        raise found
    steps = [step for _, step, _ in links[found.place :]]
    return Repetition(
        datum=datum,
        source=links[found.place][0],
        groups=found.groups,
        shape=found.shape,
        perm=found.perm,
        pointwise=tuple(step for step in steps if is_pointwise(step)),
        steps=tuple(inner for step in steps for inner in (*inner_views(step), step)),
    )


Link: TypeAlias = tuple[Datum, Step, Datum]


def _path(datum: Datum) -> list[Link]:
    """From the value that an operand goes back to, operation by operation."""
    links: list[Link] = []
    while datum.step is not None and passes(datum.step):
        data = data_input(datum.step)
        if data is None or data.constant is not None:
            break
        links.append((data, datum.step, datum))
        datum = data
    return links[::-1]


def _arrangement(links: list[Link], first: int) -> Arrangement:
    """The best there is for links of which the one numbered `first` is the first to repeat."""
    source = links[first][0]
    numbers = np.arange(source.elements, dtype=np.int64).reshape(shape_of(source))
    once, groups = _every_head_once(_carried_out(links[first:], numbers), source.elements or 1)
    best: tuple[int, tuple[int, ...]] | None = None
    for place in range(first + 1):
        earlier = np.arange(source.elements, dtype=np.int64).reshape(shape_of(links[place][0]))
        there = _carried_out(links[place:first], earlier).reshape(-1)[once]
        perm = _permutation(there)
        if perm is None:
            continue
        rank = len(perm)
        if perm[: rank - 2] == tuple(range(rank - 2)):
            best = place, perm  # a view, which perhaps the matrix product transposes
            break
        best = place, perm
    if best is None:
        raise Refusal("the heads are no rearrangement of the axes of what is repeated")
    return Arrangement(best[0], groups, once.shape, best[1])


def _every_head_once(origin: np.ndarray, elements: int) -> tuple[np.ndarray, int]:
    lead, (rows, columns) = origin.shape[:-2], origin.shape[-2:]
    groups, rest = divmod(origin.size, elements)
    split = fold_lead(lead, groups) if not rest and groups > 1 else None
    if split is None:
        raise Refusal("what is repeated is another axis than that of heads")
    kept, tail = split
    by_group = origin.reshape(*lead[:kept], -1, groups, rows, columns)
    if (by_group == by_group[..., :1, :, :]).all():
        return by_group[..., 0, :, :].reshape(*lead[:kept], *tail, rows, columns), groups
    interleaved = origin.reshape(*lead[:kept], groups, -1, rows, columns)
    if (interleaved == interleaved[..., :1, :, :, :]).all():
        raise Refusal("heads are interleaved: query head h reads KV head h % K, not h // G")
    raise Refusal("what is repeated is another axis than that of heads")


def _permutation(numbers: np.ndarray) -> tuple[int, ...] | None:
    """Axes in which the numbers 0, 1, 2, … must be read to give these; the identity and a swap of the last two are tried first."""
    rank, shape = numbers.ndim, numbers.shape
    ordered = sorted(itertools.permutations(range(rank)), key=lambda perm: -_fixed_in_front(perm))
    for perm in ordered:
        viewed = [0] * rank
        for axis, size in zip(perm, shape, strict=True):
            viewed[axis] = size
        if (np.arange(numbers.size).reshape(viewed).transpose(perm) == numbers).all():
            return perm
    return None


def _fixed_in_front(perm: tuple[int, ...]) -> int:
    return next((i for i, axis in enumerate(perm) if axis != i), len(perm))


def _carried_out(links: list[Link], numbers: np.ndarray) -> np.ndarray:
    for _, step, after in links:
        numbers = carry_out(step, numbers, after)
    return numbers


def _signature(before: Datum, step: Step, after: Datum) -> Hashable:
    numbers = tuple((name, datum.numbers) for name, datum in step.given() if datum.numbers is not None)
    inner = tuple(shape_of(datum) for datum in step.inputs.get("values", ()) if is_static(datum))
    return step.type, shape_of(before), shape_of(after), numbers, inner
