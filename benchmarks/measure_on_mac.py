#!/usr/bin/env python3
"""Measures decode speed and placement of Core ML packages on a Mac, and appends the figures to a table.

NOT RUN WHERE IT WAS WRITTEN: there was no Apple device. Its logic is tested against a stand-in for coremltools; its figures are yours.

    pip install "coremltools>=9.0"                                          # macOS 15, Python 3.10 or later; nothing else is needed
    python measure_on_mac.py fold.mlpackage repeat_kv.mlpackage             # the packages of head_sharing.py --out
    python measure_on_mac.py *.mlpackage --function prefill

The A/B of whole models, with equal weights:

    ane-layers convert path/to/model -o fold.mlpackage
    ane-layers convert path/to/model -o repeat_kv.mlpackage --head-sharing repeat_kv
    python measure_on_mac.py fold.mlpackage repeat_kv.mlpackage --one-at-a-time

Packages are timed in turn, round after round, so that a machine that grows warm meets all of them; the median of the calls' times counts.
The first package is what the others are compared with, in speed and in their results: same inputs, fresh states, decibels. Placement is
what Core ML plans for each operation (`MLComputePlan`), not what was seen to run. Only for functions with states or without, of fixed
shapes; inputs are named as this library names them, and others are filled with random numbers.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MASKED = -4e4
FLOAT16, FLOAT32, INT32 = 65552, 65568, 131104  # ArrayFeatureType of Core ML's specification
# coremltools widens fp16 inputs to fp32 in every call; here it is done before the clock starts.
DTYPES = {FLOAT16: np.float32, FLOAT32: np.float32, INT32: np.int32}
DEVICES = {"MLNeuralEngineComputeDevice": "NE", "MLGPUComputeDevice": "GPU", "MLCPUComputeDevice": "CPU"}
COLUMNS = (
    *("date", "machine", "macos", "coremltools", "compute units", "package", "function", "context", "calls"),
    *("ms", "ms low", "ms high", "tok/s", "of first", "dB to first", "NE", "GPU", "CPU", "unplanned", "off the NE"),
)


@dataclass(frozen=True)
class Interface:
    """One function of a package: its name, the type and shape of each input, and whether it has states."""

    function: str
    inputs: Mapping[str, tuple[type, tuple[int, ...]]]
    stateful: bool

    @property
    def mask_shape(self) -> tuple[int, int]:
        """New tokens and slots, from the mask; one token and no slots without a mask."""
        _, shape = self.inputs.get("causalMask", (np.float32, (1, 1, 1, 0)))
        return shape[-2], shape[-1]


def read_interface(description: Any, function: str | None) -> Interface:
    """From a specification's `description`. Without a name: `decode` if there is one, else the default function.

    Raises:
        ValueError: there is no such function, or an input is no array of a fixed shape.
    """
    functions = {entry.name: entry for entry in description.functions}
    if functions:
        name = function or ("decode" if "decode" in functions else description.defaultFunctionName)
        if name not in functions:
            raise ValueError(f"there is no function {name!r}; there is {', '.join(functions)}")
        entry = functions[name]
    else:
        name, entry = "main", description
        if function not in (None, "main"):
            raise ValueError(f"there is no function {function!r}; the package has one, 'main'")
    inputs = {}
    for feature in entry.input:
        array = feature.type.multiArrayType
        if array.dataType not in DTYPES or any(size < 1 for size in array.shape):
            raise ValueError(f"input {feature.name} of {name} is no array of a fixed shape and a known type")
        inputs[feature.name] = (DTYPES[array.dataType], tuple(array.shape))
    return Interface(name, inputs, len(entry.state) > 0)


def call_inputs(interface: Interface, position: int) -> dict[str, np.ndarray]:
    """Inputs of the call whose first new token is at `position`: the same for every package with these inputs."""
    generator = np.random.default_rng(position)
    data: dict[str, np.ndarray] = {}
    for name, (dtype, shape) in sorted(interface.inputs.items()):
        if name == "position":
            data[name] = np.full(shape, position, dtype)
        elif name == "causalMask":
            rows, slots = shape[-2:]
            hidden = np.arange(slots)[None, :] > position + np.arange(rows)[:, None]
            data[name] = np.broadcast_to(np.where(hidden, MASKED, 0), shape).astype(dtype)
        elif name.endswith("Mask"):
            data[name] = np.zeros(shape, dtype)
        elif dtype is np.int32:
            data[name] = generator.integers(1, 64, shape, dtype)
        else:
            data[name] = generator.standard_normal(shape).astype(dtype)
    return data


def positions(interface: Interface, calls: int) -> list[int]:
    """Where the calls of a round begin: one after the other, from slot 0 again when the context is full."""
    tokens, slots = interface.mask_shape
    places = max(1, slots // tokens)
    return [i % places * tokens for i in range(calls)]


def time_calls(
    predict: Callable[[dict[str, np.ndarray]], Any],
    inputs: Sequence[dict[str, np.ndarray]],
    *,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each call but the first `warmup`."""
    times = []
    for i, data in enumerate(inputs):
        started = clock()
        predict(data)
        if i >= warmup:
            times.append(clock() - started)
    return times


