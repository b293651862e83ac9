"""Commands that tell what a package costs, from its file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ane_layers import console
from ane_layers.cli_options import Json, LevelOption

PackageArgument = Annotated[Path, typer.Argument(help="An .mlpackage, ours or not.")]
PackageOrChunks = Annotated[Path, typer.Argument(help="An .mlpackage, ours or not; or a folder of chunks.")]
BandwidthOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bandwidth",
        help="MB/s, 55900 by default (the article's constant); or CHIP=MB/s, repeatable, one for each chip.",
    ),
]


def analyze(
    package: PackageOrChunks,
    function: Annotated[str | None, typer.Option(help="Only this function.")] = None,
    bandwidth: BandwidthOption = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print operations, copies, largest results and layers too.")
    ] = False,
    records: Annotated[
        bool, typer.Option("--records", help="With --json or --html: list every operation's reads and writes.")
    ] = False,
    suppress: Annotated[list[str] | None, typer.Option(help="Rule of the lint to leave out; repeatable.")] = None,
    fail_on: Annotated[
        LevelOption | None, typer.Option(help="Exit with status 1 if the lint finds something so severe, unexplained.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report, one file that needs nothing else.")] = None,
    as_json: Json = False,
) -> None:
    """Tell what a call of each function moves, what that predicts, and what a Neural Engine may not like."""
    from ane_layers.analysis import analyze as analyze_package
    from ane_layers.analysis import analyze_chunks
    from ane_layers.analysis.printing import print_analysis
    from ane_layers.chunks import is_chunked, open_packages
    from ane_layers.program import Package

    if records and not as_json and html is None:
        raise ValueError("--records needs --json or --html")
    check_page(html)
    rates = bandwidth_of(bandwidth)
    options: dict[str, Any] = {"with_records": records, "suppress": suppress or ()}
    if is_chunked(package):
        result = analyze_chunks(open_packages(package), function, rates, **options)
    else:
        result = analyze_package(Package.open(package), function, rates, **options)
    if html is not None:
        from ane_layers.analysis.report import write_report

        write_report(result, html, title=package.resolve().name)
        console.err.print(f"report written to {html}", markup=False)
    if as_json:
        console.print_json(result)
    else:
        print_analysis(result, console.tables(), details=details)
    if fail_on is not None and (rules := failing(result, fail_on.value)):
        console.fail(f"{package}: the lint finds {', '.join(rules)}")


def compare(
    first: PackageArgument,
    second: Annotated[Path, typer.Argument(help="Another one.")],
    bandwidth: BandwidthOption = None,
    html: Annotated[Path | None, typer.Option(help="Write a report, one file that needs nothing else.")] = None,
    as_json: Json = False,
) -> None:
    """Two packages side by side: operations, bytes, prediction."""
    from ane_layers.analysis import compare as compare_packages
    from ane_layers.analysis.printing_comparison import print_comparison
    from ane_layers.program import Package

    check_page(html)
    result = compare_packages(Package.open(first), Package.open(second), bandwidth=bandwidth_of(bandwidth))
    if html is not None:
        from ane_layers.analysis.report import write_comparison

        write_comparison(result, html)
        console.err.print(f"report written to {html}", markup=False)
    if as_json:
        console.print_json(result)
    else:
        print_comparison(result, console.tables())


def check_page(path: Path | None) -> None:
    """Whether a report can be written there, before anything is analysed. Raises `ValueError`."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "is a folder; name a file" if path.is_dir() else f"cannot be written: {path.parent} is no folder"
        raise ValueError(f"{path}: {what}")


def failing(result: dict[str, Any], level: str) -> list[str]:
    """Rules with a finding at least so severe that is neither expected nor suppressed, with the function's name."""
    from ane_layers.analysis.lint.finding import SEVERITIES

    severe = SEVERITIES[SEVERITIES.index(level) :]
    return [
        f"{finding['rule']} in {name}"
        for name, function in result["functions"].items()
        for finding in function["lint"]
        if finding["severity"] in severe and finding["expected"] is None and not finding["suppressed"]
    ]


def bandwidth_of(texts: list[str] | None) -> float | dict[str, float]:
    """A number, or several by chip. Raises `ValueError` for anything else."""
    from ane_layers.analysis import ARTICLE_BANDWIDTH_MB_S

    if not texts:
        return ARTICLE_BANDWIDTH_MB_S
    chips: dict[str, float] = {}
    for text in texts:
        chip, separator, rate = text.rpartition("=")
        try:
            value = float(rate)
        except ValueError:
            raise ValueError(f"--bandwidth is {text!r}, expected MB/s or CHIP=MB/s") from None
        if not separator:
            if len(texts) > 1:
                raise ValueError(f"--bandwidth {text!r}: with several, each needs a name, as in A18=60000")
            return value
        chips[chip] = value
    return chips


COMMANDS = (analyze, compare)
