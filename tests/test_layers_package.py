"""What holds for all layers at once: documentation, and imports that stay light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ane_layers
import ane_layers.layers as layers

LAYERS = [name for name in layers.__all__ if inspect.isclass(getattr(layers, name))]
FUNCTIONS = [
    name
    for name in layers.__all__
    if inspect.isfunction(getattr(layers, name)) and "Tensor" in getattr(layers, name).__annotations__["return"]
]


@pytest.mark.parametrize("name", LAYERS + FUNCTIONS)
def test_docstring_has_a_shape_block(name: str) -> None:
    doc = inspect.getdoc(getattr(layers, name)) or ""
    _, found, block = doc.partition("\nShape:\n")
    assert found
    assert block.lstrip().startswith("- ")


def test_there_are_layers_to_check() -> None:
    assert {"GroupedQueryAttention", "RMSNorm", "Linear", "OutputHead", "KVCache"} <= set(LAYERS)
    assert {"ane_softmax", "rotate", "causal_mask", "contiguous_heads"} <= set(FUNCTIONS)


def test_layers_are_re_exported_by_the_package() -> None:
    assert {name for name in layers.__all__ if not hasattr(ane_layers, name)} == set()


def test_imports_stay_without_converter_and_transformers() -> None:
    script = """
import sys
for module in ("ane_layers.layers", "ane_layers", "ane_layers.models"):
    __import__(module)
    heavy = {name.partition(".")[0] for name in sys.modules} & {"coremltools", "transformers"}
    assert not heavy, f"{module} imports {heavy}"
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
