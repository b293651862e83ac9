"""Evaluation, rankings and compressed packages do not know families: tiny models of several go through all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ane_layers.cli import app
from ane_layers.compression import Setting, compress, load_recipe, make_plan
from ane_layers.compression.sensitivity import sensitivity
from ane_layers.evaluation import evaluate
from ane_layers.generation import Session
from ane_layers.models import from_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tiny_families import reference, write_family

IDS = torch.randint(109, (48,), generator=torch.Generator().manual_seed(3)).tolist()
CAPPED = {"gemma3": {"attn_logit_softcapping": 2.0}}


FAMILIES = ["llama", "gemma3", "olmo2", "phi3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    scratch = tmp_path_factory.mktemp("families")
    return {
        family: write_family(scratch / family, family, dtype=torch.bfloat16, **CAPPED.get(family, {}))
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_matches_transformers(folders: dict[str, Path], family: str) -> None:
    """Within a window: longrope and caches play no part, and one pass over it is what `transformers` does."""
    folder = folders[family]
    found = evaluate(folder, tokens=IDS, window=48, context=64)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.top1_agreement == 1.0
    if family == "gemma3":  # transformers leaves the cap of the scores out
        return
    with torch.no_grad():
        logits = reference(folder)(torch.tensor([IDS])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:])).item()
    assert found.loss == pytest.approx(expected, abs=1e-4)


def test_evaluation_goes_by_the_context_not_by_the_window(folders: dict[str, Path]) -> None:
    """Longrope: windows of 24 tokens for a cache of 64 have a long context's frequencies, the original's too."""
    losses = {}
    for context in (32, 64):
        found = evaluate(folders["phi3"], tokens=IDS, window=24, context=context)
        assert found.kl == pytest.approx(0, abs=1e-6)
        losses[context] = found.loss
        model = from_folder(folders["phi3"], context_length=context)
        first = model.whole(torch.tensor([IDS[:24]]))[0]
        expected = torch.nn.functional.cross_entropy(first[:-1], torch.tensor(IDS[1:24])).item()
        scored = evaluate(folders["phi3"], tokens=IDS[:24], window=24, context=context)
        assert scored.loss == pytest.approx(expected, abs=1e-5)
    assert abs(losses[32] - losses[64]) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_rankings_of_both_methods(folders: dict[str, Path], family: str) -> None:
    tokens = torch.tensor(IDS).reshape(3, 16)
    ranking = sensitivity(folders[family], method="both", settings=[Setting(bits=2)], tokens=tokens, samples=8)
    names = {module.name for module in ranking.modules}
    assert {"model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj", "lm_head"} <= names
    assert set(ranking.layers) == {0, 1}
    assert all(harm > 1e-3 for harm in ranking.layers.values())
    assert ranking.agreement


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compressed_package_has_pytorchs_values(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    folder, package = folders[family], tmp_path / "m.mlpackage"
    options = ["convert", str(folder), "-o", str(package), "--context", "64", "--prefill", "8", "--recipe", "int8"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    model = from_folder(folder, context_length=64, block_size=8)
    compress(model, make_plan(model, load_recipe("int8")))
    expected = model.extend(torch.tensor([IDS])).numpy()[0]
    actual = Session(package).extend(IDS, prefill=False)
    found = np.stack([logits.values[0] for logits in actual])
    error = 10 * np.log10((expected**2).sum() / ((expected - found) ** 2).sum())
    assert error > 54  # what rounding constants leaves; int8 itself is some 35 dB from the original
    evaluated = evaluate(package, original=folder, tokens=IDS, window=48)
    assert evaluated.loss == pytest.approx(evaluate(folder, recipe="int8", tokens=IDS, window=48).loss, abs=2e-3)
