"""Clustering against coremltools' exact one: CPU time and squared error, side by side.

    python benchmarks/clustering.py --quick
    python benchmarks/clustering.py --json clustering.json

coremltools' side is `palettize_weights.blockwise_compress(weight, "KMEANS", bits, block_sizes)`, the call that its palettizer makes for
every weight. For fp16 groups of 10,000 values and more that is exact k-means in one dimension, on the distinct values; below, it is
scikit-learn's, which is not exact (the table marks it). Both sides include the indices. CPU time of one process and one thread: the
best of a few runs for ours, one run for theirs.

The distributions are drawn at the given shape; `trained` is the table of the bundled model, at its own.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file

from ane_layers.bundled import bundled_checkpoint
from ane_layers.compression.clustering import BITS, cluster

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda r, n: 0.02 * r.standard_normal(n),
    "student-t 3": lambda r, n: 0.02 * r.standard_t(3, n),
    "uniform": lambda r, n: r.uniform(-0.05, 0.05, n),
    "laplace": lambda r, n: r.laplace(scale=0.02, size=n),
    "bimodal": lambda r, n: np.where(r.random(n) < 0.3, -0.1, 0.08) + 0.01 * r.standard_normal(n),
    "outliers": lambda r, n: 0.02 * r.standard_normal(n) * np.where(r.random(n) < 2e-5, r.uniform(20, 500, n), 1),
    "bfloat16": lambda r, n: torch.from_numpy(0.02 * r.standard_normal(n)).bfloat16().double().numpy(),
}
EXACT_FROM = 10_000  # values in a group, below which coremltools takes scikit-learn's


def weight_of(name: str, rows: int, columns: int) -> np.ndarray:
    """fp16 `[rows, columns]`, or the trained table as it is."""
    if name == "trained":
        tensors = load_file(bundled_checkpoint() / "model.safetensors")
        return tensors["model.embed_tokens.weight"].half().numpy()
    return DISTRIBUTIONS[name](np.random.default_rng(0), rows * columns).astype(np.float16).reshape(rows, columns)


def ours(weight: np.ndarray, bits: int, groups: int, repeats: int) -> tuple[float, np.ndarray]:
    """CPU seconds, and the values that the weight became."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        found = cluster(weight.reshape(groups, -1), bits)
        times.append(time.process_time() - started)
    return min(times), np.take_along_axis(found.table, found.indices.astype(np.intp), axis=1)


def stock(weight: np.ndarray, bits: int, groups: int) -> tuple[float, np.ndarray]:
    from coremltools.optimize.coreml._quantization_passes import palettize_weights

    block_sizes = [0 if groups == 1 else len(weight) // groups, 0]
    started = time.process_time()
    found = palettize_weights.blockwise_compress(weight, "KMEANS", bits, block_sizes)
    seconds = time.process_time() - started
    indices = found.indices.astype(np.intp).reshape(groups, -1)
    return seconds, np.take_along_axis(found.lut.reshape(groups, -1), indices, axis=1)


def compare(name: str, weight: np.ndarray, bits: int, group_size: int, repeats: int) -> dict[str, object]:
    groups = len(weight) // group_size if group_size else 1
    values = weight.reshape(groups, -1).astype(np.float64)
    our_seconds, our_values = ours(weight, bits, groups, repeats)
    stock_seconds, stock_values = stock(weight, bits, groups)
    our_errors = ((values - our_values) ** 2).sum(axis=1)
    stock_errors = ((values - stock_values) ** 2).sum(axis=1)
    total, stock_total = float(our_errors.sum()), float(stock_errors.sum())
    # A group without an error, both sides exact, has no ratio.
    ratios = our_errors[stock_errors > 0] / stock_errors[stock_errors > 0]
    return {
        "distribution": name,
        "shape": list(weight.shape),
        "bits": bits,
        "group_size": group_size,
        "exact": values.shape[1] >= EXACT_FROM,
        "seconds": our_seconds,
        "stock_seconds": stock_seconds,
        "time_ratio": stock_seconds / our_seconds,
        "squared_error": total,
        "stock_squared_error": stock_total,
        "error_ratio": total / stock_total if stock_total else 1.0,
        "worst_group_error_ratio": float(ratios.max()) if len(ratios) else 1.0,
    }


def tables(result: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: for each width and size of a group, how the distributions compare."""
    lines = [
        "| group | bits | weights | coremltools | times faster, least to most | median | error ÷ theirs, least to most | worst group |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size, width, exact in dict.fromkeys((row["group_size"], row["bits"], row["exact"]) for row in result):
        rows = [row for row in result if (row["group_size"], row["bits"], row["exact"]) == (size, width, exact)]
        faster, errors = ([row[key] for row in rows] for key in ("time_ratio", "error_ratio"))
        worst = max(row["worst_group_error_ratio"] for row in rows)
        lines.append(
            f"| {size or 'tensor'} | {width} | {len(rows)} | {'exact' if exact else 'not exact'} | {min(faster):.1f} to {max(faster):.1f}"
            f" | {statistics.median(faster):.1f} | {min(errors):.5f} to {max(errors):.5f} | {worst:.5f} |"
        )
    return lines


def main(
    rows: Annotated[int, typer.Option(help="Output channels.")] = 2048,
    columns: Annotated[int, typer.Option(help="Input channels.")] = 4096,
    distribution: Annotated[
        list[str] | None, typer.Option(help="One of the names in the table; repeat for several.")
    ] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Repeat for several.")] = None,
    group_size: Annotated[
        list[int] | None, typer.Option(help="Channels to a table, 0 for the tensor; repeat for several.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of ours, of which the fastest counts.")] = 3,
    quick: Annotated[bool, typer.Option(help="512 by 2048, 4 and 6 bits, the tensor and groups of 32.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here as well.")] = None,
) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if quick:
        rows, columns = 512, 2048
    names = distribution or [*DISTRIBUTIONS, "trained"]
    unknown = [name for name in names if name not in DISTRIBUTIONS and name != "trained"]
    if unknown:
        raise typer.BadParameter(f"distribution: {unknown[0]!r} is none of {', '.join([*DISTRIBUTIONS, 'trained'])}")
    if find_spec("sklearn") is None:  # told now rather than at the first small group
        raise typer.BadParameter("coremltools needs scikit-learn for small groups: pip install '.[benchmarks]'")
    all_bits = bits or ([4, 6] if quick else list(BITS))
    group_sizes = group_size or ([0, 32] if quick else [0, 32, 16, 8])
    libraries = ", ".join(f"{library} {version(library)}" for library in ("coremltools", "numpy", "torch"))
    print(f"{platform.machine()}, 1 thread, {libraries}; {rows} by {columns}, CPU seconds\n")
    print("| distribution | group | bits | ours | coremltools | times faster | error ÷ theirs | worst group |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    results = []
    for name in names:
        weight = weight_of(name, rows, columns)
        for size in group_sizes:
            for width in all_bits:
                row = compare(name, weight, width, size, repeats)
                results.append(row)
                mark = "" if row["exact"] else " (not exact)"
                print(
                    f"| {name} | {size or 'tensor'} | {width} | {row['seconds']:.4f} | {row['stock_seconds']:.3f}{mark}"
                    f" | {row['time_ratio']:.1f} | {row['error_ratio']:.5f} | {row['worst_group_error_ratio']:.5f} |",
                    flush=True,
                )
    if json_path is not None:
        temporary = json_path.with_name(f".{json_path.name}.part")
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        temporary.replace(json_path)


if __name__ == "__main__":
    typer.run(main)
