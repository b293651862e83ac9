"""Model families: architecture over `ane_layers.layers`, one file each."""

from ane_layers.models.base import CausalLM
from ane_layers.models.exaone4 import Exaone4, Exaone4Config

__all__ = ["CausalLM", "Exaone4", "Exaone4Config"]
