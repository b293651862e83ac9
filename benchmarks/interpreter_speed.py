"""Decode speed and memory of the interpreter against `transformers` eager decode in fp32, one model, one context, one run.

    python benchmarks/make_checkpoint.py --out /tmp/exaone4-1.2b
    python benchmarks/interpreter_speed.py /tmp/exaone4-1.2b

Writes a decode package of the folder, compresses it to 4-bit tables with coremltools (evenly spaced values: what the values are does
not matter for speed), and runs a few tokens at a position deep in the context. `transformers` gets the folder as it is and a cache of
the same length. Every candidate runs in a process of its own; memory is the largest resident size that the operating system saw
(`measure.py`).
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from measure import measured

CANDIDATES = ("transformers eager fp32", "transformers sdpa fp32", "fp32", "fp16", "fp32 compact", "fp16 compact")
THREADS = 2


def write_package(folder: Path, package: Path, context: int) -> None:
    """A 4-bit package with one function, `main`: coremltools compresses no multifunction ones."""
    import coremltools as ct
    import coremltools.optimize.coreml as cto

    from ane_layers.conversion import convert
    from ane_layers.models import from_folder

    model = from_folder(folder, context_length=context, dtype=None)
    inputs = {
        "inputIds": torch.zeros(1, 1, dtype=torch.int32),
        "position": torch.zeros(1, dtype=torch.int32),
        "causalMask": torch.zeros(1, 1, 1, context),
    }
    plain = package.with_name("plain.mlpackage")
    states = {"keyCache": "cache.key", "valueCache": "cache.value"}
    convert(model, plain, example_inputs=inputs, outputs=("logits",), states=states)
    settings = cto.OptimizationConfig(
        global_config=cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=4096)
    )
    cto.palettize_weights(ct.models.MLModel(str(plain), skip_model_load=True), settings).save(str(package))
    shutil.rmtree(plain)


def run_interpreter(package: Path, candidate: str, context: int, position: int, tokens: int) -> list[float]:
    from ane_layers import causal_mask
    from ane_layers.interpreter import MLProgram

    mode, _, compact = candidate.partition(" ")
    program = MLProgram(package, mode=mode, compact=bool(compact))  # type: ignore[arg-type]
    state = program.make_state()
    times = []
    for i in range(tokens):
        inputs = {
            "inputIds": np.array([[7 + i]], np.int32),
            "position": np.array([position + i], np.int32),
            "causalMask": causal_mask(position + i, 1, context).half().numpy(),
        }
        started = time.perf_counter()
        program.predict(inputs, state)
        times.append(time.perf_counter() - started)
    return times


def run_transformers(folder: Path, attention: str, position: int, tokens: int) -> list[float]:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    config = model.config
    shape = (1, config.num_key_value_heads, position, config.head_dim)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.zeros(shape), torch.zeros(shape), layer)
    times = []
    with torch.inference_mode():
        for i in range(tokens):
            started = time.perf_counter()
            model(torch.tensor([[7 + i]]), past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - started)
    return times


def tables(result: Mapping[str, Any]) -> list[str]:
    """Markdown; the first candidate is what the others are held against."""
    lines = [
        f"Context {result['context']}, its last {result['tokens']} positions, {result['threads']} threads:",
        *("", "| candidate | ms a token | speed against eager | peak GB | memory against eager |"),
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        base = result["rows"][0]
        speed, memory = base["ms"] / row["ms"], row["peak_gb"] / base["peak_gb"]
        lines.append(f"| {row['candidate']} | {row['ms']:.0f} | {speed:.2f} | {row['peak_gb']:.2f} | {memory:.2f} |")
    return lines


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint in Hugging Face's format.")],
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens to decode; the first is left out.")] = 9,
    package: Annotated[Path | None, typer.Option(help="A 4-bit decode package that is there already.")] = None,
    only: Annotated[str, typer.Option(help="One candidate alone (internal: each runs in its own process).")] = "",
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    position = context - tokens
    if only:
        torch.set_num_threads(THREADS)
        if only.startswith("transformers"):
            times = run_transformers(folder, only.split()[1], position, tokens)
        else:
            assert package is not None
            times = run_interpreter(package, only, context, position, tokens)
        print(json.dumps({"ms": 1e3 * statistics.median(times[1:])}))
        return
    names = ("torch", "transformers", "coremltools")
    print(f"{platform.machine()}, {THREADS} threads, {', '.join(f'{name} {version(name)}' for name in names)}")
    print(f"{folder.name}, context {context}, positions {position} to {context - 1}, 4-bit tables")
    scratch = Path(tempfile.mkdtemp(prefix="interpreter-speed-"))
    try:
        if package is None:
            package = scratch / "decode.mlpackage"
            write_package(folder, package, context)
        result: dict[str, Any] = {"context": context, "tokens": tokens, "threads": THREADS, "rows": []}
        print("\n".join(tables(result)[-2:]))
        for name in CANDIDATES:
            command = [sys.executable, __file__, str(folder), "--context", str(context), "--tokens", str(tokens)]
            command += ["--package", str(package), "--only", name]
            took = measured(command)
            figures = json.loads(took.output.splitlines()[-1])
            result["rows"].append({"candidate": name, **figures, "peak_gb": took.peak_gb})
            print(tables(result)[-1], flush=True)
        if output is not None:
            output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
