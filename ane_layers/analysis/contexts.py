"""How a function's traffic grows with the context: which tensors have an axis of cache slots, and what they would be at other lengths.

A cache's slots are found from the file: the axis of what is read of it that attention's softmax runs over. Weights do not depend on the
context, and neither do rows that are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ane_layers.analysis.accesses import Access
from ane_layers.analysis.caches import Caches
from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.movement import data_of, repeats, root
from ane_layers.analysis.tokens import tokens
from ane_layers.analysis.traffic import Traffic, output_bytes, traffic_of

CONTEXTS = tuple(1 << power for power in range(9, 17))
"""512 … 65536 slots."""


@dataclass(frozen=True)
class _Sized:
    """Bytes of which each slot of a cache has the same share; `slots` is None for those that do not depend on it."""

    bytes: int
    slots: int | None

    def at(self, context: int, built: int) -> int:
        if self.slots is None:
            return self.bytes
        # A cache that is shorter than the longest holds a window, which a longer context does not widen.
        slots = context if self.slots == built else min(context, self.slots)
        return round(self.bytes * slots / self.slots)


class ContextModel:
    """The traffic of a function at any context length.

    Attributes:
        traffic: of the function as it is.
        context_length: slots of its longest cache, T; None if that cannot be told, or a dimension is open.
        tokens: new tokens that a call takes, S; None if that cannot be told.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.traffic = traffic_of(flow)
        taken = tokens(flow)
        self.tokens = taken.count if taken is not None else None
        caches = Caches(flow)
        lengths = _softmax_lengths(flow)
        reads = [(read, self._slots(read, lengths)) for read in caches.reads()]
        self.context_length: int | None = max((slots for _, slots in reads if slots is not None), default=None)
        if self.traffic.total is None:
            self.context_length = None
        self.tokens = self.tokens or self._written_tokens(caches)
        self._kv_read = [_Sized(read.bytes or 0, slots) for read, slots in reads]
        slots_of = {(read.step, read.datum): slots for read, slots in reads}
        lengths_of = {read.source: slots for read, slots in reads if slots is not None}
        self._kv_written = [
            _Sized(write.bytes or 0, self._written_slots(write, lengths_of)) for write in caches.writes()
        ]
        self._repetition = [
            _Sized(output_bytes(step) or 0, self._repeated_slots(step, slots_of))
            for step in flow.steps
            if repeats(step)
        ]

    def at(self, context_length: int) -> Traffic:
        """The traffic of the same function, built for another context.

        Raises:
            ValueError: the function has no cache whose slots can be told, or a context below 1.
        """
        built = self.context_length
        if built is None:
            raise ValueError(f"function {self._flow.function.name!r} has no cache whose slots can be told")
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {context_length}")

        def total(parts: Iterable[_Sized]) -> int:
            return sum(part.at(context_length, built) for part in parts)

        return Traffic(self.traffic.weights, total(self._kv_read), total(self._kv_written), total(self._repetition))

    def rows(self, lengths: Iterable[int] = CONTEXTS) -> list[dict[str, Any]]:
        """`context`, `built` and the fields of `Traffic` at each length and the function's own, in rising order; empty if there is none."""
        if self.context_length is None:
            return []
        return [
            {"context": length, "built": length == self.context_length, **self.at(length).as_dict()}
            for length in sorted({*lengths, self.context_length})
        ]

    def _slots(self, read: Access, lengths: set[int]) -> int | None:
        """Slots of a part of a cache: the length of its axis that a softmax runs over, alone or with new tokens behind it."""
        shape = _shape(read.datum)
        axis = read.step.one("axis")
        if read.step.type == "concat" and axis is not None:
            whole = (_shape(read.step.outputs[0]), _shape(read.source))
            for size, joined, held in zip(_at(shape, axis), *(_at(it, axis) for it in whole), strict=False):
                if joined in lengths:
                    # A cache that moves on leaves its oldest rows out, and is as long as before.
                    return joined if joined == held else size
        sizes = [size for size in shape if size is not None]
        return max((size for size in sizes if size in lengths or size + (self.tokens or 0) in lengths), default=None)

    def _written_tokens(self, caches: Caches) -> int | None:
        """How many slots an update of a cache fills."""
        for write in caches.writes():
            for cache, new in _put_in(write):
                for size, slots in zip(new, cache, strict=False):
                    if slots == self.context_length and len(new) == len(cache) and size is not None:
                        return size
        return None

    def _written_slots(self, write: Access, lengths_of: Mapping[Datum | None, int]) -> int | None:
        """Slots of the cache if a write fills all of them; None where it puts in rows."""
        slots = lengths_of.get(write.source, self.context_length)
        for cache, new in _put_in(write):
            # Another axis may be as long as that of the slots, so all of them must be filled.
            whole = [axis for axis in range(-len(cache), 0) if cache[axis] == slots]
            if not whole or any(axis < -len(new) or new[axis] != slots for axis in whole):
                return None
        return slots

    def _axis(self, datum: Datum) -> int | None:
        """The context length if the value has an axis that long."""
        return self.context_length if self.context_length in _shape(datum) else None

    def _repeated_slots(self, step: Step, slots_of: dict[tuple[Step, Datum], int | None]) -> int | None:
        data = data_of(step)
        if data is not None and (step, data) in slots_of:
            return slots_of[step, data]
        return self._axis(step.outputs[0]) if self.context_length is not None else None


def _put_in(write: Access) -> list[tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
    """The shape of a cache, with the shape of each value that is put into it."""
    cache = _shape(write.datum if write.source is None else write.source)
    return [(cache, _shape(new)) for new in write.rows or (write.datum,)]


def _softmax_lengths(flow: Flow) -> set[int]:
    """Lengths of the axes that a softmax runs over, in one operation or as a sum of exponentials."""
    return {size for step in flow.steps for size in _lengths(step) if size is not None and size > 1}


def _lengths(step: Step) -> Iterator[int | None]:
    if step.type == "scaled_dot_product_attention":
        yield from _shape(step.one("key"))[-2:-1]
    x, axis = step.one("x"), step.one("axis")
    if step.type == "softmax":
        yield from _at(_shape(x), axis) if axis is not None else _shape(x)[-1:]
    axes = step.one("axes")
    producer = root(x).step if x is not None else None
    if step.type == "reduce_sum" and axes is not None and producer is not None and producer.type == "exp":
        yield from _at(_shape(x), axes)


def _at(shape: tuple[int | None, ...], axes: Datum) -> Iterator[int | None]:
    """The sizes of constant axes. One that is not there is for the interpreter to refuse."""
    yield from (shape[axis] for axis in axes.numbers or () if -len(shape) <= axis < len(shape))


def _shape(datum: Datum | None) -> tuple[int | None, ...]:
    """The shape of a tensor; empty for what is none."""
    return () if datum is None or datum.tensor is None else datum.tensor.shape
