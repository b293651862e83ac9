"""What a function reads of its caches and writes to them: states, and inputs and outputs that stand for a cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ane_layers.analysis.accesses import Access, Part
from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.mask_writes import MaskWrite, mask_writes
from ane_layers.analysis.movement import (
    JOINS,
    REARRANGEMENTS,
    SELECTIONS,
    UPDATES,
    VIEWS,
    data_of,
    is_same,
    new_data_of,
    reads,
    repeats,
    root,
)

_CACHE_NAME = re.compile(r"cache|past|key|value|kv|memory|(^|[_.])[kv]([_.\d]|$)", re.IGNORECASE)
_PRODUCTS = {
    "conv": ("x", "weight"),
    "einsum": ("values",),
    "matmul": ("x", "y"),
    "scaled_dot_product_attention": ("query", "key", "value"),
}


class Caches:
    """The caches of a function.

    Every state is one. An input is one if it becomes an operand of a product of two computed values (attention's scores or its
    weighted sum) without arithmetic on the way but a mask write (`mask_writes`), and has a cache's name (`past_key_values`,
    `k_cache_0` …) or, in a function without states, is joined or updated with other values before that.

    An output is a cache or new rows for one if two of three hold: what it holds becomes such an operand too; it has a cache's name;
    an input is a cache.

    Attributes:
        sources: states and inputs that are caches.
        parts: what values hold of them.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._masked = mask_writes(flow)
        self._operands = set(self._pure(_product_operands(flow)))
        self.inputs = [
            datum
            for datum in flow.inputs.values()
            if datum in self._operands
            and (_CACHE_NAME.search(datum.name) or (not flow.states and self._is_mixed(datum)))
        ]
        self.sources = [*flow.states.values(), *self.inputs]
        self.parts = {datum: Part(datum, datum.elements) for datum in self.sources}
        # Operations of a mask write that look at the cache: what they pass on is read by whoever uses their result.
        self._passing: dict[Step, set[Datum]] = {}
        for step in flow.steps:
            self._follow(step)
        writes = [step for step in flow.steps if step.type == "write_state" and self.is_update(step)]
        # Each once: a state may be written, read again and written on, all through the same chain of values.
        self._updates = {update: write for write in reversed(writes) for update in _updates(write.one("data"))}

    def is_update(self, write: Step) -> bool:
        """Whether what a `write_state` writes is the state itself with rows replaced, rather than a value of its own."""
        data = write.one("data")
        while data is not None and data.step is not None and (is_same(data.step) or data.step.type in UPDATES):
            data = data_of(data.step)
        return data is not None and data is write.one("input")

    def in_place(self, update: Step) -> bool:
        """Whether an update replaces rows of a state, rather than makes a further copy of what it updates."""
        return update in self._updates

    def reads(self) -> Iterator[Access]:
        """What operations read that do more with a part of a cache than pass it on."""
        for step in self._flow.steps:
            if step.type == "write_state" and (self.is_update(step) or self._is_masked(step)):
                continue
            passed = {data_of(step)} if _passes(step) else self._passing.get(step, set())
            for datum in {datum: None for parameter, datum in step.given() if reads(step, parameter)}:
                if datum not in passed and datum in self.parts and not _is_target(step, datum):
                    part = self.parts[datum]
                    yield Access(step, part.source, datum, part.bytes)

    def writes(self) -> Iterator[Access]:
        """What is written: the new rows where a cache is updated; all of it where it is replaced, or no rows can be told from the rest."""
        for step in self._flow.steps:
            if step in self._updates:
                new = new_data_of(step)
                if new is not None:
                    yield Access(step, self._updates[step].one("input"), new, _bytes(new, step.outputs[0]))
            elif step.type == "write_state" and not self.is_update(step):
                data = step.one("data")
                if data is not None:
                    yield self._written(step, step.one("input"), data)
        for output in self._flow.outputs:
            if output.step is not None and self._is_cache_output(output):
                yield self._written(output.step, None, output)

    def _is_masked(self, write: Step) -> bool:
        """Whether what a `write_state` writes is the state itself with rows replaced by a mask."""
        data = write.one("data")
        while data is not None and data.step is not None and (is_same(data.step) or self._mask_write(data.step)):
            masked = self._mask_write(data.step)
            data = data_of(data.step) if masked is None else masked.cache
        return data is not None and data is write.one("input")

    def _written(self, step: Step, source: Datum | None, data: Datum) -> Access:
        """A value that becomes what a cache holds."""
        rows = tuple(self._rows(data))
        sizes = [row.elements for row in rows]
        if not rows or None in sizes:
            return Access(step, source, data, data.bytes)
        return Access(step, source, data, Part(data, sum(size for size in sizes if size is not None)).bytes, rows)

    def _rows(self, data: Datum) -> Iterator[Datum]:
        """The new rows in a value that is otherwise a cache."""
        step = root(data).step
        if step is None or step.type == "read_state":
            return
        if step.type in JOINS:
            values = step.inputs.get("values", ())
            if any(value in self.parts for value in values):
                yield from (value for value in values if value not in self.parts)
            return
        if data not in self.parts:
            return
        write = self._mask_write(step)
        before = data_of(step) if write is None else write.cache
        if write is not None:
            yield from write.new
        elif step.type in UPDATES:
            yield from (datum for datum in [new_data_of(step)] if datum is not None)
        if before is not None:
            yield from self._rows(before)

    def _follow(self, step: Step) -> None:
        write = self._mask_write(step)
        if write is not None:
            self.parts[step.outputs[0]] = self.parts[write.cache]
            inner = {output for inside in write.steps for output in inside.outputs}
            for inside in write.steps:
                if inside is step or all(user in write.steps for output in inside.outputs for user in output.users):
                    self._passing.setdefault(inside, set()).update({write.cache, *inner})
            return
        if not _passes(step):
            return
        data = data_of(step)
        if data is None or data not in self.parts:
            return
        part = self.parts[data]
        for output in step.outputs:
            elements = output.elements if step.type in SELECTIONS else part.elements
            self.parts[output] = Part(part.source, elements)

    def _mask_write(self, step: Step) -> MaskWrite | None:
        """The mask write into a cache that an operation ends."""
        return next((write for write in self._masked.get(step, ()) if write.cache in self.parts), None)

    def _is_cache_output(self, output: Datum) -> bool:
        becomes_operand = any(datum in self._operands and datum.step is not None for datum in self._pure([output]))
        named = _CACHE_NAME.search(output.name) is not None
        return becomes_operand + named + bool(self.inputs) >= 2

    def _pure(self, data: Iterable[Datum]) -> Iterator[Datum]:
        """These values and all that they are made of without arithmetic but mask writes."""
        left, seen = list(data), set[Datum]()
        while left:
            datum = left.pop()
            if datum in seen:
                continue
            seen.add(datum)
            yield datum
            if datum.step is not None:
                left += _moved(datum.step)
                left += [write.cache for write in self._masked.get(datum.step, ())]

    def _is_mixed(self, datum: Datum) -> bool:
        """Whether a value is joined or updated with others before anything is computed with it."""
        masked = {write.cache for writes in self._masked.values() for write in writes}
        left, seen = [datum], set[Datum]()
        while left:
            current = left.pop()
            if current in masked:
                return True
            if current in seen:
                continue
            seen.add(current)
            for user in current.users:
                others = [other for other in _moved(user) if other is not current and root(other).constant is None]
                if user.type in JOINS | UPDATES and others:
                    return True
                if current in _moved(user):
                    left += user.outputs
        return False


