"""What folding takes out of stock `transformers` models, converted by plain `ct.convert`, at published layer widths.

    python benchmarks/fold_existing.py --layers 2 --context 4096

Every model is converted twice, without and with the graph pass; the package without it is also folded on disk. Weights are random and the
vocabulary is small: neither touches attention. Figures are read from the saved files, and both results are run against the stock package
in the interpreter.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from stock_models import GEOMETRIES, convert_stock, published

from ane_layers.analysis import analyze
from ane_layers.program import Package
from ane_layers.rewrite import equality, fold_package
from ane_layers.rewrite.graph_pass import last_report, pass_pipeline
from ane_layers.writing import json_text

COLUMNS = (
    *("model", "function", "operations", "tile", "their MB", "data only repeated, MB", "traffic, MB", "highest rank"),
    *("pass, dB", "on disk, dB"),
)


def figures(path: Path) -> dict[str, Any]:
    costs = analyze(Package.open(path))["functions"]["main"]
    return {
        "operations": costs["operations"]["compute"],
        "tiles": costs["tile"]["count"],
        "tile_mb": costs["tile"]["bytes"] / 1e6,
        "repeated_mb": costs["traffic"]["repetition"] / 1e6,
        "traffic_mb": costs["traffic"]["total"] / 1e6,
        "highest_rank": costs["highest_rank"],
    }


def measure(
    name: str, *, attention: str, tokens: int, context: int, layers: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """One model and one number of tokens a call: as converted, with the pass, and folded on disk."""
    model = published(name, attention=attention, layers=layers, context=context)
    options: dict[str, Any] = {"context": context, "tokens": tokens}
    say(f"{name}, {tokens} tokens: converting")
    stock = convert_stock(model, folder / "stock.mlpackage", **options)
    say(f"{name}, {tokens} tokens: converting with the pass")
    passed = convert_stock(model, folder / "pass.mlpackage", passes=pass_pipeline(), **options)
    report = last_report()
    say(f"{name}, {tokens} tokens: folding on disk and comparing")
    folded = fold_package(stock, folder / "folded.mlpackage", calls=2)
    assert folded.equality is not None
    return {
        "model": name,
        "attention": attention,
        "tokens": tokens,
        "before": figures(stock),
        "after": figures(passed),
        "on_disk": figures(folded.package.path),
        "folded": report.folded,
        "left_alone": [vars(refused) for refused in report.refused],
        "snr_db": {"pass": equality(stock, passed, calls=2).least, "on_disk": folded.equality.least},
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown; before → after the pass. Equal to the bit is an infinite ratio, or, out of JSON, None."""
    lines: list[Sequence[str]] = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in rows:
        before, after = row["before"], row["after"]
        kind = "decode" if row["tokens"] == 1 else f"prefill of {row['tokens']}"
        cells = [row["model"], f"{kind}, {row['attention']}"]
        for key in ("operations", "tiles", "tile_mb", "repeated_mb", "traffic_mb", "highest_rank"):
            digits = 1 if key.endswith("_mb") else 0
            cells.append(f"{before[key]:,.{digits}f} → {after[key]:,.{digits}f}")
        lines.append(
            [
                *cells,
                *("identical" if level in (None, float("inf")) else f"{level:.0f}" for level in row["snr_db"].values()),
            ]
        )
    return ["| " + " | ".join(line) + " |" for line in lines]


def tables(result: Mapping[str, Any]) -> list[str]:
    """Markdown of what `--json` prints."""
    return [f"{result['layers']} layers, context {result['context']}:", "", *table(result["rows"])]


def main(
    models: Annotated[list[str] | None, typer.Option("--model", help="One of these models; repeatable.")] = None,
    layers: Annotated[int, typer.Option(help="Decoder layers; with one, the slice of a state is the whole state.")] = 2,
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    block: Annotated[int, typer.Option(help="Tokens of a prefill block.")] = 64,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    rows = []
    for name in models or GEOMETRIES:
        if name not in GEOMETRIES:
            raise typer.BadParameter(f"{name}: expected one of {', '.join(GEOMETRIES)}")
        for attention, tokens in (("eager", 1), ("sdpa", block)):
            folder = Path(tempfile.mkdtemp(prefix="fold-existing-"))
            try:
                rows.append(
                    measure(
                        name,
                        attention=attention,
                        tokens=tokens,
                        context=context,
                        layers=layers,
                        folder=folder,
                        say=lambda line: print(line, file=sys.stderr),
                    )
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    versions = {part: version(part) for part in ("torch", "coremltools", "transformers")}
    if as_json:
        result = {"machine": platform.machine(), **versions, "layers": layers, "context": context, "rows": rows}
        print(json_text(result))
        return
    print(", ".join(f"{part} {number}" for part, number in versions.items()) + f"; {layers} layers, context {context}")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    typer.run(main)
