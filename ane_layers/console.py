"""What the commands print with: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table

from ane_layers.writing import json_text

if TYPE_CHECKING:
    from ane_layers.agreement import Agreement
    from ane_layers.compression import CompressionReport, Plan, Ranking, TensorReport
    from ane_layers.compression.budget import AllocationFigures
    from ane_layers.evaluation import Evaluation
    from ane_layers.interpreter import Finding
    from ane_layers.rewrite import FoldedPackage
    from ane_layers.text_generation import TextGeneration
    from ane_layers.verification import Verification

INTERRUPTED = 130
"""Exit status of a run that the user stopped."""

out = Console(highlight=False, soft_wrap=True)
# Bound to the stream itself: while coremltools' output is silenced, sys.stderr is another one.
err = Console(file=sys.stderr, highlight=False, soft_wrap=True)


def tables() -> Console:
    """Standard output for tables: where it is no terminal, wide enough not to cut names."""
    return out if out.is_terminal else Console(highlight=False, soft_wrap=True, width=160)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout. JSON has no infinity: an exact match, of infinite dB, is null."""
    print(json_text(value))


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
    """A line each on stderr, infinities and NaN first: tiny numbers that vanish are seldom a fault. Otherwise in the order given."""
    for finding in sorted(findings, key=lambda finding: finding.kind == "subnormal"):
        err.print(f"{finding.kind}: {finding}", markup=False)


def print_folding(result: FoldedPackage) -> None:
    """What was folded and what was left, function by function, and how far the packages agree."""
    for function in result.report.functions:
        before, after = function.before, function.after
        out.print(
            f"{function.function}: {len(function.folded)} attentions folded; tile {before.tiles} → {after.tiles}; data only repeated "
            f"{before.repetition_bytes / 2**20:,.2f} → {after.repetition_bytes / 2**20:,.2f} MiB; operations {before.operations:,} → "
            f"{after.operations:,}",
            markup=False,
        )
        for refused in function.refused:
            size = "of open size" if refused.bytes is None else f"{refused.bytes:,} bytes"
            out.print(f"  left alone: {refused.operation} ({refused.type}, {size}): {refused.reason}", markup=False)
    if result.equality is not None:
        for name, level in result.equality.snr_db.items():
            agreed = "the same numbers" if level == float("inf") else f"{level:.1f} dB"
            out.print(
                f"{name} against the original: {agreed} ({result.equality.calls} calls, random inputs, {result.equality.mode} arithmetic)",
                markup=False,
            )


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


def print_compression(report: CompressionReport, plan: Plan) -> None:
    """What a recipe did, weights of the same place in their layers together."""
    promoted = f", layers {', '.join(map(str, sorted(plan.promoted)))} promoted" if plan.promoted else ""
    out.print(
        f"recipe {report.recipe}{promoted}: {report.bits_per_weight:.2f} bits a weight, {report.weight_bytes / 1e6:,.2f} MB, of which "
        f"tables and scales {report.table_bytes / 1e6:,.2f} MB",
        markup=False,
    )
    alike: dict[tuple[str, str, str], list[TensorReport]] = {}
    for tensor in report.tensors:
        place = re.sub(r"\.\d+(?=\.)", ".*", tensor.path)
        alike.setdefault((place, str(tensor.setting), tensor.note), []).append(tensor)
    for (place, setting, note), tensors in alike.items():
        size = sum(tensor.stored_bytes for tensor in tensors) / 1e6
        worst = min(tensor.snr_db for tensor in tensors)
        error = "" if worst == float("inf") else f", squared error {-worst:.1f} dB"
        remark = f" ({note})" if note else ""
        out.print(f"  {place}, {len(tensors)} in all: {setting}, {size:,.3f} MB{error}{remark}", markup=False)


def print_ranking(ranking: Ranking) -> None:
    """Layers, the most harmed first, with the module that takes the largest part; then agreement of methods."""
    table = Table(box=None, pad_edge=False)
    for column in ("place", "layer", f"harm at {ranking.setting}, nats", "most harmed module"):
        table.add_column(column, justify="left" if column.startswith("most") else "right", no_wrap=True)
    for place, layer in enumerate(ranking.order, 1):
        inside = [module for module in ranking.modules if module.layer == layer]
        worst = max(inside, key=lambda module: module.harm.get(ranking.setting, 0.0), default=None)
        table.add_row(str(place), str(layer), f"{ranking.layers[layer]:.3e}", worst.name if worst else "")
    out.print(table)
    for module in ranking.modules:
        if module.layer is None:
            out.print(f"{module.name}: {module.harm[ranking.setting]:.3e}", markup=False)
    for name, value in ranking.agreement.items():
        out.print(f"agreement of kl and fisher, {name}: {value:.3f}", markup=False)


def print_allocation(figures: AllocationFigures) -> None:
    """What an allocation came to."""
    settings = ", ".join(f"{count} at {key}" for key, count in figures.modules.items())
    out.print(
        f"{figures.bits_per_weight:.3f} bits a weight, {figures.read_bytes / 1e6:,.2f} MB of layers and head read a token, "
        f"{figures.stored_bytes / 1e6:,.2f} MB stored; predicted harm {figures.predicted_harm:.3e} nats; modules: {settings}",
        markup=False,
    )


def print_evaluation(result: Evaluation, as_json: bool) -> None:
    """Quality and bytes, a line each."""
    if as_json:
        print_json(result.as_dict())
        return
    unknown = "unknown (no original)"
    moved = "unknown" if result.bytes_per_token is None else f"{result.bytes_per_token / 1e6:,.2f} MB"
    rows = {
        "loss": f"{result.loss:.4f} nats a token",
        "perplexity": f"{result.perplexity:.3f}",
        "KL to the original": unknown if result.kl is None else f"{result.kl:.3e} nats",
        "top-1 agreement": unknown if result.top1_agreement is None else f"{result.top1_agreement:.2%}",
        "weights": f"{result.weight_bytes / 1e6:,.2f} MB",
        "bytes a token": f"{moved}, at context {result.context}",
        "scored": f"{result.tokens:,} tokens in windows of {result.window}",
    }
    for name, value in rows.items():
        out.print(f"{name}: {value}", markup=False)
