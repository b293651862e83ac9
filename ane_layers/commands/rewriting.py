"""Commands that change packages that exist already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ane_layers import console
from ane_layers.cli_options import Json


def fold(
    package: Annotated[Path, typer.Argument(help="An .mlpackage, whoever converted it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Package to write, ending in .mlpackage.")],
    check: Annotated[bool, typer.Option(help="Run both packages on random inputs and compare.")] = True,
    calls: Annotated[int, typer.Option(min=1, help="With the check: calls of each function, one after the other.")] = 3,
    as_json: Json = False,
) -> None:
    """Rewrite a package so that its attention reads keys and values without repeating them."""
    from ane_layers.rewrite import fold_package

    with console.progress() as say:
        result = fold_package(package, output, check=check, calls=calls, progress=say)
    console.err.print(f"{output}: written", markup=False)
    if as_json:
        console.print_json(result.as_dict())
    else:
        console.print_folding(result)


COMMANDS = (fold,)
