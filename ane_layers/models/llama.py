"""Llama 3: pre-norm blocks, rotary with llama3 scaling, grouped-query attention.

Reference: `transformers`' `LlamaForCausalLM`; Llama Team, "The Llama 3 Herd of Models", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import Attention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama's config.json."""

    attention_bias: bool = False
    mlp_bias: bool = False

    model_type = "llama"


class Llama(CausalLM):
    """Llama with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = LlamaConfig
    config: LlamaConfig

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        bias = config.attention_bias
        return PreNormLayer(
            kind,
            Attention(config, bias=bias, output_bias=bias, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
            norm=self.norm,
        )
