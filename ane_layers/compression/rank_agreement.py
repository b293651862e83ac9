"""How far two rankings agree."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

Name = TypeVar("Name", bound=Hashable)


def rank_correlation(first: Mapping[Name, float], second: Mapping[Name, float]) -> float:
    """Spearman's rank correlation of two sets of values over the same names; NaN if either is constant.

    Equal values share the mean of their ranks.
    """
    ranks = [_ranks(np.array([values[name] for name in first])) for values in (first, second)]
    a, b = (rank - rank.mean() for rank in ranks)
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: np.ndarray = (last - (counts - 1) / 2)[place]
    return means


def top_overlap(first: Mapping[int, float], second: Mapping[int, float], count: int) -> float:
    """Share of the `count` largest of one that are among the `count` largest of the other; of equal ones, the lower number counts."""

    def top(values: Mapping[int, float]) -> set[int]:
        return set(sorted(values, key=lambda name: (-values[name], name))[:count])

    return len(top(first) & top(second)) / count


def default_top(layers: int) -> int:
    """The share of layers that `top8` promotes in the 30-layer model; at least one."""
    return max(1, round(8 / 30 * layers))
