"""Plain tables and figures for printing: sizes with their unit, speeds, ranges of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

UNKNOWN = "?"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], text: Iterable[str] = ()) -> Table:
    """A table without lines; the first column and those named in `text` are text, the others figures."""
    result = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        result.add_column(escape(column), justify="left" if number == 0 or column in text else "right")
    for row in rows:
        result.add_row(*(escape(cell) for cell in row))
    return result


def decimal(size: float | None) -> str:
    """Bytes in B, kB or MB of powers of 1000, as bandwidths are given."""
    return _size(size, 1000, ("B", "kB", "MB"))


def binary(size: float | None) -> str:
    """Bytes in B, KiB, MiB or GiB of powers of 1024, which shapes give even numbers of."""
    return _size(size, 1024, ("B", "KiB", "MiB", "GiB"))


def times(size: int | None, factor: int) -> int | None:
    """The product; None stays None."""
    return None if size is None else factor * size


def number(value: float | None) -> str:
    """A count or a speed: whole numbers whole, others to three or more digits."""
    if value is None:
        return UNKNOWN
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1 else f"{value:,.2f}"


def percent(part: float | None, whole: float | None) -> str:
    """The share of a whole; a question mark where one is not known."""
    return UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


def span(names: Sequence[str]) -> str:
    """First and last of several names."""
    return names[0] if names[0] == names[-1] else f"{names[0]} … {names[-1]}"


def _size(size: float | None, step: int, units: Sequence[str]) -> str:
    if size is None:
        return UNKNOWN
    power = 0
    while power < len(units) - 1 and abs(size) >= step ** (power + 1):
        power += 1
    return f"{size:,.0f} {units[0]}" if power == 0 else f"{size / step**power:,.2f} {units[power]}"
