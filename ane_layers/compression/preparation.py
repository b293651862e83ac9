"""From what a command line names (recipe, ranking, calibration text) to a compression of a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from ane_layers.compression.compress import Compression
from ane_layers.compression.plan import Importance, make_plan
from ane_layers.compression.ranking import Ranking
from ane_layers.compression.recipe import Recipe, load_recipe
from ane_layers.models import from_folder

CALIBRATION_LENGTH = 256
"""Tokens in a window of calibration text."""


def read_recipe(recipe: str | Path | Recipe, *, promote: int | None = None) -> Recipe:
    """A recipe, with another number of promoted layers if given.

    Raises:
        ValueError: the recipe cannot be read, or promotes nothing and `promote` is given.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if promote is None:
        return found
    if found.promoted is None:
        raise ValueError(f"recipe {found.name} promotes no layers, so their number cannot be {promote}")
    return replace(found, promoted=replace(found.promoted, layers=promote))


def prepare(
    model: nn.Module,
    recipe: Recipe,
    *,
    ranking: str | Path | Ranking | None = None,
    importance: Importance | None = None,
) -> Compression:
    """A compression that compresses each weight when it is asked for it.

    Raises:
        ValueError: as `make_plan`, and for a ranking that cannot be read.
    """
    loaded = ranking if ranking is None or isinstance(ranking, Ranking) else Ranking.load(ranking)
    return Compression(make_plan(model, recipe, ranking=loaded, importance=importance))


def measure_importance(
    folder: str | Path,
    *,
    text: Path | None = None,
    windows: int = 16,
    progress: Callable[[str], None] | None = None,
) -> Importance:
    """Mean squares of every layer's inputs over calibration text, for a folder's model in fp32.

    Args:
        folder: in Hugging Face's format, with a tokenizer.
        text: the bundled calibration text if None.
        windows: of calibration text, at most.
        progress: called with a line of text at each step.
    """
    from ane_layers.compression.calibration import calibration_tokens, input_moments

    if progress is not None:
        progress("measuring the inputs of every layer on calibration text")
    tokens = calibration_tokens(folder, text, count=windows, length=CALIBRATION_LENGTH)
    return input_moments(from_folder(folder, context_length=CALIBRATION_LENGTH), tokens)
