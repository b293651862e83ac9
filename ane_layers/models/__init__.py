"""Model families: architecture over `ane_layers.layers`, one file each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ane_layers.models.base import CausalLM
from ane_layers.models.config import family_hint, load_config
from ane_layers.models.exaone import Exaone, ExaoneConfig
from ane_layers.models.exaone4 import Exaone4, Exaone4Config
from ane_layers.models.gemma3 import Gemma3, Gemma3Config
from ane_layers.models.granite import Granite, GraniteConfig
from ane_layers.models.llama import Llama, LlamaConfig
from ane_layers.models.mistral import Mistral, MistralConfig
from ane_layers.models.olmo2 import Olmo2, Olmo2Config
from ane_layers.models.phi3 import Phi3, Phi3Config
from ane_layers.models.qwen2 import Qwen2, Qwen2Config
from ane_layers.models.qwen3 import Qwen3, Qwen3Config
from ane_layers.models.smollm3 import SmolLM3, SmolLM3Config

FAMILIES: dict[str, type[CausalLM]] = {
    family.config_class.model_type: family
    for family in (Exaone, Exaone4, Gemma3, Granite, Llama, Mistral, Olmo2, Phi3, Qwen2, Qwen3, SmolLM3)
}
"""Classes by `model_type`."""


def from_folder(folder: str | Path, **options: Any) -> CausalLM:
    """`from_pretrained` of the family that the folder's `model_type` names.

    Raises:
        ValueError: for an unknown `model_type`, listing the known ones, and whatever the family refuses.
    """
    return _family(*load_config(folder)).from_pretrained(folder, **options)


def open_folder(folder: str | Path, **options: Any) -> CausalLM:
    """`open` of the family that the folder's `model_type` names: for conversion, large weights stay in the folder.

    Raises:
        ValueError: as `from_folder`.
    """
    return _family(*load_config(folder)).open(folder, **options)


def _family(config: Mapping[str, Any], path: Path) -> type[CausalLM]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{path}: field model_type is {model_type!r}{family_hint(model_type)}; supported: {known}")
    return FAMILIES[model_type]


def longest_context(folder: str | Path) -> int:
    """`max_position_embeddings` of a folder. Raises `ValueError` if it is no number, or the family is unknown."""
    config, path = load_config(folder)
    _family(config, path)
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ValueError(f"{path}: field max_position_embeddings must be a positive integer, got {longest!r}")
    return longest


def outline(folder: str | Path, *, context_length: int = 2, fuse: bool = True, **options: Any) -> CausalLM:
    """A folder's model without its weights: names and shapes as `from_folder` would give them, from config.json alone.

    Args:
        folder: in Hugging Face's format.
        context_length, fuse, options: as for `from_pretrained`.

    Raises:
        ValueError: as `from_folder` does for a config.
    """
    family = _family(*load_config(folder))
    config = family.config_class.from_pretrained(folder)
    with torch.device("meta"):
        model = family(config, context_length=context_length, **options)
        if fuse:
            model.fuse()
    return model


__all__ = [
    "FAMILIES",
    "CausalLM",
    "Exaone",
    "Exaone4",
    "Exaone4Config",
    "ExaoneConfig",
    "Gemma3",
    "Gemma3Config",
    "Granite",
    "GraniteConfig",
    "Llama",
    "LlamaConfig",
    "Mistral",
    "MistralConfig",
    "Olmo2",
    "Olmo2Config",
    "Phi3",
    "Phi3Config",
    "Qwen2",
    "Qwen2Config",
    "Qwen3",
    "Qwen3Config",
    "SmolLM3",
    "SmolLM3Config",
    "from_folder",
    "longest_context",
    "open_folder",
    "outline",
]
