"""Prints what `analyze` returns, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from ane_layers.analysis.tables import binary, decimal, number, percent, span, table, times

Function = Mapping[str, Any]
Cell = Callable[[Function], str]

_SHOWN = 12


def print_analysis(result: Mapping[str, Any], console: Console, *, details: bool = False) -> None:
    """The cost of all functions side by side; then for each repeated data, cost by context length, and lint.

    Args:
        result: of `analyze`.
        console: to print on.
        details: print operations by kind, copies, the largest results and layers as well.
    """
    print_cost(result, console)
    for name, function in result["functions"].items():
        if details:
            print_operations(name, function, console)
        print_repetition(name, function, console)
        if details:
            print_copies(name, function, console)
            print_largest(name, function, console)
            print_layers(name, function, console)
        print_contexts(name, function, console)
        print_lint(name, function, console)
        print_notes(name, function, console)
    for name, sums in result.get("together", {}).items():
        total, speed = decimal(sums["traffic"]["total"]), sums["tokens_per_second"]
        calls = "" if speed is None else f", {speed:.1f} calls a second"
        console.print(f"{name}, all chunks: {number(sums['operations'])} operations, {total}{calls}", markup=False)


def print_cost(result: Mapping[str, Any], console: Console) -> None:
    """Both accountings and the prediction, a column for each function."""
    functions: Mapping[str, Function] = result["functions"]
    speed = _speed(*functions.values())
    rows: list[tuple[str, Cell]] = [
        ("compute operations", lambda f: number(f["operations"]["compute"])),
        ("weights", lambda f: decimal(f["traffic"]["weights"])),
        ("cache read", lambda f: decimal(f["traffic"]["kv_read"])),
        ("cache written", lambda f: decimal(f["traffic"]["kv_written"])),
        ("repeated data, written and read", lambda f: decimal(times(f["traffic"]["repetition"], 2))),
        ("total", lambda f: decimal(f["traffic"]["total"])),
        ("tokens a call", lambda f: number(f["tokens_per_call"])),
        (f"{speed} at {number(result['bandwidth'])} MB/s", lambda f: number(f["tokens_per_second"])),
        *((f"{speed} at {number(mb_s)} MB/s, {chip}", _chip(chip)) for chip, mb_s in result["chips"].items()),
        ("read by all operations", lambda f: decimal(f["materialised"]["read"])),
        ("written by all operations", lambda f: decimal(f["materialised"]["written"])),
    ]
    cells = [(label, *(cell(function) for function in functions.values())) for label, cell in rows]
    console.print(table(("cost of a call", *functions), cells))
    if any((function["tokens_per_call"] or 1) > 1 for function in functions.values()):
        console.print("Calls that take many tokens are bound by arithmetic, which is not counted here.", markup=False)


def print_operations(name: str, function: Function, console: Console) -> None:
    """Operations by what they do."""
    print_heading(console, f"{name}: operations")
    rows = [
        (kind, number(row["count"]), ", ".join(f"{type_} {count:,}" for type_, count in row["by_type"].items()))
        for kind, row in function["kinds"].items()
    ]
    console.print(table(("kind", "number", "by type"), rows, text=("by type",)))


def print_repetition(name: str, function: Function, console: Console) -> None:
    """Operations that only repeat data, those of a type and size in one row."""
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for entry in function["repetitions"]:
        groups.setdefault((entry["type"], entry["bytes"]), []).append(entry)
    print_heading(console, f"{name}: repeated data" + ("" if groups else ": none"))
    rows = [
        (type_, number(len(group)), binary(size), binary(times(size, len(group))), span([e["layer"] for e in group]))
        for (type_, size), group in groups.items()
    ]
    if rows:
        console.print(table(("operation", "number", "each", "all", "layers"), rows, text=("layers",)))


def print_copies(name: str, function: Function, console: Console) -> None:
    """Operations that move data and compute nothing."""
    copies = function["copies"]
    caches = copies["of_caches"]
    print_heading(
        console,
        f"{name}: {copies['count']:,} copies, {binary(copies['bytes'])}, "
        f"of these {caches['count']:,} of caches, {binary(caches['bytes'])}",
    )
    rows = [
        (
            row["type"],
            row["cache"],
            number(row["count"]),
            binary(row["bytes"]),
            binary(times(row["bytes"], row["count"])),
        )
        for row in copies["largest"]
    ]
    console.print(table(("operation", "of", "number", "each", "all"), rows, text=("of",)))


def print_largest(name: str, function: Function, console: Console) -> None:
    """The largest results of operations."""
    print_heading(console, f"{name}: largest results")
    rows = [
        (row["type"], f"{row['dtype']} {row['shape']}", number(row["count"]), binary(row["bytes"]), row["layer"])
        for row in function["largest"]
    ]
    console.print(table(("operation", "type", "number", "each", "first in layer"), rows, text=("type",)))


def print_layers(name: str, function: Function, console: Console) -> None:
    """A row for each layer; neighbours that are alike share one, with the bytes of each."""
    shares = ("operations", "weights", "kv_read", "kv_written", "repetition", "total")
    groups: list[list[Mapping[str, Any]]] = []
    for row in function["layers"]:
        if groups and all(groups[-1][0][share] == row[share] for share in shares):
            groups[-1].append(row)
        else:
            groups.append([row])
    rows = [
        (
            span([row["layer"] for row in group]),
            number(group[0]["operations"]),
            *(decimal(group[0][share]) for share in shares[1:]),
            percent(times(group[0]["total"], len(group)), function["traffic"]["total"]),
        )
        for group in groups
    ]
    print_heading(console, f"{name}: layers, each")
    console.print(
        table(("layer", "ops", "weights", "KV read", "KV written", "repeated", "total", "share of all"), rows)
    )


def print_contexts(name: str, function: Function, console: Console) -> None:
    """What the function would move if it were built for other context lengths."""
    if not function["contexts"]:
        return
    rows = [
        (
            f"{row['context']:,}{', as built' if row['built'] else ''}",
            decimal(row["kv_read"]),
            decimal(times(row["repetition"], 2)),
            decimal(row["total"]),
            number(row["tokens_per_second"]),
        )
        for row in function["contexts"]
    ]
    print_heading(console, f"{name}: by context length")
    console.print(table(("slots", "cache read", "repeated, written and read", "total", _speed(function)), rows))


def print_lint(name: str, function: Function, console: Console) -> None:
    """Findings, unexplained ones first; of those that are as they must be the rule and the reason."""
    findings = function["lint"]
    told = [finding for finding in findings if not finding["suppressed"] and finding["expected"] is None]
    print_heading(console, f"{name}: lint" + ("" if told else ": nothing unexplained"))
    for finding in told:
        line = f"{finding['severity']} {finding['rule']}: {finding['message']} [{finding['source']}]"
        console.print(line, markup=False)
    for finding in findings:
        if finding["suppressed"]:
            console.print(f"suppressed {finding['rule']}", markup=False)
        elif finding["expected"] is not None:
            console.print(f"expected {finding['rule']}: {finding['expected']}", markup=False)


def print_notes(name: str, function: Function, console: Console) -> None:
    """What is not known, and what to know about the figures."""
    unknown = function["unknown"]
    lines = [*(f"an open dimension hides {line}" for line in unknown[:_SHOWN]), *function["notes"]]
    if len(unknown) > _SHOWN:
        lines.append(f"and {len(unknown) - _SHOWN} more")
    if lines:
        print_heading(console, f"{name}: notes")
    for line in lines:
        console.print(line, markup=False)


def print_heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False)


def _speed(*functions: Function) -> str:
    """What a speed counts: for functions of one token a call, tokens."""
    return "tokens/s" if all(function["tokens_per_call"] == 1 for function in functions) else "calls/s"


def _chip(name: str) -> Cell:
    return lambda function: number(function["chips"][name])