def _passes(step: Step) -> bool:
    if step.type in VIEWS or step.type in REARRANGEMENTS or step.type in UPDATES:
        return True
    return step.type in SELECTIONS and not repeats(step)


def _is_target(step: Step, datum: Datum) -> bool:
    return step.type == "write_state" and datum is step.one("input")


def _updates(data: Datum | None) -> Iterator[Step]:
    """The updates that lie between a state and what is written to it."""
    while data is not None and data.step is not None:
        if data.step.type in UPDATES:
            yield data.step
        data = data_of(data.step)


def _bytes(new: Datum, cache: Datum) -> int | None:
    """Bytes of new rows in the type of the cache."""
    return None if cache.tensor is None else Part(cache, new.elements).bytes


def _product_operands(flow: Flow) -> Iterator[Datum]:
    """The operands of products of two computed values."""
    for step in flow.steps:
        given = [datum for parameter in _PRODUCTS.get(step.type, ()) for datum in step.inputs.get(parameter, ())]
        if len(given) > 1 and all(root(datum).constant is None for datum in given):
            yield from given


def _moved(step: Step) -> list[Datum]:
    """The inputs whose elements an operation moves."""
    if step.type in JOINS:
        return list(step.inputs.get("values", ()))
    if _passes(step) or step.type == "pad" or repeats(step):
        return [datum for datum in (data_of(step), new_data_of(step)) if datum is not None]
    return []
