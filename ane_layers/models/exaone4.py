"""EXAONE 4: post-norm blocks, per-head q and k norms before rotary, grouped-query attention.

Reference: `transformers`' `Exaone4ForCausalLM`; LG AI Research, "EXAONE 4.0", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import HeadNormAttention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PostNormLayer
from ane_layers.models.config import SLIDING, layer_types
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


class Exaone4(CausalLM):
    """EXAONE 4 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Exaone4Config
    config: Exaone4Config

    def decoder_layer(self, number: int, kind: str) -> PostNormLayer:
        config = self.config
        # Global layers of a hybrid model have no position encoding.
        rotated = config.head_dim if config.sliding_window is None or kind == SLIDING else 0
        return PostNormLayer(
            kind,
            HeadNormAttention(config, norm=self.norm, rotated=rotated, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
