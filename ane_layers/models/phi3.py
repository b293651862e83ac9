"""Phi-3 and Phi-4-mini: Llama's blocks, a part of each head rotated, with longrope scaling; joined projections in the checkpoint.

Reference: `transformers`' `Phi3ForCausalLM`; Microsoft, "Phi-4-Mini Technical Report", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ane_layers.layers import GatedFeedForward
from ane_layers.models.attention import Attention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import PreNormLayer
from ane_layers.models.config import same_layers
from ane_layers.models.decoder_config import DecoderConfig
from ane_layers.models.weights import Names

LONGROPE = ("longrope", "su", "yarn")  # what Phi-3's files have called it


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Phi-3's config.json. `sliding_window` is null, or that of every layer."""

    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    full_attn_mod: int = 1
    interpolate_factor: float = 1.0

    model_type = "phi3"
    harmless = frozenset({"embd_pdrop"})  # dropout, in training only

    def __post_init__(self) -> None:
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"field partial_rotary_factor must be within 0 … 1, got {self.partial_rotary_factor}")
        super().__post_init__()
        same_layers(self)
        # Of Phi-4-mini's file; transformers reads none of them.
        for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
            if getattr(self, name):
                raise ValueError(f"field {name} must be false, got true")
        for name in ("full_attn_mod", "interpolate_factor"):
            if getattr(self, name) != 1:
                raise ValueError(f"field {name} must be 1, got {getattr(self, name)}")

    @classmethod
    def canonical(cls, config: Mapping[str, Any], *, file: str | Path) -> dict[str, Any]:
        config = dict(config)
        if isinstance(rope := config.get("rope_parameters"), dict):  # transformers 5
            config["rope_parameters"] = rope = dict(rope)
            share = rope.pop("partial_rotary_factor", None)
            if share is not None and config.setdefault("partial_rotary_factor", share) != share:
                raise ValueError(f"{file}: field partial_rotary_factor contradicts rope_parameters, which says {share}")
        config = super().canonical(config, file=file)
        scaling, original = config["rope_scaling"], config.get("original_max_position_embeddings")
        if isinstance(scaling, dict) and scaling.get("rope_type") in LONGROPE:
            scaling = scaling | {"rope_type": "longrope"}
            if original is not None:  # wins, as in transformers
                scaling["original_max_position_embeddings"] = original
            first, longest = scaling.get("original_max_position_embeddings"), config.get("max_position_embeddings")
            if scaling.get("factor") is None and isinstance(first, int) and first > 0 and isinstance(longest, int):
                scaling["factor"] = longest / first
            config["rope_scaling"] = scaling
        return config

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return same_layers(self)


class Phi3(CausalLM):
    """Phi-3 or Phi-4-mini with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting.

    With longrope, frequencies are those of `context_length`: the long ones beyond `original_max_position_embeddings`, for every
    position. `transformers` takes the long ones once a sequence has grown beyond it, and then for every position as well.
    """

    config_class = Phi3Config
    config: Phi3Config
    stored_names: ClassVar[Names] = {
        "q_proj": "qkv_proj",
        "k_proj": "qkv_proj",
        "v_proj": "qkv_proj",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
    }

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        return PreNormLayer(
            kind,
            Attention(config, rotated=config.rotary_dim, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
