"""Writes a checkpoint folder with EXAONE 4.0 1.2B's geometry and random weights, for measurements without a download.

    python benchmarks/make_checkpoint.py --out FOLDER [--layers 30] [--seed 0]

The folder is what transformers' `save_pretrained` writes: config.json, generation_config.json, model.safetensors in
bf16. It has no tokenizer, and its text means nothing: it serves for shapes, sizes, speed and numerical agreement.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import Exaone4Config, Exaone4ForCausalLM

# The usual initialisation. The norms after attention and feed-forward bound what a layer adds, whatever its weights.
STD = 0.02
# Norm weights away from 1: with all of them at 1 a swapped order of norm and rotary would not show.
NORM_RANGE = (0.5, 1.5)


def exaone4_config(layers: int) -> Exaone4Config:
    return Exaone4Config(
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=102400,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        max_position_embeddings=65536,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        sliding_window=None,
        # Without it, transformers derives the types from the pattern, which it cannot do when there is no window.
        layer_types=["full_attention"] * layers,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=361,
        pad_token_id=0,
    )


def random_model(layers: int, seed: int) -> Exaone4ForCausalLM:
    """A bf16 model with every parameter drawn; the same seed gives the same first layers for any number of them."""
    with torch.device("meta"):
        model = Exaone4ForCausalLM(exaone4_config(layers))
    # By way of the meta device: fp32 weights and transformers' own initialisation would double memory and time.
    model.to(torch.bfloat16).to_empty(device="cpu").tie_weights()
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for i, (name, parameter) in enumerate(parameters.items(), start=1):
            print(f"\r{i}/{len(parameters)} {name:<60}", end="", file=sys.stderr, flush=True)
            if parameter.ndim == 1:
                parameter.uniform_(*NORM_RANGE, generator=generator)
            else:
                parameter.normal_(std=STD, generator=generator)
    print(file=sys.stderr)
    return model


def make(
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a checkpoint folder with EXAONE 4.0 1.2B's geometry and random bf16 weights."""
    out = out.absolute()
    if out.exists() or out.is_symlink():
        sys.exit(f"--out {out}: exists already; give a new folder or remove it")
    if not out.parent.is_dir():
        sys.exit(f"--out {out}: {out.parent} is not a folder")
    # `kill` ends a program without the clean-up below unless it becomes an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A sibling, so that the last step is a rename: the folder is there whole or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        written = Path(scratch) / out.name
        model = random_model(layers, seed)
        print("writing", out, file=sys.stderr)
        model.save_pretrained(written)
        written.rename(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {layers} layers, {model.num_parameters():,} parameters, {size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    typer.run(make)
