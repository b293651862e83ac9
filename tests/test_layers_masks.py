"""Masks against torch's own causal masks."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from ane_layers.layers import MASKED, causal_mask, fold_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("position", "length", "context"), [(0, 1, 1), (0, 5, 5), (0, 5, 9), (4, 5, 9), (8, 1, 9)])
def test_causal_mask_matches_torch_tril(position: int, length: int, context: int, dtype: torch.dtype) -> None:
    mask = causal_mask(position, length, context, dtype=dtype)
    assert mask.shape == (1, 1, length, context)
    assert mask.dtype == dtype
    kept = torch.ones(context, context).tril()[position : position + length] == 1
    assert (mask[0, 0][kept] == 0).all()
    assert (mask[0, 0][~kept] == MASKED).all()  # -4e4 is exact in fp16


@pytest.mark.parametrize(("position", "length", "context"), [(-1, 1, 4), (0, 0, 4), (4, 1, 4), (2, 3, 4)])
def test_tokens_that_do_not_fit_are_refused(position: int, length: int, context: int) -> None:
    with pytest.raises(ValueError, match=f"{length} tokens at position {position} .* context_length of {context}"):
        causal_mask(position, length, context)


def test_hidden_slot_plus_a_score_stays_finite_in_fp16() -> None:
    assert MASKED == -4e4
    score = torch.tensor([-2.5e4, -17, 17, 2.5e4], dtype=torch.float16)
    assert torch.isfinite(score + causal_mask(0, 1, 2, dtype=torch.float16)[..., 1]).all()


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("s", [1, 5])
@pytest.mark.parametrize("b", [1, 3])
def test_folded_mask_matches_repeated_rows(groups: int, s: int, b: int) -> None:
    mask = torch.randn(b, 1, s, 7, generator=torch.Generator().manual_seed(0))
    folded = fold_mask(mask, groups)
    expected = mask if s == 1 else mask.repeat(1, 1, groups, 1)
    assert_close(folded, expected, atol=0, rtol=0)
