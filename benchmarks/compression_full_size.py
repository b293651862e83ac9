"""Folder to compressed package at the real geometry: time, peak memory and bytes a token, against stock coremltools.

    python benchmarks/make_checkpoint.py --out /tmp/exaone4-1.2b
    python benchmarks/compression_full_size.py /tmp/exaone4-1.2b --stock-layers 2

Ours: `ane-layers convert --recipe top8`, decode and prefill, from the folder to a checked package. Stock: the same graph with its
it through `torch.jit.trace`, `ct.convert` (decode alone: coremltools compresses no merged package) and `palettize_weights` with the same
setting for every weight. `--stock-layers N` runs stock on a checkpoint of N layers, one of them promoted, and scales both kinds up;
head and embedding are measured whole. `--stock-layers 0` leaves stock out. Weights are random, and so is the ranking: that changes neither
time nor bytes.

Both readings of the article's top8 (whole layers, or their feed-forward part) are held against the arithmetic from shapes.
"""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

# Weights that a token of EXAONE 4.0 1.2B reads, without tables, and the cache at context 4096, in bytes.
READINGS = {"*": 1086.4e6, "mlp.*": 1044.4e6}


def measured(command: list[str]) -> dict[str, Any]:
    """Standard output as JSON, with wall and processor seconds and the peak memory of the command in GB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # The peak is over all children so far: the larger command has to come last.
    figures = {"seconds": time.monotonic() - started, "cpu_seconds": cpu, "peak_gb": after.ru_maxrss / 1e6}
    return {**json.loads(result.stdout), **figures}


def ranking_file(folder: Path, path: Path) -> Path:
    """A ranking by layer number."""
    from ane_layers.compression.ranking import Ranking, model_facts
    from ane_layers.models import Exaone4Config
    from ane_layers.writing import write_json

    config = Exaone4Config.from_pretrained(folder)
    layers = {layer: float(layer) for layer in range(config.num_hidden_layers)}
    ranking = Ranking(method="kl", model=model_facts(config), setting="lut4g16", tokens=0, layers=layers, modules=())
    write_json(ranking.as_dict(), path)
    return path


def ours(folder: Path, scratch: Path, modules: str) -> dict[str, Any]:
    """Converts through the command line and reads the package back."""
    from ane_layers.analysis.traffic import traffic
    from ane_layers.compression import load_recipe
    from ane_layers.compression.recipe import to_toml
    from ane_layers.program import Package

    text = to_toml(load_recipe("top8")).replace('modules = "*"', f'modules = "{modules}"')
    recipe = scratch / "top8.toml"
    recipe.write_text(text)
    package = scratch / "ours.mlpackage"
    command = [
        sys.executable,
        "-m",
        "ane_layers.cli",
        "convert",
        str(folder),
        "-o",
        str(package),
        "--recipe",
        str(recipe),
    ]
    result = measured([*command, "--ranking", str(ranking_file(folder, scratch / "ranking.json")), "--json"])
    moved = traffic(Package.open(package).function("decode"))
    embedding = ("model.embed_tokens.weight",)
    tables = sum(t["table_bytes"] for t in result["compression"]["tensors"] if t["path"] not in embedding)
    shutil.rmtree(package)
    figures = {key: result[key] for key in ("seconds", "cpu_seconds", "peak_gb")}
    return figures | {"bytes_per_token": moved.total, "tables": tables, "modules": modules}


def stock(folder: Path, promoted: int) -> dict[str, Any]:
    """Stock conversion and palettization in this process, the processor time of each kind of weight apart."""
    import coremltools as ct
    import numpy as np
    import torch
    from coremltools.optimize.coreml import OpPalettizerConfig, OptimizationConfig, palettize_weights

    from ane_layers.compression import Ranking, load_recipe, make_plan
    from ane_layers.compression.preparation import read_recipe
    from ane_layers.models import Exaone4

    started = time.process_time()
    model = Exaone4.from_pretrained(folder, context_length=4096)
    ranking = Ranking.load(ranking_file(folder, Path(tempfile.mkdtemp()) / "ranking.json"))
    plan = make_plan(model, read_recipe(load_recipe("top8"), promote=promoted), ranking=ranking)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            # The converter looks states up among the outermost module's buffers.
            for name in ("key", "value"):
                buffer = model.cache._buffers.pop(name)
                model.cache.__dict__[name] = buffer
                self.register_buffer(f"{name}Cache", buffer)

        def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(ids, position, mask)

    zero = torch.zeros(1, 1, dtype=torch.int32)
    traced = torch.jit.trace(Step().eval(), (zero, zero[0], torch.zeros(1, 1, 1, 4096)), check_trace=False)
    state = [
        ct.StateType(
            ct.TensorType(shape=tuple(getattr(model.cache, name).shape), dtype=np.float16), name=f"{name}Cache"
        )
        for name in ("key", "value")
    ]
    converted = ct.convert(
        traced,
        inputs=[
            ct.TensorType("inputIds", (1, 1), dtype=np.int32),
            ct.TensorType("position", (1,), dtype=np.int32),
            ct.TensorType("causalMask", (1, 1, 1, 4096), dtype=np.float16),
        ],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        states=state,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    kinds: dict[str, dict[str, Any]] = {"lut4g16": {}, "lut8": {}, "head": {}, "embedding": {}}
    seconds = {"convert": time.process_time() - started}
    constants = [op.name for op in converted._mil_program.functions["main"].operations if op.op_type == "const"]
    for path, setting in plan.settings.items():
        place = path.removesuffix(".weight").replace(".", "_")
        name = next(constant for constant in constants if constant.startswith(f"model_{place}_weight"))
        kind = {"lm_head": "head", "model.embed_tokens": "embedding"}.get(plan.units[path], setting.key)
        grouped = {"granularity": "per_grouped_channel", "group_size": setting.group_size} if setting.group_size else {}
        kinds[kind][name] = OpPalettizerConfig(mode="kmeans", nbits=setting.bits, weight_threshold=0, **grouped)
    done: dict[str, Any] = {}
    for kind, configs in kinds.items():
        started = time.process_time()
        done |= configs
        converted = palettize_weights(converted, OptimizationConfig(op_name_configs=configs))
        seconds[kind] = time.process_time() - started
    started = time.process_time()
    folder = Path(tempfile.mkdtemp())
    converted.save(str(folder / "stock.mlpackage"))
    shutil.rmtree(folder)
    return {"stock": seconds | {"save": time.process_time() - started}, "layers": len(model.model.layers)}


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint in Hugging Face's format.")],
    stock_layers: Annotated[int, typer.Option(help="Layers that stock is run on; 0 leaves it out.")] = 2,
    only_stock: Annotated[bool, typer.Option("--only-stock", hidden=True)] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    if only_stock:
        sys.stdout, kept = sys.stderr, sys.stdout
        result = stock(folder, 1)
        print(json.dumps(result), file=kept)
        return
    print(
        f"{platform.machine()}, torch {version('torch')}, coremltools {version('coremltools')}, {folder.name}",
        flush=True,
    )
    scratch = Path(tempfile.mkdtemp(prefix="compression-"))
    figures: dict[str, Any] = {"ours": []}
    try:
        for modules, expected in READINGS.items():
            row = ours(folder, scratch, modules)
            figures["ours"].append(row)
            without = row["bytes_per_token"] - row["tables"]
            print(
                f"ours, promoted {modules!r}: {row['seconds']:.0f} s, {row['cpu_seconds']:.0f} s of processor time, "
                f"peak {row['peak_gb']:.2f} GB; {row['bytes_per_token'] / 1e6:,.1f} MB a token, of which tables {row['tables'] / 1e6:.1f} "
                f"MB; without them {without / expected - 1:+.2%} of the arithmetic",
                flush=True,
            )
        if stock_layers:
            small = scratch / "checkpoint"
            maker = Path(__file__).with_name("make_checkpoint.py")
            command = [sys.executable, str(maker), "--out", str(small), "--layers", str(stock_layers)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            row = measured([sys.executable, __file__, str(small), "--only-stock"])
            figures["stock"] = row
            parts = row["stock"]
            print(
                f"stock, {stock_layers} layers: {parts}, peak {row['peak_gb']:.2f} GB, {row['cpu_seconds']:.0f} s of processor time"
            )
            layers, promoted = 30, 8
            scaled = parts["lut8"] * promoted + parts["lut4g16"] / (stock_layers - 1) * (layers - promoted)
            scaled += parts["head"] + parts["embedding"]
            own = figures["ours"][0]["cpu_seconds"]
            print(
                f"stock palettization scaled to {layers} layers: {scaled:.0f} s of processor time, {scaled / own:.1f} times our whole "
                "conversion; its ct.convert comes on top"
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if out is not None:
            out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
