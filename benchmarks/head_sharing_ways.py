"""The ways of sharing a KV head among query heads that `head_sharing.py` compares, over one attention layer.

`fold` and `repeat_kv` are the library's own `GroupedQueryAttention`; the others exist for comparison only. All take the same tensors and
give the same result. Letters: B batch, S new tokens, T cache length, H query heads, K KV heads, G = H / K, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ane_layers import GroupedQueryAttention, KVCache, Linear, ane_softmax, fold_mask, merge_heads, split_heads


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of an attention layer; EXAONE 4.0 1.2B's by default."""

    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    context: int = 4096
    block: int = 64
    layers: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if not 2 <= self.block < self.context:
            raise ValueError(f"block must be within 2 … context - 1 ({self.context - 1}), got {self.block}")

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


class Attend(nn.Module):
    """One way from query, key and value to the heads' outputs.

    Shape:
        - query: `[B, H, S, D]`; key, value: `[B, K, T, D]`; mask: as `align_mask` returns it
        - output: `[B, H, S, D]`
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = geometry.heads, geometry.kv_heads, geometry.head_dim
        self.groups = geometry.groups
        self.scale = geometry.head_dim**-0.5

    def align_mask(self, mask: Tensor, length: int) -> Tensor:
        """The mask `[1, 1, S, T]` as `forward` wants it, made once a call for all layers."""
        return mask

    def fold(self, query: Tensor) -> Tensor:
        return query.reshape(query.shape[0], self.kv_heads, -1, self.head_dim)  # [B, K, G·S, D]

    def unfold(self, out: Tensor) -> Tensor:
        return out.reshape(out.shape[0], self.heads, -1, self.head_dim)  # [B, H, S, D]


class Broadcast(Attend):
    """K and V with an axis of 1, over which the product broadcasts. At rank 4 the batch gives its axis up, so B must be 1."""

    def __init__(self, geometry: Geometry, *, rank: int) -> None:
        super().__init__(geometry)
        self.lead = (1,) if rank == 5 else ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        length, slots = query.shape[2], key.shape[2]
        query = (query * self.scale).reshape(*self.lead, self.kv_heads, self.groups, length, self.head_dim)
        key = key.reshape(*self.lead, self.kv_heads, 1, slots, self.head_dim)
        value = value.reshape(*self.lead, self.kv_heads, 1, slots, self.head_dim)
        scores = query @ key.transpose(-1, -2) + mask  # [(1,) K, G, S, T]
        return (ane_softmax(scores) @ value).reshape(1, self.heads, length, self.head_dim)


class KVHeadLoop(Attend):
    """A product for every KV head, over the rows of its G queries. Scores are joined, so that the softmax is written once."""

    def align_mask(self, mask: Tensor, length: int) -> Tensor:
        return fold_mask(mask, self.groups)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        queries = self.fold(query * self.scale).split(1, dim=1)
        keys = key.split(1, dim=1)
        scores = torch.cat(
            [q @ k.transpose(-1, -2) for q, k in zip(queries, keys, strict=True)], dim=1
        )  # [B, K, G·S, T]
        weights = ane_softmax(scores + mask).split(1, dim=1)
        values = value.split(1, dim=1)
        return self.unfold(torch.cat([w @ v for w, v in zip(weights, values, strict=True)], dim=1))


class HeadLoop(Attend):
    """A product for every query head with its KV head."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        queries = (query * self.scale).split(1, dim=1)
        keys = key.split(1, dim=1)
        scores = torch.cat(
            [q @ keys[h // self.groups].transpose(-1, -2) for h, q in enumerate(queries)], dim=1
        )  # [B, H, S, T]
        weights = ane_softmax(scores + mask).split(1, dim=1)
        values = value.split(1, dim=1)
        return torch.cat([w @ values[h // self.groups] for h, w in enumerate(weights)], dim=1)


class Fused(Attend):
    """The fused operation over folded queries. It has no grouped form in MIL, and is kept only if it scales by itself."""

    def align_mask(self, mask: Tensor, length: int) -> Tensor:
        return fold_mask(mask, self.groups)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return self.unfold(F.scaled_dot_product_attention(self.fold(query), key, value, attn_mask=mask))


class Reference(Attend):
    """PyTorch's own grouped attention: what the others are held against."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=True)


WAYS = {
    "fold": "fold the queries: [H, S] becomes [K, G·S]",
    "repeat_kv": "repeat K and V to H heads",
    "broadcast": "broadcast K and V over the groups, rank 4",
    "broadcast_rank5": "broadcast K and V over the groups, rank 5",
    "kv_head_loop": "a loop over KV heads",
    "head_loop": "a loop over query heads",
    "fused": "the fused operation, on folded queries",
}


def attend(way: str, geometry: Geometry) -> nn.Module:
    """The module of a way, or `"reference"`. All have `align_mask(mask, length)`."""
    match way:
        case "fold" | "repeat_kv":
            return GroupedQueryAttention(
                num_attention_heads=geometry.heads,
                num_key_value_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                head_sharing=way,
            )
        case "broadcast":
            return Broadcast(geometry, rank=4)
        case "broadcast_rank5":
            return Broadcast(geometry, rank=5)
        case "kv_head_loop":
            return KVHeadLoop(geometry)
        case "head_loop":
            return HeadLoop(geometry)
        case "fused":
            return Fused(geometry)
        case "reference":
            return Reference(geometry)
    raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")


class AttentionLayer(nn.Module):
    """Projections around a way of attending. Without norms and rotation, which no way changes."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.sizes = [geometry.heads, geometry.kv_heads, geometry.kv_heads]
        self.qkv_proj = Linear(geometry.hidden, sum(self.sizes) * geometry.head_dim)
        self.o_proj = Linear(geometry.heads * geometry.head_dim, geometry.hidden)

    def forward(
        self, x: Tensor, attend: nn.Module, cache: KVCache, layer: int, position: Tensor, mask: Tensor
    ) -> Tensor:
        query, key, value = split_heads(self.qkv_proj(x), sum(self.sizes)).split(self.sizes, dim=1)
        key, value = cache.update(layer, key, value, position)
        return self.o_proj(merge_heads(attend(query, key, value, mask)))


class AttentionStack(nn.Module):
    """Attention layers over one stateful cache: what is converted.

    Shape:
        - hiddenStates: `[1, C, 1, S]`; position: int32 `[1]`; causalMask: `[1, 1, S, T]`
        - output: `[1, C, 1, S]`
    """

    def __init__(self, geometry: Geometry, way: str, seed: int = 0) -> None:
        super().__init__()
        self.attend = attend(way, geometry)
        self.layers = nn.ModuleList(AttentionLayer(geometry) for _ in range(geometry.layers))
        self.cache = KVCache(
            num_layers=geometry.layers,
            num_key_value_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            context_length=geometry.context,
        )
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            for linear in (layer.qkv_proj, layer.o_proj):
                draw = torch.randn(linear.weight.shape, generator=generator) * linear.in_features**-0.5
                if linear is layer.qkv_proj:
                    # Large queries make attention pick a few slots; a query at the wrong KV head then shows far above rounding.
                    draw[: geometry.heads * geometry.head_dim] *= 3
                linear.weight.data = draw.half().float()  # as the package stores it

    def forward(self, hiddenStates: Tensor, position: Tensor, causalMask: Tensor) -> Tensor:
        mask = self.attend.align_mask(causalMask, hiddenStates.shape[3])
        x = hiddenStates
        for i, layer in enumerate(self.layers):
            x = layer(x, self.attend, self.cache, i, position, mask)
        return x
