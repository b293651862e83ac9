"""Self-attention with a checkpoint's names, and the same in the folded layout, which loading puts in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ane_layers.layers import (
    FoldedAttention,
    FoldedNorm,
    GroupedQueryAttention,
    HeadSharing,
    Linear,
    RMSNorm,
    fold_output,
    fold_projections,
    folded_columns,
    fuse_linears,
    merge_heads,
    reorder_rows,
    rotate,
    split_heads,
)
from ane_layers.models.decoder_config import DecoderConfig
from ane_layers.models.step import Step

Norm = Callable[..., RMSNorm]
"""Makes a family's norm: `norm(size, dim=…)`."""


class Options(TypedDict, total=False):
    """What `Attention` takes beside the config."""

    head_sharing: Required[HeadSharing]
    rotated: int | None
    scale: float | None
    softcap: float | None
    bias: bool
    output_bias: bool


class Attention(nn.Module):
    """Three projections, the rotation, grouped-query attention and the output projection.

    Args:
        config: of the model.
        head_sharing: see `GroupedQueryAttention`.
        rotated: how many elements of a query or key are rotated, the first ones; 0 for a layer without position encoding; all by default.
        scale: factor on the scores, `D ** -0.5` by default.
        softcap: of the scores; see `soft_cap`.
        bias: whether the projections of queries, keys and values add a bias.
        output_bias: whether the output projection does.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        head_sharing: HeadSharing,
        rotated: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.rotated = size if rotated is None else rotated
        self.q_proj = Linear(config.hidden_size, heads * size, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv_heads * size, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv_heads * size, bias=bias)
        self.o_proj = Linear(heads * size, config.hidden_size, bias=output_bias)
        self.attention = GroupedQueryAttention(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size,
            scale=scale,
            head_sharing=head_sharing,
            softcap=softcap,
        )

    def align(self, step: Step) -> Step:
        return step

    def query_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before their rotation, `[B, H, S, D]` and `[B, K, S, D]`."""
        query = split_heads(self.q_proj(x), self.attention.num_attention_heads)
        return query, split_heads(self.k_proj(x), self.attention.num_key_value_heads)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        query, key = self.query_key(x)
        value = split_heads(self.v_proj(x), self.attention.num_key_value_heads)
        if self.rotated:
            query = rotate(query, step.cos, step.sin, rotated=self.rotated)
            key = rotate(key, step.cos, step.sin, rotated=self.rotated)
        context = step.extend(layer, key.transpose(2, 3), value.transpose(2, 3))
        return self.o_proj(merge_heads(self.attention(query, *context.joined(), step.mask)))

    def folded(self) -> FoldedSelfAttention:
        """The same in the folded layout. A step of loading."""
        return FoldedSelfAttention(self)


class HeadNormAttention(Attention):
    """With a norm over each head's query and one over each head's key, before their rotation."""

    def __init__(self, config: DecoderConfig, *, norm: Norm, **options: Unpack[Options]) -> None:
        super().__init__(config, **options)
        self.q_norm = norm(config.head_dim, dim=-1)
        self.k_norm = norm(config.head_dim, dim=-1)

    def query_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().query_key(x)
        return self.q_norm(query), self.k_norm(key)

    def folded(self) -> FoldedSelfAttention:
        return FoldedHeadNormAttention(self)


class WidthNormAttention(Attention):
    """With a norm over the queries of all heads together and one over all keys, before their rotation."""

    def __init__(self, config: DecoderConfig, *, norm: Norm, **options: Unpack[Options]) -> None:
        super().__init__(config, **options)
        self.q_norm = norm(config.num_attention_heads * config.head_dim, dim=1)
        self.k_norm = norm(config.num_key_value_heads * config.head_dim, dim=1)

    def query_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query = split_heads(self.q_norm(self.q_proj(x)), self.attention.num_attention_heads)
        return query, split_heads(self.k_norm(self.k_proj(x)), self.attention.num_key_value_heads)

    def folded(self) -> FoldedSelfAttention:
        return FoldedWidthNormAttention(self)


