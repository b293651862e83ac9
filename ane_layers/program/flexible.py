"""Shapes that a caller may choose from: what a model's description allows an input beyond one shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FlexibleShape:
    """Enumerated shapes, or a range of sizes for each axis; the other one is empty.

    Attributes:
        default: the shape that the description names itself, which an input takes that is left out.
        shapes: all shapes that are allowed.
        ranges: for each axis the least and the greatest size; None where there is no greatest.
    """

    default: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()

    def allows(self, shape: Sequence[int]) -> bool:
        """Whether a value may have this shape."""
        if self.shapes:
            return tuple(shape) in self.shapes
        return len(shape) == len(self.ranges) and all(
            least <= size and (greatest is None or size <= greatest)
            for size, (least, greatest) in zip(shape, self.ranges, strict=True)
        )

    def __str__(self) -> str:
        if self.shapes:
            return "one of " + ", ".join(str(list(shape)) for shape in self.shapes)
        return "[" + ", ".join(_range(least, greatest) for least, greatest in self.ranges) + "]"


def _range(least: int, greatest: int | None) -> str:
    if least == greatest:
        return str(least)
    return f"{least} or more" if greatest is None else f"{least} … {greatest}"


def flexible_shapes(descriptions: Iterable[Any], where: str) -> dict[str, FlexibleShape]:
    """The inputs of flexible shape among the messages of a description, by name.

    Raises:
        ValueError: a range is empty or reversed, or no shape is enumerated.
    """
    flexible = {}
    for entry in descriptions:
        array = entry.type.multiArrayType
        kind = array.WhichOneof("ShapeFlexibility")
        if kind is None:
            continue
        shapes = tuple(tuple(map(int, shape.shape)) for shape in array.enumeratedShapes.shapes)
        ranges = tuple(
            (int(size.lowerBound), None if size.upperBound < 0 else int(size.upperBound))
            for size in array.shapeRange.sizeRanges
        )
        if not shapes and not ranges:
            raise ValueError(f"{where}: field {kind} of input {entry.name!r} is empty")
        for least, greatest in ranges:
            if greatest is not None and greatest < least:
                raise ValueError(f"{where}: field {kind} of input {entry.name!r} has the range {least} … {greatest}")
        flexible[entry.name] = FlexibleShape(tuple(map(int, array.shape)), shapes, ranges)
    return flexible
