"""Prints what `compare` and `article_comparison` return, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from ane_layers.analysis.printing import print_heading
from ane_layers.analysis.tables import UNKNOWN, decimal, number, table


def print_comparison(result: Mapping[str, Any], console: Console) -> None:
    """What `compare` found, a pair of functions after the other."""
    for side in ("a", "b"):
        console.print(f"{side.upper()}: {result[side]}", markup=False)
    for pair in result["functions"]:
        print_heading(console, pair["a"] if pair["a"] == pair["b"] else f"{pair['a']} in A, {pair['b']} in B")
        rows = [_both(label, pair["figures"][key], form) for label, key, form in _FIGURES]
        rows += [_both(f"calls/s, {chip}", figure, number) for chip, figure in pair["chips"].items()]
        console.print(table((f"at {number(result['bandwidth'])} MB/s", "A", "B", "difference", "B / A"), rows))
        changed = {type_: row for type_, row in pair["by_type"].items() if row["difference"]}
        if changed:
            console.print()
            rows = [_both(type_, row, number) for type_, row in changed.items()]
            console.print(table(("operations that differ", "A", "B", "difference", "B / A"), rows))
        for kind, features in pair["interface"].items():
            for feature, sides in features.items():
                shown = [_feature(sides[side]) for side in ("a", "b")]
                console.print(f"{kind[:-1]} {feature}: {shown[0]} in A, {shown[1]} in B", markup=False)
        if pair["contexts"]:
            console.print()
            rows = [_both(number(row["context"]), row["tokens_per_second"], number) for row in pair["contexts"]]
            console.print(table(("calls/s at a context of", "A", "B", "difference", "B / A"), rows))
    for side in ("a", "b"):
        if result[f"only_{side}"]:
            console.print(f"only in {side.upper()}: {', '.join(result[f'only_{side}'])}", markup=False)


def print_article(comparison: Mapping[str, Any], console: Console) -> None:
    """Predicted against measured tokens per second of the article's A/B."""
    rows = [
        (
            name,
            decimal(build["total"]),
            number(build["predicted"]),
            number(build["measured"]),
            UNKNOWN if build["error"] is None else f"{build['error']:+.1%}",
            decimal(build["inferred"]),
        )
        for name, build in comparison["builds"].items()
    ]
    columns = ("build", "bytes a token", "tok/s", "measured tok/s", "error", "bytes inferred from it")
    console.print(table(columns, rows))
    difference = comparison["difference"]
    console.print(
        f"difference: {decimal(difference['total'])} from shapes, {decimal(difference['inferred'])} inferred",
        markup=False,
    )


_FIGURES: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("compute operations", "operations.compute", number),
    ("with constants", "operations.total", number),
    ("tile operations", "tile.count", number),
    ("highest rank", "highest_rank", number),
    ("state writes", "state_writes", number),
    ("weights stored", "weight_bytes", decimal),
    ("weights read", "traffic.weights", decimal),
    ("cache read", "traffic.kv_read", decimal),
    ("cache written", "traffic.kv_written", decimal),
    ("repeated data", "traffic.repetition", decimal),
    ("total, repetition twice", "traffic.total", decimal),
    ("copies", "copies.count", number),
    ("copied", "copies.bytes", decimal),
    ("read by all operations", "materialised.read", decimal),
    ("written by all operations", "materialised.written", decimal),
    ("tokens a call", "tokens_per_call", number),
    ("calls/s", "tokens_per_second", number),
)


def _both(label: str, figure: Mapping[str, Any], form: Callable[[Any], str]) -> tuple[str, ...]:
    difference, ratio = figure["difference"], figure["ratio"]
    sign = "+" if difference is not None and difference > 0 else ""
    return (
        label,
        form(figure["a"]),
        form(figure["b"]),
        UNKNOWN if difference is None else sign + form(difference),
        "" if ratio is None else f"{ratio:.3f}",
    )


def _feature(feature: Mapping[str, Any] | None) -> str:
    return "none" if feature is None else f"{feature['dtype']} {feature['shape']}"
