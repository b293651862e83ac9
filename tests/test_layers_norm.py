"""RMSNorm against torch's in fp32, and with every operation rounded to fp16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from ane_layers.layers import RMSNorm


def reference(x: Tensor, weight: Tensor, eps: float, dim: int) -> Tensor:
    moved = x.float().movedim(dim, -1)
    return F.rms_norm(moved, (moved.shape[-1],), weight.float(), eps).movedim(-1, dim)


def norm(size: int, eps: float, dim: int, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(size, eps=eps, dim=dim).requires_grad_(False).to(dtype)
    layer.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(7))
    return layer


def rows(shape: tuple[int, ...], scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((1, 5, 1, 1), 1), ((3, 35, 1, 4), 1), ((1, 2048, 1, 3), 1), ((1, 3, 1, 7), -1), ((3, 5, 4, 64), -1), ((3, 9), 1)],
)
def test_rms_norm_matches_torch(shape: tuple[int, ...], dim: int, eps: float) -> None:
    layer = norm(shape[dim], eps, dim)
    x = rows(shape)
    assert_close(layer(x), reference(x, layer.weight, eps, dim), atol=1e-5, rtol=0)


def test_rms_norm_with_a_weight_row_per_head_matches_torch() -> None:
    x = rows((3, 5, 4, 12))
    layer = norm(12, 1e-5, -1)
    layer.weight = torch.nn.Parameter(rows((1, 5, 1, 12)), requires_grad=False)
    expected = F.rms_norm(x, (12,), None, 1e-5) * layer.weight
    assert_close(layer(x), expected, atol=1e-5, rtol=0)


# A square of 300 is infinite in fp16; a mean square of 2e-4 and an eps of 1e-6 have few bits there. [rows, C]
FP16_ROWS = {
    "all 300": lambda shape: torch.full(shape, 300.0),
    "root mean square 700": lambda shape: rows(shape, 700.0),
    "mean square 2e-4": lambda shape: rows(shape, 2e-4**0.5),
    "mean square 1e-6": lambda shape: rows(shape, 1e-3),
    "one element of 30000": lambda shape: rows(shape).index_fill_(1, torch.tensor([2]), 3e4),
}


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize("row", FP16_ROWS)
@pytest.mark.parametrize("size", [64, 2048])
@pytest.mark.parametrize("dim", [1, -1])
def test_fp16_rms_norm_matches_fp32(dim: int, size: int, row: str, eps: float) -> None:
    x = FP16_ROWS[row]((6, size)).half()
    x = x.T.reshape(1, size, 1, 6) if dim == 1 else x.reshape(1, 3, 2, size)
    layer = norm(size, eps, dim, torch.float16)
    expected = reference(x, layer.weight, eps, dim)
    # Five roundings of 2⁻¹¹; below, half of fp16's subnormal step in x / length, which weight · sqrt(C) enlarges.
    assert_close(layer(x).float(), expected, rtol=4e-3, atol=2**-25 * 1.5 * size**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [1, -1])
def test_rms_norm_of_a_zero_row_is_zero(dim: int, dtype: torch.dtype) -> None:
    layer = norm(64, 1e-6, dim, dtype)
    shape = (3, 64, 1, 2) if dim == 1 else (3, 2, 2, 64)
    assert (layer(torch.zeros(shape, dtype=dtype)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_eps_on_tiny_rows_is_not_floored(dtype: torch.dtype) -> None:
    """Rows of mean square 1e-8: an eps of 1e-6 and one of 1e-5 differ by a factor of about three."""
    x = rows((1, 64, 1, 5), 1e-4, dtype)
    outputs = {eps: norm(64, eps, 1, dtype)(x).float() for eps in (1e-6, 1e-5)}
    for eps, out in outputs.items():
        assert_close(out, reference(x, norm(64, eps, 1, dtype).weight, eps, 1), rtol=4e-3, atol=1e-6)
    assert (outputs[1e-6].norm() / outputs[1e-5].norm()) > 3


def test_large_eps_changes_the_output() -> None:
    x = rows((1, 64, 1, 5), 0.1)
    small, large = (norm(64, eps, 1)(x) for eps in (1e-6, 1e-2))
    assert (small - large).abs().max() > 0.1


def test_negative_eps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eps.*-1e-05"):
        RMSNorm(8, eps=-1e-5)


@pytest.mark.parametrize(("shape", "dim"), [((1, 35, 1, 4), 1), ((3, 5, 4, 14), -1)])
def test_weights_stored_as_distance_from_1_match_transformers(shape: tuple[int, ...], dim: int) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    reference = Gemma3RMSNorm(shape[dim], eps=1e-5).requires_grad_(False)
    reference.weight.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(7))
    layer = RMSNorm(shape[dim], eps=1e-5, dim=dim, offset=1.0).requires_grad_(False)
    layer.load_state_dict(reference.state_dict())
    x = rows(shape)
    expected = reference(x.movedim(dim, -1)).movedim(-1, dim)
    assert_close(layer(x), expected, atol=1e-5, rtol=0)
    assert_close(layer.gain(), 1 + reference.weight, atol=0, rtol=0)
