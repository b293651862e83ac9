"""What ranking a model's layers takes: `ane-layers sensitivity` as a user runs it, seconds and peak memory.

    python benchmarks/make_checkpoint.py --out /tmp/exaone4-1.2b
    python benchmarks/sensitivity.py /tmp/exaone4-1.2b
    python benchmarks/sensitivity.py /tmp/exaone4-1.2b --method fisher --method both

A folder with random weights has no tokenizer; the command then draws token ids at random, as many as the text would have given. What
is measured is the time and the memory, not the ranking. `default` leaves the method to the command. Every run is a process of its
own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import measured


def measure(folder: Path, method: str, options: Sequence[str]) -> dict[str, Any]:
    """One run of the command, its method and number of tokens as the ranking gives them."""
    with tempfile.TemporaryDirectory(prefix="sensitivity-") as scratch:
        command = [sys.executable, "-m", "ane_layers.cli", "sensitivity", str(folder), "--json"]
        command += ["-o", str(Path(scratch) / "ranking.json"), *options]
        took = measured(command if method == "default" else [*command, "--method", method])
    ranking = json.loads(took.output)
    facts = {key: ranking[key] for key in ("method", "setting", "tokens")}
    return {"asked": method, **facts, "layers": len(ranking["layers"]), **took.figures}


def tables(result: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown."""
    lines = ["| method | setting | layers | tokens | seconds | processor seconds | peak GB |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in result:
        name = f"{row['method']}, the default" if row["asked"] == "default" else row["asked"]
        took = f"{row['seconds']:.0f} | {row['cpu_seconds']:.0f} | {row['peak_gb']:.2f}"
        lines.append(f"| {name} | {row['setting']} | {row['layers']} | {row['tokens']} | {took} |")
    return lines


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint in Hugging Face's format.")],
    method: Annotated[list[str] | None, typer.Option(help="kl, fisher, both or default; repeatable.")] = None,
    windows: Annotated[int | None, typer.Option(help="In place of the command's own number.")] = None,
    length: Annotated[int | None, typer.Option(help="In place of the command's own length of a window.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    given = {"--windows": windows, "--length": length}
    options = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    rows = [measure(folder, name, options) for name in method or ["default"]]
    print("\n".join(tables(rows)))
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
