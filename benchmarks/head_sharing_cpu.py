"""How long each way of sharing KV heads takes on this CPU, and what it allocates: attention alone, in eager PyTorch, fp32.

    python benchmarks/head_sharing_cpu.py
    python benchmarks/head_sharing_cpu.py --tokens 64
    python benchmarks/head_sharing_cpu.py --no-pin
    python benchmarks/head_sharing_cpu.py --threads 2     # on a machine that does nothing else

glibc gives a large block straight back to the system when it is freed, and the next one begins as untouched pages. A tensor that is
written anew in every call then pays a page fault every 4 KiB, several times what copying it costs, and a ratio between two ways
measures the allocator. So everything is measured in a process whose allocator keeps what it has (`PINNED`); `--no-pin` shows the
difference, and the page faults per call show that the pinning works.

With one thread, the times are the thread's processor time: waiting for a core that other work has is not in them. With more they are wall
time, and with other work on the cores worth little: threads wait for each other. Either way, compare ratios of one run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from head_sharing_ways import WAYS, Attend, Geometry, attend
from torch import Tensor

from ane_layers import causal_mask

PINNED = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),  # no block is mapped by itself …
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),  # … and the heap's end is not given back
    "MALLOC_TOP_PAD_": str(2**28),
}


class RepeatedSDPA(Attend):
    """`repeat_kv` in front of PyTorch's fused attention: `transformers`' sdpa for a block of tokens."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(self.groups, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


EAGER = {
    **WAYS,
    "fused": "SDPA on folded queries",
    "reference": "SDPA with enable_gqa",
    "repeated_sdpa": "SDPA on repeated K and V",
}


def calls(geometry: Geometry, tokens: int) -> dict[str, Callable[[], Tensor]]:
    """For every way, a call of attention alone over a full cache."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, geometry.heads, tokens, geometry.head_dim, generator=generator)
    shape = (1, geometry.kv_heads, geometry.context, geometry.head_dim)
    key, value = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    mask = causal_mask(geometry.context - tokens, tokens, geometry.context)
    found = {}
    for way in EAGER:
        module = RepeatedSDPA(geometry) if way == "repeated_sdpa" else attend(way, geometry)
        aligned = module.align_mask(mask, tokens)

        def call(module: torch.nn.Module = module, aligned: Tensor = aligned) -> Tensor:
            with torch.inference_mode():
                return module(query, key, value, aligned)

        found[way] = call
    return found


def measure(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Times calls in turn, round after round, so that what else runs on the machine meets all of them.

    Args:
        rounds: of all calls.
        seconds: that each call is repeated for in a round, at least once.
        clock: in seconds.

    Returns:
        for each: `ms`, the median over rounds of the round's median; `best`, the shortest; `ratio` to the first, the median over
        rounds of the ratio within a round, with its quartiles `ratio_low` and `ratio_high`; `faults`, page faults per call.
    """
    medians: dict[str, list[float]] = {name: [] for name in calls}
    best = dict.fromkeys(calls, math.inf)
    faults: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            calls[name]()  # the caches are another way's
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            times: list[float] = []
            while sum(times) < seconds or not times:
                started = clock()
                calls[name]()
                times.append(clock() - started)
            faults[name].append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / len(times))
            medians[name].append(statistics.median(times))
            best[name] = min(best[name], *times)
    result = {}
    for name in names:
        ratios = [own / first for own, first in zip(medians[name], medians[names[0]], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        result[name] = {
            "ms": 1e3 * statistics.median(medians[name]),
            "best": 1e3 * best[name],
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
            "faults": statistics.median(faults[name]),
        }
    return result


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keeps off standard error what libraries write there past Python, such as the profiler whenever it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def allocated(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that one call asks of PyTorch's allocator, and the most that it holds at a time."""
    call()
    with (
        silence(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        call()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    total = held = peak = 0
    for _, size in events:
        total += max(size, 0)
        held += size
        peak = max(peak, held)
    return total, peak


def in_own_process(geometry: Geometry, *, pin: bool = True, **options: Any) -> dict[str, Any]:
    """What `main` measures, in a process of its own with the allocator pinned."""
    command = [sys.executable, __file__, "--json", "--inside"]
    for name, value in {**vars(geometry), **options}.items():
        if value is not None and name != "block":
            command += [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | (PINNED if pin else {})
    # The threads are said by an option; an OMP_NUM_THREADS for other work would cut them.
    environment.pop("OMP_NUM_THREADS", None)
    result: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout
    )
    return result


def interpreter_calls(folder: Path, function: str) -> dict[str, Callable[[], Any]]:
    """For every package in a folder of `head_sharing.py`, one call in the interpreter, fp32, in the middle of the context."""
    from head_sharing import inputs

    from ane_layers.interpreter import MLProgram

    found = {}
    for way in WAYS:
        program = MLProgram(folder / f"{way}.mlpackage", function)
        state = program.make_state()
        shapes = {value.name: value.tensor_type.shape for value in program.function.inputs}
        data = inputs(shapes, position=shapes["causalMask"][3] // 2, seed=0)
        found[way] = lambda program=program, data=data, state=state: program.predict(data, state)
    return found


def main(
    hidden: Annotated[int, typer.Option()] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option()] = 64,
    context: Annotated[int, typer.Option(help="Slots of the cache.")] = 4096,
    layers: Annotated[int, typer.Option()] = 1,
    tokens: Annotated[int, typer.Option(help="New tokens: 1 is decode.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch; 1 measures processor time.")] = 1,
    rounds: Annotated[int, typer.Option()] = 15,
    seconds: Annotated[float, typer.Option(help="Of each way in each round.")] = 0.1,
    packages: Annotated[
        Path | None, typer.Option(help="Folder of head_sharing.py: times the interpreter instead.")
    ] = None,
    function: Annotated[str, typer.Option(help="Of the packages.")] = "decode",
    pin: Annotated[bool, typer.Option(help="Keep glibc's allocator from giving memory back.")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    inside: Annotated[bool, typer.Option(hidden=True, help="This is the process with the allocator pinned.")] = False,
) -> None:
    geometry = Geometry(
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=context, layers=layers, block=2
    )
    if inside:
        torch.set_num_threads(threads)
        candidates = interpreter_calls(packages, function) if packages else calls(geometry, tokens)
        clock = time.thread_time if threads == 1 else time.perf_counter
        result = measure(candidates, rounds=rounds, seconds=seconds, clock=clock)
        for name, call in candidates.items():
            result[name]["allocated"], result[name]["peak"] = allocated(call)
        print(json.dumps(result))
        return
    options = {"tokens": tokens, "threads": threads, "rounds": rounds, "seconds": seconds}
    result = in_own_process(geometry, pin=pin, packages=packages, function=function, **options)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{platform.machine()}, {threads} threads, torch {version('torch')}, fp32, allocator {'pinned' if pin else 'as it is'}"
    )
    clock = "processor time" if threads == 1 else "wall time"
    print(f"{clock}, {heads} query heads, {kv_heads} KV heads of {head_dim}, context {context}, {tokens} tokens")
    print("| way | ms | best | of fold (quartiles) | MiB allocated a call | page faults a call |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in result.items():
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        memory = f"{row['allocated'] / 2**20:.2f} | {row['faults']:.0f}"
        print(f"| {EAGER[name]} | {row['ms']:.2f} | {row['best']:.2f} | {ratio} | {memory} |")


if __name__ == "__main__":
    typer.run(main)
