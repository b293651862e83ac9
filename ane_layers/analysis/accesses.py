"""Records of caches: which part of one a value holds, and what an operation reads or writes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ane_layers.analysis.flow import Datum, Step
from ane_layers.program.types import BITS


@dataclass(frozen=True, eq=False)
class Part:
    """Elements of a cache that a value holds unchanged; None if a dimension is open."""

    source: Datum
    elements: int | None

    @property
    def bytes(self) -> int | None:
        """In the type that the cache is stored in."""
        type_ = self.source.tensor
        if self.elements is None or type_ is None:
            return None
        return math.ceil(self.elements * BITS.get(type_.dtype, 0) / 8)


@dataclass(frozen=True, eq=False)
class Access:
    """A read or a write of a cache.

    Attributes:
        step: that reads or writes.
        source: the state or input; None for an output that stands for a cache.
        datum: what is read, or what is put in: the new rows of an update in place, else the whole value.
        bytes: in the type of the cache; None if a dimension is open. Of a cache with new rows in it, those of the rows.
        rows: the new rows in a whole value; empty where they cannot be told from the rest.
    """

    step: Step
    source: Datum | None
    datum: Datum
    bytes: int | None
    rows: tuple[Datum, ...] = ()
