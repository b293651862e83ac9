"""The same attention weights with the KV heads shared in several ways: what each costs in the saved program and on this CPU.

    python benchmarks/head_sharing.py
    python benchmarks/head_sharing.py --quick
    python benchmarks/head_sharing.py --out /tmp/head-sharing      # leaves the packages and a script that measures them on a Mac

Every way (`head_sharing_ways.py`) becomes a package with a stateful cache and two functions, `decode` (one token) and `prefill` (a block).
Each package is executed by the interpreter over a cache that is full up to the new tokens, a block and then single tokens, in fp32 and in
fp16, and held against `torch.nn.functional.scaled_dot_product_attention(enable_gqa=True)`. One that disagrees makes the exit status 1.

The table is read from the saved files: operations, `tile` operations and their bytes, the highest rank, and bytes by the static
accounting of `ane_layers.analysis` (not measured traffic). Times are of this CPU, in a process with its allocator pinned; see
`head_sharing_cpu.py`. Nothing here says what the Neural Engine does with any of them; `measure_on_mac.py` is for that.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from head_sharing_cpu import in_own_process
from head_sharing_ways import WAYS, AttentionStack, Geometry

from ane_layers import causal_mask
from ane_layers.analysis import analyze
from ane_layers.conversion import Expectations, FunctionSpec, convert
from ane_layers.interpreter import MLProgram
from ane_layers.program import Package

STATES = {"keyCache": "cache.key", "valueCache": "cache.value"}
GATES = {"fp32": 100.0, "fp16": 45.0}  # dB; a query at the wrong KV head leaves less than 10
QUICK = Geometry(hidden=256, heads=8, kv_heads=2, head_dim=32, context=256, block=16, layers=2)


def inputs(shapes: Mapping[str, tuple[int | None, ...]], *, position: int, seed: int) -> dict[str, np.ndarray]:
    """What either function takes, with random tokens from `position` on."""
    _, channels, _, length = shapes["hiddenStates"]
    generator = np.random.default_rng(seed)
    return {
        "hiddenStates": generator.standard_normal((1, channels, 1, length)).astype(np.float16),
        "position": np.array([position], np.int32),
        "causalMask": causal_mask(position, length, shapes["causalMask"][3]).half().numpy(),
    }


def write_package(geometry: Geometry, way: str, folder: Path, *, seed: int = 0) -> Package:
    """The package of one way: functions `decode` and `prefill`."""
    functions = {}
    for name, length in (("decode", 1), ("prefill", geometry.block)):
        example = {
            "hiddenStates": torch.zeros(1, geometry.hidden, 1, length),
            "position": torch.zeros(1, dtype=torch.int32),
            "causalMask": torch.zeros(1, 1, length, geometry.context),
        }
        functions[name] = FunctionSpec(inputs=example)
    note = {
        "layers": geometry.layers,
        "context_length": geometry.context,
        "prefill": geometry.block,
        "head_sharing": way,
    }
    return convert(
        AttentionStack(geometry, way, seed),
        folder / f"{way}.mlpackage",
        functions=functions,
        states=STATES,
        metadata={"ane_layers.head_sharing": json.dumps(note)},
        expectations=Expectations(state_writes=dict.fromkeys(STATES, geometry.layers), tile=way == "repeat_kv"),
    )


def scenario(
    geometry: Geometry, tokens: int = 3
) -> tuple[dict[str, np.ndarray], list[tuple[str, dict[str, np.ndarray]]]]:
    """States that are full except for a block and a few tokens at the end, and the calls that fill those."""
    generator = np.random.default_rng(1)
    shape = (geometry.layers, geometry.kv_heads, geometry.context, geometry.head_dim)
    # Slots behind the position hold numbers too: a mask that is lined up wrongly lets them in.
    states = {name: generator.standard_normal(shape).astype(np.float16) for name in STATES}
    start = geometry.context - geometry.block - tokens
    calls = []
    for name, length, positions in (
        ("prefill", geometry.block, [start]),
        ("decode", 1, range(start + geometry.block, geometry.context)),
    ):
        shapes = {"hiddenStates": (1, geometry.hidden, 1, length), "causalMask": (1, 1, length, geometry.context)}
        calls += [(name, inputs(shapes, position=position, seed=position)) for position in positions]
    return states, calls


def expected(geometry: Geometry, way: str, *, seed: int = 0) -> list[np.ndarray]:
    """The scenario in PyTorch, fp32, with its own grouped attention.

    The scale of the scores is what the way's package holds: a constant of the program, so fp16; the fused operation works its own out.
    """
    states, calls = scenario(geometry)
    module = AttentionStack(geometry, "reference", seed)
    if way != "fused":
        module.attend.scale = float(np.float16(module.attend.scale))
    for name, path in STATES.items():
        module.get_buffer(path).copy_(torch.from_numpy(states[name]))
    results = []
    with torch.inference_mode():
        for _, data in calls:
            tensors = [torch.from_numpy(data[name]) for name in ("hiddenStates", "position", "causalMask")]
            results.append(module(tensors[0].float(), tensors[1], tensors[2].float()).numpy())
    return results


def agreement(package: Package, geometry: Geometry, reference: list[np.ndarray], mode: str) -> dict[str, float]:
    """Signal-to-noise ratio in dB of each function against the reference."""
    states, calls = scenario(geometry)
    programs = {name: MLProgram(package, name, mode) for name in ("prefill", "decode")}  # type: ignore[arg-type]
    state = programs["decode"].make_state()
    for name, value in states.items():
        state.write_state(name, value)
    sums = {name: [0.0, 0.0] for name in programs}
    for (name, data), wanted in zip(calls, reference, strict=True):
        difference = programs[name].predict(data, state)["output"].astype(np.float64) - wanted
        sums[name][0] += float(np.square(wanted, dtype=np.float64).sum())
        sums[name][1] += float(np.square(difference).sum())
    return {name: decibels(signal, noise) for name, (signal, noise) in sums.items()}


def decibels(signal: float, noise: float) -> float:
    if not math.isfinite(noise):
        return -math.inf
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def counted(package: Package, layers: int) -> dict[str, dict[str, Any]]:
    """Figures of each function, read from the saved file; bytes are of one call."""
    result = {}
    for name, costs in analyze(package)["functions"].items():
        result[name] = {
            "operations": costs["operations"]["compute"],
            "operations_per_layer": costs["operations"]["compute"] / layers,
            **{key: costs[key] for key in ("tile", "highest_rank", "traffic", "materialised")},
            "by_type": costs["operations"]["by_type"],
        }
    return result


COLUMNS = (
    *("way", "operations, a layer", "rank", "tile", "repeated", "cache read", "traffic", "materialised read, written"),
    *("dB fp32, fp16", "eager ms, of fold", "interpreter ms, of fold"),
)


def table(function: str, rows: Mapping[str, dict[str, Any]], cpu: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown; bytes are those of a call, in MiB."""
    columns = COLUMNS if cpu else COLUMNS[:-2]
    lines = [columns, ["---"] * len(columns)]
    for way, row in rows.items():
        figures = row["functions"][function]
        moved, everything = figures["traffic"], figures["materialised"]
        cells = [WAYS[way], f"{figures['operations']}, {figures['operations_per_layer']:.1f}", figures["highest_rank"]]
        cells += [f"{figures['tile']['count']}, {mib(figures['tile']['bytes'])}"]
        cells += [mib(moved["repetition"]), mib(moved["kv_read"]), mib(moved["total"])]
        cells += [f"{mib(everything['read'])}, {mib(everything['written'])}"]
        cells += [", ".join(f"{row['snr_db'][mode][function]:.0f}" for mode in GATES)]
        for times in cpu.values():
            cells += [f"{times[way]['ms']:.2f}, {times[way]['ratio']:.2f}"]
        lines.append(cells)
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def tables(result: Mapping[str, Any]) -> list[str]:
    """Markdown: a table for each function."""
    geometry = result["geometry"]
    lines = [", ".join(f"{key} {value}" for key, value in geometry.items())]
    for function, length in (("decode", 1), ("prefill", geometry["block"])):
        lines += ["", f"{function}, {length} {'token' if length == 1 else 'tokens'}; bytes in MiB", ""]
        lines += table(function, result["ways"], result["cpu"].get(function, {}))
    return lines


