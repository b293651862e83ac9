"""The lint as a whole: its rules, what is left out or expected, and what it says about the project's own packages."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_lint_numerics
import test_lint_operations
import test_lint_shapes
import test_lint_states
import test_lint_weights
from coremltools.converters import mil
from lint_checks import program

from ane_layers.analysis.lint import Finding, fails, lint, rules, rules_by_subject
from ane_layers.analysis.lint.page import page
from ane_layers.models import Exaone4
from ane_layers.program import Package

mb = mil.Builder

TABLES = (test_lint_numerics, test_lint_operations, test_lint_shapes, test_lint_states, test_lint_weights)
PAGE = Path(__file__).parents[1] / "docs/lint.md"


def tiled(values: Any) -> list[Any]:
    """An error, two warnings and a remark: a value that is an output and goes to a state, a tile of five axes, and a slice."""
    written = mb.tile(x=values["x"], reps=[1, 1, 3, 1, 1])
    mb.coreml_update_state(state=values["cache"], value=written)
    return [written, mb.slice_by_index(x=values["x"], begin=[0, 0, 0, 0, 3], end=[1, 2, 1, 64, 32])]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return program(tiled, {"cache": (1, 2, 3, 64, 32)}, x=(1, 2, 1, 64, 32))(tmp_path_factory.mktemp("lint"))


@pytest.fixture(scope="module")
def own(exaone4_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Package]:
    """`own(head_sharing)` is a converted model of a head_dim and a context that no rule about states minds."""
    made: dict[str, Package] = {}

    def convert(head_sharing: Any) -> Package:
        if head_sharing not in made:
            folder = exaone4_folder(head_dim=32)
            model = Exaone4.from_pretrained(folder, context_length=64, head_sharing=head_sharing)
            made[head_sharing] = model.convert(tmp_path_factory.mktemp("own") / "m.mlpackage", prefill=4)
        return made[head_sharing]

    return convert


def by_rule(package: Package, function: str | None = None, **options: Any) -> dict[str, Finding]:
    findings = lint(package, package.function(function), **options)
    assert len({finding.rule for finding in findings}) == len(findings)
    return {finding.rule: finding for finding in findings}


def unexplained(findings: dict[str, Finding]) -> set[str]:
    return {rule for rule, finding in findings.items() if finding.expected is None}


def test_every_rule_fires_on_a_program_and_leaves_another_alone() -> None:
    assert {rule for table in TABLES for rule in table.FIRES} == set(rules())
    assert {rule for table in TABLES for rule in table.SILENT} == set(rules())


def test_rules_are_complete() -> None:
    for id, rule in rules().items():
        assert rule.id == id
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id)
        assert rule.severity in ("error", "warning", "info")
        assert rule.confidence in ("high", "medium", "low", "disputed")
        assert all(getattr(rule, field.name) for field in dataclasses.fields(rule))
        assert rule.reason.endswith(".")
        assert rule.remedy.endswith(".")
        # What is disputed is no warning.
        assert rule.confidence != "disputed" or rule.severity == "info"
    assert sum(map(len, rules_by_subject().values())) == len(rules())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m ane_layers.analysis.lint.page > docs/lint.md"


def test_findings_come_sorted_by_severity(package: Package) -> None:
    findings = lint(package, package.function())
    assert [(finding.severity, finding.rule) for finding in findings] == [
        ("error", "output-also-written-to-state"),
        ("warning", "rank-above-4"),
        ("warning", "repeated-data"),
        ("warning", "state-axis-not-power-of-2"),
        ("info", "offset-slice-on-last-axis"),
    ]


def test_fails_at_a_severity_and_above(package: Package) -> None:
    findings = by_rule(package)
    error, warning = findings["output-also-written-to-state"], findings["repeated-data"]
    info = findings["offset-slice-on-last-axis"]
    assert [fails([error], level) for level in ("error", "warning", "info")] == [True, True, True]
    assert [fails([warning], level) for level in ("error", "warning", "info")] == [False, True, True]
    assert [fails([info], level) for level in ("error", "warning", "info")] == [False, False, True]
    assert fails([info, error], "error")
    assert not fails([], "info")


def test_expected_and_suppressed_findings_do_not_fail(package: Package) -> None:
    error = by_rule(package)["output-also-written-to-state"]
    assert not fails([dataclasses.replace(error, expected="for a reason")], "info")
    assert not fails([dataclasses.replace(error, suppressed=True)], "info")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be one of info, warning, error, got 'fatal'"):
        fails([], "fatal")  # type: ignore[arg-type]


def test_suppressed_findings_stay_and_are_marked(package: Package) -> None:
    before, after = by_rule(package), by_rule(package, suppress=["rank-above-4"])
    assert after.pop("rank-above-4") == dataclasses.replace(before.pop("rank-above-4"), suppressed=True)
    assert after == before
    assert lint(package, package.function(), suppress={"rank-above-4"})[-1].rule == "rank-above-4"


def test_unknown_rule_is_refused(package: Package) -> None:
    with pytest.raises(ValueError, match=r"no rule 'rank'; the rules are .*rank-above-4.*repeated-data"):
        lint(package, package.function(), suppress=["repeated-data", "rank"])


def test_finding_as_json(package: Package) -> None:
    finding = by_rule(package)["repeated-data"]
    read = json.loads(json.dumps(finding.as_dict()))
    assert read == {
        "rule": "repeated-data",
        "severity": "warning",
        "confidence": "high",
        "chips": rules()["repeated-data"].chips,
        "message": "main: operations that only repeat data (1): tile_0 (tile) fp16[1, 2, 3, 64, 32], 24,576 bytes",
        "source": rules()["repeated-data"].source,
        "operations": ["tile_0"],
        "count": 1,
        "expected": None,
        "suppressed": False,
    }


def test_message_names_the_worst_cases_first(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        return [mb.tile(x=values["x"], reps=[1, reps, 1, 1]) for reps in (2, 3, 7, 4, 6, 5, 8)]

    finding = by_rule(program(build, x=(1, 1, 8, 8))(tmp_path))["repeated-data"]
    assert finding.count == 7
    assert finding.operations == ("tile_6", "tile_2", "tile_4", "tile_5", "tile_3")
    assert re.findall(r"(tile_\d) ", finding.message) == ["tile_6", "tile_2", "tile_4"]
    assert finding.message.endswith("; 4 more")


def test_unexplained_cases_are_told_apart_from_expected_ones(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        columns = mb.exp(x=values["columns"])
        return [columns, mb.reduce_max(x=values["x"], axes=[-1], keep_dims=True)]

    finding = by_rule(program(build, columns=(1, 2, 8, 1), x=(1, 2, 8, 8))(tmp_path))["singleton-last-axis"]
    assert finding.expected is None
    assert finding.operations == ("exp_0", "identity_0")
    assert finding.count == 2
    assert "Not counted because expected: 2 (a reduction over the last axis" in finding.message


def test_own_fold_leaves_nothing_unexplained(own: Callable[[str], Package]) -> None:
    package = own("fold")
    decode, prefill = by_rule(package, "decode"), by_rule(package, "prefill")
    assert unexplained(decode) == set()
    # The last position is cut out of the last axis; low confidence, and the file does not show the values.
    assert unexplained(prefill) <= {"offset-slice-on-last-axis"}
    assert set(decode) == {"singleton-last-axis", "embedding-gather"}
    assert "one token a call (inputIds int32[1, 1])" in str(decode["singleton-last-axis"].expected)
    assert "the input causalMask" in str(prefill["repeated-data"].expected)
    for findings in (decode, prefill):
        assert not fails(findings.values(), "warning")


def test_own_repeat_kv_is_told_what_it_repeats(own: Callable[[str], Package]) -> None:
    package = own("repeat_kv")
    for function in ("decode", "prefill"):
        findings = by_rule(package, function)
        assert {"rank-above-4", "repeated-data"} <= unexplained(findings)
        # K and V in each of two layers: 8 heads from 2, over 64 slots of 32 values.
        assert findings["repeated-data"].count == 4
        assert (
            f"fp16[1, 2, 4, 64, 32], {8 * 64 * 32 * np.dtype(np.float16).itemsize:,} bytes"
            in findings["repeated-data"].message
        )
        assert fails(findings.values(), "warning")


def test_function_of_a_package_is_named(own: Callable[[str], Package]) -> None:
    for function in ("decode", "prefill"):
        assert all(finding.message.startswith(f"{function}: ") for finding in by_rule(own("fold"), function).values())
