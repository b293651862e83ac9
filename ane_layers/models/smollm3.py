"""SmolLM3: Llama's blocks, every fourth layer without position encoding.

Reference: `transformers`' `SmolLM3ForCausalLM`; Hugging Face, "SmolLM3", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import Attention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.config import FULL, SLIDING, layer_types
from ane_layers.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """SmolLM3's config.json. In `no_rope_layers` 1 is a layer that rotates, and 0 one that does not."""

    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    model_type = "smollm3"
    harmless = frozenset({"max_window_layers"})  # of Qwen2's config, in the published file

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, interval = self.num_hidden_layers, self.no_rope_layer_interval
        rotates = self.no_rope_layers
        if rotates is None:
            if interval < 1:
                raise ValueError(f"field no_rope_layer_interval must be at least 1, got {interval}")
            rotates = tuple(int((number + 1) % interval != 0) for number in range(layers))
        if len(rotates) < layers or set(rotates) - {0, 1}:
            raise ValueError(f"field no_rope_layers must have {layers} entries of 0 or 1, got {list(rotates)}")
        window = self.sliding_window if self.use_sliding_window else None
        types = self.layer_types
        if types is None:
            types = tuple(FULL if window is None or rotating else SLIDING for rotating in rotates[:layers])
        types = layer_types(layers, layer_types=types, sliding_window=window, pattern=None)
        for name, value in (("no_rope_layers", rotates), ("sliding_window", window), ("layer_types", types)):
            object.__setattr__(self, name, value)


class SmolLM3(CausalLM):
    """SmolLM3 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = SmolLM3Config
    config: SmolLM3Config

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        assert config.no_rope_layers is not None
        rotated = config.head_dim if config.no_rope_layers[number] else 0
        bias = config.attention_bias
        return PreNormLayer(
            kind,
            Attention(config, rotated=rotated, bias=bias, output_bias=bias, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
            norm=self.norm,
        )
