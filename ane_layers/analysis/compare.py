"""Two packages side by side: what their functions do otherwise, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ane_layers.analysis.analyze import function_costs
from ane_layers.analysis.bandwidth import ARTICLE_BANDWIDTH_MB_S
from ane_layers.program import Package

_FIGURES: tuple[tuple[str, ...], ...] = (
    ("operations", "compute"),
    ("operations", "total"),
    ("tile", "count"),
    ("tile", "bytes"),
    ("highest_rank",),
    ("state_writes",),
    ("weight_bytes",),
    ("traffic", "weights"),
    ("traffic", "kv_read"),
    ("traffic", "kv_written"),
    ("traffic", "repetition"),
    ("traffic", "total"),
    ("materialised", "read"),
    ("materialised", "written"),
    ("copies", "count"),
    ("copies", "bytes"),
    ("tokens_per_call",),
    ("tokens_per_second",),
)


def compare(
    a: Package,
    b: Package,
    functions: Sequence[tuple[str, str]] | None = None,
    bandwidth: float | Mapping[str, float] = ARTICLE_BANDWIDTH_MB_S,
) -> dict[str, Any]:
    """What two packages do and cost, function by function, ready to be written as JSON.

    Args:
        a, b: ours or not.
        functions: pairs of names to compare. By default those of the same name, and if there is none the two default functions.
        bandwidth: as for `analyze`.

    Returns:
        `{"a": path, "b": path, "bandwidth": MB/s, "chips": {...}, "functions": [...], "only_a": [names], "only_b": [names]}`.
        A function has the names `a` and `b`, and each with `a`, `b`, `difference` (b − a) and `ratio` (b ÷ a), None where a figure is:

        - `figures`: by dotted key of `analyze`: `operations.compute`, `traffic.total`, `tokens_per_second` …;
        - `kinds` and `by_type`: numbers of operations, constants left out;
        - `chips`: tokens per second of each chip;
        - `contexts`: for every context length that both have, `total` bytes and `tokens_per_second`;

        and `interface`: inputs, outputs and states that one alone has or that differ, as `{name: {"a": …, "b": …}}`.

    Raises:
        ValueError: a package lacks a named function.
    """
    pairs = _pairs(a, b) if functions is None else list(functions)
    chips = dict(bandwidth) if isinstance(bandwidth, Mapping) else {}
    main = ARTICLE_BANDWIDTH_MB_S if isinstance(bandwidth, Mapping) else bandwidth
    results = []
    for one, other in pairs:
        costs = [function_costs(package.function(name), main, chips) for package, name in ((a, one), (b, other))]
        results.append(_function(one, other, *costs))
    return {
        "a": str(a.path),
        "b": str(b.path),
        "bandwidth": main,
        "chips": chips,
        "functions": results,
        "only_a": [name for name in a.functions if name not in {pair[0] for pair in pairs}],
        "only_b": [name for name in b.functions if name not in {pair[1] for pair in pairs}],
    }


def _pairs(a: Package, b: Package) -> list[tuple[str, str]]:
    common = [(name, name) for name in a.functions if name in b.functions]
    return common or [(a.default_function, b.default_function)]


def _function(one: str, other: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    figures = {".".join(path): _both(_get(a, path), _get(b, path)) for path in _FIGURES}
    return {
        "a": one,
        "b": other,
        "figures": figures,
        "kinds": _counts(*({kind: row["count"] for kind, row in side["kinds"].items()} for side in (a, b))),
        "by_type": _counts(_compute(a), _compute(b)),
        "chips": {name: _both(a["chips"][name], b["chips"][name]) for name in a["chips"]},
        "interface": {kind: _differences(a[kind], b[kind]) for kind in ("inputs", "outputs", "states")},
        "contexts": _contexts(a["contexts"], b["contexts"]),
    }


def _get(function: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = function
    for key in path:
        value = value[key]
    return value


def _compute(function: Mapping[str, Any]) -> dict[str, int]:
    by_type = function["operations"]["by_type"]
    return {type_: count for type_, count in by_type.items() if type_ != "const" and not type_.startswith("constexpr_")}


def _both(a: float | None, b: float | None) -> dict[str, float | None]:
    known = a is not None and b is not None
    return {
        "a": a,
        "b": b,
        "difference": b - a if known else None,  # type: ignore[operator]
        "ratio": b / a if known and a else None,  # type: ignore[operator]
    }


def _counts(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, dict[str, float | None]]:
    """Every type or kind of both, the greatest difference first."""
    names = {*a, *b}
    rows = {name: _both(a.get(name, 0), b.get(name, 0)) for name in sorted(names)}
    return dict(sorted(rows.items(), key=lambda item: -abs(item[1]["difference"] or 0)))


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    names = [*a, *(name for name in b if name not in a)]
    return {name: {"a": a.get(name), "b": b.get(name)} for name in names if a.get(name) != b.get(name)}


def _contexts(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    other = {row["context"]: row for row in b}
    return [
        {
            "context": row["context"],
            "total": _both(row["total"], other[row["context"]]["total"]),
            "tokens_per_second": _both(row["tokens_per_second"], other[row["context"]]["tokens_per_second"]),
        }
        for row in a
        if row["context"] in other
    ]
