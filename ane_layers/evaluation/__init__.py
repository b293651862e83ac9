"""How good a model or package is at text: loss, and distance from the original; with the bytes that it takes."""

from ane_layers.evaluation.evaluator import Evaluation, Evaluator
from ane_layers.evaluation.footprint import Footprint, model_footprint, package_footprint
from ane_layers.evaluation.scoring import Score, score
from ane_layers.evaluation.sources import evaluate
from ane_layers.evaluation.windowing import Window, windows

__all__ = [
    "Evaluation",
    "Evaluator",
    "Footprint",
    "Score",
    "Window",
    "evaluate",
    "model_footprint",
    "package_footprint",
    "score",
    "windows",
]
