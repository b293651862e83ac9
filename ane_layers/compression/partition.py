"""The best lookup table for weighted numbers: k-means in one dimension, with the table in fp16.

In one dimension the clusters of an optimum are runs of neighbours in the sorted values, so that a clustering is a row of borders, and
a cluster's error follows from prefix sums. The exact dynamic program over all places for all borders takes time in proportion to k·n.
This one looks at a window of candidates around each border, all borders at once, on a coarse grid first and then on finer ones. Its
moves reach far: one step can shift every border between two places, and so take an entry away here and add it there. Lloyd's algorithm,
which moves a border only by what its two neighbours say, ends up to several times above the optimum on heavy tails.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ane_layers.compression.prefix_sums import Floats, Indices, PrefixSums, to_fp16

# A gap between two values holds a border of its own if its share of a cell is above this: two equal points at distance g cost w·g²/2
# together, and one more cell of measure m in a smooth density saves m³/6. The cube root of a third.
_OWN_BORDER = 3 ** (-1 / 3)
_TINY = 1e-300
_LLOYD_ROUNDS = 8
_BLOCK = 1 << 14  # window cells at a time: a few arrays of this many float64 stay in a core's cache


class _Level(NamedTuple):
    """Candidates lie `1 / per_cell` of a cell apart; `reach` of them on either side of a border."""

    per_cell: int
    reach: int
    rounds: int


def best_table(values: Floats, weights: Floats, size: int) -> Floats:
    """A table of `size` entries whose weighted squared error is close to the smallest possible.

    Args:
        values: float64 [n], ascending, without repetition, all of them fp16 numbers.
        weights: float64 [n], positive.
        size: entries, from 2 to n - 1.

    Returns:
        Ascending fp16 numbers as float64, at most `size` of them: each is the nearest for some value.
    """
    count = len(values)
    sums = PrefixSums.of(values, weights)
    borders, measure = _companded(values, weights, size)
    for level in _levels(size):
        borders, everything = _search(sums, borders, measure, level)
        if everything:
            break
    borders, _ = _lloyd(sums, borders, rounded=False)
    borders = _search_rounded(sums, borders)
    _, table = _lloyd(sums, borders, rounded=True)
    nearest = np.concatenate(([0], values.searchsorted((table[1:] + table[:-1]) / 2, side="right"), [count]))
    return table[np.diff(nearest) > 0]


def _levels(size: int) -> tuple[_Level, ...]:
    """Windows of over a cell to either side settle how many cells go where; finer ones, or Lloyd's algorithm, the last digits."""
    if size < 16:
        return (_Level(32, 64, 6), _Level(128, 48, 3))
    if size == 16:
        return (_Level(16, 28, 8), _Level(40, 24, 3))
    return (_Level(4, 16, 16), _Level(16, 20, 6))


def _spread_out(borders: Indices, count: int) -> Indices:
    """Borders moved apart until no cluster is empty: a value taken out of a cluster does not raise that cluster's error."""
    steps = np.arange(1, len(borders) + 1)
    apart = np.maximum.accumulate(np.maximum(np.sort(borders) - steps, 0)) + steps
    return np.minimum(apart, count - len(borders) - 1 + steps)


def _companded(values: Floats, weights: Floats, size: int) -> tuple[Indices, Floats]:
    """A first guess, and the measure in which good borders are about evenly spaced: the integral of the density's cube root.

    That is Panter and Dite's rule (1951) for many entries in a smooth density. Where values are so sparse that neighbours deserve entries
    of their own, a gap counts as one cell, however wide.

    Returns:
        `size - 1` borders, of which neighbours may coincide; the measure before each value, float64 [n], in cells.
    """
    gaps = np.diff(values)
    shares = np.cbrt((weights[1:] + weights[:-1]) * (gaps * gaps))
    shares = np.maximum(shares, shares.max() * 1e-12)
    ordered = np.sort(shares)
    below = np.cumsum(ordered) - ordered
    wide = np.arange(len(gaps), 0, -1)
    # Cells in all, were the i-th widest gap just wide enough for a border of its own: falling with i.
    cells = _OWN_BORDER * below / ordered + wide
    first = int(np.searchsorted(-cells, -size))
    own = len(gaps) - first
    smooth = ordered[:first].sum() / max(size - own, 1)
    limit = ordered[first] if own else np.inf
    shares = np.where(shares >= limit, 1.0, np.minimum(shares / max(smooth, _TINY), 1.0))
    measure = np.concatenate(([0.0], np.cumsum(shares)))
    return measure.searchsorted(np.arange(1, size) * (measure[-1] / size)), measure


