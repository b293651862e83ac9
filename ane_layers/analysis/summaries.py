"""Tables over the records of a function: by kind, by layer, copies, repetition, the largest results, caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ane_layers.analysis.accesses import Access
from ane_layers.analysis.caches import Caches
from ane_layers.analysis.flow import Datum, Flow
from ane_layers.analysis.layers import OTHER, layers
from ane_layers.analysis.movement import VIEWS
from ane_layers.analysis.records import Record
from ane_layers.program import Function, StateType

_SHARES = ("weights", "kv_read", "kv_written", "repetition", "read", "written")


def materialised(entries: Iterable[Record]) -> dict[str, int | None]:
    """`read` and `written` of all operations."""
    entries = list(entries)
    return {name: _sum(getattr(entry, name) for entry in entries) for name in ("read", "written")}


def kinds(entries: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Operations of each kind, most first: `count` and `by_type`."""
    groups = sorted(_grouped(entries, lambda entry: entry.kind).items(), key=lambda item: -len(item[1]))
    return {
        kind: {"count": len(group), "by_type": dict(Counter(entry.type for entry in group).most_common())}
        for kind, group in groups
    }


def repetitions(entries: Iterable[Record]) -> list[dict[str, Any]]:
    """Every operation that only repeats data, with its bytes."""
    return [_row(entry, entry.repetition) for entry in entries if entry.kind == "repetition"]


def copies(entries: Iterable[Record], top: int) -> dict[str, Any]:
    """Operations that move data and compute nothing; those that move nothing (a `write_state` behind an update) left out.

    `of_caches` are those of a cache's content; `largest` has one row for copies of a type and size, `bytes` being those of one.
    """
    found = [entry for entry in entries if entry.kind == "copy" and entry.written != 0]
    by_type = _grouped(found, lambda entry: entry.type)
    by_size = _grouped(found, lambda entry: (entry.type, entry.written, entry.cache))
    rows = [
        _row(group[0], group[0].written) | {"cache": group[0].cache, "count": len(group)} for group in by_size.values()
    ]
    return {
        **_count(found),
        "of_caches": _count([entry for entry in found if entry.cache]),
        "by_type": dict(sorted(((type_, _count(group)) for type_, group in by_type.items()), key=_bytes_of_item)),
        "largest": sorted(rows, key=lambda row: -(row["bytes"] or 0))[:top],
    }


def largest(flow: Flow, top: int) -> list[dict[str, Any]]:
    """The largest results that operations give, one row for those of an operation, type and shape; `bytes` are those of one, and `name` and
    `layer` those of the first. Results of open size are left out."""
    caches, of_layer = Caches(flow), layers(flow)
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for step in flow.steps:
        if step.type in VIEWS or step.operation.blocks or caches.in_place(step):
            continue
        for datum in step.outputs:
            tensor = datum.tensor
            if tensor is None or not datum.bytes:
                continue
            row = groups.setdefault(
                (step.type, tensor),
                {
                    "name": datum.name,
                    "type": step.type,
                    "layer": of_layer[step],
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": datum.bytes,
                    "count": 0,
                },
            )
            row["count"] += 1
    return sorted(groups.values(), key=lambda row: -row["bytes"])[:top]


def layer_table(entries: Iterable[Record]) -> list[dict[str, Any]]:
    """One row a layer: embedding, the numbered layers, head, other. `total` is that of `Traffic`."""
    groups = _grouped(entries, lambda entry: entry.layer)
    rows = []
    for layer in sorted(groups, key=_place):
        group = groups[layer]
        shares = {name: _sum(getattr(entry, name) for entry in group) for name in _SHARES}
        repeated = None if shares["repetition"] is None else 2 * shares["repetition"]
        rows.append(
            {
                "layer": layer,
                "operations": len(group),
                "by_type": dict(sorted(Counter(entry.type for entry in group).items())),
                **shares,
                "total": _sum([shares["weights"], shares["kv_read"], shares["kv_written"], repeated]),
            }
        )
    return rows


def cache_table(caches: Caches) -> list[dict[str, Any]]:
    """One row a state, input or output that is a cache. `reads` is the number of parts that are read."""
    reads, writes = list(caches.reads()), list(caches.writes())
    rows = [_cache(datum, reads, writes) for datum in caches.sources]
    outputs = {write.datum: None for write in writes if write.source is None}
    return rows + [_cache(datum, [], writes) | {"kind": "output"} for datum in outputs]


def notes(flow: Flow) -> list[str]:
    """What to know about a function's figures."""
    found = []
    loops = Counter(step.type for step in flow.steps if step.operation.blocks)
    for type_, count in sorted(loops.items()):
        what = "the body of a loop" if type_ == "while_loop" else "each branch"
        found.append(f"{count} {type_}: {what} is counted once, whatever happens when it runs")
    function: Function = flow.function
    if function.flexible_inputs:
        named = ", ".join(f"{name} ({shape})" for name, shape in function.flexible_inputs.items())
        found.append(f"inputs of flexible shape: {named}")
    return found


def _cache(datum: Datum, reads: Sequence[Access], writes: Sequence[Access]) -> dict[str, Any]:
    own = [read for read in reads if read.source is datum]
    written = [write for write in writes if datum in (write.source, write.datum)]
    tensor = datum.tensor
    return {
        "name": datum.name,
        "kind": "state" if isinstance(datum.type, StateType) else "input",
        "dtype": tensor.dtype if tensor is not None else "",
        "shape": list(tensor.shape) if tensor is not None else [],
        "bytes": datum.bytes,
        "read": _sum(read.bytes for read in own),
        "reads": len(own),
        "written": _sum(write.bytes for write in written),
        "writes": len(written),
    }


def _grouped(entries: Iterable[Record], key: Callable[[Record], Hashable]) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _count(entries: Sequence[Record]) -> dict[str, int | None]:
    return {"count": len(entries), "bytes": _sum(entry.written for entry in entries)}


def _bytes_of_item(item: tuple[str, dict[str, int | None]]) -> int:
    return -(item[1]["bytes"] or 0)


def _row(entry: Record, size: int | None) -> dict[str, Any]:
    return {"name": entry.name, "type": entry.type, "layer": entry.layer, "bytes": size}


def _place(layer: str) -> tuple[int, str, int]:
    fixed = {"embedding": 0, "head": 2, OTHER: 3}
    if layer in fixed:
        return fixed[layer], "", 0
    stack, _, number = layer.rpartition(".")
    return 1, stack, int(number)


def _sum(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
