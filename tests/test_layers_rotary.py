"""Rotary frequencies, tables and rotation against `transformers`' and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Exaone4Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.exaone4.modeling_exaone4 import Exaone4RotaryEmbedding, apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ane_layers.layers import RotaryEmbedding, rotary_frequencies, rotate

EXAONE4 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA31 = EXAONE4 | {"factor": 8.0}
ODD = EXAONE4 | {
    "factor": 3.5,
    "low_freq_factor": 0.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 100,
}


def exaone4_config(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Exaone4Config:
    rope = {"rope_type": "default", "rope_theta": theta} | (scaling or {})
    sizes = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": None}
    return Exaone4Config(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072, **sizes)


def known(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in EXAONE4.items() if key not in keys}


@pytest.mark.parametrize("scaling", [EXAONE4, LLAMA31, ODD])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e6), (128, 5e5), (18, 1e4)])
def test_llama3_frequencies_match_transformers(head_dim: int, theta: float, scaling: dict[str, Any]) -> None:
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](exaone4_config(head_dim, theta, scaling), device="cpu")
    assert attention_factor == 1
    actual = rotary_frequencies(head_dim, rope_theta=theta, rope_scaling=scaling)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e6), (18, 1e4), (2, 1e4)])
def test_default_frequencies_match_transformers(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    expected = Exaone4RotaryEmbedding(exaone4_config(head_dim, theta, None)).inv_freq
    assert_close(rotary_frequencies(head_dim, rope_theta=theta, rope_scaling=scaling), expected, rtol=1e-6, atol=0)
    llama = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert_close(expected, LlamaRotaryEmbedding(llama).inv_freq)


def test_frequencies_of_the_old_key_match_those_of_the_new_one() -> None:
    old = known("rope_type") | {"type": "llama3"}
    new = rotary_frequencies(64, rope_theta=1e6, rope_scaling=EXAONE4)
    assert_close(rotary_frequencies(64, rope_theta=1e6, rope_scaling=old), new, rtol=0, atol=0)
    assert not torch.equal(new, rotary_frequencies(64, rope_theta=1e6))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope_type", ["yarn", "linear", "dynamic", "longrope", "Llama3", None])
def test_unknown_rope_type_is_refused(key: str, rope_type: str | None) -> None:
    with pytest.raises(ValueError, match=f"rope_type {rope_type!r}") as error:
        rotary_frequencies(64, rope_theta=1e6, rope_scaling=known("rope_type") | {key: rope_type})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_missing_llama3_parameter_is_refused(key: str) -> None:
    for scaling in (known(key), EXAONE4 | {key: None}):
        with pytest.raises(ValueError, match=f"llama3.*lacks {key}"):
            rotary_frequencies(64, rope_theta=1e6, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 0),
        ("factor", -2),
        ("high_freq_factor", 1.0),
        ("high_freq_factor", 0.5),
        ("original_max_position_embeddings", 0),
        ("factor", "sixteen"),
        ("factor", [16]),
        ("factor", float("nan")),
    ],
)
def test_impossible_llama3_parameter_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        rotary_frequencies(64, rope_theta=1e6, rope_scaling=EXAONE4 | {key: value})


def test_parameter_that_changes_the_arithmetic_is_not_ignored() -> None:
    """`transformers` rotates only a part of the head with this parameter."""
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        rotary_frequencies(64, rope_theta=1e6, rope_scaling=EXAONE4 | {"partial_rotary_factor": 0.5})


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim.*33"):
        rotary_frequencies(33, rope_theta=1e6)


@pytest.fixture(scope="module")
def exaone4_table() -> RotaryEmbedding:
    frequencies = rotary_frequencies(64, rope_theta=1e6, rope_scaling=EXAONE4)
    return RotaryEmbedding(frequencies, max_positions=65536)


def unsigned(sin: Tensor) -> Tensor:
    """Both halves positive, as `transformers` has them."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


