"""Writes a model as a Core AI asset (`.aimodel`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ane_layers.chunks import CONFIG_KEY
from ane_layers.conversion.causal_lm import cache_buffers, plan_functions, specification
from ane_layers.conversion.files import move_into_place, workspace
from ane_layers.conversion.tracing import FunctionSpec, Traceable
from ane_layers.core_ai.packages import quiet, require
from ane_layers.models.base import CausalLM


def export(
    model: CausalLM,
    path: str | Path,
    *,
    prefill: int | Sequence[int] = 64,
    contexts: Sequence[int] = (),
    all_logits: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Writes `decode` and `prefill` over shared weights, in fp32, with the caches as inputs and their new rows as outputs.

    The names are those of a `read_only` Core ML package; floating-point inputs and outputs are fp32.

    Args:
        model: loaded by `from_pretrained` in fp32 and with `kv="read_only"`.
        path: ends in `.aimodel`; replaced only once the new asset is complete.
        prefill, contexts, all_logits: see `CausalLM.convert`.
        progress: called with a line of text at each step.

    Raises:
        ValueError: for a setting or a model that cannot be exported, or without Core AI's Python packages.
    """
    target = Path(path)
    say = progress or (lambda line: None)
    if target.suffix != ".aimodel":
        raise ValueError(f"{path}: the name of a Core AI asset must end in .aimodel")
    if model.kv != "read_only":
        raise ValueError(f"kv must be 'read_only' for Core AI, the model has {model.kv!r}")
    if model.stored is not None or any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("Core AI takes weights in fp32; load the model with from_pretrained(…, dtype=torch.float32)")
    sizes = [prefill] if isinstance(prefill, int) else list(prefill)
    plans = plan_functions(model, prefill=sizes, contexts=contexts, head="logits", all_logits=all_logits, verify=None)
    core_ai, runtime = require("coreai_torch"), require("coreai.runtime")
    converter = core_ai.TorchConverter(mode=core_ai.TorchConverter.Mode.RELEASE)
    caches = cache_buffers(model)
    with workspace(target) as folder, _unchanged(model):
        for name, plan in plans.items():
            say(f"exporting function {name}")
            spec = specification(model, plan, caches, top_k=1)
            with quiet():
                converter.add_pytorch_module(
                    Traceable(model, [], spec).eval(),
                    export_fn=_exporter(core_ai, spec),
                    input_names=list(spec.inputs),
                    output_names=list(spec.outputs),
                    entrypoint_name=name,
                )
        metadata = runtime.AIModelAssetMetadata()
        config = {
            "model": dataclasses.asdict(model.config) | {"model_type": model.config.model_type},
            "context_length": model.context_length,
            "sliding_slots": model.sliding_slots,
            "functions": {name: dataclasses.asdict(plan) for name, plan in plans.items()},
        }
        metadata.set_custom(CONFIG_KEY, json.dumps(config))
        say("converting to Core AI")
        with quiet():
            converter.to_coreai().save_asset(folder / target.name, metadata)
        move_into_place(folder / target.name, target, folder)
    return target


def _exporter(core_ai: Any, spec: FunctionSpec) -> Callable[[torch.nn.Module], Any]:
    def export(module: torch.nn.Module) -> Any:
        program = torch.export.export(module, args=tuple(spec.inputs.values()))
        return program.run_decompositions(core_ai.get_decomp_table())

    return export


@contextlib.contextmanager
def _unchanged(model: CausalLM) -> Iterator[None]:
    """Puts the caches back: a read-only model takes those that it is called with for its own."""
    kept = [(cache, cache.key, cache.value) for cache in model.caches()]
    try:
        yield
    finally:
        for cache, key, value in kept:
            cache.key, cache.value = key, value
