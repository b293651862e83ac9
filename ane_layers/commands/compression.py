"""Commands about weights: what compressing them costs in quality, and how to choose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ane_layers import console
from ane_layers.cli_options import (
    CalibrationOption,
    Folder,
    ImportanceOption,
    Json,
    MethodOption,
    Mode,
    ModeOption,
    PromoteOption,
    RankingOption,
    RecipeOption,
    Runtime,
    RuntimeOption,
    measured_importance,
    recipe_of,
    runtime_of,
)

if TYPE_CHECKING:
    from ane_layers.compression import Setting


def sensitivity(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="Ranking to write, as JSON.")],
    text: Annotated[Path | None, typer.Option(help="Calibration text; the bundled one by default.")] = None,
    method: Annotated[
        MethodOption,
        typer.Option(help="kl recomputes the model; fisher predicts from gradients; both says how far they agree."),
    ] = MethodOption.kl,
    bits: Annotated[
        str,
        typer.Option(help="Widths of lookup tables to measure modules at; layers are ranked at the first. 4,2,3,6,8"),
    ] = "4",
    group_size: Annotated[
        int, typer.Option(help="Output channels that share a table; 0 is one table for a weight.")
    ] = 16,
    windows: Annotated[int, typer.Option(help="Windows of calibration text.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 128,
    jobs: Annotated[int | None, typer.Option(help="Processes, each with the model in fp32.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws that fisher makes.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the ranking into this .png, .svg or .pdf file.")] = None,
    as_json: Json = False,
) -> None:
    """Rank layers and modules by the harm that compressing each alone does to the model's output."""
    from ane_layers.compression.sensitivity import check_output, journal_path, write_ranking
    from ane_layers.compression.sensitivity import sensitivity as measure
    from ane_layers.hub import resolve

    settings = table_settings(bits, group_size)
    check_output(output)
    if plot is not None:
        from ane_layers.compression.plot import check_picture

        check_picture(plot)
    with console.progress() as say:
        source = resolve(folder, progress=say)
        ranking = measure(
            source,
            method=method.value,
            settings=settings,
            text_file=text,
            count=windows,
            length=length,
            seed=seed,
            n_jobs=jobs,
            journal=journal_path(output),
            progress=say,
        )
    write_ranking(ranking, output, journal=journal_path(output))
    if plot is not None:
        from ane_layers.compression.plot import plot_ranking

        plot_ranking(ranking, plot)
    if as_json:
        console.print_json(ranking.as_dict())
    else:
        console.print_ranking(ranking)


def table_settings(bits: str, group_size: int) -> list[Setting]:
    """Lookup tables of the given widths, per group and, for more than one width, per tensor too: the candidates of an allocation."""
    from ane_layers.compression import Setting

    try:
        widths = [int(width) for width in bits.split(",")]
    except ValueError:
        raise ValueError(f"--bits must be widths such as 4 or 4,2,3,6,8, got {bits!r}") from None
    groups = [group_size] if group_size and len(widths) == 1 else [group_size, None] if group_size else [None]
    return [Setting(bits=width, group_size=size) for width in widths for size in groups]


def allocate(
    folder: Folder,
    ranking: Annotated[
        Path, typer.Option(help="Ranking with several widths, as `sensitivity --bits 4,2,3,6,8` writes.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Recipe to write, ending in .toml.")],
    bits_per_weight: Annotated[float | None, typer.Option(help="Budget as an average over layers and head.")] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(help="Budget as bytes that a token reads, the cache at --context included.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Budget as bytes of all weights in the package.")] = None,
    base: Annotated[str, typer.Option(help="Recipe that says how the embedding is stored.")] = "base",
    context: Annotated[int, typer.Option(help="Slots of the cache, for --bytes-per-token.")] = 4096,
    as_json: Json = False,
) -> None:
    """Choose bits for every module so that the predicted harm is least within a budget, and write that as a recipe."""
    from ane_layers.compression.budget import allocated_recipe
    from ane_layers.compression.recipe import to_toml
    from ane_layers.hub import resolve
    from ane_layers.writing import write

    if output.suffix != ".toml":
        raise ValueError(f"{output}: a recipe's name must end in .toml")
    with console.progress() as say:
        source = resolve(folder, progress=say)
        recipe, figures = allocated_recipe(
            source,
            ranking,
            base=base,
            name=output.stem,
            bits_per_weight=bits_per_weight,
            bytes_per_token=bytes_per_token,
            size=size,
            context=context,
        )
    write(output, lambda stream: stream.write(to_toml(recipe).encode()))
    if as_json:
        console.print_json(figures.as_dict())
    else:
        console.print_allocation(figures)


def evaluate(
    source: Annotated[str, typer.Argument(help="Model folder or Hub id, or a package that `convert` wrote.")],
    text: Annotated[Path | None, typer.Option(help="Text to score; the bundled held-out text by default.")] = None,
    original: Annotated[
        Path | None,
        typer.Option(help="For a package: folder of the original model, for KL, agreement and the tokenizer."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer, where that is another one.")
    ] = None,
    recipe: RecipeOption = None,
    ranking: RankingOption = None,
    promote: PromoteOption = None,
    importance: ImportanceOption = False,
    calibration: CalibrationOption = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that are run together; 512, or the context if less.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score at most so many.")] = None,
    context: Annotated[
        int | None, typer.Option(help="For a model folder: slots of the cache that the bytes a token are for.")
    ] = None,
    compact: Annotated[bool, typer.Option("--compact", help="For a package: keep large constants in fp16.")] = False,
    mode: Mode = ModeOption.fp32,
    runtime: Runtime = RuntimeOption.interpreter,
    as_json: Json = False,
) -> None:
    """Score a text: loss, distance from the original, and the bytes that it takes. Folders run in PyTorch, packages in the interpreter."""
    from ane_layers.evaluation import evaluate as evaluate_source
    from ane_layers.hub import resolve

    chosen = recipe_of(recipe, ranking, promote, importance, calibration)
    with console.progress() as say:
        path = Path(source) if Path(source).is_dir() else resolve(source, progress=say)
        result = evaluate_source(
            path,
            original=original,
            tokenizer=tokenizer,
            text=text,
            max_tokens=max_tokens,
            window=window,
            recipe=chosen,
            ranking=ranking,
            importance=measured_importance(path, importance, calibration, say),
            context=context,
            mode=mode.value,
            compact=compact,
            runtime=runtime_of(runtime),
            progress=say,
        )
    console.print_evaluation(result, as_json)


def recipes(as_json: Json = False) -> None:
    """List the recipes that come with the library."""
    from ane_layers.compression import load_recipe
    from ane_layers.compression.recipe import shipped

    found = {name: load_recipe(name) for name in shipped()}
    if as_json:
        console.print_json({"recipes": {name: recipe.description for name, recipe in found.items()}})
        return
    for name, recipe in found.items():
        needs = " Needs a ranking." if recipe.needs_ranking else ""
        console.out.print(f"{name}: {recipe.description}{needs}", markup=False)


COMMANDS = (sensitivity, allocate, evaluate, recipes)
