"""Packages of our own models: functions, names and metadata as the contracts have them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ane_layers.chunks import HIDDEN_STATES, NEW_HIDDEN_STATES, NEW_ROWS, FunctionPlan
from ane_layers.compression import Compression
from ane_layers.conversion.check import Expectations
from ane_layers.conversion.converter import convert
from ane_layers.conversion.tracing import FunctionSpec
from ane_layers.models.base import CausalLM
from ane_layers.models.graph import Head
from ane_layers.program import Package

STATES = {
    "keyCache": "cache.key",
    "valueCache": "cache.value",
    "slidingKeyCache": "sliding_cache.key",
    "slidingValueCache": "sliding_cache.value",
}
"""Core ML's names of the caches, and the buffers behind them."""

PARAMETERS = {
    "inputIds": "input_ids",
    HIDDEN_STATES: "hidden_states",
    "position": "position",
    "causalMask": "causal_mask",
    "slidingMask": "sliding_mask",
    "keyCache": "key_cache",
    "valueCache": "value_cache",
    "slidingKeyCache": "sliding_key_cache",
    "slidingValueCache": "sliding_value_cache",
}
"""Inputs, and the parameters of `CausalLM.forward` that take them."""

OUTPUTS: Mapping[Head, tuple[str, ...]] = {
    "logits": ("logits",),
    "argmax": ("token",),
    "top_k": ("topTokens", "topLogits"),
}
"""What a function gives, by its head."""


def plan_functions(
    model: CausalLM,
    *,
    prefill: Sequence[int],
    contexts: Sequence[int],
    head: Head,
    all_logits: bool,
    verify: int | None,
) -> dict[str, FunctionPlan]:
    """The functions of a package by name, `decode` first: it is the default one.

    `decode` and `prefill` read the whole cache, with the first of the block sizes; `prefill_<S>` takes other sizes, `decode_<T>` and
    `prefill_<S>_<T>` read the first T slots alone; `verify` gives the most likely token of each of its positions.

    Raises:
        ValueError: for a size that the model cannot have.
    """
    whole = model.context_length
    sizes = list(dict.fromkeys(prefill))
    for size in (*sizes, *([] if verify is None else [verify])):
        if not 2 <= size <= whole:
            raise ValueError(f"prefill must be within 2 … context_length ({whole}), got {size}")
        if model.sliding_slots and size > model.block_size:
            raise ValueError(
                f"prefill must be at most block_size ({model.block_size}), which the rolling cache was made for, got {size}"
            )
    shorter = sorted({slots for slots in contexts if slots != whole})
    for slots in shorter:
        if not 1 <= slots < whole:
            raise ValueError(f"contexts must be within 1 … context_length ({whole}), got {slots}")
    plans = {"decode": FunctionPlan(length=1, slots=whole, last_only=False, head=head)}
    for slots in (whole, *shorter):
        suffix = "" if slots == whole else f"_{slots}"
        if suffix:
            plans[f"decode{suffix}"] = FunctionPlan(length=1, slots=slots, last_only=False, head=head)
        for size in (size for size in sizes if size <= slots):
            name = f"prefill{'' if size == sizes[0] and not suffix else f'_{size}'}{suffix}"
            plans[name] = FunctionPlan(length=size, slots=slots, last_only=not all_logits, head=head)
    if verify is not None:
        plans["verify"] = FunctionPlan(length=verify, slots=whole, last_only=False, head="argmax")
    return plans


def convert_causal_lm(
    model: CausalLM,
    path: str | Path,
    *,
    prefill: int | Sequence[int],
    contexts: Sequence[int],
    head: Head,
    top_k: int,
    verify: int | None,
    all_logits: bool,
    compression: Compression | None,
    duplicate_tied: bool,
    progress: Callable[[str], None] | None,
) -> Package:
    """See `CausalLM.convert`."""
    sizes = [prefill] if isinstance(prefill, int) else list(prefill)
    if not sizes:
        raise ValueError("prefill must name at least one block size")
    plans = plan_functions(model, prefill=sizes, contexts=contexts, head=head, all_logits=all_logits, verify=verify)
    folded = model.head_sharing == "fold"
    config = {
        "model": dataclasses.asdict(model.config) | {"model_type": model.config.model_type},
        "context_length": model.context_length,
        "prefill": sizes[0],
        "functions": {name: dataclasses.asdict(plan) for name, plan in plans.items()},
        "kv": model.kv,
        "head": head,
        "top_k": top_k if head == "top_k" else None,
        "all_logits": all_logits,
        "head_sharing": model.head_sharing,
        "sliding_slots": model.sliding_slots,
        "chunk": model.part.number,
        "chunks": model.part.count,
        "layers": [model.part.first, model.part.last],
        "recipe": "fp16" if compression is None else compression.plan.recipe.name,
        "promoted_layers": [] if compression is None else list(compression.plan.promoted),
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
    }
    caches = cache_buffers(model)
    return convert(
        model,
        path,
        functions={name: specification(model, plan, caches, top_k) for name, plan in plans.items()},
        states={} if model.kv == "read_only" else caches,
        metadata={"ane_layers.config": json.dumps(config)},
        expectations=Expectations(
            state_writes=_writes(model, caches), tile=not folded, highest_rank=4 if folded else 5
        ),
        compression=compression,
        duplicate_tied=duplicate_tied,
        load=model.stored,
        progress=progress,
    )


def cache_buffers(model: CausalLM) -> dict[str, str]:
    """Those of `STATES` that a model has."""
    buffers = dict(model.named_buffers())
    return {name: path for name, path in STATES.items() if path in buffers}


def _writes(model: CausalLM, caches: Mapping[str, str]) -> dict[str, int]:
    """How often each state is written in a call: once a layer, or once."""
    if model.kv == "read_only":
        return {}
    layers = {name: model.get_buffer(path).shape[0] for name, path in caches.items()}
    return layers if model.kv == "in_place" else dict.fromkeys(layers, 1)


def specification(model: CausalLM, plan: FunctionPlan, caches: Mapping[str, str], top_k: int) -> FunctionSpec:
    """Inputs with examples, outputs and arguments of a planned function."""
    inputs: dict[str, Any] = {}
    if model.part.embedding:
        inputs["inputIds"] = torch.zeros(1, plan.length, dtype=torch.int32)
    else:
        # A head on its own gets the one position that it is asked for.
        length = plan.length if model.kinds or not plan.last_only else 1
        inputs[HIDDEN_STATES] = torch.zeros(1, model.config.hidden_size, 1, length)
    if model.kinds:
        inputs["position"] = torch.zeros(1, dtype=torch.int32)
    for name, mask in zip(("causalMask", "slidingMask"), model.masks(0, plan.length, slots=plan.slots), strict=True):
        if mask is not None:
            inputs[name] = mask
    handed_over = HIDDEN_STATES if model.part.embedding else NEW_HIDDEN_STATES
    outputs = list(OUTPUTS[plan.head]) if model.part.head else [handed_over]
    if model.kv == "read_only":
        inputs |= {name: model.get_buffer(path) for name, path in caches.items()}
        outputs += [NEW_ROWS[name] for name in caches]
    return FunctionSpec(
        inputs=inputs,
        outputs=tuple(outputs),
        arguments={"last_only": plan.last_only, "head": plan.head, "top_k": top_k},
        parameters=PARAMETERS,
    )
