"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ane_layers.compression import Recipe
    from ane_layers.compression.plan import Importance


class HeadSharingOption(StrEnum):
    fold = "fold"
    repeat_kv = "repeat_kv"


class HeadOption(StrEnum):
    logits = "logits"
    argmax = "argmax"
    top_k = "top_k"


class KvOption(StrEnum):
    in_place = "in_place"
    deferred = "deferred"
    read_only = "read_only"


class ModeOption(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    fp16_pessimistic = "fp16_pessimistic"


class LevelOption(StrEnum):
    error = "error"
    warning = "warning"
    info = "info"


class MethodOption(StrEnum):
    kl = "kl"
    fisher = "fisher"
    both = "both"


class RuntimeOption(StrEnum):
    interpreter = "interpreter"
    coreml = "coreml"


Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Folder = Annotated[str, typer.Argument(help="Model folder in Hugging Face's format, or a Hub id org/name[@revision].")]
Mode = Annotated[
    ModeOption,
    typer.Option(
        help="Interpreter: fp32; fp16, every operation's result rounded; fp16_pessimistic, sums in norms, softmax and "
        "reductions rounded too."
    ),
]
Runtime = Annotated[RuntimeOption, typer.Option(help="What runs the package; coreml needs a Mac.")]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", help="How weights are stored: a shipped recipe, or a file ending in .toml.")
]
RankingOption = Annotated[
    Path | None, typer.Option("--ranking", help="Ranking that `sensitivity` wrote, for recipes that need one.")
]
PromoteOption = Annotated[
    int | None, typer.Option("--promote", help="Promote so many layers, in place of the recipe's number.")
]
ImportanceOption = Annotated[
    bool,
    typer.Option("--importance", help="Weigh errors in lookup tables by the size of their inputs on calibration text."),
]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", help="Calibration text; the bundled one by default.")
]


def recipe_of(
    recipe: str | None,
    ranking: Path | None,
    promote: int | None,
    importance: bool,
    calibration: Path | None,
    report: Path | None = None,
) -> Recipe | None:
    """The recipe that options name. Raises `ValueError` for options without effect, before anything is loaded."""
    from ane_layers.compression import Ranking
    from ane_layers.compression.preparation import read_recipe

    if calibration is not None and not importance:
        raise ValueError(f"--calibration {calibration} needs --importance")
    if recipe is None:
        given = {"--ranking": ranking, "--promote": promote, "--importance": importance or None, "--report": report}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} needs --recipe")
        return None
    found = read_recipe(recipe, promote=promote)
    if ranking is not None:
        if not found.needs_ranking:
            raise ValueError(f"--ranking {ranking}: recipe {found.name} needs no ranking")
        Ranking.load(ranking)
    return found


def measured_importance(
    folder: str | Path, wanted: bool, calibration: Path | None, progress: Callable[[str], None]
) -> Importance | None:
    """Mean squares of every layer's inputs, where they are wanted."""
    if not wanted:
        return None
    from ane_layers.compression.preparation import measure_importance

    return measure_importance(folder, text=calibration, progress=progress)


def runtime_of(option: RuntimeOption) -> Callable[[str, str], Any] | None:
    """What makes the program of a function; None stands for the interpreter."""
    if option is RuntimeOption.interpreter:
        return None
    from ane_layers.coreml import coreml_runtime

    return coreml_runtime
