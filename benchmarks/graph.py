"""What the graphs of one model are made of, ours against stock `transformers` and against other ways of sharing heads.

    python benchmarks/graph.py
    python benchmarks/graph.py --quick

EXAONE 4.0 1.2B's widths, context 4096, `decode` and a `prefill` of 64, random weights, a vocabulary of 1,024 so that stock conversion
stays quick. Every graph is saved with two and with three layers and read back from its file; the difference is a layer, and
`--layers` of them make the model: exact for figures that grow by the same for every layer. Stock is `transformers`' Exaone4 with a
stateful cache, converted by plain `ct.convert` (`stock_models.py`); a conversion that is refused is a row that says so. The other
ways are attention alone (`head_sharing_ways.py`): projections, cache and mask without norms, rotation and feed-forward.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from head_sharing import write_package
from head_sharing_ways import WAYS
from head_sharing_ways import Geometry as AttentionGeometry
from make_checkpoint import Geometry, make
from stock_models import convert_stock, published

from ane_layers.analysis import analyze
from ane_layers.models import from_folder
from ane_layers.program import Package

OURS: dict[str, dict[str, Any]] = {
    "ours, in_place": {"kv": "in_place"},
    "ours, deferred": {"kv": "deferred"},
    "ours, read_only": {"kv": "read_only"},
    "ours, in_place, repeat_kv": {"kv": "in_place", "head_sharing": "repeat_kv"},
}
STOCK = {"transformers, eager": "eager", "transformers, sdpa": "sdpa"}
COUNTED = (2, 3)  # layers
# What the rows of each part are held against: its first.
PARTS = {"model": "the whole model", "attention": "attention alone"}
COLUMNS = (
    *("graph", "operations a layer", "operations", "ratio", "tile", "tile, MiB", "MB a token", "ratio", "highest rank"),
)

Counts = dict[str, dict[str, Any] | str]
"""Function → its figures, or why there are none."""


@dataclass(frozen=True)
class Sizes:
    """T, and S of a prefill block."""

    context: int
    block: int

    def tokens(self) -> dict[str, int]:
        return {"decode": 1, "prefill": self.block}


def counted(costs: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The figures of one function, as `analyze` gives it; bytes are a token's share of a call."""
    return {
        "operations": costs["operations"]["compute"],
        "tiles": costs["tile"]["count"],
        "tile_bytes": costs["tile"]["bytes"],
        "bytes_a_token": costs["traffic"]["total"] / tokens,
        "highest_rank": costs["highest_rank"],
    }


def of_package(package: Package, sizes: Sizes) -> Counts:
    functions = analyze(package)["functions"]
    return {name: counted(functions[name], tokens) for name, tokens in sizes.tokens().items()}


def of_ours(folder: Path, scratch: Path, sizes: Sizes, options: dict[str, Any]) -> Counts:
    model = from_folder(folder, context_length=sizes.context, dtype=None, block_size=sizes.block, **options)
    return of_package(model.convert(scratch / "ours.mlpackage", prefill=sizes.block), sizes)


def of_stock(attention: str, layers: int, scratch: Path, sizes: Sizes) -> Counts:
    """Stock has a package for each function."""
    model = published("EXAONE-4.0-1.2B", attention=attention, layers=layers, context=sizes.context)
    found: Counts = {}
    for name, tokens in sizes.tokens().items():
        try:
            path = convert_stock(model, scratch / f"{name}.mlpackage", context=sizes.context, tokens=tokens)
        except Exception as error:  # whatever the tracer or the converter says is the result
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            found[name] = counted(analyze(Package.open(path))["functions"]["main"], tokens)
    return found


def of_way(way: str, layers: int, scratch: Path, sizes: Sizes, small: bool) -> Counts:
    widths = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 32} if small else {}
    geometry = AttentionGeometry(**widths, context=sizes.context, block=sizes.block, layers=layers)
    return of_package(write_package(geometry, way, scratch), sizes)


