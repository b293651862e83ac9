"""Attention by torch's own fused kernel, for passes of many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from ane_layers.layers import Context, FoldedAttention, GroupedQueryAttention


class TorchAttention(GroupedQueryAttention):
    """`GroupedQueryAttention` by `scaled_dot_product_attention`; the same arguments and shapes."""

    def align_mask(self, mask: Tensor, length: int) -> Tensor:
        return mask  # [B, 1, S, T], whatever the heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=True)


class TorchFoldedAttention(FoldedAttention):
    """`FoldedAttention` by `scaled_dot_product_attention`; the same arguments and shapes."""

    def forward(self, query: Tensor, context: Context, mask: Tensor) -> Tensor:
        key, value = context.joined()
        heads = F.scaled_dot_product_attention(query.transpose(2, 3), key, value, attn_mask=mask, scale=1.0)
        return heads.transpose(2, 3)


def _by_torch(attention: GroupedQueryAttention | FoldedAttention) -> nn.Module:
    heads, kv_heads, size = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    if isinstance(attention, FoldedAttention):
        return TorchFoldedAttention(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size)
    return TorchAttention(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, scale=attention.scale)


def _has_kernel(module: nn.Module) -> TypeGuard[GroupedQueryAttention | FoldedAttention]:
    """Whether torch's kernel computes the same: it caps no scores."""
    if not isinstance(module, GroupedQueryAttention | FoldedAttention) or module.softcap is not None:
        return False
    return isinstance(module, GroupedQueryAttention) or module.head_sharing == "fold"


@contextmanager
def torch_attention(model: nn.Module) -> Iterator[None]:
    """Lets a model attend by torch's kernel for a while; weights and everything else stay as they are.

    The layers' own form, which an engine wants, is slow here: torch's `exp` takes ten times as long where its result is too small for fp32,
    as it is for every masked slot, half of a window.
    """
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _has_kernel(child)
    ]
    for parent, name, child in plain:
        setattr(parent, name, _by_torch(child))
    try:
        yield
    finally:
        for parent, name, child in plain:
            setattr(parent, name, child)
