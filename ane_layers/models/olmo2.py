"""OLMo 2: post-norm blocks, norms over all queries and all keys of a token before rotary.

Reference: `transformers`' `Olmo2ForCausalLM`; OLMo Team, "2 OLMo 2 Furious", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import WidthNormAttention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PostNormLayer
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """OLMo 2's config.json."""

    attention_bias: bool = False

    model_type = "olmo2"


class Olmo2(CausalLM):
    """OLMo 2 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Olmo2Config
    config: Olmo2Config

    def decoder_layer(self, number: int, kind: str) -> PostNormLayer:
        config = self.config
        bias = config.attention_bias
        return PostNormLayer(
            kind,
            WidthNormAttention(config, norm=self.norm, bias=bias, output_bias=bias, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
