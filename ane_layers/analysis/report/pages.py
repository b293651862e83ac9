"""Fills in the templates and writes the files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ane_layers import __version__
from ane_layers.analysis.report import cells
from ane_layers.analysis.report.comparison_views import comparison_title, comparison_view
from ane_layers.analysis.report.views import report_view
from ane_layers.analysis.tables import times
from ane_layers.writing import write


def write_report(analysis: Mapping[str, Any], path: str | Path, *, title: str) -> None:
    """Writes what `analyze` tells about one package as one HTML file, which loads nothing and runs no script.

    Args:
        analysis: of `analyze`, or the JSON of it.
        path: of the file; it appears when it is complete.
        title: of the page: the package's name as a rule.

    Raises:
        ValueError: what is given is no result of `analyze`.
        OSError: the folder cannot be written to.
    """
    _write(report_html(analysis, title=title), path)


def write_comparison(comparison: Mapping[str, Any], path: str | Path, *, title: str | None = None) -> None:
    """The same for what `compare` tells about two packages, whose names are the title by default.

    Raises:
        ValueError: what is given is no result of `compare`.
        OSError: the folder cannot be written to.
    """
    _write(comparison_html(comparison, title=title), path)


def report_html(analysis: Mapping[str, Any], *, title: str) -> str:
    """The page of `write_report`: the same text for the same analysis."""
    return _rendered("report.html.jinja", report_view(analysis) | {"title": title})


def comparison_html(comparison: Mapping[str, Any], *, title: str | None = None) -> str:
    """The page of `write_comparison`."""
    view = comparison_view(comparison)
    return _rendered(
        "comparison.html.jinja", view | {"title": comparison_title(comparison) if title is None else title}
    )


def _rendered(template: str, view: Mapping[str, Any]) -> str:
    return _environment().get_template(template).render(view, version=__version__)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        # Names of functions, values and chips come from outside.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "decimal": cells.decimal_size,
        "binary": cells.binary_size,
        "exact": cells.exact_size,
        "figure": cells.figure,
        "share": cells.share,
        "ratio": cells.ratio,
        "source_links": cells.source_links,
        "twice": lambda size: times(size, 2),
    }
    environment.globals["feature"] = cells.feature
    return environment


def _write(page: str, path: str | Path) -> None:
    # A path on disk need not be text: what is none is written as an escape.
    content = page.encode("utf-8", "backslashreplace")
    write(Path(path), lambda stream: stream.write(content))
