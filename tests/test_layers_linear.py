"""Linear layers as convolutions against `nn.Linear`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ane_layers.layers import Linear, fuse_linears


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.requires_grad_(False).parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return module


def channels_last(x: Tensor) -> Tensor:
    """`[B, C, 1, S] → [B, S, C]`, the layout of `nn.Linear`."""
    return x.squeeze(2).transpose(1, 2)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("b", "s"), [(1, 1), (3, 1), (1, 5), (3, 7)])
def test_linear_matches_torch(b: int, s: int, bias: bool, assign: bool) -> None:
    reference = drawn(nn.Linear(13, 9, bias=bias))
    layer = Linear(13, 9, bias=bias)
    layer.load_state_dict(reference.state_dict(), assign=assign)
    x = torch.randn(b, 13, 1, s, generator=torch.Generator().manual_seed(1))
    out = layer(x)
    assert out.shape == (b, 9, 1, s)
    assert_close(channels_last(out), reference(channels_last(x)), atol=1e-5, rtol=0)
    if assign:
        assert layer.weight.data_ptr() == reference.weight.data_ptr()


def test_linear_round_trip_matches_itself() -> None:
    layer, copy = drawn(Linear(5, 7, bias=True)), Linear(5, 7, bias=True)
    copy.load_state_dict(layer.state_dict())
    assert_close(copy.weight, layer.weight, atol=0, rtol=0)


def test_linear_refuses_a_weight_of_another_shape() -> None:
    with pytest.raises(RuntimeError, match="weight"):
        Linear(5, 7).load_state_dict({"weight": torch.zeros(5, 7)})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("s", [1, 5])
def test_fused_linears_match_torch_linears(s: int, bias: bool) -> None:
    references = [drawn(nn.Linear(13, size, bias=bias), seed) for seed, size in enumerate((9, 4, 1))]
    plain = [Linear(13, reference.out_features, bias=bias) for reference in references]
    for layer, reference in zip(plain, references, strict=True):
        layer.load_state_dict(reference.state_dict())
    x = torch.randn(3, 13, 1, s, generator=torch.Generator().manual_seed(1))
    fused = fuse_linears(plain)
    assert (fused.in_features, fused.out_features) == (13, 14)
    expected = torch.cat([reference(channels_last(x)) for reference in references], dim=-1)
    assert_close(channels_last(fused(x)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one"),
        ([Linear(4, 2), Linear(5, 2)], r"in_features \[4, 5\]"),
        ([Linear(4, 2), Linear(4, 2, bias=True)], r"bias.*\[False, True\]"),
    ],
)
def test_linears_that_do_not_fit_are_refused(layers: list[Linear], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fuse_linears(layers)