def _search(sums: PrefixSums, borders: Indices, measure: Floats, level: _Level) -> tuple[Indices, bool]:
    """Better borders among those that are evenly spaced in the measure, until a round no longer moves them far.

    Returns:
        The borders; whether every place was on the grid.
    """
    count = len(measure)
    parts = np.arange(level.per_cell * (len(borders) + 1)) / level.per_cell
    for _ in range(level.rounds):
        edges = np.concatenate(([0], borders, [count - 1]))
        fine = measure.searchsorted(np.interp(parts, np.arange(len(edges)), measure[edges]))
        grid = np.sort(np.concatenate((fine, borders, [count])))
        grid = grid[np.diff(grid, prepend=-1) > 0]
        place = grid.searchsorted(borders)
        window = np.clip(place[:, None] + np.arange(-level.reach, level.reach + 1), 1, len(grid) - 2)
        chosen, saved = _best_in_windows(sums, borders, grid[window], rounded=False)
        far = np.abs(grid.searchsorted(chosen) - place).max()
        borders = _spread_out(chosen, count)
        # A border that moved far had only a coarse grid where it went, and may have been held up by its window.
        if 2 * far < level.reach or saved < 1e-3 * sums.of_partition(borders):
            break
    return borders, len(grid) > count


def _search_rounded(sums: PrefixSums, borders: Indices) -> Indices:
    """Better borders in view of the entries' rounding to fp16, which has the more of a say the fewer values a cluster has."""
    count, size = len(sums.values), len(borders) + 1
    if count <= 1024:  # so few that they can be searched widely
        reach, rounds = math.isqrt(60_000 // size), 4
    else:
        reach, rounds = 20 if count <= 8 * size else 8, 1
    for _ in range(rounds):
        window = np.clip(borders[:, None] + np.arange(-reach, reach + 1), 1, count - 1)
        chosen, saved = _best_in_windows(sums, borders, window, rounded=True)
        borders = _spread_out(chosen, count)
        if saved < 1e-3 * sums.of_partition(borders):
            break
    return borders


def _best_in_windows(sums: PrefixSums, borders: Indices, window: Indices, *, rounded: bool) -> tuple[Indices, float]:
    """The best choice of one candidate for every border, by dynamic programming from left to right.

    Args:
        borders: [b], where the borders are now, to tell what is saved.
        window: [b, W], ascending in each row, from 1 to n - 1.
        rounded: count the rounding of the entries to fp16.

    Returns:
        The chosen borders, of which neighbours may coincide; by how much they lower the error.
    """
    count, width = window.shape
    left, right = sums.sums[:, :1], sums.sums[:, -1:]
    at = sums.sums[:, window]
    best = sums.of_runs(left, at[:, 0], rounded=rounded)
    rows = np.arange(0, width * width, width)
    came_from = np.empty((count, width), np.intp)
    block = max(1, _BLOCK // width**2)
    for start in range(1, count, block):
        stop = min(start + block, count)
        errors = sums.of_runs(at[:, start - 1 : stop - 1, None, :], at[:, start:stop, :, None], rounded=rounded)
        for border, error in enumerate(errors, start):
            error += best
            places = np.add(error.argmin(axis=1), rows, out=came_from[border])
            best = error.take(places)
    best = best + sums.of_runs(at[:, -1], right, rounded=rounded)
    choice = np.empty(count, np.intp)
    choice[-1] = best.argmin()
    for border in range(count - 1, 0, -1):
        choice[border - 1] = came_from[border, choice[border]] % width
    edges = np.concatenate((left, sums.sums[:, borders], right), axis=1)
    saved = float(sums.of_runs(edges[:, :-1], edges[:, 1:], rounded=rounded).sum() - best.min())
    return window[np.arange(count), choice], saved


def _lloyd(sums: PrefixSums, borders: Indices, *, rounded: bool) -> tuple[Indices, Floats]:
    """Lloyd's algorithm from `borders` on: entries are their values' means, borders are halfway between entries.

    Returns:
        The borders and the table, which is what they came from or what came from them.
    """
    values = sums.values
    for _ in range(_LLOYD_ROUNDS):
        edges = np.concatenate(([0], borders, [len(values)]))
        weight, moment = np.diff(sums.sums[:2, edges], axis=1)
        # The bounds hold whatever is lost in the sums of very unlike weights.
        table = np.clip(moment / (weight + sums.floor) + sums.origin, values[edges[:-1]], values[edges[1:] - 1])
        if rounded:
            table = to_fp16(table)
        moved = _spread_out(values.searchsorted((table[1:] + table[:-1]) / 2, side="right"), len(values))
        if np.array_equal(moved, borders):
            break
        borders = moved
    return borders, table
