"""Figures and strings as HTML. Every figure carries its exact value; every string is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from markupsafe import Markup

from ane_layers.analysis.tables import UNKNOWN, binary, decimal, number

MINUS = "\N{MINUS SIGN}"

_REPOSITORIES = {
    "Anemll": "Anemll/Anemll",
    "ExecuTorch": "pytorch/executorch",
    "coremltools": "apple/coremltools",
    "stablehlo-coreml": "kasper0406/stablehlo-coreml",
}
_THREAD = re.compile(rf"({'|'.join(map(re.escape, _REPOSITORIES))}) (issue|pull request) (\d+)")

_DATA = Markup('<data value="{}">{}</data>')
_SIZE = Markup('<data value="{}" title="{} bytes">{}</data>')
_NOT_KNOWN = Markup('<span class="unknown" title="not known: a dimension is open">{}</span>').format(UNKNOWN)
_LINK = Markup('<a href="https://github.com/{}/{}/{}" rel="noreferrer">{}</a>')


def decimal_size(size: float | None, *, signed: bool = False) -> Markup:
    """Bytes with a unit of powers of 1000, the exact number in `value` and `title`."""
    return _size(size, decimal, signed)


def binary_size(size: float | None, *, signed: bool = False) -> Markup:
    """The same with powers of 1024."""
    return _size(size, binary, signed)


def exact_size(size: int | None) -> Markup:
    """Bytes in full."""
    return _NOT_KNOWN if size is None else _DATA.format(size, f"{size:,}")


def figure(value: float | None, *, signed: bool = False) -> Markup:
    """A count or a speed, the exact number in `value`."""
    return _NOT_KNOWN if value is None else _DATA.format(value, _sign(number(value), value, signed))


def share(part: float | None, whole: float | None) -> Markup:
    """The share of a whole in percent."""
    return _NOT_KNOWN if part is None or not whole else Markup("{}").format(f"{part / whole:.1%}")


def ratio(value: float | None) -> Markup:
    """B ÷ A to three decimals; a dash where there is none."""
    return Markup('<span class="none">\N{EN DASH}</span>') if value is None else _DATA.format(value, f"{value:,.3f}")


def feature(dtype: str, shape: Sequence[int | None]) -> str:
    """Type and shape as text; a question mark stands for an open dimension."""
    return f"{dtype} [{', '.join(UNKNOWN if size is None else str(size) for size in shape)}]"


def source_links(source: str) -> Markup:
    """The source of a rule, with its issues and pull requests as links to where they are discussed."""
    parts, end = [], 0
    for match in _THREAD.finditer(source):
        project, kind, thread = match.groups()
        folder = "issues" if kind == "issue" else "pull"
        parts.append(Markup("{}").format(source[end : match.start()]))
        parts.append(_LINK.format(_REPOSITORIES[project], folder, thread, match.group()))
        end = match.end()
    return Markup("").join([*parts, Markup("{}").format(source[end:])])


def _size(size: float | None, form: Callable[[float | None], str], signed: bool) -> Markup:
    if size is None:
        return _NOT_KNOWN
    return _SIZE.format(size, f"{size:,}".replace("-", MINUS), _sign(form(size), size, signed))


def _sign(text: str, value: float, signed: bool) -> str:
    return f"{'+' if signed and value > 0 else ''}{text.replace('-', MINUS)}"
