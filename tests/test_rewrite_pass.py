"""The graph pass on what coremltools makes of PyTorch's own ways to repeat heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mil_programs import quiet
from torch import Tensor, nn

from ane_layers.analysis import inspect
from ane_layers.interpreter import MLProgram
from ane_layers.program import Package
from ane_layers.rewrite.graph_pass import last_report, pass_pipeline

K, G, T, D = 2, 3, 7, 4

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda x: x[:, :, None].expand(1, K, G, T, D).reshape(1, K * G, T, D),
    "repeat": lambda x: x[:, :, None].repeat(1, 1, G, 1, 1).reshape(1, K * G, T, D),
    "repeat_interleave": lambda x: x.repeat_interleave(G, dim=1),
    "repeat_interleave of tokens first": lambda x: x.transpose(1, 2).repeat_interleave(G, dim=2).transpose(1, 2),
    "cat": lambda x: torch.cat([x[:, :, None]] * G, dim=2).flatten(1, 2),
    "stack": lambda x: torch.stack([x] * G, dim=2).flatten(1, 2),
    "index_select": lambda x: x.index_select(1, torch.arange(K).repeat_interleave(G)),
}


class Eager(nn.Module):
    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.repeat = repeat

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = (query @ self.repeat(key).transpose(-1, -2) * 0.5 + mask).softmax(-1)
        return weights @ self.repeat(value), weights


class Fused(Eager):
    """Kept as one operation where the scale is the default one, taken apart where not."""

    scale: float | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return F.scaled_dot_product_attention(
            query, self.repeat(key), self.repeat(value), attn_mask=mask, scale=self.scale
        )


class FusedWithScale(Fused):
    scale = 0.3


def data(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, K * G, tokens, D), "key": (1, K, T, D), "value": (1, K, T, D), "mask": (1, 1, tokens, T)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def converted(module: nn.Module, path: Path, tokens: int, outputs: list[str]) -> Path:
    given = data(tokens)
    with quiet():
        traced = torch.jit.trace(module, tuple(given.values()))
        ct.convert(
            traced,
            inputs=[ct.TensorType(name=name, shape=value.shape) for name, value in given.items()],
            outputs=[ct.TensorType(name=name) for name in outputs],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT32,
            pass_pipeline=pass_pipeline(),
            skip_model_load=True,
        ).save(str(path))
    return path


def check(module: nn.Module, path: Path, tokens: int, outputs: list[str]) -> Package:
    package = Package.open(converted(module, path, tokens, outputs))
    (function,) = last_report().functions
    assert len(function.folded) == 1
    assert function.after.repetitions == (tokens > 1)
    given = data(tokens)
    actual = MLProgram(package).predict({name: value.numpy() for name, value in given.items()})
    assert list(actual) == outputs
    expected = module(*given.values())
    for wanted, value in zip(expected if isinstance(expected, tuple) else [expected], actual.values(), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-5, atol=1e-5)
    assert inspect(package)["functions"]["main"]["tile"]["count"] == 0
    return package


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_repeating_match_torch(tmp_path: Path, way: str, tokens: int) -> None:
    """The folded result and the unfolded weights are the function's own outputs, and keep their names."""
    check(Eager(WAYS[way]), tmp_path / "m.mlpackage", tokens, ["out", "weights"])


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("module", [Fused, FusedWithScale])
def test_pytorch_s_own_attention_matches_torch(tmp_path: Path, module: type[Fused], tokens: int) -> None:
    package = check(module(WAYS["expand"]), tmp_path / "m.mlpackage", tokens, ["out"])
    types = {operation.type for operation in package.function().block.operations}
    assert ("scaled_dot_product_attention" in types) == (module is Fused)


def test_interleaved_heads_are_left_alone(tmp_path: Path) -> None:
    converted(Eager(lambda x: x.repeat(1, G, 1, 1)), tmp_path / "m.mlpackage", 5, ["out", "weights"])
    (function,) = last_report().functions
    assert not function.folded
    assert function.before == function.after
    assert {refused.reason for refused in function.refused} == {
        "heads are interleaved: query head h reads KV head h % K, not h // G"
    }
