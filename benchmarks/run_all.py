"""Runs the benchmarks and writes the page of them.

    python benchmarks/run_all.py                         # everything; hours on two cores
    python benchmarks/run_all.py conversion clustering   # some sections
    python benchmarks/run_all.py --quick                 # minutes: small sizes, to see that it works

Every section (`sections.py`) is a process of its own. Its results go into the results file as soon as it ends, so that an interrupted
run loses one section and a section can be run again later; the page is made from that file. A quick run has a results file and a page
of its own in `build/`.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from conditions import machine, versions
from measure import measured
from render_benchmarks import page
from sections import CHECKPOINT, HERE, SECTIONS, Section

from ane_layers.writing import write, write_json

ROOT = HERE.parent


def load(path: Path) -> dict[str, Any]:
    """The results so far.

    Raises:
        ValueError: the file is not one that this program wrote.
    """
    if not path.exists():
        return {"sections": {}}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("sections"), dict):
        raise ValueError(f"{path}: field sections is missing; give a results file of this program, or a new name")
    return found


def run(section: Section, checkpoint: Path | None, scratch: Path, *, quick: bool) -> dict[str, Any]:
    """What a section measured, with what, when and on what.

    Raises:
        subprocess.CalledProcessError: the script failed.
        ValueError: the script gave no JSON.
    """
    given = section.quick if quick else section.arguments
    arguments = [str(checkpoint) if argument == CHECKPOINT else argument for argument in given]
    file = scratch / f"{section.path.stem}.json"
    command = [sys.executable, str(section.path), *arguments, "--json", *([str(file)] if section.to_file else [])]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    took = measured(command, capture=not section.to_file)
    return {
        "command": section.command(quick=quick),
        "quick": quick,
        "date": date,
        "versions": versions(),
        "machine": machine(),
        **took.figures,
        "result": json.loads(file.read_text(encoding="utf-8") if section.to_file else took.output),
    }


def make_checkpoint(folder: Path, *, quick: bool) -> Path:
    small = ["--layers", "2", "--vocabulary", "1024"] if quick else []
    measured([sys.executable, str(HERE / "make_checkpoint.py"), "--out", str(folder), *small])
    return folder


def main(
    sections: Annotated[list[str] | None, typer.Argument(help="Which; all by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, to see that everything works.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of the 1.2B geometry; made in a temporary place by default.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="build/benchmarks.json by default.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "--write", help="docs/benchmarks.md by default.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Run nothing; write the page from the results.")] = False,
) -> None:
    for name in sections or ():
        if name not in SECTIONS:
            raise typer.BadParameter(f"{name!r} is no section; there are {', '.join(SECTIONS)}")
    if checkpoint is not None and not (checkpoint / "config.json").is_file():
        raise typer.BadParameter(f"--checkpoint {checkpoint}: has no config.json")
    results = results or ROOT / "build" / ("benchmarks-quick.json" if quick else "benchmarks.json")
    out = out or (ROOT / "build" / "benchmarks-quick.md" if quick else ROOT / "docs" / "benchmarks.md")
    (ROOT / "build").mkdir(exist_ok=True)
    for option, path in (("--results", results), ("--out", out)):
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{option} {path}: {path.parent} is not a folder")
    try:
        found = load(results)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up like an interrupt
    failed = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        os.environ["TMPDIR"] = scratch  # whatever a section leaves when it is ended goes with it
        for name in [] if render else sections or SECTIONS:
            print(f"\n{name}: {shlex.join(SECTIONS[name].command(quick=quick))}", file=sys.stderr, flush=True)
            try:
                if checkpoint is None and SECTIONS[name].needs_checkpoint:
                    checkpoint = make_checkpoint(Path(scratch) / "exaone4-1.2b", quick=quick)
                entry = run(SECTIONS[name], checkpoint, Path(scratch), quick=quick)
            except (subprocess.CalledProcessError, ValueError, OSError) as error:
                print(f"{name}: failed, {error}", file=sys.stderr, flush=True)
                failed.append(name)
                continue
            # Read again: another run may have finished a section meanwhile.
            found = load(results)
            found["sections"][name] = entry
            write_json(found, results)
    text = page(found)
    print(text)
    write(out, lambda stream: stream.write(text.encode()))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
