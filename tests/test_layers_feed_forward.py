"""The gated feed-forward against `transformers`' and against itself with fused projections."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ane_layers.layers import FusedGatedFeedForward, GatedFeedForward


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("b", "s"), [(1, 1), (3, 1), (1, 5), (3, 7)])
def test_feed_forward_matches_transformers(b: int, s: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = LlamaMLP(LlamaConfig(hidden_size=14, num_attention_heads=1, intermediate_size=35, mlp_bias=bias))
    for parameter in reference.requires_grad_(False).parameters():
        parameter.normal_(0, 0.3, generator=generator)
    plain = GatedFeedForward(14, 35, bias=bias).requires_grad_(False)
    plain.load_state_dict(reference.state_dict())
    x = torch.randn(b, 14, 1, s, generator=generator)
    expected = reference(x.squeeze(2).transpose(1, 2)).transpose(1, 2).unsqueeze(2)
    assert_close(plain(x), expected, atol=1e-5, rtol=0)
    assert_close(FusedGatedFeedForward(plain)(x), expected, atol=1e-5, rtol=0)
