"""Shared by all tests: tiny EXAONE 4 folders that `transformers` writes, every parameter random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# For the commands that tests start as well: on a busy machine, threads for tiny tensors wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tiny tensors: a second thread only waits, several seconds a test where the cores are busy.
torch.set_num_threads(1)

# Positions are short here, so wavelengths below 16, from 16 to 64, and above 64 are all there: kept, blended, stretched.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Of stock `transformers` models: three query heads a KV head, and two layers, since of one the whole state would be the slice.
STOCK_SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def begun(code: str) -> subprocess.Popen[str]:
    """A Python process that runs `code`, from when it has printed `begun`: for a signal in the middle of something."""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def write_exaone4(
    folder: Path,
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    layers: int = 2,
    vocab: int = 109,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 40,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Saves a random model. A head_dim other than hidden / heads and random norms show what round numbers hide.

    The vocabulary of 109 makes 16 head pieces of 7 and a last one of 4. `overrides` go to `Exaone4Config`.
    """
    from transformers import Exaone4Config, Exaone4ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 72,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(LLAMA3),
        "sliding_window": None,
        "sliding_window_pattern": None,
        # transformers 5.24 divides by a pattern of zero if it has to derive the types.
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = Exaone4ForCausalLM(Exaone4Config(**(settings | overrides)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    return folder


@pytest.fixture(scope="session")
def exaone4_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`exaone4_folder(**options of write_exaone4)` gives a folder, made once a session: do not write into it."""
    made: dict[str, Path] = {}

    def folder(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in made:
            made[key] = write_exaone4(tmp_path_factory.mktemp("exaone4"), **options)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def exaone4_reference() -> Callable[[Path], Any]:
    """`exaone4_reference(folder)` loads `transformers`' own model of it, in fp32."""
    from transformers import Exaone4ForCausalLM

    loaded: dict[Path, Any] = {}

    def reference(folder: Path) -> Any:
        if folder not in loaded:
            loaded[folder] = Exaone4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return loaded[folder]

    return reference
