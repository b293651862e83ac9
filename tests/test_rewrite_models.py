"""Folding whole models: stock `transformers` ones converted by plain `ct.convert`, and this library's own with repeated heads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STOCK_SIZES

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fold_existing
from stock_models import convert_stock, random_model

from ane_layers import causal_mask
from ane_layers.analysis import inspect
from ane_layers.chunks import CONFIG_KEY, read_metadata
from ane_layers.interpreter import MLProgram
from ane_layers.models import Exaone4
from ane_layers.program import Package
from ane_layers.program.files import model_file
from ane_layers.program.protocol import model_class
from ane_layers.rewrite import equality, fold_package
from ane_layers.rewrite.graph_pass import NAME, last_report, pass_pipeline
from ane_layers.verification import verify

CONTEXT = 16
MODELS = {
    "Llama": {"head_dim": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Exaone4": {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 2},
}


def stock_model(family: str, attention: str) -> Any:
    return random_model(family, attention=attention, **STOCK_SIZES, **MODELS[family])


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Path]:
    made: dict[tuple[str, str, int], Path] = {}

    def package(family: str, attention: str, tokens: int) -> Path:
        key = family, attention, tokens
        if key not in made:
            path = tmp_path_factory.mktemp("stock") / "stock.mlpackage"
            made[key] = convert_stock(stock_model(family, attention), path, context=CONTEXT, tokens=tokens)
        return made[key]

    return package


CASES = [
    ("Llama", "eager", 1),
    ("Llama", "sdpa", 5),
    ("Qwen2", "eager", 5),
    ("Qwen3", "eager", 1),
    ("Qwen3", "sdpa", 3),
    ("Exaone4", "eager", 1),
]


def decibels(reference: np.ndarray, actual: np.ndarray) -> float:
    noise = np.square(reference - actual.astype(np.float64)).sum()
    return float(10 * np.log10(np.square(reference.astype(np.float64)).sum() / noise))


def logits(package: Path, tokens: int) -> np.ndarray:
    """Of the last position of every call, while the cache fills."""
    program = MLProgram(package)
    state = program.make_state()
    ids = token_ids()
    rows = []
    for position in range(0, CONTEXT - tokens + 1, tokens):
        data = {
            "inputIds": ids[:, position : position + tokens],
            "position": np.array([position], np.int32),
            "causalMask": causal_mask(position, tokens, CONTEXT).half().numpy(),
        }
        rows.append(program.predict(data, state)["logits"][0, -1])
    return np.stack(rows)


def token_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, STOCK_SIZES["vocab_size"], (1, CONTEXT)).astype(np.int32)


@pytest.mark.parametrize(("family", "attention", "tokens"), CASES)
def test_a_stock_package_folds_on_disk(
    stock: Callable[[str, str, int], Path], tmp_path: Path, family: str, attention: str, tokens: int
) -> None:
    source = stock(family, attention, tokens)
    result = fold_package(source, tmp_path / "folded.mlpackage")
    (function,) = result.report.functions
    assert len(function.folded) == STOCK_SIZES["num_hidden_layers"]
    assert (function.before.tiles, function.after.tiles) == (4, 0)
    assert function.after.operations < function.before.operations
    assert result.equality is not None
    assert result.equality.least > 120
    # What is left is the table of rotary angles, joined with itself, and the rows of one mask for both layers.
    assert {refused.type for refused in function.refused} == {"concat"}
    mask = 2 * 3 * tokens * CONTEXT if tokens > 1 else 0
    assert function.after.repetition_bytes == mask + sum(refused.bytes or 0 for refused in function.refused)
    model = stock_model(family, attention)
    with torch.no_grad():
        reference = model(torch.from_numpy(token_ids()).long()).logits[0, tokens - 1 :: tokens].numpy()
    assert decibels(reference, logits(result.package.path, tokens)) > 55


@pytest.mark.parametrize(("family", "attention", "tokens"), CASES)
def test_the_graph_pass_does_the_same(
    stock: Callable[[str, str, int], Path], tmp_path: Path, family: str, attention: str, tokens: int
) -> None:
    model = stock_model(family, attention)
    path = convert_stock(model, tmp_path / "pass.mlpackage", context=CONTEXT, tokens=tokens, passes=pass_pipeline())
    (function,) = last_report().functions
    assert len(function.folded) == STOCK_SIZES["num_hidden_layers"]
    assert (function.before.tiles, function.after.tiles) == (4, 0)
    original, counts = (
        inspect(Package.open(each))["functions"]["main"] for each in (stock(family, attention, tokens), path)
    )
    assert counts["tile"]["count"] == 0
    assert counts["highest_rank"] == 4
    assert counts["operations"]["compute"] < original["operations"]["compute"]
    assert equality(stock(family, attention, tokens), path).least > 120


def test_the_pass_leaves_a_graph_without_repetition_alone(tmp_path: Path) -> None:
    """transformers folds a single token's query itself where it calls PyTorch's attention."""
    convert_stock(
        stock_model("Llama", "sdpa"), tmp_path / "m.mlpackage", context=CONTEXT, tokens=1, passes=pass_pipeline()
    )
    (function,) = last_report().functions
    assert not function.folded
    assert function.before == function.after


def test_the_pass_joins_a_pipeline_of_one_s_own() -> None:
    import coremltools as ct

    passes = ct.PassPipeline.EMPTY
    passes.append_pass(NAME)
    passes.validate()


@pytest.fixture(scope="module")
def repeating(exaone4_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This library's own package with repeated heads: functions `decode` and `prefill` over one pair of states."""
    path = tmp_path_factory.mktemp("repeating") / "repeat_kv.mlpackage"
    model = Exaone4.from_pretrained(exaone4_folder(), context_length=32, dtype=None, head_sharing="repeat_kv")
    model.convert(path, prefill=4)
    return path


