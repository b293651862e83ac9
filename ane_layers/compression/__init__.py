"""Compression of weights: recipes, a measured sensitivity ranking, and clustering."""

from ane_layers.compression.compress import Compression, compress
from ane_layers.compression.plan import Plan, make_plan
from ane_layers.compression.ranking import Ranking
from ane_layers.compression.recipe import Recipe, load_recipe, parse_recipe
from ane_layers.compression.report import CompressionReport, TensorReport
from ane_layers.compression.setting import Setting
from ane_layers.compression.units import Unit, units
from ane_layers.compression.weights import CompressedWeight, LookupTables, ScaledIntegers, compress_weight

__all__ = [
    "CompressedWeight",
    "Compression",
    "CompressionReport",
    "LookupTables",
    "Plan",
    "Ranking",
    "Recipe",
    "ScaledIntegers",
    "Setting",
    "TensorReport",
    "Unit",
    "compress",
    "compress_weight",
    "load_recipe",
    "make_plan",
    "parse_recipe",
    "units",
]
