"""What the commands print with: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

out = Console(highlight=False, soft_wrap=True)
# Bound to the stream itself: while coremltools' output is silenced, sys.stderr is another one.
err = Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout. JSON has no infinity: an exact match, of infinite dB, is null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, a line a step elsewhere."""
    if err.is_terminal:
        with err.status("") as status:
            yield lambda line: status.update(line)
    else:
        yield lambda line: err.print(line, markup=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """One line on stderr, then the end."""
    err.print(f"error: {' '.join(message.split())}", markup=False)
    raise SystemExit(code)


def print_inspection(inspection: dict[str, Any]) -> None:
    """The counts of `ane_layers.analysis.inspect` as a table."""
    functions = inspection["functions"]
    table = Table(box=None, pad_edge=False)
    table.add_column("function")
    for name in functions:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "compute operations": lambda f: f"{f['operations']['compute']:,}",
        "with constants": lambda f: f"{f['operations']['total']:,}",
        "tile operations": lambda f: f"{f['tile']['count']:,}",
        "tile output, MiB": lambda f: "open" if f["tile"]["bytes"] is None else f"{f['tile']['bytes'] / 2**20:,.1f}",
        "highest rank": lambda f: str(f["highest_rank"]),
        "state writes": lambda f: str(f["state_writes"]),
        "weights, MB": lambda f: f"{f['weight_bytes'] / 1e6:,.2f}",
    }
    for label, cell in rows.items():
        table.add_row(label, *(cell(function) for function in functions.values()))
    out.print(table)
    for name, function in functions.items():
        out.print()
        for kind in ("inputs", "outputs", "states"):
            for feature, value in function[kind].items():
                out.print(f"{name} {kind[:-1]} {feature}: {value['dtype']} {value['shape']}", markup=False)
