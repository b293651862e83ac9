"""How often each fp16 number occurs, and which table entry each is nearest to: 65,536 numbers, whatever the tensor's size."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_CODES = 1 << 16
_SIGN = 1 << 15
_INFINITY = 0x7C00  # the code of infinity; NaN's lie above it
_CHUNK = 1 << 18  # elements at a time, since numpy widens them to int64


def histogram(
    row: NDArray[np.float16], importance: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distinct values of a row and how much each weighs. The two zeros are one value.

    Args:
        row: fp16 [n].
        importance: float64 [channels], n % channels == 0: element j counts `importance[j % channels]`. Without it, each counts 1.

    Returns:
        The values, float64 [d], ascending; their weights, float64 [d], positive. Values without weight are left out.

    Raises:
        ValueError: if a value is not finite.
    """
    counts = (
        (np.bincount(codes, minlength=_CODES) for _, codes in _chunks(row))
        if importance is None
        else (np.bincount(codes, weights, _CODES) for codes, weights in _tiles(row.view(np.uint16), importance))
    )
    totals = next(counts)
    for part in counts:
        totals += part
    totals[0] += totals[_SIGN]
    totals[_SIGN] = 0
    weighing = totals != 0
    occurring = weighing
    if importance is not None and not importance.all():
        occurring = weighing.copy()
        for _, codes in _chunks(row):
            occurring[codes] = True
    if occurring[_INFINITY:_SIGN].any() or occurring[_SIGN + _INFINITY :].any():
        raise ValueError("holds NaN or an infinity")
    found = np.flatnonzero(weighing)
    negative = int(found.searchsorted(_SIGN))
    # Codes of negative numbers ascend as the numbers descend.
    order = np.concatenate((found[negative:][::-1], found[:negative]))
    return order.astype(np.uint16).view(np.float16).astype(np.float64), totals[order].astype(np.float64)


def nearest_entries(row: NDArray[np.float16], table: NDArray[np.float64], out: NDArray[np.uint8]) -> None:
    """Writes the index of the nearest entry for every value; of two that are equally near, the lower.

    Args:
        row: fp16 [n], finite.
        table: float64 [entries], ascending, at most 256.
        out: uint8 [n].
    """
    # A mean of two fp16 numbers is exact in float64, so that no tie is decided by rounding.
    ends = _ascending().searchsorted((table[1:] + table[:-1]) / 2, side="right")
    ascending = np.repeat(np.arange(len(table), dtype=np.uint8), np.diff(ends, prepend=0, append=_CODES))
    by_code = np.concatenate((ascending[_SIGN:], ascending[_SIGN - 1 :: -1]))
    for start, codes in _chunks(row):
        # With mode "raise" numpy would write through a copy of the output.
        np.take(by_code, codes, mode="clip", out=out[start : start + len(codes)])


def squared_error(values: NDArray[np.float64], weights: NDArray[np.float64], table: NDArray[np.float64]) -> float:
    """The weighted squared distance of values from their nearest entries.

    Args:
        values: float64 [d], ascending; weights: float64 [d].
        table: float64 [entries], ascending.
    """
    ends = values.searchsorted((table[1:] + table[:-1]) / 2, side="right")
    distance = values - np.repeat(table, np.diff(ends, prepend=0, append=len(values)))
    return float(weights @ (distance * distance))


@functools.cache
def _ascending() -> NDArray[np.float64]:
    """All fp16 numbers from the lowest to the highest, NaN's as the infinity of their sign."""
    positive = np.arange(_SIGN, dtype=np.uint16)
    positive = np.minimum(positive, np.uint16(_INFINITY)).view(np.float16).astype(np.float64)
    return np.concatenate((-positive[::-1], positive))


def _chunks(row: NDArray[np.float16]) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    codes = row.view(np.uint16)
    for start in range(0, len(codes), _CHUNK):
        yield start, codes[start : start + _CHUNK]


def _tiles(
    codes: NDArray[np.uint16], importance: NDArray[np.float64]
) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.float64]]]:
    """Parts of the codes with their elements' weights, without a weight for every element of the row at once."""
    rows = codes.reshape(-1, len(importance))
    height = max(1, min(_CHUNK // len(importance), len(rows)))
    for first in range(0, len(importance), _CHUNK):
        part = importance[first : first + _CHUNK]
        weights = np.tile(part, height)
        for top in range(0, len(rows), height):
            tile = rows[top : top + height, first : first + len(part)].reshape(-1)
            yield tile, weights[: len(tile)]
