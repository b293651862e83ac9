"""Folded attention inside stock `transformers` models: the same logits as theirs, and no repetition in a plain conversion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import STOCK_SIZES
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from stock_models import convert_stock, random_model

from ane_layers.analysis import inspect
from ane_layers.integrations import replace_attention, transformers_attention
from ane_layers.integrations.transformers_attention import NAME, folded_attention
from ane_layers.program import Package
from ane_layers.rewrite.planning import repeated

FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
HYBRID = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"head_dim": 16}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Mistral, sliding window": ("Mistral", {"head_dim": 16, "sliding_window": 4}),
    "Exaone4": ("Exaone4", {"head_dim": 16, **FULL}),
    "Exaone4, hybrid": ("Exaone4", {"head_dim": 16, "sliding_window": 4, "sliding_window_pattern": "LG", **HYBRID}),
    "Gemma2, softcap": ("Gemma2", {"head_dim": 16, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 4, **HYBRID}),
    "GptOss, sinks": ("GptOss", {"head_dim": 16, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1, **HYBRID}),
}  # fmt: skip


def model_of(name: str, attention: str = "eager") -> Any:
    family, settings = MODELS[name]
    return random_model(family, attention=attention, **(STOCK_SIZES | settings))


def padded(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that hides what was put in front of shorter rows."""
    ids = torch.randint(1, STOCK_SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : row + 1] = 0
    return ids * mask, mask


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_match_the_stock_model(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    check = transformers_attention._check
    monkeypatch.setattr(transformers_attention, "_check", lambda *given: (calls.append(given), check(*given)))
    ids, mask = padded(batch, 9)
    model = model_of(name)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        assert replace_attention(model) is model
        actual = model(input_ids=ids, attention_mask=mask).logits
    seen = mask.bool()
    assert len(calls) == STOCK_SIZES["num_hidden_layers"]
    torch.testing.assert_close(actual[seen], expected[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_match_the_stock_model(name: str) -> None:
    """Prefill, then one token at a time against the model's own cache."""
    ids, mask = padded(2, 6)
    model = model_of(name)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    assert torch.equal(replace_attention(model).generate(ids, **options), expected)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Exaone4"])
def test_a_plain_conversion_repeats_nothing(tmp_path: Path, name: str, tokens: int) -> None:
    model = replace_attention(model_of(name))
    package = Package.open(convert_stock(model, tmp_path / "m.mlpackage", context=16, tokens=tokens))
    counts = inspect(package)["functions"]["main"]
    assert counts["tile"]["count"] == 0
    assert counts["highest_rank"] == 4
    # The rotary angles, and for several tokens the rows of one mask for both layers.
    assert repeated(package.function()).repetitions == 1 + (tokens > 1)


def test_weights_and_per_head_masks_match_eager() -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    model = model_of("Llama")
    layer = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 16, generator=generator) for heads in (6, 2, 2))
    for shape in ((1, 1, 5, 5), (2, 1, 5, 5), (2, 6, 5, 5)):
        mask = torch.randn(shape, generator=generator)
        expected = eager_attention_forward(layer, query, key, value, mask, scaling=0.3)
        for actual, wanted in zip(folded_attention(layer, query, key, value, mask, scaling=0.3), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    expected = eager_attention_forward(
        layer, query, key, value, torch.zeros(5, 5).masked_fill(~seen, -1e9), scaling=1.0
    )
    torch.testing.assert_close(folded_attention(layer, query, key, value, seen, scaling=1.0)[0], expected[0])


def test_it_can_be_taken_back() -> None:
    model = replace_attention(model_of("Llama"))
    assert model.config._attn_implementation == NAME
    model.set_attn_implementation("sdpa")
    ids, mask = padded(1, 5)
    with torch.no_grad():
        actual = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(actual, model_of("Llama")(input_ids=ids, attention_mask=mask).logits)


def test_a_mask_that_changes_between_calls_is_lined_up_anew() -> None:
    model, stock = replace_attention(model_of("Llama")), model_of("Llama")
    ids, _ = padded(1, 5)
    mask = torch.full((1, 1, 5, 5), -1e4).triu(1)
    for _ in range(2):
        with torch.no_grad():
            actual, expected = (each(input_ids=ids, attention_mask=mask).logits for each in (model, stock))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        mask[:, :, 3:, 1] = -1e4


def test_what_is_not_computed_is_refused() -> None:
    layer = model_of("Llama").model.layers[0].self_attn
    query, key = torch.zeros(1, 6, 3, 16), torch.zeros(1, 2, 3, 16)
    mask = torch.zeros(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"dropout is 0\.1; call eval"):
        folded_attention(layer, query, key, key, mask, dropout=0.1)
    with pytest.raises(ValueError, match="position_bias is not known"):
        folded_attention(layer, query, key, key, mask, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="a mask is missing for 3 tokens"):
        folded_attention(layer, query, key, key, None)
    folded_attention(layer, query[:, :, :1], key, key, None)  # one token sees all there is


def test_models_outside_the_registry_are_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    with pytest.raises(ValueError, match="does not look its attention up"):
        replace_attention(BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=11)))
    with pytest.raises(TypeError, match="got Linear"):
        replace_attention(torch.nn.Linear(2, 2))


def test_transformers_is_imported_only_when_it_is_used() -> None:
    code = "import sys, ane_layers.integrations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
