"""Gemma 3, its language model: four norms a block, local and global layers with rotary bases of their own.

Norm weights are stored as their distance from 1, and embeddings are scaled by the root of the hidden size.

Reference: `transformers`' `Gemma3ForCausalLM`; Gemma Team, "Gemma 3 Technical Report", 2025.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from ane_layers.layers import GatedFeedForward, RMSNorm
from ane_layers.models.attention import HeadNormAttention
from ane_layers.models.base import CausalLM
from ane_layers.models.blocks import SandwichLayer
from ane_layers.models.config import FULL, SLIDING, check_positive, layer_types
from ane_layers.models.decoder_config import DecoderConfig

GELU = partial(F.gelu, approximate="tanh")


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3's config.json (`gemma3_text`). `rope_theta` and `rope_scaling` are of global layers, `rope_local_base_freq` of local ones.

    `attn_logit_softcapping` caps the scores, as its name says; `transformers` 5.24 reads it and leaves it out. Published models have
    null there.
    """

    query_pre_attn_scalar: float
    sliding_window: int
    rope_local_base_freq: float
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window_pattern: int = 6
    layer_types: tuple[str, ...] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None

    model_type = "gemma3_text"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_pre_attn_scalar", "rope_local_base_freq")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise ValueError(f"field hidden_activation must be 'gelu_pytorch_tanh', got {self.hidden_activation!r}")
        if self.use_bidirectional_attention:
            raise ValueError("field use_bidirectional_attention is true: an encoder, not a causal language model")
        types = layer_types(
            self.num_hidden_layers,
            layer_types=self.layer_types,
            sliding_window=self.sliding_window,
            pattern=self.sliding_window_pattern,
        )
        object.__setattr__(self, "layer_types", types)

    @classmethod
    def canonical(cls, config: Mapping[str, Any], *, file: str | Path) -> dict[str, Any]:
        config = dict(config)
        if "_sliding_window_pattern" in config:  # transformers 5
            config.setdefault("sliding_window_pattern", config.pop("_sliding_window_pattern"))
        rope = config.get("rope_parameters")
        if isinstance(rope, dict) and isinstance(rope.get(SLIDING), dict):  # transformers 5: by kind of layer
            local = dict(rope[SLIDING])
            given = config.setdefault("rope_local_base_freq", local.pop("rope_theta", None))
            if (
                rope[SLIDING].get("rope_theta") != given
                or local.get("rope_type", "default") != "default"
                or len(local) > 1
            ):
                raise ValueError(
                    f"{file}: field rope_parameters: {SLIDING} is {json.dumps(rope[SLIDING])}, not understood"
                )
            config["rope_parameters"] = rope.get(FULL)
        return super().canonical(config, file=file)

    def rope(self, kind: str) -> tuple[float, dict[str, Any] | None]:
        return (self.rope_local_base_freq, None) if kind == SLIDING else (self.rope_theta, self.rope_scaling)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping


class Gemma3(CausalLM):
    """Gemma 3's language model with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = Gemma3Config
    config: Gemma3Config

    def norm(self, size: int, *, dim: int) -> RMSNorm:
        return RMSNorm(size, eps=self.config.rms_norm_eps, dim=dim, offset=1.0)

    def decoder_layer(self, number: int, kind: str) -> SandwichLayer:
        config = self.config
        attention = HeadNormAttention(
            config,
            norm=self.norm,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_sharing=self.head_sharing,
        )
        mlp = GatedFeedForward(config.hidden_size, config.intermediate_size, activation=GELU)
        return SandwichLayer(kind, attention, mlp, norm=self.norm)
