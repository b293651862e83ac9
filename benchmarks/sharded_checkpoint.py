"""A checkpoint of a model that does not fit into memory: a safetensors file for every layer, written one tensor after the other.

Names, shapes and config are those that transformers' `save_pretrained` gives (`tests/test_sharded_checkpoint.py`). Weights are
drawn once and every tensor takes a stretch of them from a place of its own, since drawing 32 billion numbers would take longer than
converting them. `holes` leaves the last rows of the feed-forward matrices out of the file, which the file system then keeps as holes: they
are zeros, take no room on disk, and are read, converted and written like any other weights.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from transformers import Exaone4Config, Exaone4ForCausalLM

# The usual initialisation. The norms after attention and feed-forward bound what a layer adds, whatever its weights.
STD = 0.02
# Norm weights away from 1: with all of them at 1 a swapped order of norm and rotary would not show.
NORM_RANGE = (0.5, 1.5)
_POOL = 1 << 26


def shapes(config: Exaone4Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is saved, in the model's order."""
    with torch.device("meta"):
        model = Exaone4ForCausalLM(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def write_sharded(config: Exaone4Config, folder: Path, *, seed: int = 0, holes: float = 0.0) -> int:
    """Writes config, index and shards into a folder that exists; returns the bytes of all tensors.

    Args:
        config: of the model.
        folder: empty.
        seed: of the weights.
        holes: share of the rows of feed-forward matrices that are left out, and read as zeros.
    """
    config.architectures = ["Exaone4ForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    generator = np.random.default_rng(seed)
    pool = bfloat16_bits(generator.standard_normal(_POOL, dtype=np.float32) * STD)
    norms = bfloat16_bits(generator.uniform(*NORM_RANGE, 1 << 20).astype(np.float32))
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes(config).items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        groups.setdefault(f"layer-{int(layer[1]):03d}" if layer else "rest", {})[name] = shape
    placed: dict[str, str] = {}
    total = 0
    for number, (group, tensors) in enumerate(groups.items(), start=1):
        print(f"\r{number}/{len(groups)} {group:<30}", end="", file=sys.stderr, flush=True)
        file = folder / f"model-{group}.safetensors"
        total += _write(file, tensors, pool, norms, generator, holes)
        placed |= dict.fromkeys(tensors, file.name)
    print(file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 → the upper half of their bits, as uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _write(
    file: Path,
    tensors: Mapping[str, tuple[int, ...]],
    pool: np.ndarray,
    norms: np.ndarray,
    generator: np.random.Generator,
    holes: float,
) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        start = out.tell()
        for name, shape in tensors.items():
            place = header[name]["data_offsets"][0]  # type: ignore[index]
            rows = shape[0] - int(holes * shape[0]) if ".mlp." in name else shape[0]
            _pour(out, start + place, rows * math.prod(shape[1:]), norms if len(shape) == 1 else pool, generator)
        out.truncate(start + end)
    return end


def _pour(out: BinaryIO, place: int, count: int, source: np.ndarray, generator: np.random.Generator) -> None:
    out.seek(place)
    first = int(generator.integers(len(source)))
    while count:
        piece = source[first : first + count]
        out.write(piece.data)
        count -= len(piece)
        first = 0
