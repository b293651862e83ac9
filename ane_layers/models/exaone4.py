"""EXAONE 4: post-norm blocks, per-head q and k norms before rotary, grouped-query attention.

Reference: `transformers`' `Exaone4ForCausalLM`; LG AI Research, "EXAONE 4.0", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ane_layers.layers import (
    Embedding,
    FusedGatedFeedForward,
    GatedFeedForward,
    GroupedQueryAttention,
    HeadSharing,
    KVCache,
    Linear,
    OutputHead,
    RMSNorm,
    RotaryEmbedding,
    fuse_linears,
    merge_heads,
    rotary_frequencies,
    rotate,
    split_heads,
)
from ane_layers.models.base import CausalLM
from ane_layers.models.config import layer_types
from ane_layers.models.decoder_config import DecoderConfig


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


class SelfAttention(nn.Module):
    """What both forms of EXAONE 4's self-attention share; `heads` is where they differ.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    attention: GroupedQueryAttention
    o_proj: Linear

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query `[B, H, S, D]`, key and value `[B, K, S, D]`; query and key normed, then rotated."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KVCache, layer: int, position: Tensor
    ) -> Tensor:
        query, key, value = self.heads(x, cos, sin)
        key, value = cache.update(layer, key, value, position)
        return self.o_proj(merge_heads(self.attention(query, key, value, mask)))


class Exaone4Attention(SelfAttention):
    """Self-attention as the checkpoint has it: three projections, a norm for q and one for k."""

    def __init__(self, config: Exaone4Config, *, head_sharing: HeadSharing) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = Linear(config.hidden_size, heads * size)
        self.k_proj = Linear(config.hidden_size, kv_heads * size)
        self.v_proj = Linear(config.hidden_size, kv_heads * size)
        self.o_proj = Linear(heads * size, config.hidden_size)
        self.q_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.attention = GroupedQueryAttention(
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, head_sharing=head_sharing
        )

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.attention
        query = self.q_norm(split_heads(self.q_proj(x), attention.num_attention_heads))
        key = self.k_norm(split_heads(self.k_proj(x), attention.num_key_value_heads))
        value = split_heads(self.v_proj(x), attention.num_key_value_heads)
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class FusedExaone4Attention(SelfAttention):
    """The same with one projection, and q and k normed and rotated together. The score's scale is part of the norm's weight."""

    def __init__(self, plain: Exaone4Attention) -> None:
        super().__init__()
        old = plain.attention
        self.qkv_proj = fuse_linears([plain.q_proj, plain.k_proj, plain.v_proj])
        self.o_proj = plain.o_proj
        # One weight row per head, [1, H + K, 1, D]. Rotation is linear, so the scale may be applied before it.
        query_rows = (plain.q_norm.weight.float() * old.scale).expand(old.num_attention_heads, -1)
        key_rows = plain.k_norm.weight.float().expand(old.num_key_value_heads, -1)
        self.qk_norm = RMSNorm(old.head_dim, eps=plain.q_norm.eps)
        self.qk_norm.weight = nn.Parameter(
            torch.cat([query_rows, key_rows])[None, :, None].detach(), requires_grad=False
        )
        self.attention = GroupedQueryAttention(
            num_attention_heads=old.num_attention_heads,
            num_key_value_heads=old.num_key_value_heads,
            head_dim=old.head_dim,
            scale=1.0,
            head_sharing=old.head_sharing,
        )

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, k = self.attention.num_attention_heads, self.attention.num_key_value_heads
        query_key, value = split_heads(self.qkv_proj(x), h + 2 * k).split([h + k, k], dim=1)
        query, key = rotate(self.qk_norm(query_key), cos, sin).split([h, k], dim=1)
        return query, key, value


class Exaone4DecoderLayer(nn.Module):
    """Post-norm: what attention and feed-forward return is normed, then added.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, config: Exaone4Config, *, head_sharing: HeadSharing) -> None:
        super().__init__()
        self.self_attn: SelfAttention = Exaone4Attention(config, head_sharing=head_sharing)
        self.mlp: nn.Module = GatedFeedForward(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dim=1)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dim=1)

    def forward(self, x: Tensor, *attention_inputs: Any) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, *attention_inputs))
        return x + self.post_feedforward_layernorm(self.mlp(x))

    def fuse(self) -> None:
        if isinstance(self.self_attn, Exaone4Attention) and isinstance(self.mlp, GatedFeedForward):
            self.self_attn = FusedExaone4Attention(self.self_attn)
            self.mlp = FusedGatedFeedForward(self.mlp)


class Exaone4Model(nn.Module):
    """Embedding, decoder layers and final norm, named as in the checkpoint."""

    def __init__(self, config: Exaone4Config, *, head_sharing: HeadSharing) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Exaone4DecoderLayer(config, head_sharing=head_sharing) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dim=1)


class Exaone4(CausalLM):
    """EXAONE 4 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Exaone4Config
    config: Exaone4Config

    def __init__(
        self,
        config: Exaone4Config,
        *,
        context_length: int,
        head_sharing: HeadSharing = "fold",
        head_pieces: int | None = None,
    ) -> None:
        super().__init__(config, context_length=context_length)
        if config.sliding_window is not None:
            raise ValueError(
                f"EXAONE 4 with sliding-window layers (sliding_window = {config.sliding_window}, as in the 32B model) "
                "is not supported yet; models in which every layer attends to everything are"
            )
        self.head_sharing = head_sharing
        self.model = Exaone4Model(config, head_sharing=head_sharing)
        self.lm_head = OutputHead(config.hidden_size, config.vocab_size, pieces=head_pieces)
        self.allocate()

    def allocate(self) -> None:
        config = self.config
        frequencies = rotary_frequencies(
            config.head_dim, rope_theta=config.rope_theta, rope_scaling=config.rope_scaling
        )
        self.rotary = RotaryEmbedding(frequencies, max_positions=self.context_length)
        self.cache = KVCache(
            num_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            context_length=self.context_length,
        )

    def forward(self, input_ids: Tensor, position: Tensor, causal_mask: Tensor, *, last_only: bool = False) -> Tensor:
        length = input_ids.shape[1]
        cos, sin = self.rotary(position, length)
        mask = self.decoder_layers()[0].self_attn.attention.align_mask(causal_mask, length)  # once for all layers
        x = self.model.embed_tokens(input_ids)
        for i, layer in enumerate(self.decoder_layers()):
            x = layer(x, cos, sin, mask, self.cache, i, position)
        if last_only and length > 1:
            x = x[:, :, :, -1:]
        return self.lm_head(self.model.norm(x))

    def fuse(self) -> None:
        for layer in self.decoder_layers():
            layer.fuse()

    def decoder_layers(self) -> list[Exaone4DecoderLayer]:
        return [cast(Exaone4DecoderLayer, layer) for layer in self.model.layers]
