"""Writes a checkpoint folder with the geometry of EXAONE 4.0 1.2B or 32B and random weights, for measurements without a download.

    python benchmarks/make_checkpoint.py --out FOLDER [--layers 30] [--seed 0]
    python benchmarks/make_checkpoint.py --out FOLDER --geometry 32b --layers 4 --vocabulary 1024   # one group of its layers
    python benchmarks/make_checkpoint.py --out FOLDER --geometry 32b --sharded --holes 0.3          # all of it, 48 GB on disk

The folder is what transformers' `save_pretrained` writes: config.json, generation_config.json, model.safetensors in
bf16. It has no tokenizer, and its text means nothing: it serves for shapes, sizes, speed and numerical agreement.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from sharded_checkpoint import NORM_RANGE, STD, shapes, write_sharded
from transformers import Exaone4Config, Exaone4ForCausalLM


class Geometry(StrEnum):
    small = "1.2b"
    large = "32b"


def exaone4_config(geometry: Geometry, layers: int | None, vocabulary: int) -> Exaone4Config:
    large = geometry is Geometry.large
    count = layers or (64 if large else 30)
    # Three layers with a sliding window, then one that sees everything; without a window, transformers derives nothing from the pattern.
    kinds = ["sliding_attention" if large and (number + 1) % 4 else "full_attention" for number in range(count)]
    return Exaone4Config(
        hidden_size=5120 if large else 2048,
        intermediate_size=27392 if large else 4096,
        num_hidden_layers=count,
        num_attention_heads=40 if large else 32,
        num_key_value_heads=8,
        head_dim=128 if large else 64,
        vocab_size=vocabulary,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        max_position_embeddings=131072 if large else 65536,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        sliding_window=4096 if large else None,
        sliding_window_pattern="LLLG" if large else None,
        layer_types=kinds,
        tie_word_embeddings=not large,
        bos_token_id=1,
        eos_token_id=361,
        pad_token_id=0,
    )


def random_model(config: Exaone4Config, seed: int) -> Exaone4ForCausalLM:
    """A bf16 model with every parameter drawn; the same seed gives the same first layers for any number of them."""
    with torch.device("meta"):
        model = Exaone4ForCausalLM(config)
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
    geometry: Annotated[Geometry, typer.Option(help="Whose widths.")] = Geometry.small,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers; the model's own by default.")] = None,
    vocabulary: Annotated[int, typer.Option(min=512, help="Rows of embedding and head.")] = 102400,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    sharded: Annotated[bool, typer.Option("--sharded", help="Write a file a layer, for models beyond memory.")] = False,
    holes: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="With --sharded: share of feed-forward rows that are zeros without room on disk."
        ),
    ] = 0.0,
) -> None:
    """Write a checkpoint folder with EXAONE 4's geometry and random bf16 weights."""
    out = out.absolute()
    if out.exists() or out.is_symlink():
        sys.exit(f"--out {out}: exists already; give a new folder or remove it")
    if not out.parent.is_dir():
        sys.exit(f"--out {out}: {out.parent} is not a folder")
    if holes and not sharded:
        sys.exit(f"--holes {holes}: belongs to --sharded")
    # `kill` ends a program without the clean-up below unless it becomes an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A sibling, so that the last step is a rename: the folder is there whole or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        written = Path(scratch) / out.name
        config = exaone4_config(geometry, layers, vocabulary)
        if sharded:
            written.mkdir()
            write_sharded(config, written, seed=seed, holes=holes)
        else:
            model = random_model(config, seed)
            print("writing", out, file=sys.stderr)
            model.save_pretrained(written)
        written.rename(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    count = sum(math.prod(shape) for shape in shapes(config).values())
    print(f"{out}: {config.num_hidden_layers} layers, {count:,} parameters, {size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    typer.run(make)
