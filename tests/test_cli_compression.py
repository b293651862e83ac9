"""The commands about weights and cost, as a user calls them, on the bundled model."""

from __future__ import annotations

import io
import json
import signal
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ane_layers import bundled_checkpoint, cli, console

MODEL = str(bundled_checkpoint())
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, stdout and stderr of a command in this process."""

    def call(*arguments: object) -> tuple[int, str, str]:
        errors = io.StringIO()
        monkeypatch.setattr(console, "err", Console(file=errors, soft_wrap=True))
        monkeypatch.setattr(sys, "argv", ["ane-layers", *map(str, arguments)])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        status = 0
        with warnings.catch_warnings():
            try:
                cli.main()
            except SystemExit as end:
                status = int(end.code or 0)
        return status, capsys.readouterr().out, errors.getvalue()

    return call


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranking that `sensitivity` wrote, with the widths of an allocation."""
    from ane_layers.compression import Setting
    from ane_layers.compression.sensitivity import sensitivity, write_ranking

    path = tmp_path_factory.mktemp("ranking") / "ranking.json"
    settings = [Setting(bits=bits, group_size=size) for bits in (4, 2, 3, 6, 8) for size in (16, None)]
    write_ranking(sensitivity(MODEL, method="fisher", settings=settings, count=1, length=48), path)
    return path


def error(result: tuple[int, str, str]) -> str:
    status, out, err = result
    assert status == 1
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_recipe_and_ranking_become_a_package_that_is_evaluated_as_its_folder(
    run: Run, ranking: Path, tmp_path: Path
) -> None:
    package, report = tmp_path / "top.mlpackage", tmp_path / "report.json"
    chosen = ("--recipe", "top8", "--ranking", ranking, "--promote", 3)
    status, out, _ = run("convert", MODEL, "-o", package, "--context", 64, "--prefill", 16, *chosen, "--report", report)
    assert status == 0
    assert "recipe top8, layers " in out
    tensors = json.loads(report.read_text())["tensors"]
    eight = [tensor for tensor in tensors if tensor["setting"] == "lut8"]
    assert len(eight) == 3 * 4
    assert all(tensor["note"] for tensor in tensors if tensor["setting"] == "fp16")
    status, out, _ = run("evaluate", package, "--original", MODEL, "--window", 64, "--max-tokens", 128, "--json")
    assert status == 0
    of_package = json.loads(out)
    status, out, _ = run("evaluate", MODEL, "--window", 64, "--max-tokens", 128, "--context", 64, *chosen, "--json")
    of_folder = json.loads(out)
    contract = {"loss", "perplexity", "kl", "top1_agreement", "weight_bytes", "bytes_per_token"}
    assert contract <= of_folder.keys() == of_package.keys()
    assert of_package["loss"] == pytest.approx(of_folder["loss"], abs=2e-3)
    assert of_package["kl"] == pytest.approx(of_folder["kl"], rel=0.05)
    assert of_package["bytes_per_token"] == pytest.approx(of_folder["bytes_per_token"], rel=0.01)
    status, out, _ = run("evaluate", MODEL, "--window", 64, "--max-tokens", 128)
    assert status == 0
    assert "KL to the original" in out


def test_sensitivity_writes_ranking_and_picture_and_resumes(run: Run, tmp_path: Path) -> None:
    output, picture = tmp_path / "ranking.json", tmp_path / "ranking.png"
    small = ("--windows", 1, "--length", 32, "--method", "fisher")
    status, out, err = run("sensitivity", MODEL, "-o", output, *small, "--plot", picture)
    assert status == 0
    assert "harm at lut4g16" in out
    assert "12" in err  # progress with counts
    written = json.loads(output.read_text())
    assert len(written["layers"]) == 12
    harms = [layer["harm"] for layer in written["layers"]]
    assert harms == sorted(harms, reverse=True)
    assert min(harms) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranking.json", "ranking.png"]
    status, out, _ = run("sensitivity", MODEL, "-o", output, *small, "--json")
    assert json.loads(out) == written


