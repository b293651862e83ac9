"""Mistral: Llama's blocks, every layer with a sliding window or none.

Reference: `transformers`' `MistralForCausalLM`; Jiang et al., "Mistral 7B", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import Attention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.config import same_layers
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Mistral's config.json. `sliding_window` is null for models in which every layer attends to everything."""

    sliding_window: int | None

    model_type = "mistral"

    def __post_init__(self) -> None:
        super().__post_init__()
        same_layers(self)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return same_layers(self)


class Mistral(CausalLM):
    """Mistral with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = MistralConfig
    config: MistralConfig

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        return PreNormLayer(
            kind,
            Attention(config, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