def speed(times: Sequence[float], tokens: int) -> dict[str, float]:
    """Median and quartiles in ms, and tokens a second of the median."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"ms": 1e3 * middle, "ms low": 1e3 * low, "ms high": 1e3 * high, "tok/s": tokens / middle}


def decibels(reference: Mapping[str, Any], actual: Mapping[str, Any]) -> float | None:
    """Signal-to-noise ratio over all outputs; None if they are not the same outputs."""
    if reference.keys() != actual.keys():
        return None
    signal = noise = 0.0
    for name, wanted in reference.items():
        wanted, found = np.asarray(wanted, np.float64), np.asarray(actual[name], np.float64)
        if wanted.shape != found.shape:
            return None
        signal += float(np.square(wanted).sum())
        noise += float(np.square(wanted - found).sum())
    if not math.isfinite(noise) or signal == 0:
        return None
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def walk(operations: Iterable[Any]) -> Iterator[Any]:
    """Operations with those of their nested blocks; constants left out."""
    for operation in operations:
        kind = operation.operator_name.rpartition(".")[2]
        if kind != "const" and not kind.startswith("constexpr_"):
            yield operation
        for block in operation.blocks:
            yield from walk(block.operations)


def placement(operations: Iterable[Any], usage_of: Callable[[Any], Any]) -> dict[str, Any]:
    """How many operations Core ML plans on which device, and the types of those that are not on the Neural Engine.

    `unplanned` are those of which the plan says nothing.
    """
    devices: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    for operation in walk(operations):
        usage = usage_of(operation)
        name = type(usage.preferred_compute_device).__name__ if usage is not None else ""
        device = DEVICES.get(name, name) if name else "unplanned"
        devices[device] += 1
        if device not in ("NE", "unplanned"):
            elsewhere[operation.operator_name.rpartition(".")[2]] += 1
    counts = {device: devices.get(device, 0) for device in ("NE", "GPU", "CPU", "unplanned")}
    return {**counts, "off the NE": " ".join(f"{kind}:{count}" for kind, count in elsewhere.most_common())}


class Loaded:
    """A package in Core ML. The only part that calls coremltools."""

    def __init__(self, coreml: Any, path: Path, function: str | None, units: str) -> None:
        described = coreml.models.MLModel(str(path), skip_model_load=True).get_spec().description
        self.path, self.interface = path, read_interface(described, function)
        self._coreml, self._units = coreml, getattr(coreml.ComputeUnit, units)
        name = self.interface.function if len(described.functions) else None
        self.model = coreml.models.MLModel(str(path), function_name=name, compute_units=self._units)
        if getattr(self.model, "__proxy__", self) is None:
            raise ValueError(f"{path}: Core ML did not load {self.interface.function}; see the warning above")
        self.state = self.model.make_state() if self.interface.stateful else None

    def predict(self, data: dict[str, np.ndarray]) -> Any:
        return self.model.predict(data, state=self.state) if self.state is not None else self.model.predict(data)

    def plan(self) -> dict[str, Any]:
        """Placement, or why there is none: a missing plan must not lose the times."""
        try:
            plan = self._coreml.models.compute_plan.MLComputePlan.load_from_path(
                path=self.model.get_compiled_model_path(), compute_units=self._units
            )
            function = plan.model_structure.program.functions[self.interface.function]
            usage_of = plan.get_compute_device_usage_for_mlprogram_operation
            return placement(function.block.operations, usage_of)
        except Exception as error:
            return {"off the NE": f"no plan: {type(error).__name__}: {error}"}


def measure(
    loads: Sequence[Callable[[], Loaded]], *, calls: int, warmup: int, rounds: int, together: bool
) -> list[dict[str, Any]]:
    """A row for each package; `together` keeps all loaded and takes turns, otherwise one is done before the next is loaded."""
    rows: list[dict[str, Any]] = []
    reference: Mapping[str, Any] = {}
    groups = [list(loads)] if together else [[load] for load in loads]
    for group in groups:
        packages = [load() for load in group]
        times: list[list[float]] = [[] for _ in packages]
        # A few tokens, so that the last result depends on what the cache holds.
        results = [
            [package.predict(call_inputs(package.interface, i)) for i in positions(package.interface, 4)][-1]
            for package in packages
        ]
        for _ in range(rounds):
            for package, own in zip(packages, times, strict=True):
                inputs = [call_inputs(package.interface, i) for i in positions(package.interface, warmup + calls)]
                own += time_calls(package.predict, inputs, warmup=warmup)
        for package, own, result in zip(packages, times, results, strict=True):
            reference = reference or result
            tokens, context = package.interface.mask_shape
            row = {
                "package": package.path.name,
                "function": package.interface.function,
                "context": context,
                "calls": len(own),
            }
            row |= speed(own, tokens)
            row |= {
                "of first": row["tok/s"] / (rows[0] if rows else row)["tok/s"],
                "dB to first": decibels(reference, result),
            }
            rows.append(row | package.plan())
    return rows


def machine() -> dict[str, str]:
    try:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        chip = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        chip = ""
    date = datetime.date.today().isoformat()
    return {"date": date, "machine": chip or platform.machine(), "macos": platform.mac_ver()[0]}


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def append(rows: Sequence[Mapping[str, Any]], table: Path) -> None:
    """Adds rows to a table, CSV or Markdown by its suffix, which begins with the columns' names if it is new."""
    lines = [[cell(row.get(column)) for column in COLUMNS] for row in rows]
    if not table.exists():
        lines = [list(COLUMNS), *([["---"] * len(COLUMNS)] if table.suffix == ".md" else []), *lines]
    with table.open("a", newline="", encoding="utf-8") as file:
        if table.suffix == ".md":
            file.writelines(f"| {' | '.join(line)} |\n" for line in lines)
        else:
            csv.writer(file).writerows(lines)


