"""What the page of two packages shows: the JSON of `compare`, grouped as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

from markupsafe import Markup

from ane_layers.analysis.bandwidth import ARTICLE_BANDWIDTH_MB_S
from ane_layers.analysis.report.bars import Bar, stacked_bars
from ane_layers.analysis.report.cells import binary_size, decimal_size, figure
from ane_layers.analysis.report.curves import Series, context_curve
from ane_layers.analysis.report.views import (
    MATERIALISED_KEYS,
    TRAFFIC_KEYS,
    bandwidth_name,
    legend,
    materialised_bar,
    traffic_bar,
    unit,
)
from ane_layers.analysis.tables import number

Json = Mapping[str, Any]
FigureRow: TypeAlias = tuple[str, Json, Callable[..., Markup]]

_SPEED = "tokens_per_second"

_SHOWN: Mapping[str, tuple[str, Callable[..., Markup]]] = {
    "traffic.total": ("total of a call, repetition twice", decimal_size),
    "traffic.weights": ("weights read", decimal_size),
    "traffic.kv_read": ("KV cache read", decimal_size),
    "traffic.kv_written": ("KV cache written", decimal_size),
    "traffic.repetition": ("repeated data, once", decimal_size),
    _SPEED: ("predicted", figure),
    "tokens_per_call": ("tokens a call", figure),
    "materialised.read": ("read by all operations", decimal_size),
    "materialised.written": ("written by all operations", decimal_size),
    "copies.count": ("copies", figure),
    "copies.bytes": ("copied", binary_size),
    "tile.count": ("tile operations", figure),
    "tile.bytes": ("written by tile operations", binary_size),
    "operations.compute": ("compute operations", figure),
    "operations.total": ("operations in the file, constants too", figure),
    "highest_rank": ("highest rank", figure),
    "state_writes": ("state writes", figure),
    "weight_bytes": ("weights stored", decimal_size),
}


def comparison_view(comparison: Json) -> dict[str, Any]:
    """All that the template asks for but the title."""
    return {
        "comparison": comparison,
        "is_article": comparison["bandwidth"] == ARTICLE_BANDWIDTH_MB_S,
        "article_bandwidth": ARTICLE_BANDWIDTH_MB_S,
        "bandwidth_name": bandwidth_name(comparison["bandwidth"]),
        "keys": (*TRAFFIC_KEYS, *MATERIALISED_KEYS),
        "pairs": [pair_view(index, pair, comparison) for index, pair in enumerate(comparison["functions"])],
    }


def comparison_title(comparison: Json) -> str:
    """The names of both packages, without their folders unless they are the same."""
    a, b = (str(comparison[side]) for side in ("a", "b"))
    names = [PurePath(path).name or path for path in (a, b)]
    return " and ".join(names if names[0] != names[1] else (a, b))


def pair_view(index: int, pair: Json, comparison: Json) -> dict[str, Any]:
    """A function of A beside one of B."""
    id = f"p{index}"
    figures = pair["figures"]
    tokens = {side: figures["tokens_per_call"][side] for side in ("a", "b")}
    unit_ = unit(1) if set(tokens.values()) == {1} else unit(None)
    name = pair["a"] if pair["a"] == pair["b"] else f"{pair['a']} in A, {pair['b']} in B"
    return {
        "id": id,
        "pair": pair,
        "name": name,
        "unit": unit_,
        "bars": stacked_bars(bars(figures), id=f"{id}-bytes", title=f"{name}: where the bytes of a call go"),
        "figures": figure_rows(pair, unit_, comparison),
        "changed": {type_: row for type_, row in pair["by_type"].items() if row["difference"]},
        "unchanged": {type_: row for type_, row in pair["by_type"].items() if not row["difference"]},
        "interface": [
            (kind.removesuffix("s"), feature, sides)
            for kind, rows in pair["interface"].items()
            for feature, sides in rows.items()
        ],
        "curve": curve(id, name, unit_, pair["contexts"]),
    }


def bars(figures: Json) -> list[Bar]:
    """Both accountings of A and of B, on one scale."""

    def of(side: str, group: str) -> dict[str, Any]:
        return {key.removeprefix(f"{group}."): row[side] for key, row in figures.items() if key.startswith(f"{group}.")}

    sides = ("a", "b")
    found = [traffic_bar(f"{side.upper()}: the article's accounting", of(side, "traffic")) for side in sides]
    found += [materialised_bar(f"{side.upper()}: everything materialised", of(side, "materialised")) for side in sides]
    return found


def figure_rows(pair: Json, unit_: str, comparison: Json) -> list[FigureRow]:
    """Label, figures and form of every row, the chips' predictions behind the first one. Figures that are not known here come last,
    under their key."""
    figures, chips = pair["figures"], comparison["chips"]
    rows: list[FigureRow] = []
    for key in (key for key in _SHOWN if key in figures):
        label, form = _SHOWN[key]
        rows.append((label, figures[key], form))
        if key == _SPEED:
            rows[-1] = (f"{label} {unit_}, {bandwidth_name(comparison['bandwidth'])}", figures[key], form)
            rows += [
                (f"{label} {unit_}, {chip}, {number(chips[chip])} MB/s", row, form)
                for chip, row in pair["chips"].items()
            ]
    return rows + [(key, row, figure) for key, row in figures.items() if key not in _SHOWN]


def curve(id: str, name: str, unit_: str, contexts: Any) -> dict[str, Any]:
    """Both packages over the context lengths that both have."""
    series = []
    for side in ("a", "b"):
        points = ((row["context"], row["tokens_per_second"][side]) for row in contexts)
        known = tuple((context, speed) for context, speed in points if speed is not None)
        series.append(Series(label=side.upper(), points=known))
    title = f"{name}: predicted {unit_} over the context length"
    svg = context_curve(series, id=f"{id}-contexts", title=title, unit=unit_)
    return {"svg": svg, "legend": legend([one.label for one in series])}