def mib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**20:.2f}".removesuffix(".00")


def main(
    hidden: Annotated[int, typer.Option(help="Channels.")] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    block: Annotated[int, typer.Option(help="Tokens of a prefill block.")] = 64,
    layers: Annotated[int, typer.Option(help="Attention layers.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="A small geometry, for a look at the program itself.")] = False,
    cpu: Annotated[bool, typer.Option(help="Time the ways on this CPU.")] = True,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch while timing; see head_sharing_cpu.py.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder that keeps the packages, for a Mac or a phone.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    geometry = QUICK if quick else Geometry(**sizes, context=context, block=block, layers=layers)
    scratch = Path(tempfile.mkdtemp(prefix="head-sharing-"))
    folder = out or scratch
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = run(geometry, folder, threads if cpu else 0, say=lambda line: print(line, file=sys.stderr))
        if out:
            shutil.copy(Path(__file__).with_name("measure_on_mac.py"), out)
            (out / "head_sharing.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
        print("\n".join(tables(result)))
    if result["disagree"]:
        print("disagrees with PyTorch: " + "; ".join(result["disagree"]), file=sys.stderr)
        raise typer.Exit(1)


def run(geometry: Geometry, folder: Path, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Builds, checks, counts and, with `threads`, times all ways; the packages stay in the folder."""
    result: dict[str, Any] = {
        "machine": {"machine": platform.machine(), "torch": version("torch"), "coremltools": version("coremltools")},
        "geometry": vars(geometry),
        "ways": {},
        "disagree": [],
        "cpu": {},
    }
    for way in WAYS:
        say(f"building and checking {way}")
        package = write_package(geometry, way, folder)
        reference = expected(geometry, way)
        decibel = {mode: agreement(package, geometry, reference, mode) for mode in GATES}
        result["ways"][way] = {"functions": counted(package, geometry.layers), "snr_db": decibel}
        result["disagree"] += [
            f"{way}, {function}, {mode}: {level:.1f} dB, below {GATES[mode]:g}"
            for mode, levels in decibel.items()
            for function, level in levels.items()
            if not level >= GATES[mode]
        ]
    if threads:
        result["machine"]["threads"] = threads
        timing = {"threads": threads, "seconds": 0.02 if geometry == QUICK else 0.1}
        for function, length in (("decode", 1), ("prefill", geometry.block)):
            say(f"timing {function}")
            result["cpu"][function] = {
                "eager": in_own_process(geometry, tokens=length, **timing),
                "interpreter": in_own_process(geometry, packages=folder, function=function, **timing),
            }
    return result


if __name__ == "__main__":
    typer.run(main)
