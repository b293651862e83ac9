"""What is drawn, against `transformers`' logits warpers; how often, by chi-square."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ane_layers.sampling import Sampler


def logits(count: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, count)


def warped(values: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores, ids = torch.from_numpy(values)[None], torch.zeros(1, 1, dtype=torch.long)
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k is not None else []
    warpers += [TopPLogitsWarper(top_p)] if top_p is not None else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.5, 0.9, 1.0])
def test_distribution_matches_transformers(temperature: float, top_k: int | None, top_p: float | None) -> None:
    values = logits()
    found = Sampler(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(values)
    np.testing.assert_allclose(found, warped(values, temperature, top_k, top_p), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}])
def test_frequencies_match_the_distribution(options: dict[str, Any]) -> None:
    values, draws = logits(12, seed=3) / 3, 20_000
    sampler = Sampler(temperature=0.8, seed=1, **options)
    counts = np.bincount([sampler.sample(values) for _ in range(draws)], minlength=len(values))
    expected = warped(values, 0.8, options.get("top_k"), options.get("top_p")) * draws
    kept = expected > 0
    assert counts[~kept].sum() == 0
    square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert freedom >= 2
    # Mean and 4 standard deviations of chi-square: the seed is fixed, so it holds or does not.
    assert square < freedom + 4 * math.sqrt(2 * freedom)


def test_seed_decides() -> None:
    values = logits()
    runs = [
        [sampler.sample(values) for _ in range(50)] for sampler in (Sampler(temperature=1, seed=s) for s in (4, 4, 5))
    ]
    assert runs[0] == runs[1] != runs[2]
    unseeded = [[sampler.sample(values) for _ in range(50)] for sampler in (Sampler(temperature=1) for _ in range(2))]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_dtype_does_not_matter(dtype: type) -> None:
    values = logits().astype(dtype)
    for temperature in (0.0, 1.0):
        assert Sampler(temperature=temperature, seed=2).sample(values) == Sampler(
            temperature=temperature, seed=2
        ).sample(values.astype(np.float64))


def test_ties_are_decided() -> None:
    values = np.array([1.0, 3.0, 3.0, 0.0, 3.0])
    assert Sampler().sample(values) == 1
    np.testing.assert_array_equal(Sampler().probabilities(values), [0, 1, 0, 0, 0])
    # As in transformers, those as likely as the k-th stay; of the nucleus, the lower ids go first.
    np.testing.assert_allclose(Sampler(temperature=1, top_k=2).probabilities(values), [0, 1 / 3, 1 / 3, 0, 1 / 3])
    np.testing.assert_allclose(Sampler(temperature=1, top_p=0.5).probabilities(values), [0, 0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(Sampler(temperature=1, top_p=0.5).probabilities(np.zeros(2)), [1, 0])


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 1), (1 - 2**-53, 2)])
def test_no_draw_gives_an_excluded_token(draw: float, expected: int) -> None:
    sampler = Sampler(temperature=1, top_k=2)
    sampler._random = SimpleNamespace(random=lambda: draw)
    assert sampler.sample(np.array([0.0, 3.0, 3.1, 1.0])) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    values = np.array([-3e38, 5.0, 3e38, 0.0])
    found = Sampler(temperature=temperature).probabilities(values)
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(1)
    assert Sampler(temperature=temperature, seed=0).sample(values) in range(4)
    if temperature < 1:
        assert found[2] == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or above, got -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or above, got nan"),
        ({"temperature": math.inf}, "temperature must be 0 or above, got inf"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, got nan"),
        ({"seed": -1}, "seed must be 0 or above, got -1"),
    ],
)
def test_ranges(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Sampler(**options)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_must_be_finite(bad: float, temperature: float) -> None:
    values = logits()
    values[[7, 9]] = bad
    with pytest.raises(ValueError, match=rf"2 of 50 logits are not finite \(token 7: {bad}\)"):
        Sampler(temperature=temperature).sample(values)
    with pytest.raises(ValueError, match=r"logits must have the shape \[V\], got \[1, 50\]"):
        Sampler(temperature=temperature).sample(values[None])
    with pytest.raises(ValueError, match=r"got \[0\]"):
        Sampler(temperature=temperature).sample(values[:0])
