"""Granite 3: Llama's blocks, with factors on embeddings, scores, residual additions and logits.

Reference: `transformers`' `GraniteForCausalLM`; Granite Team, "Granite 3.0 Language Models", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import Attention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.config import check_positive
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Granite's config.json. `attention_multiplier` is the scale of the scores, and logits are divided by `logits_scaling`."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    attention_bias: bool = False
    mlp_bias: bool = False

    model_type = "granite"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.logits_scaling


class Granite(CausalLM):
    """Granite with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = GraniteConfig
    config: GraniteConfig

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        scale, bias = config.attention_multiplier, config.attention_bias
        return PreNormLayer(
            kind,
            Attention(config, scale=scale, bias=bias, output_bias=bias, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
            norm=self.norm,
            residual=config.residual_multiplier,
        )
