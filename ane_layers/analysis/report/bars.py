"""Stacked bars as inline SVG. Widths are in percent and text in pixels, so one picture suits a desk and a phone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ane_layers.analysis.tables import UNKNOWN, decimal

NARROW = 340
"""Width in pixels at which labels must still fit."""

_LETTER = 6.8
_BAR, _PITCH, _TOP = 26, 60, 20
_ROW, _ROW_BAR = 20, 14

_OPEN = Markup(
    '<svg class="{kind}" width="100%" height="{height}" role="img" aria-labelledby="{id}-title {id}-description">\n'
    '<title id="{id}-title">{title}</title><desc id="{id}-description">{description}</desc>\n'
)
_CLOSE = Markup("</svg>\n")
_RECT = Markup(
    '<rect class="part {kind}" x="{x:.3f}%" y="{y}" width="{width:.3f}%" height="{height}"><title>{title}</title></rect>\n'
)
_TEXT = Markup('<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>\n')
_LINE = Markup('<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>\n')


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a bar. `kind` is the CSS class that gives its colour; None for bytes that are not known."""

    kind: str
    label: str
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Parts one behind the other; `total` is None if a part is."""

    label: str
    parts: tuple[Part, ...]
    total: int | None

    @property
    def known(self) -> int:
        """Bytes of the parts that are known."""
        return sum(part.bytes or 0 for part in self.parts)


def opening(*, kind: str, height: int, id: str, title: str, description: str) -> Markup:
    """The start of a picture that has a name and a description. `id` is the page's own, no string of a package."""
    return _OPEN.format(kind=kind, height=height, id=id, title=title, description=description)


def closing() -> Markup:
    return _CLOSE


def text(kind: str, x: str, y: float, content: str, anchor: str = "start") -> Markup:
    return _TEXT.format(kind=kind, x=x, y=y, anchor=anchor, text=content)


def line(kind: str, start: tuple[str, float], end: tuple[str, float]) -> Markup:
    return _LINE.format(kind=kind, x1=start[0], y1=start[1], x2=end[0], y2=end[1])


def stacked_bars(bars: Sequence[Bar], *, id: str, title: str) -> Markup:
    """A few bars on one scale in bytes, each under its label and total."""
    scale = max((bar.known for bar in bars), default=0)
    height = _PITCH * len(bars) + _TOP
    pieces = [opening(kind="bars", height=height, id=id, title=title, description=_described(bars))]
    for number, bar in enumerate(bars):
        y = _PITCH * number
        pieces.append(text("label", "0", y + 16, bar.label))
        pieces.append(text("total", "100%", y + 16, decimal(bar.total), "end"))
        pieces.extend(_parts(bar, scale, y + 24, _BAR, written=True))
    if scale:
        axis = height - _TOP
        pieces.append(line("axis", ("0", axis), ("100%", axis)))
        for tick in ticks(scale):
            x = 100 * tick / scale
            anchor = "start" if tick == 0 else "end" if x > 90 else "middle"
            pieces.append(line("axis", (f"{x:.3f}%", axis), (f"{x:.3f}%", axis + 5)))
            pieces.append(text("tick", f"{x:.3f}%", axis + 17, tick_label(tick), anchor))
    return Markup("").join([*pieces, closing()])


def row_bars(bars: Sequence[Bar], *, id: str, title: str) -> Markup:
    """A bar a row on one scale, with labels and totals in columns of their own width beside it."""
    scale = max((bar.known for bar in bars), default=0)
    height = _ROW * len(bars)
    labels, totals = [bar.label for bar in bars], [decimal(bar.total) for bar in bars]
    pieces = [_column(labels, height, "start")]
    pieces.append(opening(kind="bars", height=height, id=id, title=title, description=_described(bars)))
    for number, bar in enumerate(bars):
        pieces.extend(_parts(bar, scale, _ROW * number + 3, _ROW_BAR))
    pieces += [closing(), _column(totals, height, "end")]
    return Markup('<div class="rows">\n{}</div>\n').format(Markup("").join(pieces))


def ticks(scale: float) -> Iterator[int]:
    """Three to six round numbers from 0 up to the scale; fewer below 3."""
    step = 10 ** math.floor(math.log10(scale))
    while scale / step < 2 and step > 1:
        step //= 10
    for factor in (1, 2, 5):
        if scale / (step * factor) < 6:
            step *= factor
            break
    else:
        step *= 10
    yield from range(0, math.floor(scale) + 1, step)


def tick_label(size: int) -> str:
    """Round bytes without decimals that say nothing."""
    return "0" if size == 0 else decimal(size).replace(".00", "")


def _parts(bar: Bar, scale: int, y: int, height: int, *, written: bool = False) -> Iterator[Markup]:
    x = 0.0
    for part in bar.parts:
        if not part.bytes or not scale:
            continue
        width = 100 * part.bytes / scale
        told = f"{part.label}: {part.bytes:,} bytes"
        yield _RECT.format(kind=part.kind, x=x, y=y, width=width, height=height, title=told)
        size = decimal(part.bytes)
        inside = next((t for t in (f"{part.label} {size}", size) if len(t) * _LETTER + 12 < width / 100 * NARROW), "")
        if written and inside:
            yield text(f"inside on-{part.kind}", f"{x + width / 2:.3f}%", y + height / 2 + 4.5, inside, "middle")
        x += width


def _column(texts: Sequence[str], height: int, anchor: str) -> Markup:
    """Text beside the rows, which the description of the bars has in words."""
    width = math.ceil(max(map(len, texts), default=0) * _LETTER) + 10
    x = "0" if anchor == "start" else str(width)
    lines = [text("label", x, _ROW * number + 14.5, content, anchor) for number, content in enumerate(texts)]
    column = Markup('<svg class="column" width="{}" height="{}" aria-hidden="true">\n{}</svg>\n')
    return column.format(width, height, Markup("").join(lines))


def _described(bars: Sequence[Bar]) -> str:
    told = []
    for bar in bars:
        parts = ", ".join(f"{part.label} {decimal(part.bytes)}" for part in bar.parts if part.bytes != 0)
        total = UNKNOWN if bar.total is None else decimal(bar.total)
        told.append(f"{bar.label}: {total}{f' ({parts})' if parts else ''}")
    return "; ".join(told) + "."
