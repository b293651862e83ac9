"""Lookup tables for weights: as good as exact k-means in one dimension, in a small part of its time.

A fp16 tensor has at most 65,536 distinct values. They are counted once, the table is found from the counts (`partition.py`), and the
indices are looked up in a list of all fp16 numbers; the tensor itself is passed over twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ane_layers.compression.histogram import histogram, nearest_entries, squared_error
from ane_layers.compression.partition import best_table

BITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, eq=False)
class Clustering:
    """Tables and what each value became.

    Shape:
        - table: fp16 `[groups, 2**bits]`, ascending within a group; unused entries repeat the last used value
        - indices: uint8 `[groups, n]`

    Attributes:
        error: squared error of all values over their squares, every element counting the same; 0 for values that are all zero.
    """

    table: np.ndarray
    indices: np.ndarray
    error: float


def cluster(
    values: np.ndarray,
    bits: int,
    *,
    importance: np.ndarray | None = None,
    progress: Callable[[str], None] | None = None,
) -> Clustering:
    """Lookup tables that make the squared error small: within 0.2 % of the smallest possible, as measured in `benchmarks/clustering.py`.

    A group of at most `2**bits` distinct values is represented exactly, so that clustering a clustering's values changes nothing; the
    zeros +0 and -0 are one value. Every index is that of the nearest entry of the stored table. The same input gives the same result.
    Beyond `values` and the indices it takes some 20 MB, whatever the size.

    Args:
        values: fp16 `[groups, n]`, finite; each row gets a table of its own.
        bits: 1, 2, 3, 4, 6 or 8.
        importance: `[channels]`, n % channels == 0: the squared error of element j counts `importance[j % channels]` times. Not negative,
            finite; if all are zero, every element counts the same.
        progress: called with a line of text now and then.

    Raises:
        ValueError: if an argument is none of these.
    """
    if not isinstance(values, np.ndarray) or values.dtype != np.float16 or values.ndim != 2 or not values.size:
        what = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ValueError(f"values: clustering takes fp16 [groups, n] with n > 0, got {what}")
    if bits not in BITS:
        raise ValueError(f"bits: {bits!r} is none of {', '.join(map(str, BITS))}")
    groups, count = values.shape
    weights = None if importance is None else _checked(importance, count)
    say = progress or (lambda line: None)
    size = 1 << bits
    tables = np.empty((groups, size), np.float16)
    indices = np.empty(values.shape, np.uint8)
    noise = signal = 0.0
    for group, row in enumerate(values):
        if group % max(1, groups // 20) == 0:
            say(f"clustering group {group + 1} of {groups}")
        try:
            distinct, mass = histogram(row)
            found = _table(row, size, weights, distinct, mass)
        except ValueError as error:
            raise ValueError(f"values: group {group} {error}") from error
        tables[group, : len(found)] = found
        tables[group, len(found) :] = found[-1]
        nearest_entries(row, found, indices[group])
        noise += squared_error(distinct, mass, found)
        signal += float(mass @ (distinct * distinct))
    return Clustering(tables, indices, noise / signal if signal else 0.0)


def _table(
    row: np.ndarray, size: int, weights: np.ndarray | None, distinct: np.ndarray, mass: np.ndarray
) -> np.ndarray:
    """The group's entries, ascending: float64 `[at most size]`. `distinct` and `mass` are the row's, every element counting the same."""
    if len(distinct) <= size:  # exactly, those without weight too: there is room
        return distinct
    if weights is not None:
        distinct, mass = histogram(row, weights)
    return best_table(distinct, mass, size) if len(distinct) > size else distinct


def _checked(importance: np.ndarray, count: int) -> np.ndarray | None:
    """The importance as float64 with a largest value of 1, or None if there is nothing to tell apart.

    Raises:
        ValueError: if it has another shape, or a value is negative or not finite.
    """
    weights = np.asarray(importance, np.float64)
    if weights.ndim != 1 or not weights.size or count % weights.size:
        raise ValueError(f"importance: expected [channels] with channels dividing {count}, got {list(weights.shape)}")
    if not np.isfinite(weights).all():
        raise ValueError("importance: holds NaN or an infinity")
    if weights.min() < 0:
        raise ValueError(f"importance: holds a negative number, {weights.min():g}")
    largest = weights.max()
    return None if largest == 0 or weights.min() == largest else weights / largest
