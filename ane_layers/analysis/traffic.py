"""The article's accounting of what a call moves, which the bandwidth model divides by: weights, cache, and repeated data.

Source: "Core ML Decode Optimization: Removing the 1.9 GiB Per-Token Copy Caused by GQA repeat_kv".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ane_layers.analysis.caches import Caches
from ane_layers.analysis.flow import Flow, Step
from ane_layers.analysis.movement import LOOKUPS, SELECTIONS, data_of, is_same, reads, repeats, root
from ane_layers.analysis.storage import passed_bytes, stored_bytes
from ane_layers.program import Function


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call. Static sums over the operations of the file, those of nested blocks once: not measured traffic.

    Attributes:
        weights: constants as they are stored, by each operation that reads them. A lookup or slice counts what it passes on, with the
            tables and scales that this needs. Constants of fewer than 10 elements (axes, paddings) are left out.
        kv_read: what operations read of states, and of inputs and outputs that are caches. A slice of a cache counts as the
            slice, through any further slicing, rearranging, conversion or mask write, where an operation computes with it, joins or
            repeats it.
        kv_written: new rows: those that an update, a mask or a join puts into a state or into a cache that is an output, and those that are
            outputs themselves. Where no rows can be told from the rest, as in `state · 0.5`, the whole value. What a mask write rewrites
            beside the rows is materialised, and not counted here.
        repetition: outputs of operations that only repeat data (see `movement.repeats`), once; `total` counts them twice, for they
            are written and read again.
        unknown: operations whose share is not in the figures, since a dimension is open.

    Where an open dimension hides a part of `kv_read`, `kv_written` or `repetition`, that figure is None. `weights` then leaves
    out the rows of lookups alone.
    """

    weights: int
    kv_read: int | None
    kv_written: int | None
    repetition: int | None
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int | None:
        """`weights + kv_read + kv_written + 2 × repetition`; None if one of them is."""
        if self.kv_read is None or self.kv_written is None or self.repetition is None:
            return None
        return self.weights + self.kv_read + self.kv_written + 2 * self.repetition

    def as_dict(self) -> dict[str, int | None]:
        """The figures, ready for JSON."""
        return {
            "weights": self.weights,
            "kv_read": self.kv_read,
            "kv_written": self.kv_written,
            "repetition": self.repetition,
            "total": self.total,
        }


def traffic(function: Function) -> Traffic:
    """What one call of a function moves, from the file alone.

    Example:
        >>> traffic(Package.open("model.mlpackage").function("decode")).total
    """
    return traffic_of(Flow(function))


def traffic_of(flow: Flow) -> Traffic:
    """The same of a flow that is already made."""
    unknown: list[str] = []
    caches = Caches(flow)
    weights = 0
    for step in flow.steps:
        size = constant_bytes(step)
        if size is None:
            unknown.append(f"weights: {step.name} ({step.type})")
        else:
            weights += size
    repeated = [(step, output_bytes(step)) for step in flow.steps if repeats(step)]
    return Traffic(
        weights=weights,
        kv_read=_sum("kv_read", ((read.step, read.bytes) for read in caches.reads()), unknown),
        kv_written=_sum("kv_written", ((write.step, write.bytes) for write in caches.writes()), unknown),
        repetition=_sum("repetition", repeated, unknown),
        unknown=tuple(unknown),
    )


def constant_bytes(step: Step) -> int | None:
    """Bytes of constants that an operation reads, each constant once; None if a dimension is open.

    Views pass constants on unread. Selections read what they pass on.
    """
    if is_same(step):
        return 0
    total = 0
    data = data_of(step) if step.type in SELECTIONS else None
    for datum in {root(datum): None for parameter, datum in step.given() if reads(step, parameter)}:
        if datum.constant is None:
            continue
        if data is None or datum is not root(data):
            total += stored_bytes(datum.constant)
            continue
        passed = [output.elements for output in step.outputs]
        if None in passed:
            return None
        axis = _axis(step) if datum is data else None
        total += passed_bytes(datum.constant, sum(size for size in passed if size is not None), axis)
    return total


def output_bytes(step: Step) -> int | None:
    """Bytes of all results; None if a dimension is open."""
    sizes = [output.bytes for output in step.outputs]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _axis(step: Step) -> int | None:
    """The axis along which a lookup passes on whole rows."""
    if step.type not in LOOKUPS or step.type == "gather_along_axis":
        return None
    axis = step.one("axis")
    if step.type == "gather_nd" or axis is None:
        return 0
    return axis.numbers[0] if axis.numbers else None


def _sum(what: str, parts: Iterable[tuple[Step, int | None]], unknown: list[str]) -> int | None:
    total: int | None = 0
    for step, size in parts:
        if size is None:
            unknown.append(f"{what}: {step.name} ({step.type})")
            total = None
        elif total is not None:
            total += size
    return total