class FoldedSelfAttention(nn.Module):
    """`Attention` in the folded layout: one projection, queries and keys rotated together, no head transposed.

    The score's scale rides on the rotation of the queries. In the projection's weights it would be rounded, and lookup tables that
    smaller rows of queries share with keys and values would serve them badly.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, plain: Attention) -> None:
        super().__init__()
        old = plain.attention
        self.rotated = plain.rotated
        self.scale = old.scale
        self.qkv_proj = self.projection(plain)
        self.o_proj = fold_output(plain.o_proj, num_key_value_heads=old.num_key_value_heads, head_dim=old.head_dim)
        self.attention = FoldedAttention(
            num_attention_heads=old.num_attention_heads,
            num_key_value_heads=old.num_key_value_heads,
            head_dim=old.head_dim,
            head_sharing=old.head_sharing,
            softcap=old.softcap,
        )

    def projection(self, plain: Attention) -> Linear:
        """The joined projection of queries, keys and values."""
        sizes = {"num_key_value_heads": plain.attention.num_key_value_heads, "head_dim": plain.attention.head_dim}
        return fold_projections(plain.q_proj, plain.k_proj, plain.v_proj, **sizes)

    def align(self, step: Step) -> Step:
        fold_rows = self.attention.head_sharing == "fold"
        return step.folded(self.attention.groups, fold_rows=fold_rows, query_scale=self.scale)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before their rotation, `[B, K, D, (G+1)·S]`, and values, `[B, K, D, S]`."""
        return self.attention.split(self.qkv_proj(x))

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        length = x.shape[3]
        query_key, value = self.split(x)
        if self.rotated:
            query_key = rotate(query_key, step.cos, step.sin, dim=2, rotated=self.rotated)
        query, key = query_key.split([self.attention.groups * length, length], dim=3)
        if not self.rotated and self.scale != 1.0:
            query = query * self.scale
        heads = self.attention(query, step.extend(layer, key, value), step.mask)
        return self.o_proj(self.attention.merge(heads))


class FoldedHeadNormAttention(FoldedSelfAttention):
    """`HeadNormAttention` in the folded layout: one norm for queries and keys, with the score's scale in the queries' weights."""

    def __init__(self, plain: HeadNormAttention) -> None:
        super().__init__(plain)
        groups = self.attention.groups
        self.qk_norm = FoldedNorm(self.attention.head_dim, groups, eps=plain.q_norm.eps)
        columns = [plain.q_norm.gain().float() * self.scale] * groups + [plain.k_norm.gain().float()]
        weight = torch.stack(columns, dim=1)[None, None].detach()  # [1, 1, D, G+1]
        self.qk_norm.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = 1.0

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query_key, value = super().split(x)
        return self.qk_norm(query_key), value


class FoldedWidthNormAttention(FoldedSelfAttention):
    """`WidthNormAttention` in the folded layout: queries, keys and values follow each other, each in the order that one reshape reads."""

    def __init__(self, plain: WidthNormAttention) -> None:
        super().__init__(plain)
        order = folded_columns(*self._sizes(plain))
        self.q_norm, self.k_norm = (
            RMSNorm(norm.size, eps=norm.eps, dim=norm.dim) for norm in (plain.q_norm, plain.k_norm)
        )
        query = plain.q_norm.gain().detach().float()[order] * self.scale
        self.q_norm.weight = nn.Parameter(query, requires_grad=False)
        self.k_norm.weight = nn.Parameter(plain.k_norm.gain().detach().float(), requires_grad=False)
        self.scale = 1.0

    @staticmethod
    def _sizes(plain: Attention) -> tuple[int, int, int]:
        old = plain.attention
        return old.num_attention_heads, old.num_key_value_heads, old.head_dim

    def projection(self, plain: Attention) -> Linear:
        query = reorder_rows(plain.q_proj, folded_columns(*self._sizes(plain)))  # (KV head, head_dim, query)
        return fuse_linears([query, plain.k_proj, plain.v_proj])

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kv_heads, size = self.attention.num_key_value_heads, self.attention.head_dim
        width = kv_heads * size
        query, key, value = self.qkv_proj(x).split([self.attention.groups * width, width, width], dim=1)
        shape = (x.shape[0], kv_heads, size, -1)
        parts = [self.q_norm(query).reshape(shape), self.k_norm(key).reshape(shape)]
        return torch.cat(parts, dim=3), value.reshape(shape)  # [B, K, D, (G+1)·S] and [B, K, D, S]