def test_allocate_writes_a_recipe_within_its_budget(run: Run, ranking: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    status, out, _ = run("allocate", MODEL, "--ranking", ranking, "--bits-per-weight", 4.5, "-o", recipe, "--json")
    assert status == 0
    figures = json.loads(out)
    assert 4.4 < figures["bits_per_weight"] <= 4.5
    assert len(tomllib.loads(recipe.read_text())["modules"]) == 12 * 4 + 1
    status, out, _ = run("evaluate", MODEL, "--window", 64, "--max-tokens", 64, "--recipe", recipe, "--json")
    assert status == 0
    # What it reads and stores is what a package of it holds, norms and the cache aside.
    assert json.loads(out)["weight_bytes"] == pytest.approx(figures["stored_bytes"], rel=0.01)
    for option, value in (("--size", 1_900_000), ("--bytes-per-token", 8_000_000)):
        context = ("--context", 2048) if option == "--bytes-per-token" else ()
        status, out, _ = run("allocate", MODEL, "--ranking", ranking, option, value, *context, "-o", recipe, "--json")
        figures = json.loads(out)
        slots = 2 * 2 * 12 * 2 * 32 * 2049
        spent = figures["stored_bytes"] if option == "--size" else figures["read_bytes"] + slots
        assert 0.98 * value < spent <= value


def test_mixed_keeps_to_the_bytes_of_top8(run: Run, ranking: Path, tmp_path: Path) -> None:
    """5.2 bits are those of EXAONE 4.0 1.2B; the recipe's budget holds on any model."""
    report = tmp_path / "r.json"
    options = ("--context", 64, "--prefill", 16, "--recipe", "mixed", "--ranking", ranking, "--report", report)
    status, _, _ = run("convert", MODEL, "-o", tmp_path / "m.mlpackage", *options, "--json")
    assert status == 0
    tensors = json.loads(report.read_text())["tensors"]
    read = [t for t in tensors if t["setting"] != "fp16" and "embed_tokens" not in t["path"]]
    elements = sum(t["shape"][0] * t["shape"][1] for t in read)
    assert 5.1 < 8 * sum(t["data_bytes"] + t["table_bytes"] for t in read) / elements <= 5.2
    assert len({t["setting"] for t in read}) > 2


def test_recipes_are_listed(run: Run) -> None:
    status, out, _ = run("recipes", "--json")
    assert status == 0
    assert {"base", "top8", "top12", "fp16", "int8", "mixed"} <= json.loads(out)["recipes"].keys()
    assert "top8: " in run("recipes")[1]


def test_mistakes_about_recipes_are_one_line_before_anything_is_loaded(run: Run, ranking: Path, tmp_path: Path) -> None:
    package = tmp_path / "m.mlpackage"

    def convert(*options: object) -> str:
        return error(run("convert", MODEL, "-o", package, "--context", 64, "--prefill", 16, *options))

    assert "recipe 'top9' is not known; there are base," in convert("--recipe", "top9")
    assert "--ranking needs --recipe" in error(run("convert", MODEL, "-o", package, "--ranking", ranking))
    assert "--promote needs --recipe" in convert("--promote", 3)
    assert "recipe base needs no ranking" in convert("--recipe", "base", "--ranking", ranking)
    assert "recipe base promotes no layers" in convert("--recipe", "base", "--promote", 3)
    assert "[promoted] needs a ranking" in convert("--recipe", "top8")
    assert "--calibration" in convert("--recipe", "base", "--calibration", ranking)
    assert "none.json: cannot be read" in convert("--recipe", "top8", "--ranking", tmp_path / "none.json")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[layers]\nbits = 5\n")
    assert "wrong.toml: [layers]: bits must be 1, 2, 3, 4, 6, 8" in convert("--recipe", wrong)
    assert "give one budget" in error(run("allocate", MODEL, "--ranking", ranking, "-o", tmp_path / "a.toml"))
    assert "must end in .toml" in error(
        run("allocate", MODEL, "--ranking", ranking, "--size", 10**6, "-o", tmp_path / "a.json")
    )
    assert "the smallest settings take" in error(
        run("allocate", MODEL, "--ranking", ranking, "--size", 1000, "-o", tmp_path / "a.toml")
    )
    assert "--bits must be widths" in error(run("sensitivity", MODEL, "-o", tmp_path / "r.json", "--bits", "four"))
    assert "bits must be 1, 2, 3, 4, 6, 8" in error(run("sensitivity", MODEL, "-o", tmp_path / "r.json", "--bits", 5))
    assert "gif" in error(
        run(
            "sensitivity", MODEL, "-o", tmp_path / "r.json", "--plot", tmp_path / "p.gif", "--length", 8, "--windows", 1
        )
    )
    assert "is no folder" in error(run("sensitivity", MODEL, "-o", tmp_path / "none" / "r.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wrong.toml"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from ane_layers.models import Exaone4

    folder = tmp_path_factory.mktemp("packages")
    for sharing in ("fold", "repeat_kv"):
        model = Exaone4.from_pretrained(MODEL, context_length=64, dtype=None, head_sharing=sharing)
        model.convert(folder / f"{sharing}.mlpackage", prefill=16)
    return {sharing: folder / f"{sharing}.mlpackage" for sharing in ("fold", "repeat_kv")}


def test_analyze_prints_the_contracts_json_and_a_report(run: Run, packages: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    status, out, _ = run("analyze", packages["fold"], "--json", "--html", page, "--bandwidth", 60000)
    assert status == 0
    result: dict[str, Any] = json.loads(out)
    decode = result["functions"]["decode"]
    moved = decode["traffic"]
    assert moved["total"] == moved["weights"] + moved["kv_read"] + moved["kv_written"] + 2 * moved["repetition"]
    assert decode["tokens_per_second"] == pytest.approx(60000e6 / moved["total"])
    assert {"rule", "severity", "message", "source"} <= decode["lint"][0].keys()
    assert {"read", "written"} == decode["materialised"].keys()
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    status, out, _ = run(
        "analyze", packages["repeat_kv"], "--function", "decode", "--details", "--bandwidth", "A18=60000"
    )
    assert status == 0
    assert "24" in out
    assert "tile" in out
    assert "A18" in out


def test_lint_fails_the_command_where_it_is_asked_to(run: Run, packages: dict[str, Path]) -> None:
    assert run("analyze", packages["fold"], "--fail-on", "warning")[0] == 0
    status, out, err = run("analyze", packages["repeat_kv"], "--fail-on", "warning")
    assert status == 1
    assert "repeated-data in decode" in err
    assert "cost of a call" in out
    names = ("repeated-data", "rank-above-4", "matmul-above-rank-4", "singleton-last-axis")
    rules = [part for name in names for part in ("--suppress", name)]
    assert run("analyze", packages["repeat_kv"], "--fail-on", "warning", *rules)[0] == 0
    assert "no rule" in error(run("analyze", packages["fold"], "--suppress", "nonsense"))


def test_compare_shows_what_folding_saves(run: Run, packages: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    status, out, _ = run("compare", packages["fold"], packages["repeat_kv"], "--json", "--html", page)
    assert status == 0
    decode = next(pair for pair in json.loads(out)["functions"] if pair["a"] == "decode")
    # K and V of 12 layers, written out for 8 heads of 32 at 64 slots.
    assert decode["figures"]["traffic.repetition"]["difference"] == 24 * 8 * 64 * 32 * 2
    assert page.exists()
    status, out, _ = run("compare", packages["fold"], packages["repeat_kv"])
    assert status == 0
    assert "tile" in out


def test_mistakes_about_analysis_are_one_line(run: Run, packages: dict[str, Path], tmp_path: Path) -> None:
    assert "--bandwidth is 'fast'" in error(run("analyze", packages["fold"], "--bandwidth", "fast"))
    assert "each needs a name" in error(run("analyze", packages["fold"], "--bandwidth", 1, "--bandwidth", 2))
    assert "-5" in error(run("analyze", packages["fold"], "--bandwidth", "A=-5"))
    assert "is no folder" in error(run("analyze", packages["fold"], "--html", tmp_path / "none" / "r.html"))
    assert "--records needs --json" in error(run("analyze", packages["fold"], "--records"))
    assert "none" in error(run("analyze", packages["fold"], "--function", "none"))
    assert "none.mlpackage" in error(run("analyze", tmp_path / "none.mlpackage"))
