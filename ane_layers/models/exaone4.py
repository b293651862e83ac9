"""EXAONE 4: post-norm blocks, per-head q and k norms before rotary, grouped-query attention.

Reference: `transformers`' `Exaone4ForCausalLM`; LG AI Research, "EXAONE 4.0", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ane_layers.layers import (
    FoldedAttention,
    FoldedNorm,
    FusedGatedFeedForward,
    GatedFeedForward,
    GroupedQueryAttention,
    HeadSharing,
    Linear,
    RMSNorm,
    fold_output,
    fold_projections,
    merge_heads,
    rotate,
    split_heads,
)
from ane_layers.models.base import CausalLM
from ane_layers.models.config import SLIDING, layer_types
from ane_layers.models.decoder_config import DecoderConfig
from ane_layers.models.step import Step


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(DecoderConfig):
    """EXAONE 4's config.json. `sliding_window` is null for models in which every layer attends to everything."""

    sliding_window: int | None
    sliding_window_pattern: int | str | None = None
    layer_types: tuple[str, ...] | None = None

    model_type = "exaone4"

    def __post_init__(self) -> None:
        super().__post_init__()
        types = layer_types(
            self.num_hidden_layers,
            layer_types=self.layer_types,
            sliding_window=self.sliding_window,
            pattern=self.sliding_window_pattern,
        )
        object.__setattr__(self, "layer_types", types)


class Exaone4Attention(nn.Module):
    """Self-attention as the checkpoint has it: three projections, a norm for q and one for k.

    Args:
        config: of the model.
        rotates: whether queries and keys are rotated. Global layers of a hybrid model have no position encoding.
        head_sharing: see `GroupedQueryAttention`.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, config: Exaone4Config, *, rotates: bool, head_sharing: HeadSharing) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.rotates = rotates
        self.q_proj = Linear(config.hidden_size, heads * size)
        self.k_proj = Linear(config.hidden_size, kv_heads * size)
        self.v_proj = Linear(config.hidden_size, kv_heads * size)
        self.o_proj = Linear(heads * size, config.hidden_size)
        self.q_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.attention = GroupedQueryAttention(
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, head_sharing=head_sharing
        )

    def align(self, step: Step) -> Step:
        return step

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        attention = self.attention
        query = self.q_norm(split_heads(self.q_proj(x), attention.num_attention_heads))  # [B, H, S, D]
        key = self.k_norm(split_heads(self.k_proj(x), attention.num_key_value_heads))
        value = split_heads(self.v_proj(x), attention.num_key_value_heads)
        if self.rotates:
            query, key = rotate(query, step.cos, step.sin), rotate(key, step.cos, step.sin)
        context = step.extend(layer, key.transpose(2, 3), value.transpose(2, 3))
        return self.o_proj(merge_heads(attention(query, *context.joined(), step.mask)))


class FoldedExaone4Attention(nn.Module):
    """The same in the folded layout: one projection, q and k normed and rotated together, the score's scale in q's norm weight.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, plain: Exaone4Attention) -> None:
        super().__init__()
        old = plain.attention
        sizes = {"num_key_value_heads": old.num_key_value_heads, "head_dim": old.head_dim}
        self.rotates = plain.rotates
        self.qkv_proj = fold_projections(plain.q_proj, plain.k_proj, plain.v_proj, **sizes)
        self.o_proj = fold_output(plain.o_proj, **sizes)
        self.attention = FoldedAttention(
            num_attention_heads=old.num_attention_heads, head_sharing=old.head_sharing, **sizes
        )
        self.qk_norm = FoldedNorm(old.head_dim, old.groups, eps=plain.q_norm.eps)
        # Rotation is linear, so the scale may be applied before it.
        columns = [plain.q_norm.weight.float() * old.scale] * old.groups + [plain.k_norm.weight.float()]
        weight = torch.stack(columns, dim=1)[None, None].detach()  # [1, 1, D, G+1]
        self.qk_norm.weight = nn.Parameter(weight, requires_grad=False)

    def align(self, step: Step) -> Step:
        return step.folded(self.attention.groups, fold_rows=self.attention.head_sharing == "fold")

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        length = x.shape[3]
        query_key, value = self.attention.split(self.qkv_proj(x))
        query_key = self.qk_norm(query_key)  # [B, K, D, (G+1)·S]
        if self.rotates:
            query_key = rotate(query_key, step.cos, step.sin, dim=2)
        query, key = query_key.split([self.attention.groups * length, length], dim=3)
        heads = self.attention(query, step.extend(layer, key, value), step.mask)
        return self.o_proj(self.attention.merge(heads))


class Exaone4DecoderLayer(nn.Module):
    """Post-norm: what attention and feed-forward return is normed, then added.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, config: Exaone4Config, *, kind: str, head_sharing: HeadSharing) -> None:
        super().__init__()
        self.kind = kind
        rotates = config.sliding_window is None or kind == SLIDING
        self.self_attn: Exaone4Attention | FoldedExaone4Attention = Exaone4Attention(
            config, rotates=rotates, head_sharing=head_sharing
        )
        self.mlp: GatedFeedForward | FusedGatedFeedForward = GatedFeedForward(
            config.hidden_size, config.intermediate_size
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dim=1)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dim=1)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, step, layer))
        return x + self.post_feedforward_layernorm(self.mlp(x))

    def fuse(self) -> None:
        if isinstance(self.self_attn, Exaone4Attention) and isinstance(self.mlp, GatedFeedForward):
            self.self_attn = FoldedExaone4Attention(self.self_attn)
            self.mlp = FusedGatedFeedForward(self.mlp)


class Exaone4(CausalLM):
    """EXAONE 4 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Exaone4Config
    config: Exaone4Config

    def decoder_layer(self, kind: str) -> Exaone4DecoderLayer:
        return Exaone4DecoderLayer(self.config, kind=kind, head_sharing=self.head_sharing)
