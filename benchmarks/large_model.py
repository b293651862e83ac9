"""A model that fits into no memory here: EXAONE 4.0 32B's geometry, 64 layers, to a folder of packages; interrupted, and resumed.

    python benchmarks/large_model.py [--checkpoint FOLDER] [--scratch FOLDER] [--json large.json]

Writes a checkpoint with a file a layer (about 46 GB on disk: a third of the feed-forward rows are holes, see `sharded_checkpoint.py`),
converts it with `--chunk-limit` and `--resume`, ends the conversion in the middle of a chunk, and gives the same command again. The
second run has to leave finished chunks alone: their files are the same ones. What both needed is what the operating system says of
each process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import launcher, measured

QUICK = ["--layers", "2", "--vocabulary", "1024"]


def interrupted(command: list[str], kept: Path, chunks: int) -> dict[str, Any]:
    """Runs a command until so many chunks are kept, and ends it while it works on the next."""
    with tempfile.TemporaryDirectory(prefix="measure-") as scratch:
        figures = Path(scratch) / "figures.json"
        process = subprocess.Popen(launcher(figures, command), stdout=subprocess.DEVNULL)
        try:
            journal = kept / "journal.jsonl"
            while process.poll() is None and not (journal.is_file() and _lines(journal) > chunks):
                time.sleep(0.5)
            time.sleep(5)
            if process.poll() is not None:
                raise RuntimeError(f"the conversion ended with status {process.returncode} before it was interrupted")
        finally:
            process.terminate()
            process.wait()
        found: dict[str, Any] = json.loads(figures.read_text())
        return found


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Name → inode, time and size of the weight files below a folder of chunks."""
    found = {}
    for path in sorted(folder.glob("*.mlpackage/Data/com.apple.CoreML/weights/weight.bin")):
        about = path.stat()
        found[path.relative_to(folder).parts[0]] = (about.st_ino, about.st_mtime_ns, about.st_size)
    return found


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="A folder that is there already.")] = None,
    scratch: Annotated[Path | None, typer.Option(help="Where 48 + 18 GB have room.")] = None,
    recipe: Annotated[str, typer.Option(help="How weights are stored.")] = "base",
    limit: Annotated[float, typer.Option(help="MB of weights in a chunk.")] = 1000,
    after: Annotated[int, typer.Option(help="Chunks after which the conversion is interrupted.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Two layers and a small vocabulary.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    work = Path(tempfile.mkdtemp(prefix="large-", dir=scratch))
    try:
        if checkpoint is None:
            checkpoint = work / "checkpoint"
            maker = Path(__file__).with_name("make_checkpoint.py")
            size = QUICK if quick else ["--holes", "0.34"]
            command = [sys.executable, str(maker), "--out", str(checkpoint), "--geometry", "32b", "--sharded", *size]
            subprocess.run(command, check=True)
        parts = work / "parts"
        chunk = ["--chunks", "2"] if quick else ["--chunk-limit", str(limit)]
        command = [sys.executable, "-m", "ane_layers.cli", "convert", str(checkpoint), "-o", str(parts), "--resume"]
        command += ["--recipe", recipe, *chunk, "--json"]
        kept = work / "parts.unfinished"
        first = interrupted(command, kept, 1 if quick else after)
        before = files(kept / "chunks")
        second = measured(command)
        after_all = files(parts)
        again = [name for name, about in before.items() if after_all.get(name) != about]
        if again:
            raise RuntimeError(f"chunks were made again: {', '.join(again)}")
        analysis = measured([sys.executable, "-m", "ane_layers.cli", "analyze", str(parts), "--json"])
        together = json.loads(analysis.output)["together"]
        config = json.loads((checkpoint / "config.json").read_text())
        result = {
            "recipe": recipe,
            "layers": config["num_hidden_layers"],
            "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
            "chunks": len(after_all),
            "kept": len(before),
            "weight_bytes": [size for _, _, size in after_all.values()],
            "interrupted": first,
            "resumed": second.figures,
            "decode_bytes": together["decode"]["traffic"]["total"],
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join(tables(result)))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def tables(result: dict[str, Any]) -> list[str]:
    """Markdown of what was measured."""
    lines = [
        "| run | chunks finished | wall s | processor s | peak GB |",
        "| --- | --- | --- | --- | --- |",
    ]
    made = result["chunks"] - result["kept"]
    for name, count, row in (
        ("interrupted", result["kept"], result["interrupted"]),
        ("resumed", made, result["resumed"]),
    ):
        lines.append(f"| {name} | {count} | {row['seconds']:,.0f} | {row['cpu_seconds']:,.0f} | {row['peak_gb']:.2f} |")
    written = sum(result["weight_bytes"])
    lines += [
        "",
        f"{result['layers']} layers, {result['checkpoint_bytes'] / 1e9:.1f} GB of bf16, to {result['chunks']} chunks with recipe "
        f"`{result['recipe']}`: {written / 1e9:.2f} GB of weights, {max(result['weight_bytes']) / 1e6:,.0f} MB in the largest; "
        f"{result['decode_bytes'] / 1e9:.2f} GB a token by the accounting of `analyze`. The {result['kept']} chunks that were finished "
        "before the interruption are the same files afterwards.",
    ]
    return lines


if __name__ == "__main__":
    typer.run(main)