def row(part: str, name: str, function: str, pair: list[dict[str, Any] | str], layers: int) -> dict[str, Any]:
    """A graph with two and with three layers, as a layer and as the whole model."""
    place = {"part": part, "graph": name, "function": function}
    for found in pair:
        if isinstance(found, str):
            return {**place, "refused": found}
    first, second = (dict(found) for found in pair)  # type: ignore[arg-type]
    rank = max(first.pop("highest_rank"), second.pop("highest_rank"))
    layer = {key: second[key] - first[key] for key in first}
    model = {key: first[key] + (layers - COUNTED[0]) * layer[key] for key in first}
    return {**place, "refused": None, "highest_rank": rank, "a_layer": layer, "model": model}


def measure(sizes: Sizes, layers: int, *, small: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="graph-") as name:
        scratch = Path(name)
        folders = {count: scratch / f"layers-{count}" for count in COUNTED}
        for count, folder in folders.items():
            make(out=folder, geometry=Geometry.small, layers=count, vocabulary=1024, seed=0)
        makers: dict[tuple[str, str], Callable[[int, Path], Counts]] = {}
        for label, options in OURS.items():
            makers["model", label] = lambda n, at, options=options: of_ours(folders[n], at, sizes, options)
        for label, attention in STOCK.items():
            makers["model", label] = lambda n, at, attention=attention: of_stock(attention, n, at, sizes)
        for way, label in WAYS.items():
            makers["attention", label] = lambda n, at, way=way: of_way(way, n, at, sizes, small)
        rows = []
        for (part, label), make_one in makers.items():
            say(f"{PARTS[part]}: {label}")
            pairs = []
            for count in COUNTED:
                with tempfile.TemporaryDirectory(dir=scratch) as own:
                    pairs.append(make_one(count, Path(own)))
            rows += [row(part, label, name, [pair[name] for pair in pairs], layers) for name in sizes.tokens()]
        return rows


def tables(result: Mapping[str, Any]) -> list[str]:
    """Markdown: a table for each part and function."""
    lines = []
    for function, tokens in (("decode", "1 token"), ("prefill", f"{result['block']} tokens")):
        for part, words in PARTS.items():
            rows = [entry for entry in result["rows"] if (entry["part"], entry["function"]) == (part, function)]
            lines += ["", f"`{function}`, {tokens}; {words}, {result['layers']} layers:", ""]
            lines += ["| " + " | ".join(line) + " |" for line in [COLUMNS, ["---"] * len(COLUMNS)]]
            lines += ["| " + " | ".join(cells(entry, rows[0])) + " |" for entry in rows]
    return lines[1:]


def cells(entry: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    if entry["refused"]:
        return [entry["graph"], f"refused: {entry['refused']}".replace("|", "\\|"), *[""] * (len(COLUMNS) - 2)]
    model = entry["model"]
    ratios = [f"{model[key] / base['model'][key]:.2f}" for key in ("operations", "bytes_a_token")]
    found = [entry["graph"], f"{entry['a_layer']['operations']:,}", f"{model['operations']:,}", ratios[0]]
    found += [f"{model['tiles']:,}", f"{model['tile_bytes'] / 2**20:,.0f}"]
    return [*found, f"{model['bytes_a_token'] / 1e6:,.1f}", ratios[1], str(entry["highest_rank"])]


def main(
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    block: Annotated[int, typer.Option(help="Tokens of a prefill block.")] = 64,
    layers: Annotated[int, typer.Option(min=2, help="Of the whole model.")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="Context 256, block 16, narrow attention alone.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    sizes = Sizes(256, 16) if quick else Sizes(context, block)
    rows = measure(sizes, layers, small=quick, say=lambda line: print(line, file=sys.stderr))
    result = {"context": sizes.context, "block": sizes.block, "layers": layers, "rows": rows}
    print("\n".join(tables(result)))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
