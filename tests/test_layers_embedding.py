"""The embedding against `nn.Embedding`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ane_layers.layers import Embedding


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("b", "s"), [(1, 1), (3, 1), (1, 5), (3, 7)])
def test_embedding_matches_torch(b: int, s: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = nn.Embedding(17, 13).requires_grad_(False)
    reference.weight.normal_(generator=generator)
    layer = Embedding(17, 13)
    layer.load_state_dict(reference.state_dict())
    ids = torch.randint(17, (b, s), generator=generator, dtype=dtype)
    assert_close(layer(ids), reference(ids).transpose(1, 2).unsqueeze(2), atol=0, rtol=0)


def test_ids_above_16_bits_match_their_rows() -> None:
    """ids 65536 and 102399 are cut to 0 and 36863 where they pass through 16 bits."""
    layer = Embedding(102400, 3).requires_grad_(False)
    layer.weight.copy_(torch.arange(102400.0)[:, None] + torch.tensor([0.0, 0.25, 0.5]))
    ids = torch.tensor([[65536, 102399, 36863, 0]], dtype=torch.int32)
    expected = torch.tensor([65536.0, 102399.0, 36863.0, 0.0])
    assert_close(layer(ids)[0, 0, 0], expected, atol=0, rtol=0)
    assert_close(layer(ids[:, 1:2])[0, :, 0, 0], torch.tensor([102399.0, 102399.25, 102399.5]), atol=0, rtol=0)


def test_an_id_past_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        Embedding(17, 3)(torch.tensor([[17]], dtype=torch.int32))


@pytest.mark.parametrize("s", [1, 5])
def test_scaled_embedding_matches_transformers(s: int) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    reference = Gemma3TextScaledWordEmbedding(17, 13, 0, embed_scale=13**0.5).requires_grad_(False)
    layer = Embedding(17, 13, scale=13**0.5)
    layer.load_state_dict({"weight": reference.weight})
    ids = torch.arange(s)[None]
    assert_close(layer(ids), reference(ids).transpose(1, 2).unsqueeze(2), atol=1e-6, rtol=0)
