"""Model families: architecture over `ane_layers.layers`, one file each."""

from pathlib import Path
from typing import Any

from ane_layers.models.base import CausalLM
from ane_layers.models.config import family_hint, load_config
from ane_layers.models.exaone4 import Exaone4, Exaone4Config

FAMILIES: dict[str, type[CausalLM]] = {"exaone4": Exaone4}
"""Classes by `model_type`."""


def from_folder(folder: str | Path, **options: Any) -> CausalLM:
    """`from_pretrained` of the family that the folder's `model_type` names.

    Raises:
        ValueError: for an unknown `model_type`, listing the known ones, and whatever the family refuses.
    """
    config, path = load_config(folder)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{path}: field model_type is {model_type!r}{family_hint(model_type)}; supported: {known}")
    return FAMILIES[model_type].from_pretrained(folder, **options)


__all__ = ["FAMILIES", "CausalLM", "Exaone4", "Exaone4Config", "from_folder"]
