"""Folder to package: time, peak memory and bytes a token, ours against stock coremltools.

    python benchmarks/make_checkpoint.py --out /tmp/exaone4-1.2b
    python benchmarks/conversion.py /tmp/exaone4-1.2b

Ours is `ane-layers convert`, from the folder to a checked package with `decode` and `prefill`: in fp16, and with the recipe `top8` in
both readings of the article (whole layers promoted, or their feed-forward part). Stock is the same graph through the steps of
`stock_conversion.py`. Every step of either is a process of its own; peak memory is that of the largest step.

coremltools compresses no package with two functions, so stock has to palettize `decode` and `prefill` each, before merging them: the
total is given with palettizing counted once, which is less than it takes, and twice. It is measured on a checkpoint of
`--stock-layers N`, one of them promoted, and scaled by kind of layer; head and embedding are measured whole. Weights are random, and
so is the ranking: that changes neither time nor bytes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import measured

HERE = Path(__file__).parent
# Weights that a token of EXAONE 4.0 1.2B reads, without tables, and the cache at context 4096, in bytes: by what `top8` promotes.
READINGS = {"top8": ("*", 1086.4e6), "top8, feed-forward only": ("mlp.*", 1044.4e6)}
ARITHMETIC_IS_OF = {"layers": 30, "vocabulary": 102400, "context": 4096, "promoted": 8}
TIMES = ("seconds", "cpu_seconds")

Figures = dict[str, Any]


def sizes(folder: Path) -> dict[str, int]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {"layers": config["num_hidden_layers"], "vocabulary": config["vocab_size"]}


def make_checkpoint(out: Path, *, layers: int, vocabulary: int) -> Path:
    command = [sys.executable, str(HERE / "make_checkpoint.py"), "--out", str(out)]
    command += ["--layers", str(layers), "--vocabulary", str(vocabulary)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


def ranking_file(folder: Path, path: Path) -> Path:
    """A ranking by layer number."""
    from ane_layers.compression.ranking import Ranking, model_facts
    from ane_layers.models import Exaone4Config
    from ane_layers.writing import write_json

    config = Exaone4Config.from_pretrained(folder)
    layers = {layer: float(layer) for layer in range(config.num_hidden_layers)}
    ranking = Ranking(method="kl", model=model_facts(config), setting="lut4g16", tokens=0, layers=layers, modules=())
    write_json(ranking.as_dict(), path)
    return path


def ours(folder: Path, scratch: Path, given: Mapping[str, int], modules: str | None) -> Figures:
    """Converts through the command line and reads the package back. Without `modules` to promote, in fp16."""
    from ane_layers.analysis.traffic import traffic
    from ane_layers.program import Package

    package = scratch / "ours.mlpackage"
    command = [sys.executable, "-m", "ane_layers.cli", "convert", str(folder), "-o", str(package), "--json"]
    command += ["--context", str(given["context"]), "--prefill", str(given["prefill"])]
    if modules is not None:
        command += ["--recipe", recipe(scratch, modules), "--promote", str(given["promoted"])]
        command += ["--ranking", str(ranking_file(folder, scratch / "ranking.json"))]
    took = measured(command)
    tensors = json.loads(took.output).get("compression", {}).get("tensors", [])
    tables = sum(tensor["table_bytes"] for tensor in tensors if tensor["path"] != "model.embed_tokens.weight")
    moved = traffic(Package.open(package).function("decode")).total
    shutil.rmtree(package)
    return {**took.figures, "bytes_per_token": moved, "tables": tables}


def recipe(scratch: Path, modules: str) -> str:
    """The shipped recipe, or a file that is like it but for the modules that are promoted."""
    from ane_layers.compression import load_recipe
    from ane_layers.compression.recipe import to_toml

    if modules == "*":
        return "top8"
    path = scratch / "top8.toml"
    path.write_text(to_toml(load_recipe("top8")).replace('modules = "*"', f'modules = "{modules}"'))
    return str(path)


def stock(
    folder: Path, scratch: Path, given: Mapping[str, int], sample_layers: int, say: Callable[[str], None]
) -> Figures:
    """Every step of the stock way; see the module. Steps leave their packages in the folder `scratch`."""
    context = ["--context", str(given["context"])]

    def step(name: str, *arguments: object) -> tuple[str, Figures]:
        say(f"stock: {name}")
        took = measured([sys.executable, str(HERE / "stock_conversion.py"), *map(str, arguments)])
        return took.output, took.figures

    steps = {}
    packages = {name: scratch / f"{name}.mlpackage" for name in ("decode", "prefill", "both", "sample", "smaller")}
    for name, tokens in (("decode", 1), ("prefill", given["prefill"])):
        _, steps[f"convert {name}"] = step(
            f"convert {name}", "convert", folder, packages[name], "--tokens", tokens, *context
        )
    _, steps["merge"] = step("merge", "merge", *(packages[name] for name in ("decode", "prefill", "both")))
    for name in ("decode", "prefill", "both"):
        shutil.rmtree(packages[name])
    say(f"stock: a sample of {sample_layers} layers")
    small = make_checkpoint(scratch / "sample", layers=sample_layers, vocabulary=given["vocabulary"])
    step("convert the sample", "convert", small, packages["sample"], "--tokens", 1, *context)
    ranking = ranking_file(small, scratch / "sample-ranking.json")
    arguments = ("palettize", small, packages["sample"], packages["smaller"], "--ranking", ranking)
    output, steps["palettize, sample"] = step("palettize the sample", *arguments)
    kinds = json.loads(output)
    scaled = scale(kinds, sample_layers, given["stock_layers"], given["promoted"])
    return {"layers": given["stock_layers"], "sample_layers": sample_layers, "steps": steps, "kinds": kinds} | totals(
        steps, scaled
    )


def scale(kinds: Mapping[str, Figures], sample: int, layers: int, promoted: int) -> Figures:
    """Seconds to palettize all layers, from a sample with one promoted layer; what a call takes anyway is counted once."""
    counts = {"lut8": promoted, "lut4g16": (layers - promoted) / (sample - 1), "head": 1, "embedding": 1}
    return {
        key: kinds["nothing"][key]
        + sum(count * max(0.0, kinds[kind][key] - kinds["nothing"][key]) for kind, count in counts.items())
        for key in TIMES
    }


def totals(steps: Mapping[str, Figures], palettizing: Figures) -> Figures:
    """Of the fp16 package, and of the compressed one with palettizing counted once and twice."""
    fp16 = [figures for name, figures in steps.items() if not name.startswith("palettize")]
    times = {key: sum(figures[key] for figures in fp16) for key in TIMES}
    peak = max(figures["peak_gb"] for figures in fp16)
    compressed = max(figures["peak_gb"] for figures in steps.values())
    found = {"fp16": {**times, "peak_gb": peak}}
    for name, often in (("top8, palettized once", 1), ("top8, palettized twice", 2)):
        found[name] = {key: times[key] + often * palettizing[key] for key in TIMES} | {"peak_gb": compressed}
    return {"palettizing": palettizing, "totals": found}


def tables(result: Mapping[str, Any]) -> list[str]:
    """Markdown: ours, stock with its ratios to ours, and stock's steps."""
    given, found = result["given"], result["ours"]
    lines = [
        f"{given['layers']} layers, vocabulary {given['vocabulary']:,}, context {given['context']}, prefill {given['prefill']}:",
        *(
            "",
            "| ours | seconds | processor seconds | peak GB | MB a token | of it tables | without them, of the arithmetic |",
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        apart = row["bytes_per_token"] - row["tables"]
        expected = row.get("arithmetic")
        against = f"{apart / expected - 1:+.2%}" if expected else "-"
        lines.append(
            f"| {name} | {times(row)} | {row['bytes_per_token'] / 1e6:,.1f} | {row['tables'] / 1e6:,.1f} | {against} |"
        )
    if "stock" not in result:
        return lines
    other = result["stock"]
    lines += [
        *(
            "",
            f"Stock, `ct.convert` of {other['layers']} layers, palettizing scaled up from {other['sample_layers']}:",
            "",
        ),
        "| stock | seconds | processor seconds | peak GB | seconds, of ours | processor seconds, of ours | peak, of ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in other["totals"].items():
        own = found[name.partition(",")[0]]
        ratios = " | ".join(f"{row[key] / own[key]:.1f}" for key in (*TIMES, "peak_gb"))
        lines.append(f"| {name} | {times(row)} | {ratios} |")
    steps = other["steps"] | {"palettize, scaled, once": {**other["palettizing"], "peak_gb": None}}
    lines += ["", "| step | seconds | processor seconds | peak GB |", "| --- | --- | --- | --- |"]
    return lines + [f"| {name} | {times(row)} |" for name, row in steps.items()]


def times(row: Mapping[str, Any]) -> str:
    peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
    return f"{row['seconds']:.1f} | {row['cpu_seconds']:.1f} | {peak}"


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint in Hugging Face's format.")],
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    prefill: Annotated[int, typer.Option(help="Tokens of a prefill block.")] = 64,
    promote: Annotated[int, typer.Option(min=1, help="Layers at 8 bits.")] = 8,
    stock_layers: Annotated[int, typer.Option(help="Layers that stock is palettized on; 0 leaves stock out.")] = 2,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers that stock's ct.convert is run on; all of the folder's by default."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    if stock_layers < 0 or stock_layers == 1:
        raise typer.BadParameter(
            f"--stock-layers {stock_layers}: must be 0, or 2 and more: one is promoted, the others are not"
        )
    own = sizes(folder)
    if promote > own["layers"]:
        raise typer.BadParameter(f"--promote {promote}: {folder} has {own['layers']} layers")
    given = {**own, "context": context, "prefill": prefill, "promoted": promote}
    scratch = Path(tempfile.mkdtemp(prefix="conversion-"))
    try:
        result = run(
            folder, scratch, given, (stock_layers, layers), lambda line: print(line, file=sys.stderr, flush=True)
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("\n".join(tables(result)))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def run(
    folder: Path, scratch: Path, given: dict[str, int], stock_sizes: Sequence[int | None], say: Callable[[str], None]
) -> Figures:
    """Ours, then stock on so many layers (of the sample, of `ct.convert`)."""
    result: Figures = {"given": given, "ours": {}}
    say("ours: fp16")
    result["ours"]["fp16"] = ours(folder, scratch, given, None)
    published = all(given[key] == value for key, value in ARITHMETIC_IS_OF.items())
    for name, (modules, arithmetic) in READINGS.items():
        say(f"ours: {name}")
        result["ours"][name] = ours(folder, scratch, given, modules)
        if published:
            result["ours"][name]["arithmetic"] = arithmetic
    sample, layers = stock_sizes
    if sample:
        source = folder
        if layers is not None and layers != given["layers"]:
            source = make_checkpoint(scratch / "fewer", layers=layers, vocabulary=given["vocabulary"])
        sized = given | {"stock_layers": layers or given["layers"]}
        result["stock"] = stock(source, scratch, sized, sample, say)
    return result


if __name__ == "__main__":
    typer.run(main)
