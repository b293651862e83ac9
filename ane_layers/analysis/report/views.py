"""What the page of one package shows: the JSON of `analyze`, grouped as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from ane_layers.analysis.bandwidth import ARTICLE_BANDWIDTH_MB_S, tokens_per_second
from ane_layers.analysis.lint import rules
from ane_layers.analysis.report.bars import Bar, Part, row_bars, stacked_bars
from ane_layers.analysis.report.curves import Series, context_curve, swatch
from ane_layers.analysis.tables import number, span, times

Json = Mapping[str, Any]

SHARES = (("weights", "weights"), ("kv_read", "KV read"), ("kv_written", "KV written"))
"""Summands of the article's accounting that count once, with short names."""

REPETITION = "repetition, twice"
MATERIALISED = (("read", "read"), ("written", "written"))

TRAFFIC_KEYS = (*SHARES, ("repetition", REPETITION))
MATERIALISED_KEYS = tuple((kind, f"{name} by all operations") for kind, name in MATERIALISED)

_LONGEST_LABEL, _LONGEST_LAYER = 32, 14


def report_view(analysis: Json) -> dict[str, Any]:
    """All that the template asks for but the title."""
    functions = [
        function_view(index, name, function, analysis)
        for index, (name, function) in enumerate(analysis["functions"].items())
    ]
    return {
        "analysis": analysis,
        "bandwidth_name": bandwidth_name(analysis["bandwidth"]),
        "article_bandwidth": ARTICLE_BANDWIDTH_MB_S,
        "is_article": analysis["bandwidth"] == ARTICLE_BANDWIDTH_MB_S,
        "functions": functions,
        "bars": stacked_bars(
            [traffic_bar(shortened(view["name"]), view["function"]["traffic"]) for view in functions],
            id="overview-bytes",
            title="where the bytes of a call go",
        ),
        "keys": TRAFFIC_KEYS,
        "takes_many": any((view["function"]["tokens_per_call"] or 1) > 1 for view in functions),
    }


def function_view(index: int, name: str, function: Json, analysis: Json) -> dict[str, Any]:
    """One function: its figures as they are, and beside them what is drawn or grouped.

    `id` stands for it in the page, for names in packages may hold anything.
    """
    id = f"f{index}"
    lint = function["lint"]
    return {
        "id": id,
        "name": name,
        "function": function,
        "unit": unit(function["tokens_per_call"]),
        "shares": shares(function["traffic"]),
        "bars": stacked_bars(accounts(function), id=f"{id}-bytes", title=f"{name}: where the bytes of a call go"),
        "layer_bars": row_bars(
            [traffic_bar(shortened(row["layer"], _LONGEST_LAYER), row) for row in function["layers"]],
            id=f"{id}-layers",
            title=f"{name}: bytes of a call by layer",
        ),
        "layer_groups": alike(function["layers"], lambda row: row["by_type"]),
        "repetition_groups": repetition_groups(function["repetitions"]),
        "constants": constants(function),
        "curve": curve(id, name, function, analysis),
        "contexts": context_rows(function["contexts"], analysis["chips"]),
        "told": [explained(f) for f in lint if not f["suppressed"] and f["expected"] is None],
        "expected": [explained(f) for f in lint if not f["suppressed"] and f["expected"] is not None],
        "suppressed": [explained(f) for f in lint if f["suppressed"]],
    }


def bandwidth_name(bandwidth: float) -> str:
    """How the bandwidth is called wherever a speed is predicted from it."""
    if bandwidth == ARTICLE_BANDWIDTH_MB_S:
        return f"the article's constant, {number(bandwidth)} MB/s"
    return f"the given {number(bandwidth)} MB/s"


def unit(tokens_per_call: int | None) -> str:
    """Calls are tokens only where each takes one."""
    return "tok/s" if tokens_per_call == 1 else "calls/s"


def shortened(name: str, longest: int = _LONGEST_LABEL) -> str:
    """A name that fits at a bar; the page has it in full elsewhere."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def traffic_bar(label: str, traffic: Json) -> Bar:
    """The article's accounting of a function or a layer."""
    parts = [Part(kind=key, label=name, bytes=traffic[key]) for key, name in SHARES]
    parts.append(Part(kind="repetition", label=REPETITION, bytes=times(traffic["repetition"], 2)))
    return Bar(label=label, parts=tuple(parts), total=traffic["total"])


