"""Attention by torch's own fused kernel, for passes of many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from ane_layers.layers import GroupedQueryAttention


class TorchAttention(GroupedQueryAttention):
    """`GroupedQueryAttention` by `scaled_dot_product_attention`; the same arguments and shapes."""

    def align_mask(self, mask: Tensor, length: int) -> Tensor:
        return mask  # [B, 1, S, T], whatever the heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=True)


@contextmanager
def torch_attention(model: nn.Module) -> Iterator[None]:
    """Lets a model attend by `TorchAttention` for a while; weights and everything else stay as they are.

    The layers' own form, which an engine wants, is slow here: torch's `exp` takes ten times as long where its result is too small for fp32,
    as it is for every masked slot, half of a window.
    """
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, GroupedQueryAttention)
    ]
    for parent, name, child in plain:
        by_torch = TorchAttention(
            num_attention_heads=child.num_attention_heads,
            num_key_value_heads=child.num_key_value_heads,
            head_dim=child.head_dim,
            scale=child.scale,
        )
        setattr(parent, name, by_torch)
    try:
        yield
    finally:
        for parent, name, child in plain:
            setattr(parent, name, child)
