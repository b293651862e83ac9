"""Grouped-query attention in the folded layout from end to end: no head is transposed, repeated or joined on the way.

A 1×1 convolution may give its channels in any order, and the next one may take them in any. With the rows of the joined q, k and v
projection in the order (KV head, head_dim, [its G queries, k, v]), what it gives, `[B, K·D·(G+2), 1, S]`, is read as `[B, K, D, (G+2)·S]`
by one reshape, for one token and for many; and with the columns of the output projection in the order (KV head, head_dim, query),
what attention gives goes into it by another. Both orders are given to the weights when they are loaded (`folded_rows`, `folded_columns`).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from ane_layers.layers.attention import HeadSharing, check_head_sharing, check_heads, repeat_kv
from ane_layers.layers.kv_cache import Context
from ane_layers.layers.linear import Linear, fuse_linears, reorder_rows
from ane_layers.layers.norm import RMSNorm
from ane_layers.layers.softmax import soft_cap


def folded_rows(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> Tensor:
    """Row numbers that bring joined q, k and v rows, `cat([q, k, v])`, into the folded order.

    Shape:
        - output: int64 `[(H + 2·K)·D]`, for `weight[rows]` and `bias[rows]`
    """
    check_heads(num_attention_heads, num_key_value_heads)
    h, k, d = num_attention_heads, num_key_value_heads, head_dim
    numbers = torch.arange((h + 2 * k) * d)
    query, key, value = numbers.split([h * d, k * d, k * d])
    queries = rearrange(query, "(k g d) -> k d g", k=k, d=d)
    single = [rearrange(part, "(k d) -> k d 1", k=k) for part in (key, value)]
    return torch.cat([queries, *single], dim=2).reshape(-1)


def fold_projections(query: Linear, key: Linear, value: Linear, *, num_key_value_heads: int, head_dim: int) -> Linear:
    """One `Linear` for query, key and value, whose output `FoldedAttention.split` reads. A step of loading.

    Raises:
        ValueError: for sizes that do not fit, or if some have a bias and some do not.
    """
    rows = folded_rows(query.out_features // head_dim, num_key_value_heads, head_dim)
    return reorder_rows(fuse_linears([query, key, value]), rows)


def fold_output(output: Linear, *, num_key_value_heads: int, head_dim: int) -> Linear:
    """The output projection for what `FoldedAttention.merge` gives. A step of loading."""
    columns = folded_columns(output.in_features // head_dim, num_key_value_heads, head_dim)
    folded = fuse_linears([output])
    folded.weight = nn.Parameter(folded.weight[:, columns], requires_grad=False)
    return folded


def folded_columns(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> Tensor:
    """Column numbers that let the output projection read folded heads, for `o_proj.weight[:, columns]`.

    Shape:
        - output: int64 `[H·D]`
    """
    check_heads(num_attention_heads, num_key_value_heads)
    numbers = torch.arange(num_attention_heads * head_dim)
    return rearrange(numbers, "(k g d) -> (k d g)", k=num_key_value_heads, d=head_dim)


class FoldedNorm(RMSNorm):
    """`RMSNorm` over the head_dim of folded queries and keys, `[B, K, D, (G+1)·S]`, each with a weight of its own.

    Args:
        head_dim: D.
        groups: G.
        eps: see `RMSNorm`.

    Shape:
        - input, output: `[B, K, D, (G+1)·S]`
        - weight: `[1, 1, D, G+1]`, the key's last
    """

    def __init__(self, head_dim: int, groups: int, *, eps: float) -> None:
        super().__init__(head_dim, eps=eps, dim=2)
        self.weight = nn.Parameter(torch.ones(1, 1, head_dim, groups + 1))

    def spread_weight(self, x: Tensor) -> Tensor:
        # Over the tokens of each query; a constant by the time that a program is written.
        length = x.shape[3] // self.weight.shape[3]
        if length == 1:
            return self.weight
        spread = self.weight[..., None].expand(*self.weight.shape, length)
        return spread.reshape(*self.weight.shape[:3], x.shape[3])


class FoldedAttention(nn.Module):
    """`softmax(Q·Kᵀ + mask)·V` over folded heads, with keys and values in one part or two: the cache, and the new tokens themselves.

    Two parts serve a cache that is written after attention, or not at all: the scores of both are joined, softmax runs over
    them together, and each part of the weights meets its own values. Scale the query beforehand, in a weight.

    Args:
        num_attention_heads: H.
        num_key_value_heads: K, a divisor of H.
        head_dim: D.
        head_sharing: `"repeat_kv"` writes K and V out for every query head, for comparison: same weights, same result.
        softcap: if given, scores are capped before the mask; see `soft_cap`.

    Shape:
        - query: `[B, K, D, G·S]`, query g of token s at `g·S + s`
        - context: see `Context`: keys and values `[B, K, T, D]`, those of the new tokens `[B, K, D, S]` or None
        - mask: additive, `[B or 1, 1, G·S, T]` (`[…, S, T]` with `"repeat_kv"`), with S more columns, last, if the new tokens are a part of
          their own; see `fold_mask`
        - output: `[B, K, D, G·S]`
    """

    def __init__(
        self,
        *,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        head_sharing: HeadSharing = "fold",
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_attention_heads, num_key_value_heads)
        check_head_sharing(head_sharing)
        self.head_sharing = head_sharing
        self.softcap = softcap
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.groups = num_attention_heads // num_key_value_heads
        self.head_dim = head_dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """What the joined projection gives, as queries with their key, and the value.

        Shape:
            - qkv: `[B, K·D·(G+2), 1, S]`
            - output: `[B, K, D, (G+1)·S]` and `[B, K, D, S]`
        """
        length = qkv.shape[3]
        folded = qkv.reshape(qkv.shape[0], self.num_key_value_heads, self.head_dim, -1)  # [B, K, D, (G+2)·S]
        query_key, value = folded.split([(self.groups + 1) * length, length], dim=3)
        return query_key, value

    def merge(self, heads: Tensor) -> Tensor:
        """Folded heads as the output projection reads them.

        Shape:
            - heads: `[B, K, D, G·S]`
            - output: `[B, K·D·G, 1, S]`
        """
        length = heads.shape[3] // self.groups
        return heads.reshape(heads.shape[0], -1, 1, length)

    def forward(self, query: Tensor, context: Context, mask: Tensor) -> Tensor:
        if self.head_sharing == "repeat_kv":
            return self._repeated(query, context, mask)
        query = query.transpose(2, 3)  # [B, K, G·S, D]: an attribute of the matrix product, no operation
        scores = query @ context.key.transpose(2, 3)  # [B, K, G·S, T]
        if context.new_key is None:
            return context.value.transpose(2, 3) @ self._weights(scores, mask).transpose(2, 3)
        scores = torch.cat([scores, query @ context.new_key], dim=3)  # [B, K, G·S, T + S]
        weights = self._weights(scores, mask)
        old, new = weights.split([context.key.shape[2], context.new_key.shape[3]], dim=3)
        assert context.new_value is not None
        return context.value.transpose(2, 3) @ old.transpose(2, 3) + context.new_value @ new.transpose(2, 3)

    def _repeated(self, query: Tensor, context: Context, mask: Tensor) -> Tensor:
        query = rearrange(query, "b k d (g s) -> b (k g) s d", g=self.groups)
        key, value = (repeat_kv(part, self.groups) for part in context.joined())
        heads = self._weights(query @ key.transpose(2, 3), mask) @ value  # [B, H, S, D]
        return rearrange(heads, "b (k g) s d -> b k d (g s)", k=self.num_key_value_heads)

    def _weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.softcap is not None:
            scores = soft_cap(scores, self.softcap)
        # One operation. It takes the largest score off itself; `ane_softmax` spells the same out in five.
        return (scores + mask).softmax(dim=3)

    def extra_repr(self) -> str:
        return (
            f"num_attention_heads={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads}, "
            f"head_dim={self.head_dim}"
        )
