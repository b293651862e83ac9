"""Tiny models of every family with random weights, as `transformers` writes them, and `transformers`' own run of them.

For tests and for `benchmarks/families.py`. Every parameter is drawn, norms and biases too, and sizes are such that head_dim differs from
hidden_size / heads: what round numbers hide shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from ane_layers.models.exaone import FIELDS, Exaone
from ane_layers.models.weights import stored_name

# Positions are short here, so wavelengths below 16, from 16 to 64, and above 64 are all there: kept, blended, stretched.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Three of four pairs of an 8-element head; a short context is of 32 tokens.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 3.0, 7.0],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1], "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
    ),
    "exaone": ("Llama", {"rope_parameters": LLAMA3}),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 5, "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
        },
    ),
    # transformers checks longrope's lists against hidden_size / heads.
    "phi3": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "hidden_size": 48,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
}
"""Name of a family's file → beginning of its classes' names in `transformers`, and what its config has beside the common sizes."""


def write_family(
    folder: Path,
    family: str,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Saves a random model of a family; `overrides` go to its config in `transformers`."""
    name, own = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": 109,
        "hidden_size": 60,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 14,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    config = _class(f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        **json.loads(json.dumps(settings | own | overrides))
    )
    model = _class(f"{name}ForCausalLM")(config)
    draw(model, seed)
    model.to(dtype).save_pretrained(folder)
    if family == "exaone":
        _rename_to_exaone(folder)
    return folder


@torch.no_grad()
def draw(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter: norms around 1, or around 0 where a weight is the distance from 1, and biases that are felt."""
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if "Gemma" in type(model).__name__ else 1.0
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.3, generator=generator)
        elif parameter.ndim == 1:
            parameter.uniform_(offset - 0.5, offset + 0.5, generator=generator)
        else:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)


def reference(folder: Path) -> Any:
    """`transformers`' model of a folder, in fp32; a Llama under other names for EXAONE 3."""
    config = json.loads((folder / "config.json").read_text())
    source = folder / "llama" if config["model_type"] == "exaone" else folder
    kind = json.loads((source / "config.json").read_text())["architectures"][0]
    return _class(kind).from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


def _class(name: str) -> Any:
    return getattr(transformers, name)


def _rename_to_exaone(folder: Path) -> None:
    """Turns a Llama's folder into EXAONE 3's, as transformers 4 wrote it; the Llama stays in a folder inside."""
    (folder / "llama").mkdir()
    for file in list(folder.glob("*.json")) + list(folder.glob("*.safetensors")):
        file.rename(folder / "llama" / file.name)
    config = json.loads((folder / "llama" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "model_type": "exaone", "embed_dropout": 0.0}
    for name in ("attention_bias", "mlp_bias"):
        del config[name]
    for theirs, ours in FIELDS.items():
        config[theirs] = config.pop(ours)
    config["architectures"] = ["ExaoneForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "llama" / "model.safetensors")
    renamed = {stored_name(name, Exaone.stored_names): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
