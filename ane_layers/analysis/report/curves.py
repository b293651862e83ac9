"""Predicted speed over the context length as inline SVG, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from ane_layers.analysis.report.bars import closing, line, opening, text
from ane_layers.analysis.tables import number

STYLES = 6
"""Kinds of line that the style sheet knows; more series use them again."""

_TOP, _FLOOR, _BOTTOM, _HEIGHT = 42, 244, 264, 312
_LEFT, _RIGHT = 17.0, 94.0
_MOST_TICKS, _MOST_DENSE_TICKS = 9, 7
_NEAR = 8.5

_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-5L5 0L0 5L-5 0z",
    "M0-5L4.5 4h-9z",
    "M0 5L4.5-4h-9z",
    "M-4-4L4 4M4-4L-4 4",
)
_MARKER = Markup('<svg class="marker s{}" x="{:.3f}%" y="{:.2f}" overflow="visible"><path d="{}"/></svg>\n')
_SWATCH = Markup(
    '<svg class="swatch" width="34" height="12" aria-hidden="true"><line class="curve s{0}" x1="0" y1="6" x2="34" y2="6"/>'
    '<svg class="marker s{0}" x="17" y="6" overflow="visible"><path d="{1}"/></svg></svg>'
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve: `points` are pairs of context length and speed, in rising order."""

    label: str
    points: tuple[tuple[int, float], ...]


def swatch(style: int) -> Markup:
    """A piece of the line of a series, for the legend."""
    return _SWATCH.format(style % STYLES, _SHAPES[style % STYLES])


def context_curve(series: Sequence[Series], *, id: str, title: str, unit: str, built: Collection[int] = ()) -> Markup:
    """One line a series; empty if there is nothing to draw.

    Args:
        series: the first two are labelled with their figures if there are no more.
        id: of the picture, the page's own.
        title: its name.
        unit: of the speeds.
        built: context lengths to mark as the package's own.
    """
    contexts = sorted({context for one in series for context, _ in one.points})
    speeds = [speed for one in series for _, speed in one.points if speed > 0]
    if not contexts or not speeds:
        return Markup("")
    levels = speed_ticks(min(speeds), max(speeds))
    axes = _Axes(contexts[0], contexts[-1], levels[0], levels[-1])
    pieces = [opening(kind="curves", height=_HEIGHT, id=id, title=title, description=_described(series, unit))]
    pieces.append(text("tick", "0", 12, f"{unit}, logarithmic"))
    for level in levels:
        y = axes.y(level)
        pieces.append(line("grid", ("11%", y), ("100%", y)))
        pieces.append(text("tick", "0", y + 4, number(level)))
    pieces.extend(_context_ticks(contexts, built, axes))
    for style, one in enumerate(series):
        pieces.extend(_drawn(one, style % STYLES, axes))
    if len(series) <= 2:
        pieces.extend(_labels(series, axes))
    pieces.append(text("tick", "54%", _HEIGHT - 4, "context length in slots, logarithmic (K = 1,024)", "middle"))
    return Markup("").join([*pieces, closing()])


def short(speed: float) -> str:
    """A speed as it fits at a point of the curve; the table beside it has all digits."""
    return f"{speed:,.0f}" if speed >= 100 else number(speed)


def speed_ticks(low: float, high: float) -> list[float]:
    """Round numbers from below `low` to above `high`: all with one digit, or if those are too many 1, 2 and 5 times a power of ten, or
    powers of ten alone."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors, most in ((tuple(range(1, 10)), _MOST_DENSE_TICKS), ((1, 2, 5), _MOST_TICKS), ((1,), _MOST_TICKS)):
        candidates = [factor * 10.0**power for power in powers for factor in factors]
        first = max(index for index, level in enumerate(candidates) if level <= low * (1 + 1e-9))
        last = next((i for i, level in enumerate(candidates) if level >= high * (1 - 1e-9)), len(candidates) - 1)
        found = candidates[first : max(last, first + 1) + 1]
        if len(found) <= most:
            break
    return found


@dataclass(frozen=True)
class _Axes:
    first: int
    last: int
    low: float
    high: float

    def x(self, context: int) -> float:
        """Percent of the width."""
        if self.first == self.last:
            return (_LEFT + _RIGHT) / 2
        return _LEFT + (_RIGHT - _LEFT) * math.log(context / self.first) / math.log(self.last / self.first)

    def y(self, speed: float) -> float:
        """Pixels from the top."""
        return _FLOOR - (_FLOOR - _TOP) * math.log(speed / self.low) / math.log(self.high / self.low)


def _context_ticks(contexts: Sequence[int], built: Collection[int], axes: _Axes) -> Iterator[Markup]:
    marked = [axes.x(context) for context in contexts if context in built]
    previous = -_NEAR
    for context in contexts:
        x = axes.x(context)
        place = f"{x:.3f}%"
        if context in built:
            yield line("built", (place, 32), (place, _BOTTOM))
            yield text("tick", place, 27, "as built", "middle")
        elif x - previous < _NEAR or any(abs(x - other) < _NEAR for other in marked):
            continue
        yield line("axis", (place, _BOTTOM), (place, _BOTTOM + 5))
        label = f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
        yield text("tick", place, _BOTTOM + 18, label, "middle")
        previous = x


def _drawn(series: Series, style: int, axes: _Axes) -> Iterator[Markup]:
    places = [(axes.x(context), axes.y(speed)) for context, speed in series.points if speed > 0]
    for (x, y), (next_x, next_y) in pairwise(places):
        yield line(f"curve s{style}", (f"{x:.3f}%", round(y, 2)), (f"{next_x:.3f}%", round(next_y, 2)))
    for x, y in places:
        yield _MARKER.format(style, x, y, _SHAPES[style])


def _labels(series: Sequence[Series], axes: _Axes) -> Iterator[Markup]:
    """Figures of the faster series above its points, of the slower one below."""
    for index, one in enumerate(series):
        others = dict(series[1 - index].points) if len(series) == 2 else {}
        previous = -_NEAR
        for context, speed in one.points:
            x = axes.x(context)
            other = others.get(context, 0)
            same = index == 1 and short(speed) == short(other)
            if speed <= 0 or same or x - previous < _NEAR:
                continue
            above = speed >= other
            yield text("value", f"{x:.3f}%", round(axes.y(speed) + (-9 if above else 18), 2), short(speed), "middle")
            previous = x


def _described(series: Sequence[Series], unit: str) -> str:
    told = [
        f"{one.label}: " + ", ".join(f"{number(speed)} {unit} at {context:,}" for context, speed in one.points)
        for one in series
    ]
    return "; ".join(told) + "."
