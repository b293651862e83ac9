"""Qwen3: pre-norm blocks, per-head q and k norms before rotary.

Reference: `transformers`' `Qwen3ForCausalLM`; Qwen Team, "Qwen3 Technical Report", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import HeadNormAttention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.config import upper_layers
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Qwen3's config.json. With `use_sliding_window`, layers from `max_window_layers` on see a window; `sliding_window` is null else."""

    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None

    model_type = "qwen3"

    def __post_init__(self) -> None:
        super().__post_init__()
        upper_layers(self)


class Qwen3(CausalLM):
    """Qwen3 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Qwen3Config
    config: Qwen3Config

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        bias = config.attention_bias
        return PreNormLayer(
            kind,
            HeadNormAttention(config, norm=self.norm, bias=bias, output_bias=bias, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
