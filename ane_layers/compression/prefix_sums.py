"""The squared error of one table entry for any run of sorted values, from sums that are made once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class PrefixSums:
    """Sums over sorted values up to each place.

    Attributes:
        values, weights: float64 [n], as they came.
        sums: float64 [3, n + 1], the sums of weight, weight times value and weight times squared value before each place. They count from
            the middle outwards, zero there: the small ones around the middle do not pass through an outlier's large ones.
        origin: the value in the middle, subtracted from all values beforehand.
        floor: a weight next to nothing, for division by the weight of a run, which may be empty.
    """

    values: Floats
    weights: Floats
    sums: Floats
    origin: float
    floor: float

    @classmethod
    def of(cls, values: Floats, weights: Floats) -> PrefixSums:
        """The sums of `values`, float64 [n], ascending, with their weights, float64 [n], positive; n > 1."""
        middle = len(values) // 2
        origin = float(values[middle])
        centred = values - origin
        terms = np.stack((weights, weights * centred, weights * (centred * centred)))
        sums = np.empty((3, len(values) + 1))
        sums[:, middle] = 0
        np.cumsum(terms[:, middle:], axis=1, out=sums[:, middle + 1 :])
        np.negative(np.cumsum(terms[:, middle - 1 :: -1], axis=1)[:, ::-1], out=sums[:, :middle])
        return cls(values, weights, sums, origin, 1e-18 * float(weights.sum()))

    def of_runs(self, left: Floats, right: Floats, *, rounded: bool) -> Floats:
        """The error of one entry for the values between two places, for many pairs at once; infinite if the places are swapped.

        Args:
            left, right: `sums` at the two places, [3, ...], broadcast against each other.
            rounded: the entry is the mean rounded to fp16, not the mean.
        """
        weight = right[0] - left[0]
        moment = right[1] - left[1]
        error = right[2] - left[2]
        swapped = weight < 0
        weight += self.floor
        if rounded:
            entry = moment / weight
            entry += self.origin
            entry = to_fp16(entry) - self.origin
            weight *= entry
            moment *= 2
            moment -= weight
            moment *= entry
        else:
            moment *= moment
            moment /= weight
        error -= moment
        np.putmask(error, swapped, np.inf)
        return error

    def of_partition(self, borders: Indices) -> float:
        """The error of a mean for every run between borders, from the values themselves: a small one is lost in differences of sums."""
        edges = np.concatenate(([0], borders))
        moments = np.add.reduceat(self.weights * self.values, edges)
        means = moments / np.add.reduceat(self.weights, edges)
        spread = self.values - np.repeat(means, np.diff(edges, append=len(self.values)))
        return float((self.weights * (spread * spread)).sum())


def to_fp16(values: Floats) -> Floats:
    """The nearest fp16 numbers, finite ones, as float64."""
    # torch, since numpy converts several times as slowly.
    return torch.from_numpy(np.clip(values, -_LARGEST, _LARGEST)).half().double().numpy()
