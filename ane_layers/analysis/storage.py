"""Bytes of constants as they are stored: dense, or as the parts of a compressed constant."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TypeGuard

from ane_layers.program import Blob, TensorType, ValueType
from ane_layers.program.constexpr import Compressed, Constant
from ane_layers.program.types import BITS

# Constants with fewer elements are axes, paddings and the like: coremltools writes them in the program, not in the weight file.
SMALLEST_COUNTED = 10

# Parts that serve many elements at once; every other part has a share for each element.
_SHARED_PARTS = ("lut", "scale", "offset", "zero_point")
_PARAMETERS = ("axis", "shape", "vector_axis")


def stored_bytes(constant: Constant) -> int:
    """Bytes of a whole constant: of a compressed one its indices or numbers and its tables, scales and masks, each once.

    Constants of fewer than 10 elements count nothing.
    """
    return sum({key: size for key, size in _leaves(constant, Fraction(1), None, None)}.values())


def passed_bytes(constant: Constant, elements: int, axis: int | None = None) -> int:
    """Bytes behind `elements` of a constant's elements, which a lookup or a slice passes on; at most all of it.

    Every element counts with the bits that it is stored in (an index of a lookup table; a number; the average share of a sparse
    tensor), and so do the tables and scales that are needed: all of them, or, where `axis` is looked up and there are
    several along it, no more than the rows that are passed on can need.

    Args:
        constant: what is looked up.
        elements: that are passed on.
        axis: along which whole rows are looked up; None if any element may be.
    """
    type_ = constant.type
    if not isinstance(type_, TensorType) or not type_.is_static or type_.element_count == 0:
        return 0
    share = min(Fraction(1), Fraction(elements, type_.element_count))
    rows = None
    if axis is not None and type_.rank:
        axis %= type_.rank
        # Passing on a part of every row touches every row: then the share says nothing about rows.
        rows = max(1, -(-elements * (type_.shape[axis] or 1) // type_.element_count))
    return sum({key: size for key, size in _leaves(constant, share, axis, rows)}.values())


def _leaves(
    constant: Constant, share: Fraction, axis: int | None, rows: int | None
) -> Iterator[tuple[tuple[object, ...], int]]:
    """What is stored, each with a key that is the same for the same bytes, and the bytes of its share."""
    if isinstance(constant, Compressed):
        for name, part in constant.parts.items():
            if name in _PARAMETERS:
                continue
            if name not in _SHARED_PARTS:
                yield from _leaves(part, share, axis, rows)
            elif share > 0:
                yield from _leaves(part, _blocks(constant, part, axis, rows), None, None)
    elif isinstance(constant, Blob):
        yield constant.key, -(-constant.stored_bytes * share.numerator // share.denominator)
    elif _is_counted(constant.type):
        yield (id(constant),), -(-constant.type.byte_count * share.numerator // share.denominator)


def _is_counted(type_: ValueType) -> TypeGuard[TensorType]:
    return (
        isinstance(type_, TensorType)
        and type_.dtype in BITS
        and type_.is_static
        and type_.element_count >= SMALLEST_COUNTED
    )


def _blocks(whole: Compressed, part: Constant, axis: int | None, rows: int | None) -> Fraction:
    """Which share of a table or scale the rows that are passed on can need."""
    if axis is None or rows is None or not isinstance(part.type, TensorType):
        return Fraction(1)
    shape = part.type.shape
    if "axis" in whole.parts:
        # The older format of quantized numbers: one scale for all, or one a channel of `axis`.
        channel = int(whole.parts["axis"].array()) % whole.type.rank
        blocks = shape[0] if shape and channel == axis else 1
    elif len(shape) >= whole.type.rank and "shape" not in whole.parts:
        # A scale has the axes of the whole; a table two more, entries and vector. (The older format has one table, and a `shape`.)
        blocks = shape[axis]
    else:
        blocks = 1
    return Fraction(min(rows, blocks or 1), blocks or 1)