def test_all_functions_of_a_package_are_folded(
    repeating: Path, exaone4_folder: Callable[..., Path], tmp_path: Path
) -> None:
    result = fold_package(repeating, tmp_path / "folded.mlpackage")
    assert [function.function for function in result.report.functions] == ["decode", "prefill"]
    for function in result.report.functions:
        assert len(function.folded) == 2
        assert (function.before.tiles, function.after.tiles) == (4, 0)
    assert result.equality is not None
    assert result.equality.least > 120
    # Metadata but for the way of sharing heads, states and the default function are what they were: what reads packages still does.
    original, folded = Package.open(repeating), Package.open(result.package.path)
    configs = [read_metadata(package) for package in (original, folded)]
    assert [config.pop("head_sharing") for config in configs] == ["repeat_kv", "fold"]
    assert configs[0] == configs[1]
    assert result.package.metadata == folded.metadata
    assert {**original.metadata, CONFIG_KEY: ""} == {**folded.metadata, CONFIG_KEY: ""}
    assert verify(result.package.path, exaone4_folder(), tokens=20).snr_db > 40


@pytest.mark.parametrize("text", ["{", "[]", "no metadata"])
def test_metadata_that_is_not_ours_is_kept(repeating: Path, tmp_path: Path, text: str) -> None:
    source = tmp_path / "source.mlpackage"
    shutil.copytree(repeating, source)
    model = model_class()()
    model.ParseFromString(model_file(source).read_bytes())
    entries = model.description.metadata.userDefined
    if text == "no metadata":
        entries.clear()
    else:
        entries[CONFIG_KEY] = text
    model_file(source).write_bytes(model.SerializeToString())
    result = fold_package(source, tmp_path / "folded.mlpackage", check=False)
    assert result.package.metadata == Package.open(source).metadata


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ane_layers.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_prints_what_it_did(repeating: Path, tmp_path: Path) -> None:
    target = tmp_path / "folded.mlpackage"
    done = command("fold", repeating, "-o", target, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["functions"]["decode"]["before"]["tiles"] == 4
    assert found["functions"]["decode"]["after"]["tiles"] == 0
    assert found["functions"]["prefill"]["folded"][0]["groups"] == 4
    # Equal to the bit is written as null, JSON having no infinity.
    assert all(level is None or level > 120 for level in found["equality"]["snr_db"].values())
    assert "tile" not in inspect(Package.open(target))["functions"]["decode"]["operations"]["by_type"]
    again = command("fold", target, "-o", tmp_path / "twice.mlpackage")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.splitlines()[-1].startswith("error: ")
    assert "nothing to fold" in again.stderr.splitlines()[-1]
    assert not (tmp_path / "twice.mlpackage").exists()


def test_the_command_prints_text_and_skips_the_check(repeating: Path, tmp_path: Path) -> None:
    done = command("fold", repeating, "-o", tmp_path / "folded.mlpackage", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "decode: 2 attentions folded; tile 4 → 0" in done.stdout
    assert "against the original" not in done.stdout


def test_the_benchmark_measures_what_the_reports_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {name: STOCK_SIZES[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    monkeypatch.setitem(fold_existing.GEOMETRIES, "tiny", {"family": "Qwen2", "intermediate_size": 8, **sizes})
    row = fold_existing.measure(
        "tiny", attention="sdpa", tokens=3, context=16, layers=2, folder=tmp_path, say=lambda line: None
    )
    assert row["after"] == row["on_disk"]
    assert (row["before"]["tiles"], row["after"]["tiles"], row["folded"]) == (4, 0, 2)
    # Two tensors a layer, of six heads of eight numbers in two bytes for each slot.
    assert row["before"]["tile_mb"] == 2 * 2 * 6 * 16 * 8 * 2 / 1e6
    assert "4 → 0" in fold_existing.table([row])[2]
