"""The ways of sharing KV heads as Core AI programs: what the converter makes of each, and what Core AI's runtime for Linux takes.

    pip install coreai-torch          # Linux or macOS; not a dependency of this library
    python benchmarks/gqa_core_ai.py

Attention alone (`head_sharing_ways.py`), fp32. Counts are of the program that `coreai-torch` writes: operations without constants, and the
bytes of results that only repeat data (`tile`, `broadcast_in_dims`). Times are of the runtime that comes with `coreai-core`, on this
CPU, with glibc's allocator pinned as in `head_sharing_cpu.py`: processor time of all its threads, so that waiting for a core is not in it.
They say nothing about Apple's devices. Compare rows of one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from head_sharing_cpu import PINNED, measure, silence
from head_sharing_ways import WAYS, Geometry, attend

from ane_layers import causal_mask

warnings.filterwarnings("ignore", message=".*coreai-torch has only been validated.*")
try:
    import coreai_torch
    from coreai.runtime import NDArray
except ImportError:
    sys.exit("gqa_core_ai.py needs Core AI's Python packages: pip install coreai-torch")

BITS = {"f16": 16, "f32": 32}
NAMES = {**WAYS, "fused": "SDPA on folded queries", "reference": "SDPA with enable_gqa"}


def counts(text: str) -> tuple[int, int]:
    """Operations of a program's text without constants, and bytes of results that only repeat data."""
    operations = repeated = 0
    for line in text.splitlines():
        found = re.match(r"\s*%\S+ = coreai\.(?:decomposable\.)?(\w+) ", line)
        if not found or found[1] in ("constant", "invoke"):
            continue
        operations += 1
        if found[1] in ("tile", "broadcast_in_dims"):
            shape, dtype = re.findall(r"tensor<([\dx]*)x(\w+)>", line)[-1]
            repeated += math.prod(map(int, shape.split("x"))) * BITS[dtype] // 8
    return operations, repeated


async def load(way: str, geometry: Geometry, tokens: int, folder: Path) -> tuple[str, Callable[[], Any], float]:
    """The program's text, a call of it, and its largest difference from PyTorch."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, geometry.heads, tokens, geometry.head_dim, generator=generator)
    shape = (1, geometry.kv_heads, geometry.context, geometry.head_dim)
    key, value = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    mask = causal_mask(geometry.context - tokens, tokens, geometry.context)
    wanted = attend("reference", geometry)(query, key, value, mask)
    module = attend(way, geometry).eval()
    inputs = {"query": query, "key": key, "value": value, "mask": module.align_mask(mask, tokens)}

    def export(module: torch.nn.Module) -> Any:
        exported = torch.export.export(module, args=tuple(inputs.values()))
        return exported.run_decompositions(coreai_torch.get_decomp_table())

    converter = coreai_torch.TorchConverter(mode=coreai_torch.TorchConverter.Mode.RELEASE)
    converter.add_pytorch_module(module, export_fn=export, input_names=list(inputs), output_names=["output"])
    program = converter.to_coreai()
    asset = program.save_asset(folder / f"{way}.aimodel")
    model = await asset.executable().__aenter__()  # lives as long as the process
    function = model.load_function("main")
    arrays = {name: NDArray(tensor.numpy()) for name, tensor in inputs.items()}
    loop = asyncio.get_running_loop()
    error = abs((await function(arrays))["output"].numpy() - wanted.numpy()).max()
    return str(program), lambda: loop.run_until_complete(function(arrays)), float(error)


def main(
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    rounds: Annotated[int, typer.Option()] = 7,
    seconds: Annotated[float, typer.Option(help="Of each way in each round.")] = 0.3,
) -> None:
    if "MALLOC_TOP_PAD_" not in os.environ:  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PINNED)
    geometry = Geometry(context=context)
    packages = ", ".join(f"{name} {version(name)}" for name in ("coreai-core", "coreai-torch", "torch"))
    print(f"{platform.machine()} {platform.system()}, no Apple device, {packages}, fp32, context {context}")
    print("| way | tokens | operations | repeated MiB | error | ms | best | of fold (quartiles) | page faults |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    loop = asyncio.new_event_loop()
    errors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gqa-core-ai-") as scratch:
        for tokens in (1, 64):
            folder = Path(scratch) / str(tokens)
            folder.mkdir()
            with silence(), contextlib.redirect_stdout(io.StringIO()):
                loaded = {way: loop.run_until_complete(load(way, geometry, tokens, folder)) for way in NAMES}
            calls = {way: call for way, (_, call, _) in loaded.items()}
            times = measure(calls, rounds=rounds, seconds=seconds, clock=time.process_time)
            for way, (text, _, error) in loaded.items():
                operations, repeated = counts(text)
                row = times[way]
                ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
                cells = [
                    NAMES[way],
                    tokens,
                    operations,
                    f"{repeated / 2**20:g}",
                    f"{error:.0e}",
                    f"{row['ms']:.1f}",
                    f"{row['best']:.1f}",
                ]
                print("| " + " | ".join(map(str, [*cells, ratio, f"{row['faults']:.0f}"])) + " |", flush=True)
                errors.append(error)
    if wrong := [error for error in errors if not error < 1e-5]:
        sys.exit(f"differs from PyTorch by {wrong[0]:.1e}")


if __name__ == "__main__":
    typer.run(main)
