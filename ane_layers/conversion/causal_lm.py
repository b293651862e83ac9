"""Packages of our own models: functions, names and metadata as the contracts have them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from ane_layers.compression import Compression
from ane_layers.conversion.check import Expectations
from ane_layers.conversion.converter import convert
from ane_layers.conversion.tracing import FunctionSpec
from ane_layers.models.base import CausalLM
from ane_layers.program import Package

STATES = {"keyCache": "cache.key", "valueCache": "cache.value"}


def convert_causal_lm(
    model: CausalLM,
    path: str | Path,
    *,
    prefill: int,
    all_logits: bool,
    compression: Compression | None,
    duplicate_tied: bool,
    progress: Callable[[str], None] | None,
) -> Package:
    """See `CausalLM.convert`."""
    if not 2 <= prefill <= model.context_length:
        raise ValueError(f"prefill must be within 2 … context_length ({model.context_length}), got {prefill}")
    folded = model.head_sharing == "fold"
    config = {
        "model": dataclasses.asdict(model.config) | {"model_type": model.config.model_type},
        "context_length": model.context_length,
        "prefill": prefill,
        "kv": "in_place",
        "head": "logits",
        "all_logits": all_logits,
        "head_sharing": model.head_sharing,
        "chunk": 0,
        "chunks": 1,
        "recipe": "fp16" if compression is None else compression.plan.recipe.name,
        "promoted_layers": [] if compression is None else list(compression.plan.promoted),
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
    }
    return convert(
        model,
        path,
        functions={
            "decode": _function(1, model.context_length, last_only=False),
            "prefill": _function(prefill, model.context_length, last_only=not all_logits),
        },
        states=STATES,
        metadata={"ane_layers.config": json.dumps(config)},
        expectations=Expectations(
            state_writes=model.config.num_hidden_layers, tile=not folded, highest_rank=4 if folded else 5
        ),
        compression=compression,
        duplicate_tied=duplicate_tied,
        progress=progress,
    )


def _function(length: int, context_length: int, *, last_only: bool) -> FunctionSpec:
    return FunctionSpec(
        inputs={
            "inputIds": torch.zeros(1, length, dtype=torch.int32),
            "position": torch.zeros(1, dtype=torch.int32),
            "causalMask": torch.zeros(1, 1, length, context_length),
        },
        outputs=("logits",),
        arguments={"last_only": last_only},
    )
