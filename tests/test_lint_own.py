"""The lint on the project's own packages: whatever the options, every finding is either explained or named in its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ane_layers.analysis.lint import lint
from ane_layers.analysis.lint.page import UNEXPLAINED
from ane_layers.compression import Ranking, Setting, compress, load_recipe, make_plan
from ane_layers.compression.ranking import model_facts
from ane_layers.compression.recipe import Promotion
from ane_layers.models import Exaone4
from ane_layers.program import Package

Folder = Callable[..., Path]

FULL: dict[str, Any] = {"layers": 2, "head_dim": 32, "hidden": 64}
HYBRID: dict[str, Any] = {
    **FULL,
    "layers": 4,
    "sliding_window": 20,
    "sliding_window_pattern": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}


def unexplained(package: Package) -> dict[tuple[str, str], str]:
    """The severity of each finding that nothing explains, by function and rule."""
    return {
        (name, finding.rule): finding.severity
        for name, function in package.functions.items()
        for finding in lint(package, function)
        if finding.expected is None
    }


@pytest.mark.parametrize(
    ("kv", "head"), [("in_place", "logits"), ("deferred", "argmax"), ("read_only", "top_k")], ids=lambda value: value
)
def test_every_way_of_writing_the_cache(exaone4_folder: Folder, tmp_path: Path, kv: str, head: str) -> None:
    folder = exaone4_folder(dtype=torch.bfloat16, **FULL)
    model = Exaone4.from_pretrained(folder, context_length=64, dtype=None, kv=kv, block_size=8)
    package = model.convert(tmp_path / "m.mlpackage", prefill=(4, 8), contexts=[32], head=head, top_k=5, verify=3)
    assert {"decode", "prefill_8", "verify", "decode_32"} <= set(package.functions)
    assert unexplained(package) == {}


@pytest.mark.parametrize("kv", ["in_place", "deferred", "read_only"])
def test_every_way_of_writing_a_rolling_cache(exaone4_folder: Folder, tmp_path: Path, kv: str) -> None:
    folder = exaone4_folder(dtype=torch.bfloat16, **HYBRID)
    model = Exaone4.from_pretrained(folder, context_length=64, dtype=None, kv=kv, block_size=8)
    assert unexplained(model.convert(tmp_path / "m.mlpackage", prefill=8)) == {}


EXPECTED_OF_WEIGHTS = {
    "int8": {"compression-folded-on-old-chips"},
    "base": {"palettized-stateful-coremltools-9"},
    "promoted": {"palettized-stateful-coremltools-9"},
}


@pytest.mark.parametrize("name", EXPECTED_OF_WEIGHTS)
def test_every_kind_of_weight(exaone4_folder: Folder, tmp_path: Path, name: str) -> None:
    model = Exaone4.from_pretrained(
        exaone4_folder(dtype=torch.bfloat16, vocab=256, **FULL), context_length=64, dtype=None
    )
    recipe = load_recipe("top8" if name == "promoted" else name)
    ranking = None
    if name == "promoted":
        recipe = dataclasses.replace(recipe, promoted=Promotion(layers=1, setting=Setting(bits=8), modules="*"))
        facts = model_facts(model.config)
        ranking = Ranking(method="kl", model=facts, setting="lut4", tokens=1, layers={0: 1.0, 1: 2.0}, modules=())
    compression = compress(model, make_plan(model, recipe, ranking=ranking))
    package = model.convert(tmp_path / "m.mlpackage", prefill=4, compression=compression)
    found = unexplained(package)
    # Nothing in the graph needs to change for them, and no build that looks for warnings fails.
    assert set(found.values()) <= {"info"}
    assert {rule for _, rule in found} == EXPECTED_OF_WEIGHTS[name]
    assert {rule for _, rule in found} <= set(UNEXPLAINED)