def materialised_bar(label: str, materialised: Json) -> Bar:
    """The other accounting."""
    parts = tuple(Part(kind=key, label=name, bytes=materialised[key]) for key, name in MATERIALISED)
    known = all(part.bytes is not None for part in parts)
    return Bar(label=label, parts=parts, total=sum(part.bytes or 0 for part in parts) if known else None)


def accounts(function: Json) -> list[Bar]:
    return [
        traffic_bar("The article's accounting", function["traffic"]),
        materialised_bar("Everything materialised", function["materialised"]),
    ]


def shares(traffic: Json) -> list[dict[str, Any]]:
    """Rows of the table beside the bars."""
    rows = [{"kind": part.kind, "label": part.label, "bytes": part.bytes} for part in traffic_bar("", traffic).parts]
    return [row | {"total": traffic["total"]} for row in rows]


def alike(rows: Sequence[Json], key: Callable[[Json], Any]) -> list[dict[str, Any]]:
    """Neighbours with the same `key`, as one row: the span of their layers, their number, the first of them."""
    groups = [list(group) for _, group in groupby(rows, key)]
    return [{"layers": span([row["layer"] for row in g]), "count": len(g), "first": g[0]} for g in groups]


def repetition_groups(repetitions: Sequence[Json]) -> list[dict[str, Any]]:
    """Repetitions of a type and size in one row, with what all of them write."""
    groups: dict[tuple[str, int | None], list[Json]] = {}
    for entry in repetitions:
        groups.setdefault((entry["type"], entry["bytes"]), []).append(entry)
    return [
        {
            "type": type_,
            "bytes": size,
            "count": len(group),
            "all": times(size, len(group)),
            "layers": span([entry["layer"] for entry in group]),
        }
        for (type_, size), group in groups.items()
    ]


def constants(function: Json) -> dict[str, int]:
    """Operations that only hold or decompress constants, which the kinds leave out."""
    by_type = function["operations"]["by_type"]
    return {type_: count for type_, count in by_type.items() if type_ == "const" or type_.startswith("constexpr_")}


def context_rows(contexts: Sequence[Json], chips: Json) -> list[dict[str, Any]]:
    """The rows of `analyze`, with what each chip's bandwidth predicts."""
    return [
        dict(row) | {"chips": [tokens_per_second(row["total"], bandwidth) for bandwidth in chips.values()]}
        for row in contexts
    ]


def curve(id: str, name: str, function: Json, analysis: Json) -> dict[str, Any]:
    """The picture over context lengths and its legend."""
    bandwidths = {bandwidth_name(analysis["bandwidth"]): analysis["bandwidth"]}
    bandwidths |= {f"{chip}, {number(speed)} MB/s": speed for chip, speed in analysis["chips"].items()}
    series = []
    for label, bandwidth in bandwidths.items():
        points = ((row["context"], tokens_per_second(row["total"], bandwidth)) for row in function["contexts"])
        known = tuple((context, speed) for context, speed in points if speed is not None)
        series.append(Series(label=label, points=known))
    return {
        "svg": context_curve(
            series,
            id=f"{id}-contexts",
            title=f"{name}: predicted {unit(function['tokens_per_call'])} over the context length",
            unit=unit(function["tokens_per_call"]),
            built=[row["context"] for row in function["contexts"] if row["built"]],
        ),
        "legend": legend([one.label for one in series]),
    }


def legend(labels: Sequence[str]) -> list[tuple[Markup, str]]:
    """A piece of line and a name for each series."""
    return [(swatch(style), label) for style, label in enumerate(labels)]


def explained(finding: Json) -> dict[str, Any]:
    """A finding with its rule's reason and remedy; empty if the rule is not known here (a file of another version)."""
    rule = rules().get(finding["rule"])
    reason, remedy = (rule.reason, rule.remedy) if rule is not None else ("", "")
    return dict(finding) | {"reason": reason, "remedy": remedy}