@pytest.mark.parametrize("position", [0, 1, 4095, 65535 - 4])
@pytest.mark.parametrize("length", [1, 5])
def test_table_matches_transformers(exaone4_table: RotaryEmbedding, position: int, length: int) -> None:
    config = exaone4_config(64, 1e6, EXAONE4)
    expected = Exaone4RotaryEmbedding(config)(torch.zeros(1), torch.arange(position, position + length)[None])
    cos, sin = exaone4_table(torch.tensor([position], dtype=torch.int32), length)
    assert cos.shape == sin.shape == (1, 1, length, 64)
    assert cos.dtype == sin.dtype == torch.float32
    assert_close(cos[0], expected[0], atol=1e-5, rtol=0)
    assert_close(unsigned(sin)[0], expected[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", [1, 4095, 65535])
def test_table_matches_float64_within_fp32_rounding(exaone4_table: RotaryEmbedding, position: int) -> None:
    """An fp16 table is off by radians at position 4095: the angle itself is then rounded to steps of 2."""
    exponents = torch.arange(0, 64, 2, dtype=torch.float64) / 64
    frequencies = 1e6**-exponents
    kept = ((8192 * frequencies / (2 * torch.pi) - 1) / 3).clamp(0, 1)
    angles = position * frequencies * (kept + (1 - kept) / 16)
    cos, sin = exaone4_table(torch.tensor([position], dtype=torch.int32), 1)
    # Frequency and angle are rounded to fp32 relatively; the cosine turns that into an absolute error.
    bound = 4 * 2**-24 * angles.repeat(2) + 1e-6
    assert ((cos.flatten() - angles.cos().repeat(2)).abs() <= bound).all()
    assert ((unsigned(sin).flatten() - angles.sin().repeat(2)).abs() <= bound).all()


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(("position", "length"), [(0, 1), (0, 5), (6, 1), (6, 7)])
@pytest.mark.parametrize("scaling", [None, ODD])
def test_rotation_matches_transformers(b: int, position: int, length: int, scaling: dict[str, Any] | None) -> None:
    d = 18
    generator = torch.Generator().manual_seed(position)
    query, key = torch.randn(b, 6, length, d, generator=generator), torch.randn(b, 3, length, d, generator=generator)
    positions = torch.arange(position, position + length)[None]
    cos, sin = Exaone4RotaryEmbedding(exaone4_config(d, 1e4, scaling))(query, positions)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    frequencies = rotary_frequencies(d, rope_theta=1e4, rope_scaling=scaling)
    table = RotaryEmbedding(frequencies, max_positions=13)(torch.tensor([position], dtype=torch.int32), length)
    assert_close(rotate(query, *table), expected[0], atol=1e-5, rtol=0)
    assert_close(rotate(key, *table), expected[1], atol=1e-5, rtol=0)


def test_position_past_the_table_is_an_error() -> None:
    table = RotaryEmbedding(rotary_frequencies(8, rope_theta=1e4), max_positions=4)
    with pytest.raises(IndexError):
        table(torch.tensor([3], dtype=torch.int32), 2)


@pytest.mark.parametrize("folded", [False, True])
def test_rotation_of_a_part_of_the_head_matches_transformers(folded: bool) -> None:
    """Phi-4-mini's: the first elements are rotated, with a factor, and the others left as they are."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as partial_rotation

    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 5, 16, generator=generator), torch.randn(2, 1, 5, 16, generator=generator)
    frequencies = rotary_frequencies(12, rope_theta=100.0)
    angles = torch.outer(torch.arange(2.0, 7), torch.cat([frequencies] * 2))
    expected = partial_rotation(query, key, 1.2 * angles.cos()[None], 1.2 * angles.sin()[None])
    table = RotaryEmbedding(frequencies, max_positions=9, head_dim=16, factor=1.2)
    cos, sin = table(torch.tensor([2], dtype=torch.int32), 5)
    for x, wanted in zip((query, key), expected, strict=True):
        actual = rotate(x.mT, cos.mT, sin.mT, dim=2, rotated=12).mT if folded else rotate(x, cos, sin, rotated=12)
        assert_close(actual, wanted, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="12 elements of a head are to be rotated, but head_dim is 10"):
        RotaryEmbedding(frequencies, max_positions=9, head_dim=10)
