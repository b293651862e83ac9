"""The command line: parses, calls, prints. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from ane_layers import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_out = Console(highlight=False, soft_wrap=True)
# Bound to the stream itself: while coremltools' output is silenced, sys.stderr is another one.
_err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


class HeadSharingOption(StrEnum):
    fold = "fold"
    repeat_kv = "repeat_kv"


class KvOption(StrEnum):
    in_place = "in_place"
    deferred = "deferred"
    read_only = "read_only"


class ModeOption(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Neural-Engine-friendly transformer layers: convert, inspect and verify Core ML packages on any machine."""
    if version:
        _out.print(__version__)
        raise typer.Exit


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="Model folder in Hugging Face's format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Package to write, ending in .mlpackage.")],
    context: Annotated[int, typer.Option(help="Slots of the KV cache.")] = 4096,
    prefill: Annotated[int, typer.Option(help="Tokens in a prefill block.")] = 64,
    head_sharing: Annotated[
        HeadSharingOption, typer.Option(help="How query heads share KV heads.")
    ] = HeadSharingOption.fold,
    kv: Annotated[KvOption, typer.Option(help="When the cache is written.")] = KvOption.in_place,
    fuse: Annotated[bool, typer.Option(help="Join projections that read the same input.")] = True,
    head_pieces: Annotated[int | None, typer.Option(help="Convolutions that the output head is split into.")] = None,
    all_logits: Annotated[bool, typer.Option(help="Let prefill return every position's logits.")] = False,
    duplicate_tied: Annotated[bool, typer.Option(help="Store a table shared by embedding and head twice.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a model folder to a Core ML package with functions `decode` and `prefill`, and check the result."""
    if kv is not KvOption.in_place:
        raise ValueError(f"--kv {kv} is not supported yet; in_place is")
    from ane_layers.analysis import inspect as inspect_package
    from ane_layers.models import from_folder

    started = time.monotonic()
    with _progress() as say:
        say(f"loading {folder}")
        model = from_folder(
            folder,
            context_length=context,
            dtype=None,
            fuse=fuse,
            head_sharing=head_sharing.value,
            head_pieces=head_pieces,
        )
        package = model.convert(
            output, prefill=prefill, all_logits=all_logits, duplicate_tied=duplicate_tied, progress=say
        )
    _err.print(f"{output}: written and checked in {time.monotonic() - started:.0f} s")
    _print_inspection(inspect_package(package), as_json)


@app.command()
def inspect(
    package: Annotated[Path, typer.Argument(help="An .mlpackage, ours or not.")], as_json: Json = False
) -> None:
    """Count what is in a package, from its own files."""
    from ane_layers.analysis import inspect as inspect_package
    from ane_layers.program import Package

    _print_inspection(inspect_package(Package.open(package)), as_json)


@app.command()
def verify(
    package: Annotated[Path, typer.Argument(help="Package that `convert` wrote.")],
    folder: Annotated[Path, typer.Argument(help="Model folder it was converted from.")],
    tokens: Annotated[
        int | None, typer.Option(help="Random tokens to run; twice the prefill block by default.")
    ] = None,
    mode: Annotated[ModeOption, typer.Option(help="fp32, or every operation rounded to fp16.")] = ModeOption.fp32,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    gate: Annotated[
        float, typer.Option(help="Least signal-to-noise ratio in dB; below it the exit status is 1.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Execute a package and compare its logits with PyTorch's."""
    from ane_layers.verification import verify as verify_package

    with _progress() as say:
        result = verify_package(package, folder, tokens=tokens, mode=mode.value, seed=seed, progress=say)
    if as_json:
        _print_json(result.as_dict())
    else:
        _out.print(
            f"{result.tokens} positions compared, {result.mode} arithmetic: {result.snr_db:.1f} dB, "
            f"KL {result.kl:.3g} nats, top-1 agreement {result.top1_agreement:.1%}"
        )
    if not result.snr_db >= gate:
        _fail(f"{package}: {result.snr_db:.1f} dB is below the gate of {gate:g} dB")


def _print_inspection(inspection: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(inspection)
        return
    functions = inspection["functions"]
    table = Table(box=None, pad_edge=False)
    table.add_column("function")
    for name in functions:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "compute operations": lambda f: f"{f['operations']['compute']:,}",
        "with constants": lambda f: f"{f['operations']['total']:,}",
        "tile operations": lambda f: f"{f['tile']['count']:,}",
        "tile output, MiB": lambda f: f"{f['tile']['bytes'] / 2**20:,.1f}",
        "highest rank": lambda f: str(f["highest_rank"]),
        "state writes": lambda f: str(f["state_writes"]),
        "weights, MB": lambda f: f"{f['weight_bytes'] / 1e6:,.2f}",
    }
    for label, cell in rows.items():
        table.add_row(label, *(cell(function) for function in functions.values()))
    _out.print(table)
    for name, function in functions.items():
        _out.print()
        for kind in ("inputs", "outputs", "states"):
            for feature, value in function[kind].items():
                _out.print(f"{name} {kind[:-1]} {feature}: {value['dtype']} {value['shape']}", markup=False)


def _print_json(value: dict[str, Any]) -> None:
    # JSON has no infinity: an exact match is reported as null dB.
    clean = {
        key: None if isinstance(item, float) and not abs(item) < float("inf") else item for key, item in value.items()
    }
    print(json.dumps(clean, indent=2, allow_nan=False))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, a line a step elsewhere."""
    if _err.is_terminal:
        with _err.status("") as status:
            yield lambda line: status.update(line)
    else:
        yield lambda line: _err.print(line, markup=False)


def _fail(message: str, code: int = 1) -> NoReturn:
    _err.print(f"error: {' '.join(message.split())}", markup=False)
    raise SystemExit(code)


def main() -> None:
    """Entry point of `ane-layers`: a user's mistake becomes one line on stderr and a non-zero exit status."""
    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warnings.showwarning = lambda message, *_, **__: _err.print(f"warning: {message}", markup=False)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        app()
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", 130)
    except (ValueError, OSError) as error:
        _fail(str(error) or type(error).__name__)


if __name__ == "__main__":
    main()
