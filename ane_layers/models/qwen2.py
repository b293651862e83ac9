"""Qwen2 and Qwen2.5: Llama's blocks, with biases on queries, keys and values.

Reference: `transformers`' `Qwen2ForCausalLM`; Qwen Team, "Qwen2.5 Technical Report", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import Attention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.config import upper_layers
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Qwen2's config.json. With `use_sliding_window`, layers from `max_window_layers` on see a window; `sliding_window` is null else."""

    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    use_mrope: bool = False

    model_type = "qwen2"

    def __post_init__(self) -> None:
        super().__post_init__()
        upper_layers(self)
        if self.use_mrope:
            raise ValueError(
                "field use_mrope is true: positions of more than one axis are for images, which are not handled"
            )


class Qwen2(CausalLM):
    """Qwen2 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Qwen2Config
    config: Qwen2Config

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        return PreNormLayer(
            kind,
            Attention(config, bias=True, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