def main(arguments: Sequence[str] | None = None, coreml: Any = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("packages", nargs="+", type=Path, help="the first is what the others are compared with")
    parser.add_argument("--function", help="decode, or the default function, if not given")
    parser.add_argument(
        "--compute-units", default="CPU_AND_NE", choices=["CPU_AND_NE", "ALL", "CPU_ONLY", "CPU_AND_GPU"]
    )
    parser.add_argument("--calls", type=int, default=64, help="timed calls of each round")
    parser.add_argument("--warmup", type=int, default=8, help="calls before them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="for packages that do not fit into memory together"
    )
    parser.add_argument("--table", type=Path, default=Path("measured.md"), help="appended to; .csv or .md")
    options = parser.parse_args(arguments)
    if min(options.calls, options.rounds) < 1 or options.warmup < 0:
        parser.error("--calls and --rounds must be at least 1, --warmup at least 0")
    if coreml is None:
        if platform.system() != "Darwin" or int(platform.mac_ver()[0].split(".")[0]) < 15:
            parser.error(f"this needs macOS 15 or later, here is {platform.system()} {platform.mac_ver()[0]}")
        import coremltools as coreml
    for path in options.packages:
        if not (path / "Manifest.json").is_file():
            parser.error(f"{path} is no .mlpackage")

    def load(path: Path) -> Callable[[], Loaded]:
        return lambda: Loaded(coreml, path, options.function, options.compute_units)

    rows = measure(
        [load(path) for path in options.packages],
        calls=options.calls,
        warmup=options.warmup,
        rounds=options.rounds,
        together=not options.one_at_a_time,
    )
    common = {**machine(), "coremltools": coreml.__version__, "compute units": options.compute_units}
    rows = [{**common, **row} for row in rows]
    append(rows, options.table)
    for row in rows:
        counts = ", ".join(f"{device} {row[device]}" for device in ("NE", "GPU", "CPU", "unplanned") if device in row)
        print(f"{row['package']} {row['function']}: {row['tok/s']:.2f} tok/s, {row['of first']:.2f} of the first")
        print(f"    planned: {counts or row['off the NE']}")
    print(f"appended to {options.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
