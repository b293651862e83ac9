"""The checkpoint that the large benchmark converts is what transformers would have saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Exaone4Config

from ane_layers.checkpoint import Checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from sharded_checkpoint import write_sharded


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_and_would_save_the_same(tied: bool, tmp_path: Path) -> None:
    config = Exaone4Config(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
    )
    folder = tmp_path / "sharded"
    folder.mkdir()
    total = write_sharded(config, folder, seed=3, holes=0.25)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    written = Checkpoint.open(folder)
    assert set(saved) == set(written)
    assert all(torch.equal(saved[name], written[name]) for name in saved)
    assert total == sum(2 * tensor.numel() for tensor in saved.values())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    up = written["model.layers.1.mlp.up_proj.weight"]
    assert not up[54:].any()
    assert bool(up[:54].any(dim=1).all())
    # A matrix and the norms behind it have values of their own.
    assert not torch.equal(up[:40, :40], written["model.layers.2.mlp.up_proj.weight"][:40, :40])
    norm = written["model.layers.0.post_attention_layernorm.weight"].float()
    assert 0.49 <= float(norm.min()) < float(norm.max()) <= 1.51
