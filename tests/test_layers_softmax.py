"""The decomposed softmax against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from ane_layers.layers import MASKED, ane_softmax, soft_cap


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("shape", [(1, 2, 1, 7), (3, 5, 4, 13), (1, 1, 1, 1)])
def test_softmax_matches_torch(shape: tuple[int, ...], dim: int) -> None:
    scores = 20 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_close(ane_softmax(scores, dim), torch.softmax(scores, dim), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masked_softmax_matches_torch(dtype: torch.dtype) -> None:
    """fp16: a masked score below -16 leaves the last exact steps of -4e4, and must not become an infinity."""
    scores = torch.tensor([[-17.0, 30, 5, -1000, 12, -25000, 0]], dtype=dtype)
    mask = torch.tensor([[MASKED, 0, 0, MASKED, 0, MASKED, MASKED]], dtype=dtype)
    masked = scores + mask
    assert torch.isfinite(masked).all()
    out = ane_softmax(masked)
    assert_close(out.float(), torch.softmax(masked.float(), -1), atol=1e-6 if dtype == torch.float32 else 5e-4, rtol=0)
    assert (out[mask != 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("slots", [7, 4096])
def test_fully_masked_row_matches_the_uniform_distribution(slots: int, dtype: torch.dtype) -> None:
    out = ane_softmax(torch.full((1, 2, 3, slots), MASKED, dtype=dtype))
    assert_close(out.float(), torch.full_like(out, 1 / slots).float(), atol=0, rtol=1e-3)


def test_softmax_of_large_fp16_scores_matches_fp32() -> None:
    scores = (3e4 * torch.randn(3, 17, generator=torch.Generator().manual_seed(0))).clamp(-6e4, 6e4).half()
    assert_close(ane_softmax(scores).float(), torch.softmax(scores.float(), -1), atol=1e-3, rtol=0)


def test_soft_cap_keeps_small_scores_and_bounds_large_ones() -> None:
    scores = torch.tensor([0.0, 1e-3, -2.0, 50.0, 1e4, -1e4], dtype=torch.float64)
    capped = soft_cap(scores, 50.0)
    assert_close(capped, 50 * torch.tanh(scores / 50), atol=0, rtol=1e-15)
    assert_close(capped[:3], scores[:3], atol=2e-3, rtol=0)
    assert capped.abs().max() <= 50
