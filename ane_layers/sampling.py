"""Chooses the next token from logits."""

from __future__ import annotations

import math

import numpy as np


class Sampler:
    """Greedy, or random by temperature, top-k and top-p, applied in this order as in `transformers`.

    The same seed and the same logits give the same tokens, whatever the dtype the logits came in holds exactly.

    Args:
        temperature: divides the logits; 0 takes the most likely token, the lowest id among equals, and leaves the other
            arguments without effect.
        top_k: only the k most likely tokens; those as likely as the k-th stay too.
        top_p: only the most likely tokens up to this probability mass, the one that reaches it included; among equals the
            lower id goes first.
        seed: of the draws; None takes one from the system.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be 0 or above, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must be 0 or above, got {seed}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def sample(self, logits: np.ndarray) -> int:
        """The next token.

        Shape:
            - logits: `[V]`

        Raises:
            ValueError: for another shape, or logits that are not all finite.
        """
        if self.temperature == 0:
            return int(_checked(logits).argmax())
        cumulated = self.probabilities(logits).cumsum()
        # A draw is below 1, so the product is below the total, and the first sum above it belongs to a token that is not excluded.
        return int(np.searchsorted(cumulated, self._random.random() * cumulated[-1], side="right"))

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """What `sample` draws from, in fp64; excluded tokens have 0.

        Shape:
            - logits: `[V]`
            - output: `[V]`

        Raises:
            ValueError: as `sample`.
        """
        logits = _checked(logits)
        if self.temperature == 0:
            return np.eye(1, len(logits), int(logits.argmax()))[0]
        # The largest becomes 0 first: a tiny temperature then gives -inf for the others, never inf - inf.
        with np.errstate(over="ignore"):
            scores = (logits - logits.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(scores):
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        probabilities: np.ndarray = np.exp(scores)
        probabilities /= probabilities.sum()
        if self.top_p is not None and self.top_p < 1:
            order = np.argsort(-probabilities, kind="stable")
            before = probabilities[order].cumsum() - probabilities[order]
            probabilities[order[before >= self.top_p]] = 0
            probabilities /= probabilities.sum()
        return probabilities


def _checked(logits: np.ndarray) -> np.ndarray:
    if logits.ndim != 1 or not logits.size:
        raise ValueError(f"logits must have the shape [V], got {list(logits.shape)}")
    wrong = np.flatnonzero(~np.isfinite(logits))
    if wrong.size:
        raise ValueError(
            f"{wrong.size} of {logits.size} logits are not finite (token {wrong[0]}: {logits[wrong[0]]}); "
            "`ane-layers verify` compares the package with PyTorch"
        )
    return logits.astype(np.float64)
