"""A stock `transformers` model as a stateful Core ML program, the way its ports are written: nothing in the graph is this library's.

The wrapper gives the model a `Cache` over two buffers, `[layers, K, T, D]`, written by slice assignment, and hands it position and mask.
Letters: S new tokens, T cache length, K KV heads, D head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ane_layers.conversion.quiet import quiet_coremltools

STATES = ("keyCache", "valueCache")

# Attention widths and the rest of the published configurations, by what this benchmark calls them.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "family": "Llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "Qwen2.5-1.5B": {
        "family": "Qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "Qwen3-1.7B": {
        "family": "Qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "EXAONE-4.0-1.2B": {
        "family": "Exaone4",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        # Said for every layer: without a window, transformers derives no types from its pattern.
        "sliding_window": None,
        "layer_types": "full_attention",
    },
}


def random_model(family: str, *, attention: str = "sdpa", seed: int = 0, **settings: Any) -> Any:
    """A model of a family of `transformers` (`"Llama"`, `"Qwen3"`), in fp32, every parameter random, norms included."""
    import transformers

    config_of = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_of(**settings)
    config._attn_implementation = attention
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


def published(name: str, *, attention: str, layers: int, context: int) -> Any:
    """A random model of one of `GEOMETRIES`, of few layers, with a vocabulary of 1,024: neither touches attention."""
    settings = dict(GEOMETRIES[name])
    if "layer_types" in settings:
        settings["layer_types"] = [settings["layer_types"]] * layers
    sizes = {"num_hidden_layers": layers, "vocab_size": 1024, "max_position_embeddings": context}
    return random_model(settings.pop("family"), attention=attention, **sizes, **settings)


class StatefulModel(nn.Module):
    """Token ids, position and mask to logits of the last position, keys and values kept in two states.

    Shape:
        - inputIds: int32 `[1, S]`; position: int32 `[1]`; causalMask: `[1, 1, S, T]`
        - output: `[1, 1, vocabulary]`
    """

    def __init__(self, model: Any, context: int) -> None:
        super().__init__()
        self.model = model
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, config.num_key_value_heads, context, head_dim)
        for name in STATES:
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, inputIds: Tensor, position: Tensor, causalMask: Tensor) -> Tensor:
        cache = _cache(self, position)
        places = position + torch.arange(inputIds.shape[1], dtype=torch.int32)
        return self.model(
            input_ids=inputIds,
            attention_mask=causalMask,
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits


def _cache(wrapper: StatefulModel, position: Tensor) -> Any:
    from transformers.cache_utils import Cache

    class SliceCache(Cache):
        """Rows of the wrapper's buffers, as the model's layers ask for them."""

        def __init__(self) -> None:
            self.layers: list[Any] = []

        def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            end = position + key.shape[2]
            for name, rows in zip(STATES, (key, value), strict=True):
                wrapper.get_buffer(name)[layer_idx : layer_idx + 1, :, position:end, :] = rows
            held = [wrapper.get_buffer(name)[layer_idx : layer_idx + 1] for name in STATES]
            return held[0], held[1]

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            return 0

    return SliceCache()


def convert_stock(
    model: Any, path: Path, *, context: int, tokens: int, passes: Any = None, vocabulary: str = "logits"
) -> Path:
    """Converts with plain `ct.convert`, for iOS 18 and in fp16. `passes` is the pass pipeline, coremltools' own by default."""
    with quiet_coremltools():
        import coremltools as ct

        wrapper = StatefulModel(model, context).eval()
        examples = (
            torch.zeros(1, tokens, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, 1, tokens, context),
        )
        with torch.no_grad():
            traced = torch.jit.trace(wrapper, examples, check_trace=False)
        inputs = [
            ct.TensorType(name="inputIds", shape=(1, tokens), dtype=np.int32),
            ct.TensorType(name="position", shape=(1,), dtype=np.int32),
            ct.TensorType(name="causalMask", shape=(1, 1, tokens, context), dtype=np.float16),
        ]
        states = [
            ct.StateType(
                wrapped_type=ct.TensorType(shape=tuple(wrapper.get_buffer(name).shape), dtype=np.float16), name=name
            )
            for name in STATES
        ]
        converted = ct.convert(
            traced,
            inputs=inputs,
            outputs=[ct.TensorType(name=vocabulary, dtype=np.float16)],
            states=states,
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=passes,
            skip_model_load=True,
        )
        converted.save(str(path))
    return path
