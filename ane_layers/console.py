"""What the commands print with: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ane_layers.agreement import Agreement
    from ane_layers.interpreter import Finding
    from ane_layers.text_generation import TextGeneration
    from ane_layers.verification import Verification

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


def print_verification(result: Verification, *, positions: bool, findings: bool, as_json: bool) -> None:
    """The figures on stdout; positions there too, but on stderr beside JSON; on stderr, what went wrong in the numbers."""
    if as_json:
        print_json(result.as_dict())
    else:
        position, least = result.worst_position
        out.print(
            f"{result.tokens} positions compared, {result.mode} arithmetic: {result.snr_db:.1f} dB, "
            f"KL {result.kl:.3g} nats, top-1 agreement {result.top1_agreement:.1%}; worst is position {position}, {least:.1f} dB"
        )
    if positions:
        for position, ratio in enumerate(result.position_db):
            (err if as_json else out).print(f"position {position}: {ratio:.1f} dB", markup=False)
    if findings:
        print_findings(result.findings)
    elif result.first_non_finite is not None:
        err.print(f"first operation out of range: {result.first_non_finite}", markup=False)


def print_findings(findings: Sequence[Finding]) -> None:
    """A line each on stderr, infinities and NaN first: tiny numbers that vanish are seldom a fault."""
    for finding in sorted(findings, key=lambda finding: finding.kind == "subnormal"):
        err.print(f"{finding.kind}: {finding}", markup=False)


def print_agreement(result: Agreement, as_json: bool) -> None:
    """How many prompts two packages continue alike, and where they part."""
    if as_json:
        print_json(result.as_dict())
        return
    out.print(f"{result.identical} of {result.prompts} prompts: identical tokens ({result.tokens} tokens, greedy)")
    for difference in result.differences:
        out.print(f"prompt {difference.prompt + 1} parts after {difference.position} tokens")


def print_generation(generation: TextGeneration, text: str, runtime: str, as_json: bool) -> None:
    """The figures of a generation on stderr, its text having been printed; all of it on stdout as JSON."""
    stats = generation.stats
    speed = stats.tokens_per_second
    if as_json:
        figures = {
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "prefill_seconds": stats.prefill_seconds,
        }
        print_json({"text": text, **figures, "tokens_per_second": speed, "finish_reason": generation.finish_reason})
    else:
        print()
    decoded = "" if speed is None else f", then {speed:.1f} tokens per second"
    err.print(
        f"{stats.prompt_tokens} prompt tokens in {stats.prefill_seconds:.2f} s{decoded} ({runtime})", markup=False
    )


def print_outputs(summary: dict[str, Any]) -> None:
    """The summary of `ane_layers.running.run`, an output a line."""
    for name, output in summary["outputs"].items():
        if "value" in output:
            out.print(f"{name}: {output['value']}", markup=False)
        else:
            out.print(
                f"{name}: {output['dtype']} {output['shape']}, min {output['min']}, max {output['max']}", markup=False
            )
