"""EXAONE 3.0 and 3.5: Llama's architecture under names of its own.

Reference: the `modeling_exaone.py` that comes with the weights; LG AI Research, "EXAONE 3.5", 2024. `transformers` has no class of it.
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
from ane_layers.models.decoder_config import DecoderConfig
from ane_layers.models.weights import Names

FIELDS = {"num_layers": "num_hidden_layers", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"}
"""Fields of its config.json, and what others call them."""


@dataclass(frozen=True, kw_only=True)
class ExaoneConfig(DecoderConfig):
    """EXAONE 3's config.json, its fields under the names that other families have."""

    model_type = "exaone"
    harmless = frozenset({"embed_dropout"})  # in training only

    @classmethod
    def canonical(cls, config: Mapping[str, Any], *, file: str | Path) -> dict[str, Any]:
        missing = [name for name in FIELDS if name not in config]
        if missing:
            raise ValueError(f"{file}: field {', '.join(missing)} is missing")
        for theirs, ours in FIELDS.items():
            if config.get(ours, config[theirs]) != config[theirs]:
                raise ValueError(f"{file}: field {ours} is {config[ours]!r}, but {theirs} says {config[theirs]!r}")
        return super().canonical({FIELDS.get(name, name): value for name, value in config.items()}, file=file)


class Exaone(CausalLM):
    """EXAONE 3 with a KV cache, ready for Core ML. See `CausalLM` for loading, running and converting."""

    config_class = ExaoneConfig
    config: ExaoneConfig
    stored_names: ClassVar[Names] = {
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "self_attn": "attn.attention",
        "o_proj": "out_proj",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }

    def decoder_layer(self, number: int, kind: str) -> PreNormLayer:
        config = self.config
        return PreNormLayer(
            kind,
            Attention(config, head_sharing=self.head_sharing),
            GatedFeedForward(config.hidden_size, config.intermediate_size),
            norm=self.norm,
        )
