"""Fills in the templates and writes the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

from ane_layers import __version__
from ane_layers.analysis.report import cells
from ane_layers.analysis.report.comparison_views import comparison_title, comparison_view
from ane_layers.analysis.report.views import report_view
from ane_layers.analysis.tables import number, times
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
    if not isinstance(analysis.get("functions"), Mapping):
        raise ValueError("a report takes what analyze returns, with functions by name")
    with _complete("analyze"):
        return _rendered("report.html.jinja", report_view(analysis) | {"title": title})


def comparison_html(comparison: Mapping[str, Any], *, title: str | None = None) -> str:
    """The page of `write_comparison`."""
    if not {"a", "b"} <= set(comparison):
        raise ValueError("a report of two packages takes what compare returns, with a and b")
    with _complete("compare"):
        name = comparison_title(comparison) if title is None else title
        return _rendered("comparison.html.jinja", comparison_view(comparison) | {"title": name})


@contextmanager
def _complete(function: str) -> Iterator[None]:
    """Says what a result lacks that another version wrote, or that was cut short."""
    try:
        yield
    except (KeyError, UndefinedError) as error:
        raise ValueError(f"not all that this version's {function} returns: {error}") from error


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
        "number": number,
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
