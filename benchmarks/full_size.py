"""Converts a full-size checkpoint with both head sharings and without fusing, and tabulates what each costs.

    python benchmarks/make_checkpoint.py --out /tmp/exaone4-1.2b
    python benchmarks/full_size.py /tmp/exaone4-1.2b

Every conversion runs in a process of its own, so that its peak memory is its own. `--verify N` also executes the folded package for
N tokens against PyTorch; with a few layers (`make_checkpoint.py --layers 2`) that takes seconds.
"""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

VARIANTS = {
    "fold": ["--head-sharing", "fold"],
    "repeat_kv": ["--head-sharing", "repeat_kv"],
    "fold, not fused": ["--head-sharing", "fold", "--no-fuse"],
}


def measured(command: list[str]) -> tuple[str, float, float]:
    """Standard output, seconds, and the largest resident memory in GB that any child had so far."""
    started = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout, time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint in Hugging Face's format.")],
    context: Annotated[int, typer.Option(help="Slots of the KV cache.")] = 4096,
    prefill: Annotated[int, typer.Option(help="Tokens in a prefill block.")] = 64,
    verify: Annotated[int, typer.Option(help="Tokens to execute the folded package for.")] = 0,
    only: Annotated[str, typer.Option(help="One variant alone (internal: each runs in its own process).")] = "",
) -> None:
    if not only:
        print(
            f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')}, coremltools {version('coremltools')}"
        )
        print(f"{folder.name}, context {context}, prefill {prefill}")
        print(
            "| variant | seconds | peak GB | decode compute, all | prefill compute, all | tiles, MiB | rank | weights MB |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for name in VARIANTS:
            command = [
                sys.executable,
                __file__,
                str(folder),
                "--context",
                str(context),
                "--prefill",
                str(prefill),
                "--only",
                name,
            ]
            if name == "fold":
                command += ["--verify", str(verify)]
            print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout, end="", flush=True)
        return
    scratch = Path(tempfile.mkdtemp(prefix="full-size-"))
    try:
        package = scratch / "model.mlpackage"
        tool = [sys.executable, "-m", "ane_layers.cli"]
        options = ["--context", str(context), "--prefill", str(prefill), "--json", *VARIANTS[only]]
        out, seconds, peak = measured([*tool, "convert", str(folder), "-o", str(package), *options])
        functions: dict[str, Any] = json.loads(out)["functions"]
        decode, block = functions["decode"], functions["prefill"]
        operations = [f"{f['operations']['compute']:,}, {f['operations']['total']:,}" for f in (decode, block)]
        tiles = f"{decode['tile']['count']}, {decode['tile']['bytes'] / 2**20:.0f}"
        row = [
            only,
            f"{seconds:.0f}",
            f"{peak:.2f}",
            *operations,
            tiles,
            decode["highest_rank"],
            f"{decode['weight_bytes'] / 1e6:,.1f}",
        ]
        print("|", " | ".join(map(str, row)), "|")
        for mode in ("fp32", "fp16") if verify else ():
            checked = [*tool, "verify", str(package), str(folder), "--tokens", str(verify), "--mode", mode, "--json"]
            print(f"verify: {json.dumps(json.loads(measured(checked)[0]))}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
