"""The HTML reports: every figure of the JSON is there, pictures have its proportions, nothing is loaded, every string is escaped."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from html_pages import Element, Page, by_id, check_page, parse, table
from lint_checks import operations, program
from mil_programs import mb, quiet

from ane_layers.analysis import analyze, compare
from ane_layers.analysis.lint import rules
from ane_layers.analysis.report import comparison_html, report_html, write_comparison, write_report
from ane_layers.analysis.report.bars import ticks
from ane_layers.analysis.report.cells import source_links
from ane_layers.analysis.report.curves import speed_ticks
from ane_layers.models import Exaone4
from ane_layers.program import Package

Json = dict[str, Any]
CHIPS = {"phone": 60_000, "tablet <b>": 100_000.5}
HOSTILE = "</title></style></svg>\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def packages(exaone4_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Package]:
    folder = tmp_path_factory.mktemp("report")
    result = {}
    for sharing in ("fold", "repeat_kv"):
        model = Exaone4.from_pretrained(exaone4_folder(layers=3), context_length=48, dtype=None, head_sharing=sharing)
        result[sharing] = model.convert(folder / f"{sharing}.mlpackage", prefill=5)
    return result


@pytest.fixture(scope="module")
def analyses(packages: dict[str, Package]) -> dict[str, Json]:
    return {
        "fold": analyze(packages["fold"]),
        "repeat_kv": analyze(packages["repeat_kv"], bandwidth=CHIPS, with_records=True, suppress=["repeated-data"]),
    }


@pytest.fixture(scope="module")
def pages(analyses: dict[str, Json]) -> dict[str, Page]:
    return {name: parse(report_html(analysis, title=name)) for name, analysis in analyses.items()}


@pytest.fixture(scope="module")
def comparison(packages: dict[str, Package]) -> Json:
    return compare(packages["fold"], packages["repeat_kv"], bandwidth=CHIPS)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The analysis of a function whose input is open."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], dim=1).exp()

    path = tmp_path_factory.mktemp("open") / "p.mlpackage"
    with quiet():
        model = ct.convert(
            torch.jit.trace(Module().eval(), torch.zeros(1, 3)),
            inputs=[ct.TensorType("x", (1, ct.RangeDim(1, 8, default=3)), np.float16)],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        model.save(str(path))
    analysis = analyze(Package.open(path), with_records=True)
    assert analysis["functions"]["main"]["traffic"]["total"] is None
    return analysis


# The pages as they are.


def test_pages_are_well_formed_and_load_nothing(pages: dict[str, Page], comparison: Json, unknown: Json) -> None:
    for page in (*pages.values(), parse(comparison_html(comparison)), parse(report_html(unknown, title="open"))):
        check_page(page)
        (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
        assert policy.attributes["content"].startswith("default-src 'none'")
        assert "Nothing here was measured on a device" in page.all("header")[0].text
        assert "static sums" in page.all("header")[0].text


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every figure of a JSON value with the keys to it; dimensions of shapes aside."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, path)
    elif isinstance(value, int | float) and not isinstance(value, bool) and path[-1] != "shape":
        yield path, value


@pytest.mark.parametrize("name", ["fold", "repeat_kv"])
def test_every_figure_and_shape_of_an_analysis_is_on_the_page(
    name: str, analyses: dict[str, Json], pages: dict[str, Page]
) -> None:
    page = pages[name]
    for index, (own, function) in enumerate(analyses[name]["functions"].items()):
        overview = [cells[own].values for cells in table(page, "overview-table").values()]
        shown = {*by_id(page, f"f{index}").values, *(value for values in overview for value in values)}
        checked = 0
        for path, value in numbers(function):
            twice = path[-1] == "repetition" and path[0] != "records"
            assert str(2 * value if twice else value) in shown, path
            checked += 1
        assert checked > 200
        interface = table(page, f"f{index}-interface")
        for kind in ("inputs", "outputs", "states"):
            for feature, type_ in function[kind].items():
                row = interface[feature]
                assert row["kind"].text == kind[:-1]
                assert row["type"].text == f"{type_['dtype']} {type_['shape']}"
        for caption in ("largest", "caches"):
            rows = table(page, f"f{index}-{caption}")
            for row in function[caption]:
                assert rows[row["name"]]["type"].text == f"{row['dtype']} {row['shape']}"


LAYER_COLUMNS = {
    "operations": "operations",
    "weights": "weights",
    "KV read": "kv_read",
    "KV written": "kv_written",
    "total": "total",
    "read by all": "read",
    "written by all": "written",
}


def test_tables_match_the_analysis_cell_by_cell(analyses: dict[str, Json], pages: dict[str, Page]) -> None:
    page = pages["repeat_kv"]
    for index, (name, function) in enumerate(analyses["repeat_kv"]["functions"].items()):
        id = f"f{index}"
        overview = {row: cells[name].values for row, cells in table(page, "overview-table").items()}
        assert overview["total, by the article's accounting"] == [str(function["traffic"]["total"])]
        assert overview["predicted with the article's constant, 55,900 MB/s"] == [str(function["tokens_per_second"])]
        assert overview["predicted, tablet <b>, 100,000 MB/s"] == [str(function["chips"]["tablet <b>"])]
        assert overview["highest rank"] == ["5"]
        traffic = {row: cells["bytes"].text for row, cells in table(page, f"{id}-traffic").items()}
        assert traffic == {
            "weights": f"{function['traffic']['weights']:,}",
            "KV read": f"{function['traffic']['kv_read']:,}",
            "KV written": f"{function['traffic']['kv_written']:,}",
            "repetition, twice": f"{2 * function['traffic']['repetition']:,}",
            "total": f"{function['traffic']['total']:,}",
            "read by all operations": f"{function['materialised']['read']:,}",
            "written by all operations": f"{function['materialised']['written']:,}",
        }
        layers = table(page, f"{id}-layer-table")
        assert list(layers) == [row["layer"] for row in function["layers"]]
        for row in function["layers"]:
            cells = layers[row["layer"]]
            assert {column: cells[column].values for column in LAYER_COLUMNS} == {
                column: [str(row[key])] for column, key in LAYER_COLUMNS.items()
            }
            assert cells["repetition, twice"].values == [str(2 * row["repetition"])]
            assert cells["share"].text == f"{100 * row['total'] / function['traffic']['total']:.1f}%"
        contexts = table(page, f"{id}-context-table")
        for row in function["contexts"]:
            cells = contexts[f"{row['context']:,}{', as built' if row['built'] else ''}"]
            assert cells["total"].values == [str(row["total"])]
            unit = "tok/s" if name == "decode" else "calls/s"
            assert float(*cells[f"{unit}, phone"].values) == pytest.approx(60_000e6 / row["total"])
        repeated = table(page, f"{id}-repetitions")
        assert len(function["repetitions"]) >= 6
        for row in function["repetitions"]:
            cells = repeated[row["name"]]
            assert (cells["operation"].text, cells["layer"].text) == (row["type"], row["layer"])
            assert cells["writes"].values == [str(row["bytes"])]
        records = table(page, f"{id}-records")
        assert list(records) == [row["name"] for row in function["records"]]
        for row in function["records"]:
            assert records[row["name"]]["read"].values == [str(row["read"])]
            assert records[row["name"]]["repetition, once"].values == [str(row["repetition"])]
        kinds = table(page, f"{id}-kinds")
        for kind, row in function["kinds"].items():
            assert kinds[kind]["by type"].text == ", ".join(f"{t} {count:,}" for t, count in row["by_type"].items())


def test_sizes_have_units_and_the_exact_bytes(analyses: dict[str, Json], pages: dict[str, Page]) -> None:
    size = analyses["repeat_kv"]["functions"]["decode"]["traffic"]["total"]
    (tile,) = [d for d in by_id(pages["repeat_kv"], "f0").all("dl", kind="tiles")[0].all("data")][:1]
    assert tile.attributes == {"value": str(size), "title": f"{size:,} bytes"}
    assert tile.text == f"{size / 1000:,.2f} kB"


# Pictures.


def percent(element: Element, name: str) -> float:
    return float(element.attributes[name].removesuffix("%"))


def test_bars_have_the_proportions_of_the_bytes(analyses: dict[str, Json], pages: dict[str, Page]) -> None:
    for name, analysis in analyses.items():
        for index, function in enumerate(analysis["functions"].values()):
            traffic = dict(function["traffic"])
            total = traffic.pop("total")
            traffic["repetition"] *= 2
            scale = max(total, sum(function["materialised"].values()))
            picture = pictures(pages[name])[f"f{index}-bytes"]
            for group in (traffic, function["materialised"]):
                start = 0.0
                for kind, size in group.items():
                    found = picture.all("rect", kind=kind)
                    assert len(found) == (size > 0)
                    for rect in found:
                        assert percent(rect, "x") == pytest.approx(start, abs=2e-3)
                        assert percent(rect, "width") == pytest.approx(100 * size / scale, abs=2e-3)
                        assert rect.text.endswith(f": {size:,} bytes")
                    start += 100 * size / scale
            layers = pictures(pages[name])[f"f{index}-layers"]
            widths = [percent(rect, "width") for rect in layers.all("rect", kind="weights")]
            sizes = [row["weights"] for row in function["layers"] if row["weights"]]
            largest = max(row["total"] for row in function["layers"])
            assert widths == pytest.approx([100 * size / largest for size in sizes], abs=2e-3)


def pictures(page: Element) -> dict[str, Element]:
    return {
        picture.all("title")[0].attributes["id"].removesuffix("-title"): picture
        for picture in page.all("svg", role="img")
    }


def test_curves_lie_where_the_logarithms_say(analyses: dict[str, Json], pages: dict[str, Page]) -> None:
    function = analyses["repeat_kv"]["functions"]["decode"]
    picture = pictures(pages["repeat_kv"])["f0-contexts"]
    levels = [
        (float(line.attributes["y1"]), float(text.text.replace(",", "")))
        for line, text in zip(
            picture.all("line", kind="grid"),
            [t for t in picture.all("text", kind="tick") if percent_free(t)],
            strict=True,
        )
    ]
    (low, bottom), (high, top) = levels[0][::-1], levels[-1][::-1]
    rows = function["contexts"]
    first, last = rows[0]["context"], rows[-1]["context"]
    for style, bandwidth in enumerate((55_900, *CHIPS.values())):
        markers = picture.all("svg", kind=f"s{style}")
        assert len(markers) == len(rows)
        assert len(picture.all("line", kind=f"s{style}")) == len(rows) - 1
        places = [percent(marker, "x") for marker in markers]
        for marker, row in zip(markers, rows, strict=True):
            speed = bandwidth * 1e6 / row["total"]
            expected = bottom + (top - bottom) * math.log(speed / low) / math.log(high / low)
            assert float(marker.attributes["y"]) == pytest.approx(expected, abs=0.01)
            part = math.log(row["context"] / first) / math.log(last / first)
            assert percent(marker, "x") == pytest.approx(places[0] + part * (places[-1] - places[0]), abs=2e-3)
    (built,) = [text for text in picture.all("text") if text.text == "as built"]
    (mine,) = [index for index, row in enumerate(rows) if row["built"]]
    assert percent(built, "x") == pytest.approx(percent(picture.all("svg", kind="s0")[mine], "x"), abs=2e-3)
    legend = [entry.text for entry in by_id(pages["repeat_kv"], "f0").all("ul", kind="legend")[0].all("li")]
    assert legend == [
        "the article's constant, 55,900 MB/s",
        "phone, 60,000 MB/s",
        "tablet <b>, 100,000 MB/s",
    ]


def percent_free(text: Element) -> bool:
    """Whether it stands at the left edge, as the labels of the grid do; the unit stands above them."""
    return text.attributes["x"] == "0" and text.text[0].isdigit()


@pytest.mark.parametrize(
    ("low", "high"), [(67.3, 99.1), (1.54, 176), (24, 13531), (0.002, 9e8), (50, 50), (100, 100.1)]
)
def test_ticks_of_a_curve_enclose_it(low: float, high: float) -> None:
    levels = speed_ticks(low, high)
    assert levels[0] <= low * (1 + 1e-6)
    assert levels[-1] >= high * (1 - 1e-6)
    assert levels == sorted(set(levels))
    assert 2 <= len(levels) <= 13
    assert all(float(f"{level:.0e}") == pytest.approx(level) for level in levels)


@pytest.mark.parametrize("scale", [1, 2, 7, 10, 999, 1_000, 59_999, 60_000, 8_868_464, 128_204_540, 2_298_747_232])
def test_ticks_of_bars_are_few_and_round(scale: int) -> None:
    found = list(ticks(scale))
    assert found[0] == 0
    assert 2 <= len(found) <= 7
    assert scale - found[-1] < found[1]
    assert found == [found[1] * index for index in range(len(found))]
    assert str(found[1]).rstrip("0") in {"1", "2", "5"}


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_differ_in_luminance_and_text_can_be_read(scheme: str, pages: dict[str, Page]) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", pages["fold"].all("style")[0].text)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark))
    for kind in ("text", "muted", "link", "error", "warning", "info"):
        assert contrast(colours[kind], colours["ground"]) >= 4.5, kind
        assert contrast(colours[kind], colours["raised"]) >= 4.5, kind
    parts = ("weights", "kv_read", "kv_written", "repetition", "read", "written")
    for kind in parts:
        assert contrast(colours[f"on-{kind}"], colours[kind]) >= 4.5, kind
    assert contrast(colours["on-repetition"], colours["hatch"]) >= 3
    for group in (
        ("weights", "kv_read", "kv_written"),
        ("repetition", "kv_read"),
        ("repetition", "weights"),
        ("read", "written"),
    ):
        ordered = sorted(group, key=lambda kind: luminance(colours[kind]))
        for one, other in pairwise(ordered):
            assert contrast(colours[one], colours[other]) >= 1.3, (one, other)
    for line in range(6):
        assert contrast(colours[f"s{line}"], colours["ground"]) >= 3, line


# Lint.


def test_findings_are_told_with_reason_remedy_and_source(analyses: dict[str, Json], pages: dict[str, Page]) -> None:
    states = set()
    for name, analysis in analyses.items():
        for index, function in enumerate(analysis["functions"].values()):
            section = by_id(pages[name], f"f{index}")
            found = section.all("article", kind="finding")
            assert len(found) == len(function["lint"])
            for article, finding in zip(found, function["lint"], strict=True):
                rule = rules()[finding["rule"]]
                quiet_ = finding["suppressed"] or finding["expected"] is not None
                states.add((finding["suppressed"], quiet_))
                assert ("quiet" in article.attributes["class"]) == quiet_
                assert any(article in details.all("article") for details in section.all("details")) == quiet_
                words = [finding["rule"], finding["message"], rule.reason, rule.remedy, finding["source"]]
                words += [finding["expected"] or "", finding["chips"], finding["confidence"], finding["severity"]]
                for word in (*words, *finding["operations"]):
                    assert word in article.text
                assert article.values == [str(finding["count"])]
    assert states == {(False, False), (False, True), (True, True)}


def test_a_rule_that_is_not_known_is_told_without_its_reason(analyses: dict[str, Json]) -> None:
    analysis = copy.deepcopy(analyses["fold"])
    finding = analysis["functions"]["decode"]["lint"][0]
    finding |= {"rule": "of-another-version", "expected": None}
    page = parse(report_html(analysis, title="x"))
    (article,) = [a for a in page.all("article") if "of-another-version" in a.text]
    assert [term.text for term in article.all("dt")] == ["Source", "Confidence", "Chips", "Worst cases"]


def test_threads_in_sources_are_links() -> None:
    links = parse(f"<!DOCTYPE html>{source_links('x <b>; coremltools issue 1807 (y); coremltools pull request 2593')}")
    assert links.text == "x <b>; coremltools issue 1807 (y); coremltools pull request 2593"
    assert [link.attributes["href"] for link in links.all("a")] == [
        "https://github.com/apple/coremltools/issues/1807",
        "https://github.com/apple/coremltools/pull/2593",
    ]
    assert [link.text for link in links.all("a")] == ["coremltools issue 1807", "coremltools pull request 2593"]


# Strings from outside.

NAMED = {"functions", "by_type", "inputs", "outputs", "states", "chips", "kinds"}


def hostile(value: Any, key: str = "") -> Any:
    """The same with something nasty in every string, and in every key that comes from a package or a user."""
    if isinstance(value, dict):
        return {(f"{name}{HOSTILE}" if key in NAMED else name): hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


def test_every_string_is_escaped(analyses: dict[str, Json], comparison: Json, unknown: Json) -> None:
    for analysis in (analyses["repeat_kv"], unknown):
        nasty = hostile(analysis)
        page = parse(report_html(nasty, title=HOSTILE))
        check_page(page)
        assert page.all("title")[0].text == page.all("h1")[0].text == HOSTILE
        plain = parse(report_html(analysis, title="x"))
        text = page.text
        assert text.count(HOSTILE) > 20
        # Nothing but text has come in.
        assert {element.tag for element in page.walk()} == {element.tag for element in plain.walk()}
        for name in strings(nasty):
            assert " ".join(name.split()) in text, name
    nasty = hostile(comparison)
    page = parse(comparison_html(nasty))
    check_page(page)
    assert page.text.count(HOSTILE) > 20


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_names_in_a_foreign_package_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert('x')</script>"

    def rename(model: Any) -> None:
        for operation in operations(model):
            if operation.type == "tile":
                operation.attributes["name"].immediateValue.tensor.strings.values[0] = name

    make = program(lambda v: [mb.exp(x=mb.tile(x=v["x"], reps=(1, 3)))], change=rename, x=(2, 4))
    package = make(tmp_path)
    path = tmp_path / "report.html"
    write_report(analyze(package), path, title="foreign")
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    page = parse(text)
    check_page(page)
    assert table(page, "f0-repetitions")[name]["writes"].values == [str(2 * 12 * 2)]


def test_a_name_that_is_no_text_is_written_as_an_escape(comparison: Json, tmp_path: Path) -> None:
    write_comparison(comparison | {"a": "bad\udcff.mlpackage"}, tmp_path / "c.html")
    assert "bad\\udcff.mlpackage" in parse((tmp_path / "c.html").read_text(encoding="utf-8")).all("h1")[0].text


# What is not known, and what is missing.


def test_open_dimensions_give_question_marks(unknown: Json) -> None:
    page = parse(report_html(unknown, title="open"))
    function = unknown["functions"]["main"]
    assert table(page, "f0-traffic")["total"]["bytes"].text == "?"
    assert table(page, "f0-traffic")["repetition, twice"]["size"].text == "?"
    assert table(page, "f0-interface")["x"]["type"].text == "fp16 [1, ?]"
    overview = table(page, "overview-table")
    assert overview["predicted with the article's constant, 55,900 MB/s"]["main"].text == "? calls/s"
    assert overview["tokens"]["main"].text == "?"
    assert "f0-contexts" not in pictures(page)
    assert pictures(page)["f0-bytes"].all("text", kind="total")[0].text == "?"
    notes = [entry.text for entry in by_id(page, "f0").all("li")]
    for line in (*function["unknown"], *function["notes"]):
        assert line in notes


def test_what_is_no_result_is_refused(analyses: dict[str, Json], comparison: Json, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes what analyze returns"):
        write_report(comparison | {"bandwidth": 1}, tmp_path / "x.html", title="x")
    with pytest.raises(ValueError, match="takes what compare returns"):
        write_comparison(analyses["fold"], tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []


# Files.


def test_the_same_analysis_gives_the_same_file(analyses: dict[str, Json], comparison: Json, tmp_path: Path) -> None:
    for number in range(2):
        write_report(json.loads(json.dumps(analyses["repeat_kv"])), tmp_path / f"r{number}.html", title="t")
        write_comparison(json.loads(json.dumps(comparison)), str(tmp_path / f"c{number}.html"))
    for name in ("r", "c"):
        one, other = ((tmp_path / f"{name}{number}.html").read_bytes() for number in range(2))
        assert one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c0.html", "c1.html", "r0.html", "r1.html"]


def test_a_failure_leaves_the_file_that_was_there(analyses: dict[str, Json], tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    write_report(analyses["fold"], path, title="before")
    before = path.read_bytes()
    broken = copy.deepcopy(analyses["fold"])
    del broken["functions"]["prefill"]["copies"]["largest"]
    with pytest.raises(ValueError, match=r"not all that this version's analyze returns: .*largest"):
        write_report(broken, path, title="after")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.html"]


# Two packages.


def test_a_comparison_has_every_figure_of_both(comparison: Json) -> None:
    page = parse(comparison_html(comparison))
    assert page.all("h1")[0].text == "fold.mlpackage and repeat_kv.mlpackage"
    assert parse(comparison_html(comparison, title="mine")).all("h1")[0].text == "mine"
    for index, pair in enumerate(comparison["functions"]):
        shown = by_id(page, f"p{index}").values
        for path, value in numbers({key: item for key, item in pair.items() if key != "interface"}):
            assert str(value) in shown, path
        figures = table(page, f"p{index}-figures")
        rows = [pair["figures"]["tile.count"], pair["figures"]["traffic.total"], pair["chips"]["phone"]]
        unit = "tok/s" if pair["a"] == "decode" else "calls/s"
        labels = ["tile operations", "total of a call, repetition twice", f"predicted {unit}, phone, 60,000 MB/s"]
        for label, row in zip(labels, rows, strict=True):
            cells = figures[label]
            assert [cells[c].values for c in ("A", "B", "difference")] == [
                [str(row[k])] for k in ("a", "b", "difference")
            ]
            assert cells["B ÷ A"].values == ([] if row["ratio"] is None else [str(row["ratio"])])
        assert figures["tile operations"]["difference"].text == "+6"
        assert set(table(page, f"p{index}-changed")) == {t for t, row in pair["by_type"].items() if row["difference"]}
        assert {"tile", "expand_dims"} <= set(table(page, f"p{index}-changed"))
        contexts = table(page, f"p{index}-context-table")
        for row in pair["contexts"]:
            cells = contexts[f"{row['context']:,}"]
            assert cells[f"{unit} of B"].values == [str(row["tokens_per_second"]["b"])]
            assert cells["bytes of A"].values == [str(row["total"]["a"])]
        picture = pictures(page)[f"p{index}-bytes"]
        first, second = picture.all("rect", kind="weights")
        assert first.attributes["width"] == second.attributes["width"]
        (repeated,) = (
            picture.all("rect", kind="repetition")
            if pair["a"] == "decode"
            else picture.all("rect", kind="repetition")[1:]
        )
        assert repeated.text.endswith(f": {2 * pair['figures']['traffic.repetition']['b']:,} bytes")


def test_a_comparison_tells_what_one_alone_has(packages: dict[str, Package], tmp_path: Path) -> None:
    make = program(lambda v: [mb.exp(x=v["x"])], x=(2, 4))
    result = compare(make(tmp_path), packages["fold"])
    page = parse(comparison_html(result))
    check_page(page)
    interface = table(page, "p0-interface")
    assert (interface["x"]["A"].text, interface["x"]["B"].text) == ("fp16 [2, 4]", "none")
    assert (interface["keyCache"]["kind"].text, interface["keyCache"]["A"].text) == ("state", "none")
    assert "main in A, decode in B" in page.all("h2")[0].text
    assert "Functions of B alone, not compared: prefill." in page.text
    assert "p0-contexts" not in pictures(page)


def test_a_bandwidth_of_the_users_own_is_not_called_the_articles(packages: dict[str, Package]) -> None:
    header = parse(report_html(analyze(packages["fold"], bandwidth=61_000), title="x")).all("header")[0].text
    assert "The bandwidth is the given 61,000 MB/s, in place of the 55,900 MB/s that the article" in header
    header = parse(report_html(analyze(packages["fold"]), title="x")).all("header")[0].text
    assert "The bandwidth is the article's constant, 55,900 MB/s, which the article" in header
