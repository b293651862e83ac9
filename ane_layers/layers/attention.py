"""Grouped-query attention that folds the query heads instead of repeating K and V."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor, nn

from ane_layers.layers.masks import fold_mask
from ane_layers.layers.softmax import ane_softmax, soft_cap

HeadSharing = Literal["fold", "repeat_kv"]


class GroupedQueryAttention(nn.Module):
    """`softmax(Q·Kᵀ·scale + mask)·V`, where G = H / K query heads read the same KV head.

    `head_sharing="fold"` views the G query heads of a KV head as further rows of its query, `[B, H, S, D] → [B, K, G·S, D]`: rows of a
    matrix product do not depend on each other, so K and V are read as they are stored. Nothing is repeated and no operand broadcasts;
    the rank stays 4 for one token and for many. `"repeat_kv"` writes K and V out G times, as most ports do, for comparison: it needs the
    same weights and gives the same result.

    Query head h reads KV head h // G. For a checkpoint whose heads are interleaved (h % K), see `contiguous_heads`.

    Args:
        num_attention_heads: H.
        num_key_value_heads: K, a divisor of H.
        head_dim: D.
        scale: factor on the scores, `D ** -0.5` by default. 1.0 costs no operation, for ports that fold it into a weight.
        head_sharing: `"fold"` or `"repeat_kv"`.
        softcap: if given, scores are capped before the mask; see `soft_cap`.

    Shape:
        - query: `[B, H, S, D]`
        - key, value: `[B, K, T, D]`
        - mask: additive, `[B or 1, 1, S, T]`; or already through `align_mask`, so that it is done once for all layers
        - output: `[B, H, S, D]`

    Raises:
        ValueError: for sizes that do not divide, an unknown `head_sharing`, or a mask that is boolean or differs by head.

    Source: Ainslie et al., "GQA", 2023.
    """

    def __init__(
        self,
        *,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        scale: float | None = None,
        head_sharing: HeadSharing = "fold",
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_attention_heads, num_key_value_heads)
        check_head_sharing(head_sharing)
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.groups = num_attention_heads // num_key_value_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.head_sharing = head_sharing
        self.softcap = softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        length = query.shape[2]
        if self.scale != 1.0:
            # The query is the smallest of the three; the order also keeps fp16 scores in range.
            query = query * self.scale
        if mask is not None:
            mask = self.align_mask(mask, length)
        if self.head_sharing == "repeat_kv":
            return self._attend(query, repeat_kv(key, self.groups), repeat_kv(value, self.groups), mask)
        # One reshape: splitting the heads first would pass through rank 5.
        query = query.reshape(query.shape[0], self.num_key_value_heads, -1, self.head_dim)  # [B, K, G·S, D]
        out = self._attend(query, key, value, mask)
        return out.reshape(out.shape[0], self.num_attention_heads, length, self.head_dim)

    def align_mask(self, mask: Tensor, length: int) -> Tensor:
        """The mask as the scores need it; a mask that is already aligned is returned as it is.

        Shape:
            - mask: `[B, 1, S, T]` or `[B, 1, G·S, T]`
            - output: `[B, 1, G·S, T]` if folded and S > 1, else `[B, 1, S, T]`
        """
        if mask.dtype == torch.bool:
            raise ValueError("GroupedQueryAttention takes an additive mask, got a boolean one; see causal_mask")
        if mask.shape[1] != 1:
            raise ValueError(
                f"GroupedQueryAttention takes one mask for all heads, [B, 1, S, T], got {list(mask.shape)}"
            )
        rows = mask.shape[2]
        if rows not in (1, length, self.groups * length):
            raise ValueError(f"GroupedQueryAttention: mask has {rows} rows for {length} tokens in {self.groups} groups")
        if self.head_sharing == "repeat_kv" or rows != length:
            return mask
        return fold_mask(mask, self.groups)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2)  # [B, K, G·S, T]
        if self.softcap is not None:
            scores = soft_cap(scores, self.softcap)
        if mask is not None:
            scores = scores + mask
        return ane_softmax(scores) @ value

    def extra_repr(self) -> str:
        return (
            f"num_attention_heads={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads}, "
            f"head_dim={self.head_dim}, scale={self.scale:g}, head_sharing={self.head_sharing!r}"
        )


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """Every KV head written out for each of its query heads: what the folding avoids, for comparison.

    Shape:
        - x: `[B, K, T, D]`
        - output: `[B, K·G, T, D]`
    """
    if groups == 1:
        return x
    b, k, t, d = x.shape
    return x[:, :, None].expand(b, k, groups, t, d).reshape(b, k * groups, t, d)


def check_head_sharing(head_sharing: str) -> None:
    """Raises `ValueError` for an unknown `head_sharing`."""
    if head_sharing not in get_args(HeadSharing):
        raise ValueError(f"head_sharing must be one of {get_args(HeadSharing)}, got {head_sharing!r}")


def check_heads(num_attention_heads: int, num_key_value_heads: int) -> None:
    """Raises `ValueError` unless the KV heads divide the query heads."""
    if num_key_value_heads < 1 or num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"num_attention_heads ({num_attention_heads}) must be a multiple of num_key_value_heads ({num_key_value_heads})"
        )


def contiguous_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> Tensor:
    """Row numbers that bring interleaved query heads (head h reads KV head h % K) into contiguous order (h // G).

    The folding needs a KV head's queries next to each other. For interleaved heads that is a permutation of weights when they are
    loaded, and costs nothing afterwards. With `rows = contiguous_heads(…)`:

        q_proj.weight[rows], q_proj.bias[rows], a full-width q_norm.weight[rows], o_proj.weight[:, rows]

    Shape:
        - output: int64 `[H·D]`
    """
    check_heads(num_attention_heads, num_key_value_heads)
    rows = torch.arange(num_attention_heads * head_dim)
    return rearrange(rows, "(g k d) -> (k g d)", k=num_key_value_heads, d=head_dim)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Hidden states to heads.

    Shape:
        - x: `[B, H·D, 1, S]`
        - output: `[B, H, S, D]`
    """
    if x.shape[3] == 1:
        # One token: the axes are only renamed, one reshape in place of a reshape and a transpose.
        return x.reshape(x.shape[0], num_heads, 1, x.shape[1] // num_heads)
    return rearrange(x, "b (h d) 1 s -> b h s d", h=num_heads)


def merge_heads(x: Tensor) -> Tensor:
    """Heads to hidden states, the reverse of `split_heads`.

    Shape:
        - x: `[B, H, S, D]`
        - output: `[B, H·D, 1, S]`
    """
    if x.shape[2] == 1:
        return x.reshape(x.shape[0], x.shape[1] * x.shape[3], 1, 1)
    return rearrange(x, "b h s d -> b (h d) 1 s")
