"""The doctor, on this machine and on ones that it is made to believe in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ane_layers import analysis, conversion, doctor
from ane_layers.commands import analysis as analysis_commands
from ane_layers.commands import compression, core_ai, packages, rewriting, text
from ane_layers.doctor import ABILITIES, CORE_AI, COREML, INTERPRETER, READING, WEIGHTS, Report, Row, examine
from ane_layers.interpreter import MLProgram

# Core AI is an extra that may or may not be there.
ON_LINUX = [ability for ability in ABILITIES if ability not in (COREML, CORE_AI)]


def row(report: Report, name: str) -> Row:
    return next(row for row in report.rows if row.name == name)


def working(report: Report) -> list[str]:
    return [ability for ability, works in report.as_dict()["works"].items() if works and ability != CORE_AI]


@pytest.fixture
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "system", lambda: "Linux")


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes distributions report other versions; None: not installed."""
    real = importlib.metadata.version

    def pretend(**changed: str | None) -> None:
        def version(name: str) -> str:
            if name not in changed:
                return real(name)
            if (found := changed[name]) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_this_machine_converts_and_runs(on_linux: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lines: list[str] = []
    report = examine(progress=lines.append)
    assert [row for row in report.rows if row.status == "problem"] == []
    for name in ("trial conversion", "trial analysis", "trial run"):
        assert row(report, name).found == "passed"
    assert working(report) == ON_LINUX
    assert report.exit_status == 0
    assert "converting and running a small layer" in lines
    assert list(tmp_path.iterdir()) == []
    declared = {"torch", "numpy", "coremltools", "safetensors", "libmilstoragepython", "libmodelpackage"}
    assert declared <= {row.name for row in report.rows}
    assert "transformers" not in {row.name for row in report.rows}  # a test's, not the user's


def test_every_command_is_spoken_of() -> None:
    modules = (packages, rewriting, analysis_commands, compression, text, core_ai)
    commands = {command.__name__.replace("_", "-") for module in modules for command in module.COMMANDS}
    assert {ability.split()[0] for ability in ABILITIES} == commands - {"doctor"}


def test_an_extra_that_is_not_installed_is_no_problem(versions: Callable[..., None]) -> None:
    versions(**{"coreai-torch": None})
    report = examine(quick=True)
    assert row(report, "Core AI").status == "absent"
    assert report.reasons(CORE_AI) == ["Core AI: an optional extra: pip install 'ane-layers[coreai]'"]
    assert report.exit_status == 0
    versions(**{"coreai-torch": "0.4.3"})
    assert examine(quick=True).reasons(CORE_AI) == []


def test_json_and_lines(on_linux: None) -> None:
    report = examine(quick=True)
    values = json.loads(json.dumps(report.as_dict()))
    assert set(values) == {"rows", "works", "reasons"}
    assert set(values["rows"][0]) == {"name", "found", "status", "note", "prevents"}
    assert list(values["works"]) == list(ABILITIES)
    lines = list(report.lines())
    assert "convert: works" in lines
    assert any(line.startswith("generate --runtime coreml: does not work: Core ML: ") for line in lines)
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("library", ["libmilstoragepython", "libmodelpackage"])
@pytest.mark.parametrize("quick", [False, True])
def test_a_missing_native_library_is_told_at_the_start(
    on_linux: None, monkeypatch: pytest.MonkeyPatch, library: str, quick: bool
) -> None:
    """coremltools issue 2361: the converter notices only when it writes its result."""
    monkeypatch.setitem(sys.modules, f"coremltools.{library}", None)
    report = examine(quick=quick)
    found = row(report, library)
    assert found.status == "problem"
    assert "built for this Python and platform" in found.note
    assert working(report) == [*READING, *INTERPRETER, *WEIGHTS]
    assert report.exit_status == 1
    assert "trial conversion" not in {row.name for row in report.rows}
    if library == "libmilstoragepython":
        assert "'BlobWriter not loaded' (coremltools issue 2361)" in found.note


def test_that_library_s_absence_is_what_conversion_fails_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from coremltools.converters.mil.backend.mil import load

    monkeypatch.setattr(load, "BlobWriter", None)
    report = Report(tuple(doctor._trial()))
    assert "BlobWriter not loaded" in row(report, "trial conversion").note


def test_coremltools_that_does_not_import(on_linux: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    report = examine()
    assert row(report, "coremltools import").status == "problem"
    assert working(report) == list(WEIGHTS)
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("name", "version", "status", "said", "works"),
    [
        ("numpy", "2.4.0", "problem", "coremltools issue 2633", ON_LINUX[1:]),
        ("coremltools", "8.3", "warning", "pip install 'coremltools>=9.0'", ON_LINUX),
        ("coremltools", None, "problem", "pip install 'coremltools>=9.0'", []),
        ("rich", "13.0", "warning", "pip install 'rich>=13.7'", ON_LINUX),
    ],
)
def test_versions_are_held_against_the_declared_ranges(
    on_linux: None,
    versions: Callable[..., None],
    name: str,
    version: str | None,
    status: str,
    said: str,
    works: list[str],
) -> None:
    versions(**{name: version})
    report = examine(quick=True)
    found = row(report, name)
    assert (found.found, found.status) == (version or "not installed", status)
    assert said in found.note
    assert working(report) == works


def test_an_old_python(on_linux: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    report = examine(quick=True)
    assert row(report, "Python").note == "ane-layers requires >=3.11"
    assert (working(report), report.exit_status) == ([], 1)


def test_a_checkout_that_is_not_installed(on_linux: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-distribution")
    report = examine(quick=True)
    assert row(report, "Python").status == "warning"
    assert report.exit_status == 0


def test_a_torch_newer_than_coremltools_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    import coremltools._deps as known

    monkeypatch.setattr(known, "_TORCH_MAX_VERSION", torch.__version__.partition("+")[0])
    assert list(doctor._torch_tested(tried=False)) == []
    monkeypatch.setattr(known, "_TORCH_MAX_VERSION", "2.0.0")
    assert [row.status for row in doctor._torch_tested(tried=False)] == ["warning"]
    assert [row.status for row in doctor._torch_tested(tried=True)] == ["ok"]


def test_little_room_is_a_warning(on_linux: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 10**9))
    monkeypatch.setattr(os, "sysconf", lambda name: 10**6 if name == "SC_PHYS_PAGES" else 4096)
    report = examine(quick=True, folder=tmp_path / "not" / "yet")
    assert [(row(report, name).found, row(report, name).status) for name in ("free disk", "memory in all")] == [
        ("1.0 GB", "warning"),
        ("4.1 GB", "warning"),
    ]
    assert report.exit_status == 0


@pytest.mark.parametrize(
    ("version", "bindings", "status", "works"),
    [
        ("15.1", True, "ok", True),
        ("26.0", True, "ok", True),
        ("14.7", True, "problem", False),
        ("15.1", False, "problem", False),
    ],
)
def test_a_mac(monkeypatch: pytest.MonkeyPatch, version: str, bindings: bool, status: str, works: bool) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    stand_in: Any = type(sys)("libcoremlpython") if bindings else None
    monkeypatch.setitem(sys.modules, "coremltools.libcoremlpython", stand_in)
    report = examine(quick=True)
    assert row(report, "Core ML").status == status
    assert ("generate --runtime coreml" in working(report)) is works
    assert report.exit_status == 0  # converting needs no Core ML


def fails(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("two\nlines")


def test_a_failed_trial_conversion_prevents_converting(on_linux: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "convert", fails)
    report = examine()
    assert row(report, "trial conversion") == Row(
        "trial conversion", "failed", "problem", "RuntimeError: two lines", ("convert",)
    )
    assert report.exit_status == 1


def test_a_failed_trial_analysis_prevents_reading(on_linux: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "analyze", fails)
    report = examine()
    assert row(report, "trial analysis").found == "failed"
    assert working(report) == [ability for ability in ON_LINUX if ability not in READING]
    assert report.exit_status == 0


@pytest.mark.parametrize(("changed", "found"), [(fails, "failed"), (None, "wrong")])
def test_a_trial_run_that_fails_or_is_wrong(
    on_linux: None, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Any] | None, found: str
) -> None:
    real = MLProgram.predict
    off_by_one = lambda *a: {name: value + 1 for name, value in real(*a).items()}  # noqa: E731
    monkeypatch.setattr(MLProgram, "predict", changed or off_by_one)
    report = examine()
    assert row(report, "trial run").found == found
    assert not set(INTERPRETER) & set(working(report))
